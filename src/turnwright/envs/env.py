"""The environment interface. Environments exchange messages, never tokens.

`Env` is what a user writes: `reset`, `step`, `reward`, `close`. `step` gets an `Action`, the
model's reply, and returns a `Step`. Most environments are simpler to write as tools
(`tool_env.py`) or as a Gymnasium environment (`gym.py`); what a rollout does with one is in
`rollouts/episode.py`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

from turnwright.envs.user_code import LARGEST, as_flag, as_number, describe_value
from turnwright.errors import EnvError
from turnwright.types import (
    ContentPart,
    Message,
    Messages,
    StopReason,
    Task,
    ToolCall,
    Trajectory,
    read_part,
)

if TYPE_CHECKING:
    from turnwright.config import Limits
    from turnwright.config.schema import OnTurnLength


@dataclass(frozen=True, slots=True)
class InlineObservation:
    """Observation inserted into the model's own message, without closing it; the model continues
    after the text.

    `keep_chars` or `keep_tokens` first rewinds the last reply. The removed part leaves the context
    and stays in the trajectory as a separate branch.

    Example::

        Step(InlineObservation("But wait, ", keep_chars=action.raw.rindex("Answer:")))
    """

    text: str | tuple[ContentPart, ...] = ""
    """Text to insert, or its parts: texts, images and videos; never trained."""
    keep_chars: int | None = None
    """Characters of `action.raw` to keep; None keeps the complete reply."""
    keep_tokens: int | None = None
    """Sampled tokens to keep, out of `action.tokens`; None keeps the complete reply."""
    tail: Literal["trained", "untrained"] = "trained"
    """Whether sampled tokens removed from the context are trained, a dropped end token included."""

    def __post_init__(self) -> None:
        if isinstance(self.text, (list, tuple)):
            try:
                object.__setattr__(self, "text", tuple(map(read_part, self.text)))
            except (TypeError, KeyError) as error:
                raise EnvError(f"InlineObservation: {error}") from error
        elif not isinstance(self.text, str):
            raise EnvError(
                f"InlineObservation(text={self.text!r:.80}): text must be a string, or a list of "
                "texts and images"
            )
        if self.keep_chars is not None and self.keep_tokens is not None:
            raise EnvError("InlineObservation: give keep_chars or keep_tokens, not both")
        for name, value in (("keep_chars", self.keep_chars), ("keep_tokens", self.keep_tokens)):
            if value is not None and (not isinstance(value, int) or value < 0):
                raise EnvError(
                    f"InlineObservation({name}={value!r}): give an integer >= 0, counted from the "
                    "start of the reply"
                )
        if self.tail not in ("trained", "untrained"):
            raise EnvError(f'InlineObservation(tail={self.tail!r}): write "trained" or "untrained"')

    @property
    def message(self) -> Message:
        """The inserted content as a message."""
        return Message("user", self.text)

    def check(self, chars: int, tokens: int) -> None:
        """Check a reply of this length; raise `EnvError` when it is shorter than the part to
        keep."""
        for name, value, length in (
            ("keep_chars", self.keep_chars, chars),
            ("keep_tokens", self.keep_tokens, tokens),
        ):
            if value is not None and value > length:
                raise EnvError(
                    f"InlineObservation({name}={value}): the reply has only {length}; count in "
                    "action.raw"
                )

    def kept_text(self, reply: str) -> str:
        """Return the kept part of a reply whose tokens are unknown, one token per UTF-8 byte (the
        built-in tokenizer)."""
        encoded = reply.encode("utf-8", "replace")
        self.check(len(reply), len(encoded))
        if self.keep_tokens is None:
            return reply[: self.keep_chars]
        return encoded[: self.keep_tokens].decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class NewHistory:
    """Observation that replaces the conversation: the model continues with these messages, and no
    others.

    A number is the index of a message of the conversation so far, the last reply included; a reply
    that is kept so keeps its sampled ids. What is left out stays in the trajectory as a branch
    (`rewritten`), trained as before.

    Example::

        Step(NewHistory([0, "Summary: the key is red.", "What now?"]))
    """

    messages: Sequence[Any]
    """Indices of messages that are kept, and new messages; a string is a user message."""

    def __post_init__(self) -> None:
        if isinstance(self.messages, (str, Message, Mapping)):
            items: tuple[Any, ...] = (self.messages,)
        else:
            items = tuple(self.messages)
        read: list[Message | int] = []
        for item in items:
            if isinstance(item, int) and not isinstance(item, bool):
                read.append(item)
                continue
            try:
                read.append(Message.of(item))
            except (TypeError, ValueError, KeyError) as error:
                raise EnvError(f"NewHistory: {error}") from error
        object.__setattr__(self, "messages", tuple(read))

    @property
    def new(self) -> tuple[Message, ...]:
        """The messages that the conversation did not have."""
        return tuple(item for item in self.messages if isinstance(item, Message))

    def with_new(self, messages: Sequence[Message]) -> NewHistory:
        """Return a copy with other new messages, in order."""
        remaining = iter(messages)
        items = []
        for item in self.messages:
            items.append(next(remaining) if isinstance(item, Message) else item)
        return NewHistory(items)

    def check(self, size: int) -> None:
        """Check the indices for a conversation of this many messages; raise `EnvError` for one that
        is not there, or twice."""
        if not self.messages:
            raise EnvError("NewHistory has no message; the model needs one to answer")
        kept = [item for item in self.messages if isinstance(item, int)]
        for index in kept:
            if not 0 <= index < size:
                raise EnvError(
                    f"NewHistory keeps message {index}, and the conversation has {size}, from 0 to "
                    f"{size - 1}"
                )
        if len(set(kept)) < len(kept):
            raise EnvError("NewHistory keeps a message twice; keep it once")


class Step(NamedTuple):
    """Return value of `Env.step`; Gymnasium's 5-tuple."""

    observation: Messages | InlineObservation | NewHistory | None = None
    """Next input of the model: a string (a user message), one or several messages of any role, or
    None for no message; `InlineObservation` inserts text into the model's own message, `NewHistory`
    replaces the conversation."""
    reward: float | None = 0.0
    """Added to the episode's reward. None: not computed, so the episode has no reward."""
    terminated: bool = False
    """The episode is over by the rules of the environment."""
    truncated: bool = False
    """The environment ends the episode early."""
    info: Mapping[str, Any] = MappingProxyType({})
    """Stored in the record of the turn. The value of `state` names the state that the next turn
    begins in, for algorithms that compare equal states of a task."""


