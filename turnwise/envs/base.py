"""The seam to the world of one episode. It sees messages, never tokens."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from turnwise.envs.user_code import as_flag, as_number, shown
from turnwise.errors import EnvError
from turnwise.types import Message, Messages, Task, ToolCall, Trajectory
from turnwise.types.renamed import Renamed


@dataclass(frozen=True, slots=True)
class InlineObservation:
    """An observation that stands inside the model's own message: no close, no new header, and the model speaks on.

    With `keep_chars` or `keep_tokens` the last reply is rewound first: what lies behind that point leaves the context, and
    stays in the trajectory as a branch of its own.

    Example::

        Step(Inline("But wait, ", keep_chars=action.raw.rindex("Answer:")))
    """

    text: str = ""
    """What the world writes, never trained."""
    keep_chars: int | None = None
    """How many characters of `action.raw` stay; None keeps the whole reply."""
    keep_tokens: int | None = None
    """The same in sampled tokens, of the `action.tokens` that there are."""
    tail: Literal["trained", "untrained"] = "trained"
    """What becomes of the sampled tokens that leave the context, a dropped end token included."""

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise EnvError(f"Inline(text={self.text!r:.80}): the text is a string")
        if self.keep_chars is not None and self.keep_tokens is not None:
            raise EnvError("Inline: say keep_chars or keep_tokens, not both")
        for name, value in (("keep_chars", self.keep_chars), ("keep_tokens", self.keep_tokens)):
            if value is not None and (not isinstance(value, int) or value < 0):
                raise EnvError(f"Inline({name}={value!r}): a whole number of at least 0, counted from the reply's beginning")
        if self.tail not in ("trained", "untrained"):
            raise EnvError(f'Inline(tail={self.tail!r}): write "trained" or "untrained"')

    def check(self, chars: int, tokens: int) -> None:
        """See that a reply of this length can be cut so.

        Raises:
            EnvError: when it is shorter than what should stay.
        """
        for name, value, most in (("keep_chars", self.keep_chars, chars), ("keep_tokens", self.keep_tokens, tokens)):
            if value is not None and value > most:
                raise EnvError(f"Inline({name}={value}): the reply has only {most}; count in action.raw")

    def kept_text(self, reply: str) -> str:
        """What stays of a reply where nobody knows its tokens: they are its bytes, as for the built-in renderer.

        Raises:
            EnvError: as `check`.
        """
        said = reply.encode("utf-8", "replace")
        self.check(len(reply), len(said))
        return reply[: self.keep_chars] if self.keep_tokens is None else said[: self.keep_tokens].decode("utf-8", "replace")


class Step(NamedTuple):
    """What `Env.step` returns; it is Gymnasium's 5-tuple."""

    observation: Messages | InlineObservation | None = None
    """What the model is told next: a string (a user message), a message, or several of any role; None for nothing;
    `InlineObservation` to write inside the model's own message."""
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
    """The whole reply as an assistant message; this reply alone where it goes on inside an earlier one's message."""
    truncated: bool = False
    """The reply was cut off at its token limit."""
    tokens: int = 0
    """How many tokens it has, its end token not counted."""
    raw_source: Callable[[], str] | None = field(default=None, repr=False, compare=False)
    """Gives `raw`, which few environments ask for."""

    @property
    def raw(self) -> str:
        """All that the reply says, reasoning and calls included, without its end token; cut behind a stop text."""
        return self.text if self.raw_source is None else self.raw_source()

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls that the reply asks for, malformed ones with `error` set."""
        return self.message.tool_calls

    @property
    def reasoning(self) -> str | None:
        """The reply's reasoning, where the model's format sets it apart."""
        return self.message.reasoning

    whole = Renamed("raw_source")


@dataclass(frozen=True, slots=True)
class Scores:
    """What a reward of several parts came to: `Env.reward`, a reward function or a play function may return one."""

    own: float | None = 0.0
    """The episode's own, weighted; None when a part was not computed."""
    turns: tuple[float, ...] = ()
    """What each turn gets besides, weighted."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The parts by name, without their weights; of turns the sum."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What is counted: calls of judges, parts that were not computed."""

    @property
    def total(self) -> float | None:
        """All of it."""
        return None if self.own is None else self.own + math.fsum(self.turns)

    def checked(self, what: str) -> Scores:
        """The same with each number as a float.

        Raises:
            RewardError: for one that is no finite number.
        """
        return Scores(
            as_number(self.own, what),
            tuple(as_number(one, f"{what} by turn") or 0.0 for one in self.turns),
            {
                str(name): found
                for name, one in self.parts.items()
                if (found := as_number(one, f"{what}, {name!r}")) is not None
            },
            {str(name): as_number(one, f"{what}, metric {name!r}") or 0.0 for name, one in self.metrics.items()},
        )

    def with_added(self, added: float | None) -> Scores:
        """The same with so much more for the episode; None was not computed."""
        own = None if self.own is None or added is None else self.own + added
        return Scores(own, self.turns, self.parts, self.metrics)


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

    def reward(self, trajectory: Trajectory) -> float | Scores | Awaitable[float | Scores | None] | None:
        """The reward of the finished episode, on top of those of its steps; 0.0 unless overridden. None: not computed.

        `Scores`, which a `rewards(...)` gives, tells the parts of it by name.
        """
        return 0.0

    def close(self) -> Awaitable[None] | None:
        """Let go of everything. Called once, whatever happened."""
        return None

    def snapshot(self) -> Any:
        """The state of the episode, which no later `step` changes; optional, for `restore` after a failed step."""
        return None

    def restore(self, state: Any) -> Awaitable[None] | None:
        """Go back to what `snapshot` gave, of this environment or of another one with the same task and seed."""
        raise NotImplementedError(f"{type(self).__name__} has snapshot but no restore")


@runtime_checkable
class SupportsSnapshot(Protocol):
    """Environment that declares whether it has snapshots; of any other, overriding `Env.snapshot` declares it."""

    @property
    def snapshots(self) -> bool | None:
        """Whether `snapshot` and `restore` can be called; None is decided by overriding. Read before each step."""
        ...

    def snapshot(self) -> Any:
        """Return the state of the episode."""
        ...

    def restore(self, state: Any) -> Any:
        """Return to a state that `snapshot` gave."""
        ...


@runtime_checkable
class IsolatedReward(Protocol):
    """Environment that can compute its reward in a separate process by itself."""

    def isolated_reward(self, trajectory: Trajectory) -> Any:
        """Compute the reward of the finished episode in a separate process."""
        ...


@runtime_checkable
class HasGroupReward(Protocol):
    """Environment factory with a reward that compares the episodes of a task."""

    @property
    def group_reward(self) -> Callable[..., Any] | None:
        """Function of the finished trajectories of a task, or None."""
        ...


def as_step(value: Any) -> Step:
    """What `Env.step` returned, as a `Step`.

    Raises:
        EnvError: when it is neither a Step nor a 5-tuple, its flags are no booleans, or its info is no dict.
        RewardError: when its reward is not a finite number.
    """
    if not isinstance(value, tuple) or len(value) != 5:
        raise EnvError(f"step returned {shown(value)}; return tw.Step(...) or a Gymnasium 5-tuple")
    observation, reward, terminated, truncated, info = value
    if type(info) is not dict and not isinstance(info, Mapping):
        raise EnvError(f"step returned the info {shown(info)}; info is a dict")
    return Step(
        observation,
        as_number(reward, "a step's reward"),
        as_flag(terminated, "a step's terminated"),
        as_flag(truncated, "a step's truncated"),
        info,
    )


EnvFactory = Callable[[], Env]
