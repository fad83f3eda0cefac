"""The seam to the world of one episode. It sees messages, never tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from turnwise.types import Message, Messages, Task, ToolCall, Trajectory


class Step(NamedTuple):
    """What `Env.step` returns; it is Gymnasium's 5-tuple."""

    observation: Messages | None = None
    """What the model is told next: a string (a user message), a message, or several of any role; None for nothing."""
    reward: float | None = 0.0
    """Added to the episode's reward. None: not computed, so the episode has no reward."""
    terminated: bool = False
    """The episode is over by the world's own rules."""
    truncated: bool = False
    """The environment cuts the episode short."""
    info: Mapping[str, Any] = MappingProxyType({})
    """Kept in the record of the turn."""


@dataclass(frozen=True, slots=True)
class Action:
    """What the model did, as an environment sees it."""

    text: str
    """The reply's visible text: no end token, no reasoning, no tool calls."""
    message: Message
    """The whole reply as an assistant message."""
    truncated: bool = False
    """The reply was cut off at its token limit."""

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls that the reply asks for, malformed ones with `error` set."""
        return self.message.tool_calls

    @property
    def reasoning(self) -> str | None:
        """The reply's reasoning, where the model's format sets it apart."""
        return self.message.reasoning


class Env(ABC):
    """The world of one episode: used once, then closed. Given to a rollout as a factory (the class itself, say).

    Every method may be `async`; one that is not runs in a thread, so it may block. Order of calls: `reset`, `step` until it
    says terminated or truncated or a limit is met, `reward`, `close` (always, also after an error).

    Example::

        class Echo(Env):
            def reset(self, task, *, seed=None):
                return "Say hello."
            def step(self, action):
                return Step(reward=float("hello" in action.text), terminated=True)
    """

    tools: Sequence[Mapping[str, Any]] = ()
    """OpenAI schemas of the tools that the model is told of; read after `reset`."""

    @abstractmethod
    def reset(self, task: Task, *, seed: int | None = None) -> Messages | Awaitable[Messages | None] | None:
        """Begin the episode; returns the opening messages (a string is one user message), or None for the task's own."""

    @abstractmethod
    def step(self, action: Action) -> Step | tuple[Any, ...] | Awaitable[Step | tuple[Any, ...]]:
        """Answer one reply. Raise `InvalidAction` for the model's mistakes: its message becomes the observation."""

    def reward(self, trajectory: Trajectory) -> float | Awaitable[float | None] | None:
        """The reward of the finished episode, on top of those of its steps; 0.0 unless overridden. None: not computed."""
        return 0.0

    def close(self) -> Awaitable[None] | None:
        """Let go of everything. Called once, whatever happened."""
        return None


EnvFactory = Callable[[], Env]
