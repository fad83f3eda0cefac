"""Shared task sampling and parsing of tool calls."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from importlib.util import find_spec
from typing import Any

from turnwright.envs.spec import check_split
from turnwright.envs.tools.tool_schema import InvalidArguments, ToolSignature
from turnwright.errors import ConfigError
from turnwright.types import ContentPart, Message, Task, ToolCall, join_texts


class CallError(ValueError):
    """Error in the tool calls of a reply; the message is for the model, the one-word
    `cause` for the record."""

    def __init__(self, message: str, cause: str) -> None:
        super().__init__(message)
        self.cause = cause


def read_single_call(calls: Sequence[ToolCall], tool: ToolSignature) -> dict[str, Any]:
    """Return the arguments of the only call of a reply."""
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


def tool_results(
    calls: Sequence[ToolCall], name: str, content: str | tuple[ContentPart, ...]
) -> tuple[Message, ...]:
    """Return the same result for each call of a reply."""
    return tuple(
        Message("tool", content, tool_call_id=call.id or None, name=name) for call in calls
    )


def error_results(
    calls: Sequence[ToolCall], name: str, mistake: CallError
) -> tuple[tuple[Message, ...], Mapping[str, Any]]:
    """Return error messages for the calls, and the step's `info`."""
    messages = tool_results(calls, name, f"Error: {mistake}")
    return messages, {
        "tool_calls": len(calls),
        "tool_errors": len(calls),
        f"tool_errors/{mistake.cause}": len(calls),
    }


def visible_texts(messages: Sequence[Message]) -> list[str]:
    """Return each message as text for a scripted player, with the alt text of images."""
    return [
        m.content
        if isinstance(m.content, str)
        else join_texts([p if isinstance(p, str) else p.alt or "" for p in m.content])
        for m in messages
    ]


def question_text(messages: Sequence[Message]) -> str:
    """Return the first user message as text for a scripted player."""
    return next(
        text
        for text, message in zip(visible_texts(messages), messages, strict=True)
        if message.role == "user"
    )


def tool_call(name: str, **arguments: Any) -> str:
    """Return the text of a tool call in the Hermes format."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


_HELD_OUT_SHARE = 4
_MAX_IDLE_DRAWS = 1000  # consecutive draws without a new task before sampling stops


def sample_tasks(
    env: str, split: str, n: int, seed: int, draw: Callable[[random.Random], tuple[str, Task]]
) -> list[Task]:
    """Sample up to `n` tasks, drawn with a key that decides their split; about a quarter of
    the keys is held out."""
    check_split(split)
    rng = random.Random(f"{env}/{split}/{seed}")
    tasks: dict[str, Task] = {}
    idle = 0
    while len(tasks) < n and idle < _MAX_IDLE_DRAWS:
        key, task = draw(rng)
        idle += 1
        if is_held_out(env, key) == (split == "eval") and task.id not in tasks:
            tasks[task.id] = task
            idle = 0
    return list(tasks.values())


def require_extra(extra: str, package: str) -> None:
    """Check that the package of an extra is installed, without importing it."""
    if find_spec(package) is None:
        raise ConfigError(f"{package} is not installed; pip install 'turnwright[{extra}]'")


def is_held_out(env: str, key: str) -> bool:
    """Whether tasks of a key are held out: about a quarter, by hash."""
    digest = blake2b(key.encode(), digest_size=8, key=env.encode()).digest()
    return int.from_bytes(digest, "big") % _HELD_OUT_SHARE == 0
