"""What the built-in environments with one tool share: a reply's single call, read and held to the tool's signature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.env.tools.schema import InvalidArguments, ToolSignature
from turnwise.types import ContentPart, Message, ToolCall


class CallError(ValueError):
    """What is wrong with the calls of a reply, worded for the model; `cause` in one word for the record."""

    def __init__(self, said: str, cause: str) -> None:
        super().__init__(said)
        self.cause = cause


def read_single_call(calls: Sequence[ToolCall], tool: ToolSignature) -> dict[str, Any]:
    """The arguments of the one call of a reply.

    Raises:
        Mistake: for several calls, one that cannot be read, another tool, or arguments that do not fit.
    """
    if len(calls) > 1:
        raise CallError("one call a turn; none of these was run", "several_calls")
    (call,) = calls
    if call.error is not None:
        raise CallError(call.error, call.cause or "malformed")
    if call.name != tool.name:
        raise CallError(f"no tool {call.name!r:.40}; there is {tool.name}", "unknown_tool")
    try:
        return tool.read(call.arguments)
    except InvalidArguments as error:
        raise CallError(str(error)[:300], error.cause) from None


def tool_results(calls: Sequence[ToolCall], name: str, content: str | tuple[ContentPart, ...]) -> tuple[Message, ...]:
    """The same result for each call of a reply."""
    return tuple(Message("tool", content, tool_call_id=call.id or None, name=name) for call in calls)


def error_results(calls: Sequence[ToolCall], name: str, mistake: CallError) -> tuple[tuple[Message, ...], Mapping[str, Any]]:
    """Messages that tell a mistake, and what a step's `info` says of it."""
    told = tool_results(calls, name, f"Error: {mistake}")
    return told, {"tool_calls": len(calls), "tool_errors": len(calls), f"tool_errors/{mistake.cause}": len(calls)}


def visible_texts(messages: Sequence[Message]) -> list[str]:
    """Each message in words, as a scripted player reads it: texts, and what stands for images."""
    return [
        m.content if isinstance(m.content, str) else "".join(p if isinstance(p, str) else p.alt or "" for p in m.content)
        for m in messages
    ]