@dataclass(frozen=True, slots=True)
class Action:
    """One reply of the model, as passed to `Env.step`."""

    text: str
    """Visible text of the reply: no end token, no reasoning, no tool calls."""
    message: Message
    """The complete reply as an assistant message; only this reply where it continues an earlier
    message."""
    truncated: bool = False
    """The reply reached its token limit."""
    tokens: int = 0
    """Number of tokens, without the end token."""
    raw_source: Callable[[], str] | None = field(default=None, repr=False, compare=False)
    """Computes `raw` on demand, since few environments use it."""
    end_token: str = ""
    """Text of the token that ended the reply; empty if the reply was cut or ended with a stop
    text."""

    @property
    def raw(self) -> str:
        """Complete text, reasoning and calls included, without the end token; truncated after a
        stop text."""
        return self.text if self.raw_source is None else self.raw_source()

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Tool calls of the reply; malformed ones have `error` set."""
        return self.message.tool_calls

    @property
    def reasoning(self) -> str | None:
        """Reasoning of the reply, if the model's format separates it."""
        return self.message.reasoning


@dataclass(frozen=True, slots=True)
class Scores:
    """Reward made of several parts; returned by `Env.reward`, a reward function or an agent
    function."""

    own: float | None = 0.0
    """Weighted reward of the episode; None when a part was not computed."""
    turns: tuple[float, ...] = ()
    """Additional weighted reward of each turn."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Unweighted parts by name; a part computed per turn is summed."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Counters: judge calls, parts that were not computed."""
    status: Literal["completed", "truncated", "aborted", "failed"] | StopReason = "completed"
    """How an agent function's episode ended, or the limit that it met; environments say it by
    `Step`.

    `completed` and `truncated` are rewarded and trained alike, and counted apart. `aborted` (given
    up for a reason outside the episode) has no reward, whatever `own` is, and is not trained.
    `failed` is a failure like an exception: no reward, not trained."""
    rows: tuple[tuple[float, tuple[Any, ...]], ...] = ()
    """Reward of each training row of an agent function, with the replies (of `Model.generate`) that
    it trains. The episode's reward is `own` plus their mean; what is trained in a row is compared
    by `own` plus the row's."""
    agents: Mapping[str, float] = field(default_factory=dict)
    """Rewards of agents with one of their own, by name; the others have the episode's.

    `total` does not have them.
    """

    @property
    def total(self) -> float | None:
        """Sum of the episode's and all turns' rewards, and the mean of the rows'; None when not
        computed."""
        if self.own is None:
            return None
        mean = math.fsum(reward for reward, _ in self.rows) / max(len(self.rows), 1)
        return self.own + math.fsum(self.turns) + mean

    def checked(self, what: str) -> Scores:
        """Return a copy with every number as a float; raise `RewardError` for one that is not
        finite or too large."""
        own = as_number(self.own, what)
        turns = tuple(as_number(value, f"{what} by turn") or 0.0 for value in self.turns)

        parts = {}
        for name, value in self.parts.items():
            number = as_number(value, f"{what}, {name!r}")
            if number is not None:
                parts[str(name)] = number

        metrics = {}
        for name, value in self.metrics.items():
            metrics[str(name)] = as_number(value, f"{what}, metric {name!r}") or 0.0

        rows = []
        for value, replies in self.rows:
            rows.append((as_number(value, f"{what} by row") or 0.0, tuple(replies)))

        agents = {}
        for name, value in self.agents.items():
            number = as_number(value, f"{what} of agent {name!r}")
            if number is not None:
                agents[str(name)] = number

        return Scores(own, turns, parts, metrics, self.status, tuple(rows), agents)

    def with_added(self, added: float | None) -> Scores:
        """Return a copy with `added` on top of the episode's reward; None means not computed."""
        if self.own is None or added is None:
            return replace(self, own=None)
        return replace(self, own=self.own + added)


