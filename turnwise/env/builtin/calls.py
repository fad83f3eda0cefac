"""What the built-in environments with one tool share: a reply's single call, read and held to the tool's signature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.env.tools.schema import BadArguments, Signature
from turnwise.types import Message, Part, ToolCall


class Mistake(ValueError):
    """What is wrong with the calls of a reply, worded for the model; `cause` in one word for the record."""

    def __init__(self, said: str, cause: str) -> None:
        super().__init__(said)
        self.cause = cause


def read_one(calls: Sequence[ToolCall], tool: Signature) -> dict[str, Any]:
    """The arguments of the one call of a reply.

    Raises:
        Mistake: for several calls, one that cannot be read, another tool, or arguments that do not fit.
    """
    if len(calls) > 1:
        raise Mistake("one call a turn; none of these was run", "several_calls")
    (call,) = calls
    if call.error is not None:
        raise Mistake(call.error, call.cause or "malformed")
    if call.name != tool.name:
        raise Mistake(f"no tool {call.name!r:.40}; there is {tool.name}", "unknown_tool")
    try:
        return tool.read(call.arguments)
    except BadArguments as error:
        raise Mistake(str(error)[:300], error.cause) from None


def answered(calls: Sequence[ToolCall], name: str, content: str | tuple[Part, ...]) -> tuple[Message, ...]:
    """The same result for each call of a reply."""
    return tuple(Message("tool", content, tool_call_id=call.id or None, name=name) for call in calls)


def wrong(calls: Sequence[ToolCall], name: str, mistake: Mistake) -> tuple[tuple[Message, ...], Mapping[str, Any]]:
    """Messages that tell a mistake, and what a step's `info` says of it."""
    told = answered(calls, name, f"Error: {mistake}")
    return told, {"tool_calls": len(calls), "tool_errors": len(calls), f"tool_errors/{mistake.cause}": len(calls)}


def shown(messages: Sequence[Message]) -> list[str]:
    """Each message in words, as a scripted player reads it: texts, and what stands for images."""
    return [
        m.content if isinstance(m.content, str) else "".join(p if isinstance(p, str) else p.alt or "" for p in m.content)
        for m in messages
    ]
