"""Shared task sampling and tool-call reading."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from importlib.util import find_spec
from typing import Any

from turnwise.envs.tools.schema import InvalidArguments, ToolSignature
from turnwise.errors import ConfigError
from turnwise.types import ContentPart, Message, Task, ToolCall


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


_HELD_OUT_SHARE = 4
_MOST_DRAWS = 1000
"""Draws in a row that give nothing new, after which there is nothing new."""


def sample_tasks(world: str, split: str, n: int, seed: int, draw: Callable[[random.Random], tuple[str, Task]]) -> list[Task]:
    """Up to `n` different tasks of a split; fewer where there are no more.

    Args:
        draw: gives a key and a task. Tasks of one key are on one side of the split, about a quarter of the keys held out.

    Raises:
        ValueError: for another split than `train` and `eval`.
    """
    if split not in ("train", "eval"):
        raise ValueError(f"a split is 'train' or 'eval', not {split!r}")
    rng = random.Random(f"{world}/{split}/{seed}")
    tasks: dict[str, Task] = {}
    idle = 0
    while len(tasks) < n and idle < _MOST_DRAWS:
        key, task = draw(rng)
        idle += 1
        if is_held_out(world, key) == (split == "eval") and task.id not in tasks:
            tasks[task.id] = task
            idle = 0
    return list(tasks.values())


def require_extra(extra: str, package: str) -> None:
    """See that the package of an extra is installed, without importing it.

    Raises:
        ConfigError: when it is not.
    """
    if find_spec(package) is None:
        raise ConfigError(f"{package} is not installed; pip install 'turnwise[{extra}]'")


def is_held_out(world: str, key: str) -> bool:
    """Whether tasks of a key are for evaluation: about a quarter are, by hash."""
    digest = blake2b(key.encode(), digest_size=8, key=world.encode()).digest()
    return int.from_bytes(digest, "big") % _HELD_OUT_SHARE == 0
