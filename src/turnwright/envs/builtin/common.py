"""Shared task sampling, parsing of tool calls, and moves on a grid."""

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

MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
"""(row, column) change of each move on a grid, in the order of Gymnasium's actions."""


class CallError(ValueError):
    """Error in the tool calls of a reply; the message is for the model, the one-word `cause` for
    the record."""

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
    count = len(calls)
    info = {"tool_calls": count, "tool_errors": count, f"tool_errors/{mistake.cause}": count}
    return messages, info


def visible_texts(messages: Sequence[Message]) -> list[str]:
    """Return each message as text for a scripted player, with the alt text of images."""
    texts = []
    for message in messages:
        if isinstance(message.content, str):
            texts.append(message.content)
        else:
            parts = [part if isinstance(part, str) else part.alt or "" for part in message.content]
            texts.append(join_texts(parts))
    return texts


def question_text(messages: Sequence[Message]) -> str:
    """Return the first user message as text for a scripted player."""
    roles = [message.role for message in messages]
    return visible_texts(messages)[roles.index("user")]


def tool_call(name: str, **arguments: Any) -> str:
    """Return the text of a tool call in the Hermes format."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


_HELD_OUT_SHARE = 4
"""One key in so many is held out."""

_MAX_IDLE_DRAWS = 1000
"""Consecutive draws without a new task before sampling stops."""


def sample_tasks(
    env: str, split: str, n: int, seed: int, draw: Callable[[random.Random], tuple[str, Task]]
) -> list[Task]:
    """Sample up to `n` tasks, drawn with a key that decides their split; about a quarter of the
    keys is held out."""
    check_split(split)
    rng = random.Random(f"{env}/{split}/{seed}")
    tasks: dict[str, Task] = {}
    idle_draws = 0
    while len(tasks) < n and idle_draws < _MAX_IDLE_DRAWS:
        key, task = draw(rng)
        idle_draws += 1
        is_of_split = is_held_out(env, key) == (split == "eval")
        if is_of_split and task.id not in tasks:
            tasks[task.id] = task
            idle_draws = 0
    return list(tasks.values())


def require_extra(extra: str, package: str) -> None:
    """Check that the package of an extra is installed, without importing it."""
    if find_spec(package) is None:
        raise ConfigError(f"{package} is not installed; pip install 'turnwright[{extra}]'")


def is_held_out(env: str, key: str) -> bool:
    """Whether tasks of a key are held out: about a quarter, by hash."""
    digest = blake2b(key.encode(), digest_size=8, key=env.encode()).digest()
    return int.from_bytes(digest, "big") % _HELD_OUT_SHARE == 0
