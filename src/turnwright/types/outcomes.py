"""Outcomes of episodes: stop reasons, statuses and failures."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class FailureKind(StrEnum):
    """Which part failed. The model's mistakes are not failures: they become observations."""

    ENVIRONMENT = "environment"
    """The environment failed: a connection, a file, a process. A retry may succeed."""
    TOOL = "tool"
    """A tool raised `ToolFailure`. A retry may succeed."""
    REWARD = "reward"
    """The reward could not be computed, or is not a finite number."""
    ENGINE = "engine"
    """The engine failed or broke its contract."""
    TIMEOUT = "timeout"
    """A deadline passed. A retry may succeed."""
    USER_BUG = "user_bug"
    """A bug in the code of an environment, tool, reward or agent function. A retry fails again."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure as data: a failed rollout is a record, never a crash."""

    type: str
    message: str
    phase: str
    """reset, step, reward, generate, render, play or close."""
    traceback: str = ""
    kind: str = ""
    """The part that failed, a `FailureKind`."""
    place: str = ""
    """`file.py:line` of the user code that raised it, if known."""
    turn: int = -1
    """Index of the turn, -1 before the first."""
    recovery: str = ""
    """How the episode continued: `restored`, `replayed`, a new `attempt`, or `asked again` (an
    engine, a reward). Empty if the failure ended it.
    """

    def __repr__(self) -> str:
        """Return one line, without the traceback."""
        text = f"{self.type} in {self.phase}: {shortened(self.message)}"
        if self.place:
            text += f" ({self.place})"
        return f"<Failure {text}>"


def shortened(text: str, limit: int = 200) -> str:
    """Return a text as one line of at most `limit` characters.

    Characters that no terminal can print are replaced.
    """
    # White space shrinks, so a few times the limit is looked at; a text may be of any length.
    line = " ".join(text[: 4 * limit].split())
    line = "".join(char if char.isprintable() else "\ufffd" for char in line)
    is_whole = len(line) <= limit and len(text) <= 4 * limit
    return line if is_whole else line[: limit - 1] + "…"


class Status(StrEnum):
    """The four coarse outcomes of slime's `Sample.Status`."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


class StopReason(StrEnum):
    """Why an episode ended; `reason.sentence` describes it and `reason.status` classifies it.

    Example::

        >>> tw.StopReason("max_turns").status
        <Status.TRUNCATED: 'truncated'>
    """

    status: Status
    """The status, one of slime's four."""
    sentence: str
    """Description in one sentence."""

    def __new__(cls, value: str, *about: Any) -> StopReason:
        # `about` is (status, sentence). For type checkers, a lookup gives the value alone.
        self = str.__new__(cls, value)
        self._value_ = value
        self.status, self.sentence = about
        return self

    DONE = "done", Status.COMPLETED, "The environment ended the episode."
    ENV_TRUNCATED = "env_truncated", Status.TRUNCATED, "The environment truncated the episode."
    MAX_TURNS = "max_turns", Status.TRUNCATED, "The episode reached its turn limit."
    EPISODE_TOKENS = "episode_tokens", Status.TRUNCATED, "The episode reached its token limit."
    CONTEXT = "context", Status.TRUNCATED, "The next request would not fit in the context."
    TURN_LENGTH = (
        "turn_length",
        Status.TRUNCATED,
        "A reply reached the token limit of a turn without an end token.",
    )
    WALL_CLOCK = "wall_clock", Status.TRUNCATED, "The episode reached its time limit."
    INVALID_TOKEN = (
        "invalid_token",
        Status.TRUNCATED,
        "The model sampled a misplaced control token.",
    )
    ENV_ERROR = "env_error", Status.FAILED, "The environment raised an exception."
    TOOL_ERROR = "tool_error", Status.FAILED, "A tool failed through no fault of the model."
    REWARD_ERROR = "reward_error", Status.FAILED, "The reward could not be computed."
    ENGINE_ERROR = "engine_error", Status.FAILED, "The engine failed or broke its contract."
    TIMEOUT = "timeout", Status.FAILED, "A call missed its deadline."
    ABORTED = "aborted", Status.ABORTED, "The agent function gave the episode up."

    @property
    def failed(self) -> bool:
        """Whether no reward can be trusted, because of a failure or an abort."""
        return self.status in (Status.FAILED, Status.ABORTED)
