"""Calls in tags with attributes. MiniMax M2::

    <minimax:tool_call>
    <invoke name="look_up">
    <parameter name="key">a</parameter>
    </invoke>
    </minimax:tool_call>

Muse and MiniCPM 5 write the same with other tags. Arguments are bare text and have lost their types (see `values.coerce`).
"""

import re

from turnwise.render.parsers.base import Dialect, Format, Thinking
from turnwise.render.parsers.readers import Tags


def _tags(call: str, argument: str) -> Tags:
    return Tags(
        re.compile(rf'<{call} name="([^">\n]*)">'),
        re.compile(rf'\s*<{argument} name="([^">\n]*)">'),
        f"</{argument}>",
        f"</{call}>",
        f'<{call} name="NAME"><{argument} name="KEY">VALUE</{argument}></{call}>',
    )


MINIMAX_M2 = Format("minimax_m2", (Dialect("<minimax:tool_call>", _tags("invoke", "parameter"), "</minimax:tool_call>"),))

MUSE = Format(
    "muse",
    (Dialect("<atem:function_calls>", _tags("atem:invoke", "atem:parameter"), "</atem:function_calls>"),),
    thinking=Thinking("to=self<|message|>", "<|eom|>"),
)
"""Muse: `<atem:function_calls>`, `<atem:invoke name=...>`; thinking is a message to itself."""
