"""Mistral's two ways, a list of JSON (v3, Nemo) and a name before JSON (v11 and later), to the end of the reply::

[TOOL_CALLS][{"name": "look_up", "arguments": {"key": "a"}, "id": "abcdefghi"}]
[THINK]I look it up.[/THINK]Let me see.[TOOL_CALLS]look_up[ARGS]{"key": "a"}[TOOL_CALLS]look_up[ARGS]{"key": "b"}
[TOOL_CALLS]look_up[CALL_ID]abcdefghi[ARGS]{"key": "a"}
"""

from turnwise.render.parsers.base import Dialect, Format, Thinking, Tools
from turnwise.render.parsers.readers import JsonCalls, NamedJson
from turnwise.types import ToolCall


def _head(text: str) -> tuple[str, str]:
    name, _, given_id = text.partition("[CALL_ID]")
    return name.strip(), given_id.strip()


_LIST = JsonCalls(many=True)
_NAMED = NamedJson("[ARGS]", "[TOOL_CALLS]NAME[ARGS]{...}", _head)


def _read(body: str, tools: Tools) -> list[ToolCall]:
    return (_LIST if body.lstrip()[:1] in ("[", "{") else _NAMED)(body, tools)


MISTRAL = Format(
    "mistral",
    (Dialect("[TOOL_CALLS]", _read),),
    hints=("[TOOL_CALLS]", "[/THINK]", "[THINK]"),
    thinking=Thinking("[THINK]", "[/THINK]"),
)
