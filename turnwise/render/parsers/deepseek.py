"""DeepSeek's three ways. V3 and R1::

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look_up
    ```json
    {"key": "a"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3.1::

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look_up<｜tool▁sep｜>{"key": "a"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3.2 (`function_calls`) and V4 (`tool_calls`), where `string` says whether the text is a string or JSON::

    <｜DSML｜tool_calls>
    <｜DSML｜invoke name="look_up">
    <｜DSML｜parameter name="key" string="true">a</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls>
"""

import re

from turnwise.render.parsers.base import CallSyntax, ReplyFormat, Tools
from turnwise.render.parsers.readers import NamedJsonCalls, TaggedCalls
from turnwise.types import ToolCall

_SEP = "<｜tool▁sep｜>"
_FENCED = NamedJsonCalls("\n```json\n", f"function{_SEP}NAME\\n```json\\n{{...}}\\n```")
_BARE = NamedJsonCalls(_SEP, f"NAME{_SEP}{{...}}")
_SECTIONS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")


def _deepseek_read(body: str, tools: Tools) -> list[ToolCall]:
    kind, _, call = body.partition(_SEP)
    if kind.strip() == "function" and not call.lstrip().startswith("{"):
        return _FENCED(call.rstrip().removesuffix("```"), tools)
    return _BARE(body, tools)


_DEEPSEEK_TAGS = TaggedCalls(
    re.compile(r'<｜DSML｜invoke name="([^">\n]*)">'),
    re.compile(r'\s*<｜DSML｜parameter name="([^">\n]*)" string="(?P<type>true|false)">'),
    "</｜DSML｜parameter>",
    "</｜DSML｜invoke>",
    '<｜DSML｜invoke name="NAME"><｜DSML｜parameter name="KEY" string="true|false">VALUE</｜DSML｜parameter></｜DSML｜invoke>',
)
DEEPSEEK = ReplyFormat(
    "deepseek",
    (
        CallSyntax("<｜tool▁call▁begin｜>", _deepseek_read, "<｜tool▁call▁end｜>", _SECTIONS),
        CallSyntax("<｜DSML｜tool_calls>", _DEEPSEEK_TAGS, "</｜DSML｜tool_calls>"),
        CallSyntax("<｜DSML｜function_calls>", _DEEPSEEK_TAGS, "</｜DSML｜function_calls>"),
    ),
)
