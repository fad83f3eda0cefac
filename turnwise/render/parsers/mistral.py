"""Mistral's two ways, a list of JSON (v3, Nemo) and a name before JSON (v11 and later), to the end of the reply::

[TOOL_CALLS][{"name": "look_up", "arguments": {"key": "a"}, "id": "abcdefghi"}]
[THINK]I look it up.[/THINK]Let me see.[TOOL_CALLS]look_up[ARGS]{"key": "a"}[TOOL_CALLS]look_up[ARGS]{"key": "b"}
[TOOL_CALLS]look_up[CALL_ID]abcdefghi[ARGS]{"key": "a"}
"""

from turnwise.render.parsers.base import CallSyntax, ReasoningMarks, ReplyFormat, Tools
from turnwise.render.parsers.readers import JsonCalls, NamedJsonCalls
from turnwise.types import ToolCall


def _mistral_head(text: str) -> tuple[str, str]:
    name, _, given_id = text.partition("[CALL_ID]")
    return name.strip(), given_id.strip()


_LIST = JsonCalls(many=True)
_NAMED = NamedJsonCalls("[ARGS]", "[TOOL_CALLS]NAME[ARGS]{...}", _mistral_head)


def _mistral_read(body: str, tools: Tools) -> list[ToolCall]:
    return (_LIST if body.lstrip()[:1] in ("[", "{") else _NAMED)(body, tools)


MISTRAL = ReplyFormat(
    "mistral",
    (CallSyntax("[TOOL_CALLS]", _mistral_read),),
    hints=("[TOOL_CALLS]", "[/THINK]", "[THINK]"),
    thinking=ReasoningMarks("[THINK]", "[/THINK]"),
)
