"""Tools and calls of tools as SGLang has them, which Miles' loops read replies with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from turnwright.renderers.parsers import PARSERS


class Function(BaseModel):
    """A function that a model may call."""

    description: str | None = None
    name: str | None = None
    parameters: Any = None
    strict: bool = False


class Tool(BaseModel):
    """A tool; all of them are functions."""

    type: str = "function"
    function: Function


class ToolCallItem(BaseModel):
    """One call: its position, the tool's name and its arguments as JSON."""

    tool_index: int
    name: str | None = None
    parameters: str


FORMATS = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "hermes": "hermes",
    "qwen3_coder": "qwen3_coder",
    "llama3": "llama3",
    "mistral": "mistral",
    "deepseekv3": "deepseek",
    "deepseekv31": "deepseek",
    "glm": "glm",
    "glm45": "glm",
    "glm47": "glm",
    "kimi_k2": "kimi",
    "minimax-m2": "minimax_m2",
    "pythonic": "pythonic",
}
"""Our formats by SGLang's names."""
THOUGHT = "</think>"


class FunctionCallParser:
    """Reads the calls of a reply; without `tools` none is known."""

    ToolCallParserEnum = FORMATS

    def __init__(self, tools: Sequence[Tool], tool_call_parser: str) -> None:
        if tool_call_parser not in FORMATS:
            raise ValueError(
                f"tool_call_parser {tool_call_parser!r}; there are {', '.join(FORMATS)}"
            )
        self.tools = list(tools)
        self._parser = PARSERS[FORMATS[tool_call_parser]]

    def has_tool_call(self, text: str) -> bool:
        """Whether a reply has a call."""
        return bool(self.parse_non_stream(text)[1])

    def parse_non_stream(self, full_text: str) -> tuple[str, list[ToolCallItem]]:
        """Return the text outside of the calls, and the calls of known tools that can be read; all
        text where there is none."""
        schemas = [tool.model_dump() for tool in self.tools]
        names = [tool.function.name for tool in self.tools]

        # SGLang reads calls only: a thought is text, and what looks like a call in it too.
        thought, mark, rest = full_text.rpartition(THOUGHT)
        message = self._parser.parse(rest, schemas)

        items: list[ToolCallItem] = []
        for call in message.tool_calls:
            if call.name not in names or call.error is not None:
                continue
            arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
            index = names.index(call.name)
            items.append(ToolCallItem(tool_index=index, name=call.name, parameters=arguments))
        if not items:
            return full_text, []
        return f"{thought}{mark}{message.text}".strip(), items