class Env(ABC):
    """Environment of one episode: used once, then closed. A rollout takes a factory, such as the
    class itself.

    Every method may be `async`; a synchronous one runs in a thread and may block. Order of calls:
    `reset`; `step` until terminated, truncated or a limit is reached; `reward`; `close` (always,
    also after an error).

    Example::

        class Echo(Env):
            def reset(self, task, *, seed=None):
                return "Say hello."
            def step(self, action):
                return Step(reward=float("hello" in action.text), terminated=True)
    """

    tools: Sequence[Mapping[str, Any]] = ()
    """OpenAI schemas of the tools offered to the model; read after `reset`."""
    on_turn_length: OnTurnLength | None = None
    """Handling of a reply without an end token, in place of `limits.on_turn_length`; read after
    `reset`. None: the limit's."""

    @abstractmethod
    def reset(
        self, task: Task, *, seed: int | None = None
    ) -> Messages | Awaitable[Messages | None] | None:
        """Begin the episode; return the opening messages (a string is one user message), or None
        for the task's messages."""

    @abstractmethod
    def step(self, action: Action) -> Step | tuple[Any, ...] | Awaitable[Step | tuple[Any, ...]]:
        """Respond to one reply.

        Raise `InvalidAction` for mistakes of the model: its message becomes the observation.
        """

    def reward(
        self, trajectory: Trajectory
    ) -> float | Scores | Awaitable[float | Scores | None] | None:
        """Compute the reward of the finished episode, added to those of its steps. Default: 0.0.
        None: not computed.

        `Scores`, as returned by `rewards(...)`, also reports named parts.
        """
        return 0.0

    def close(self) -> Awaitable[None] | None:
        """Release all resources. Called exactly once, also after errors."""
        return None

    def snapshot(self) -> Any:
        """Return the episode state for `restore` after a failed step; later steps must not change
        it. Optional."""
        return None

    def restore(self, state: Any) -> Awaitable[None] | None:
        """Restore a state from `snapshot`, taken from this environment or another with the same
        task and seed."""
        raise NotImplementedError(f"{type(self).__name__} has snapshot but no restore")


