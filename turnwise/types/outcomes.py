"""Outcomes of episodes: stop reasons, statuses and failures."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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
    """How the episode continued: `restored`, `replayed`, a new `attempt`, or `asked again` (an engine, a reward). Empty if the
    failure ended it.
    """


class Status(StrEnum):
    """The four coarse outcomes of slime's ``Sample.Status``."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


class StopReason(StrEnum):
    """Why an episode ended; ``reason.sentence`` describes it and ``reason.status`` classifies it."""

    DONE = "done"
    ENV_TRUNCATED = "env_truncated"
    MAX_TURNS = "max_turns"
    EPISODE_TOKENS = "episode_tokens"
    CONTEXT = "context"
    TURN_LENGTH = "turn_length"
    WALL_CLOCK = "wall_clock"
    INVALID_TOKEN = "invalid_token"
    ENV_ERROR = "env_error"
    TOOL_ERROR = "tool_error"
    REWARD_ERROR = "reward_error"
    ENGINE_ERROR = "engine_error"
    TIMEOUT = "timeout"
    ABORTED = "aborted"

    @property
    def sentence(self) -> str:
        """Description in one sentence."""
        return _ROWS[self][1]

    @property
    def status(self) -> Status:
        """The status, one of slime's four."""
        return _ROWS[self][0]

    @property
    def failed(self) -> bool:
        """Whether no reward can be trusted, because of a failure or an abort."""
        return self.status in (Status.FAILED, Status.ABORTED)


_ROWS: dict[StopReason, tuple[Status, str]] = {
    StopReason.DONE: (Status.COMPLETED, "The environment ended the episode."),
    StopReason.ENV_TRUNCATED: (Status.TRUNCATED, "The environment truncated the episode."),
    StopReason.MAX_TURNS: (Status.TRUNCATED, "The episode reached its turn limit."),
    StopReason.EPISODE_TOKENS: (Status.TRUNCATED, "The episode reached its token limit."),
    StopReason.CONTEXT: (Status.TRUNCATED, "The next request would not fit in the context."),
    StopReason.TURN_LENGTH: (Status.TRUNCATED, "A reply reached the token limit of a turn without an end token."),
    StopReason.WALL_CLOCK: (Status.TRUNCATED, "The episode reached its time limit."),
    StopReason.INVALID_TOKEN: (Status.TRUNCATED, "The model sampled a misplaced control token."),
    StopReason.ENV_ERROR: (Status.FAILED, "The environment raised an exception."),
    StopReason.TOOL_ERROR: (Status.FAILED, "A tool failed through no fault of the model."),
    StopReason.REWARD_ERROR: (Status.FAILED, "The reward could not be computed."),
    StopReason.ENGINE_ERROR: (Status.FAILED, "The engine failed or broke its contract."),
    StopReason.TIMEOUT: (Status.FAILED, "A call missed its deadline."),
    StopReason.ABORTED: (Status.ABORTED, "The episode was cancelled."),
}
