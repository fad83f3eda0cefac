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

from turnwise.render.parsers.base import Dialect, Format, Thinking
from turnwise.render.parsers.readers import Tags

_TAGS = Tags(
    re.compile(r"<function=([^>\n]*)>"),
    re.compile(r"\s*<parameter=([^>\n]*)>"),
    "</parameter>",
    "</function>",
    "<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>",
    newline=True,
)
QWEN3_CODER = Format("qwen3_coder", (Dialect("<tool_call>", _TAGS, "</tool_call>"),))

SEED = Format(
    "seed", (Dialect("<seed:tool_call>", _TAGS, "</seed:tool_call>"),), thinking=Thinking("<seed:think>", "</seed:think>")
)
"""`<seed:tool_call>` around the same tags, `<seed:think>` around thinking."""
