"""What broke in an episode, as data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FailureKind(StrEnum):
    """Whose doing a failure is. What the model does wrong is none of these: it is an observation."""

    ENVIRONMENT = "environment"
    """The world broke: a connection, a file, a process. It may go well the next time."""
    TOOL = "tool"
    """A tool raised `ToolFailure`. It may go well the next time."""
    REWARD = "reward"
    """The reward could not be computed, or is no finite number."""
    ENGINE = "engine"
    """What samples failed or broke its contract."""
    TIMEOUT = "timeout"
    """Something did not answer by its deadline. It may the next time."""
    USER_BUG = "user_bug"
    """A mistake in the code of an environment, tool, reward or play function: the next time is the same."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What broke, as data: a bad rollout is a record, never a crash."""

    type: str
    message: str
    phase: str
    """reset, step, reward, generate, render, play or close."""
    traceback: str = ""
    kind: str = ""
    """Whose doing it is, a `FailureKind`."""
    place: str = ""
    """`file.py:line` where a person's code raised it, as far as that is known."""
    turn: int = -1
    """The turn that it broke, -1 before the first."""
    recovery: str = ""
    """Where the episode went on: `restored`, `replayed`, a fresh `attempt`, or `asked again` (an engine, a reward); empty where
    this was its end."""
