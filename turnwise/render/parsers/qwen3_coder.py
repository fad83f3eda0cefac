"""Qwen3-Coder's tags, which Qwen 3.5 and later, Nemotron 3 and Step 3.5 write too::

    <tool_call>
    <function=look_up>
    <parameter=key>
    a
    </parameter>
    </function>
    </tool_call>

Arguments are bare text and have lost their types: the tool's JSON schema says what `5` is (see `values.coerce`).
"""

import re

from turnwise.render.parsers.base import CallSyntax, ReasoningMarks, ReplyFormat
from turnwise.render.parsers.readers import TaggedCalls

_QWEN3_CODER_TAGS = TaggedCalls(
    re.compile(r"<function=([^>\n]*)>"),
    re.compile(r"\s*<parameter=([^>\n]*)>"),
    "</parameter>",
    "</function>",
    "<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>",
    newline=True,
)
QWEN3_CODER = ReplyFormat("qwen3_coder", (CallSyntax("<tool_call>", _QWEN3_CODER_TAGS, "</tool_call>"),))

SEED = ReplyFormat(
    "seed",
    (CallSyntax("<seed:tool_call>", _QWEN3_CODER_TAGS, "</seed:tool_call>"),),
    thinking=ReasoningMarks("<seed:think>", "</seed:think>"),
)
"""`<seed:tool_call>` around the same tags, `<seed:think>` around thinking."""