@runtime_checkable
class SupportsSnapshot(Protocol):
    """Environment that declares whether it has snapshots; otherwise overriding `Env.snapshot`
    declares it."""

    @property
    def snapshots(self) -> bool | None:
        """Whether `snapshot` and `restore` can be called; None: whether they are overridden.

        Read before each step.
        """
        ...

    def snapshot(self) -> Any:
        """Return the episode state."""
        ...

    def restore(self, state: Any) -> Any:
        """Restore a state from `snapshot`."""
        ...


@lru_cache(maxsize=256)
def implements(kind: type, protocol: Any) -> bool:
    """Return whether a class has the methods of a protocol; an `isinstance` for each episode costs
    10 us."""
    return issubclass(kind, protocol)


@runtime_checkable
class NeedsLimits(Protocol):
    """Environment that depends on the limits of the run."""

    def set_limits(self, limits: Limits) -> None:
        """Receive the limits of the episode; called once, before the first `reset`."""
        ...


@runtime_checkable
class NeedsDecoder(Protocol):
    """Environment that reads the ids of a trajectory; not in a separate process."""

    def set_decoder(self, decode: Callable[[Sequence[int]], str]) -> None:
        """Receive a function that decodes ids without special tokens; called once, before the first
        `reset`."""
        ...


@runtime_checkable
class IsolatedReward(Protocol):
    """Environment that can compute its own reward in a separate process."""

    def isolated_reward(self, trajectory: Trajectory) -> Any:
        """Compute the reward of the finished episode in a separate process."""
        ...


@runtime_checkable
class ChecksRow(Protocol):
    """Environment factory that can tell from a row alone whether its environment can be made."""

    def check_row(self, task: Task) -> None:
        """Make the environment of a row and close it; raise `EnvError` for what is wrong with
        it."""
        ...


@runtime_checkable
class HasGroupReward(Protocol):
    """Environment factory with a reward that compares the episodes of a task."""

    @property
    def group_reward(self) -> Callable[..., Any] | None:
        """Function of the finished trajectories of a task, or None."""
        ...


MAX_CHARACTERS = 4_000_000
"""Characters that one observation may have: more than the longest contexts hold."""


def check_size(observation: Any, where: str) -> None:
    """Raise `EnvError` for a text that no model reads; it would only fill the memory and the
    journal."""
    if isinstance(observation, str) and len(observation) > MAX_CHARACTERS:
        raise EnvError(
            f"{where} returned an observation of {len(observation):,} characters; at most "
            f"{MAX_CHARACTERS:,} are allowed: return the part that the model needs"
        )


def as_step(value: Any) -> Step:
    """Convert a return value of `Env.step`; raise `EnvError` for another form, `RewardError` for a
    reward that is not finite or too large."""
    if not isinstance(value, tuple) or len(value) != 5:
        raise EnvError(
            f"step returned {describe_value(value)}; return tw.Step(...) or a Gymnasium 5-tuple"
        )
    observation, reward, terminated, truncated, info = value
    check_size(observation, "step")

    # Nearly every step is as it should be, and is returned as it is.
    has_plain_info = type(info) is dict or type(info) is MappingProxyType
    has_flags = type(terminated) is type(truncated) is bool
    has_reward = type(reward) is float and -LARGEST <= reward <= LARGEST
    if type(value) is Step and has_plain_info and has_flags and has_reward:
        return value

    if not has_plain_info and not isinstance(info, Mapping):
        raise EnvError(f"step returned the info {describe_value(info)}; info is a dict")
    return Step(
        observation,
        as_number(reward, "a step's reward"),
        as_flag(terminated, "a step's terminated"),
        as_flag(truncated, "a step's truncated"),
        info,
    )


EnvFactory = Callable[[], Env]
