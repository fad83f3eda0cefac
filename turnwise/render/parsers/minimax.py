"""Calls in tags with attributes. MiniMax M2::

    <minimax:tool_call>
    <invoke name="look_up">
    <parameter name="key">a</parameter>
    </invoke>
    </minimax:tool_call>

Muse and MiniCPM 5 write the same with other tags. Arguments are bare text and have lost their types (see `values.coerce`).
"""

import re

from turnwise.render.parsers.base import CallSyntax, ReasoningMarks, ReplyFormat
from turnwise.render.parsers.readers import TaggedCalls


def _minimax_tags(call: str, argument: str) -> TaggedCalls:
    return TaggedCalls(
        re.compile(rf'<{call} name="([^">\n]*)">'),
        re.compile(rf'\s*<{argument} name="([^">\n]*)">'),
        f"</{argument}>",
        f"</{call}>",
        f'<{call} name="NAME"><{argument} name="KEY">VALUE</{argument}></{call}>',
    )


MINIMAX_M2 = ReplyFormat(
    "minimax_m2", (CallSyntax("<minimax:tool_call>", _minimax_tags("invoke", "parameter"), "</minimax:tool_call>"),)
)

MUSE = ReplyFormat(
    "muse",
    (CallSyntax("<atem:function_calls>", _minimax_tags("atem:invoke", "atem:parameter"), "</atem:function_calls>"),),
    thinking=ReasoningMarks("to=self<|message|>", "<|eom|>"),
)
"""Muse: `<atem:function_calls>`, `<atem:invoke name=...>`; thinking is a message to itself."""
