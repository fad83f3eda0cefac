"""StopReason, Status, Failure, FailureKind."""

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


class Status(StrEnum):
    """The four coarse outcomes that slime's ``Sample.Status`` knows."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


class StopReason(StrEnum):
    """Why an episode ended; ``reason.sentence`` says it in words and ``reason.status`` coarsely."""

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
        """One sentence for people."""
        return _ROWS[self][1]

    @property
    def status(self) -> Status:
        """Which of slime's four statuses this reason is."""
        return _ROWS[self][0]

    @property
    def failed(self) -> bool:
        """Whether no reward can be trusted: something broke, or the episode was cut off from outside."""
        return self.status in (Status.FAILED, Status.ABORTED)


_ROWS: dict[StopReason, tuple[Status, str]] = {
    StopReason.DONE: (Status.COMPLETED, "The environment said that the episode is over."),
    StopReason.ENV_TRUNCATED: (Status.TRUNCATED, "The environment cut the episode short."),
    StopReason.MAX_TURNS: (Status.TRUNCATED, "The episode used all the turns it may have."),
    StopReason.EPISODE_TOKENS: (Status.TRUNCATED, "The episode used all the tokens it may have."),
    StopReason.CONTEXT: (Status.TRUNCATED, "The next request would not fit in the context."),
    StopReason.TURN_LENGTH: (Status.TRUNCATED, "A reply reached the tokens of a turn without an end."),
    StopReason.WALL_CLOCK: (Status.TRUNCATED, "The episode used all the time it may have."),
    StopReason.INVALID_TOKEN: (Status.TRUNCATED, "The model sampled a control token out of place."),
    StopReason.ENV_ERROR: (Status.FAILED, "The environment raised an exception."),
    StopReason.TOOL_ERROR: (Status.FAILED, "A tool broke in a way that is not the model's doing."),
    StopReason.REWARD_ERROR: (Status.FAILED, "The reward could not be computed."),
    StopReason.ENGINE_ERROR: (Status.FAILED, "The engine failed or broke its contract."),
    StopReason.TIMEOUT: (Status.FAILED, "Something did not answer by its deadline."),
    StopReason.ABORTED: (Status.ABORTED, "The episode was stopped from outside."),
}
