"""Rewards of weighted, named parts, sync or async: per episode, per turn, or per group of episodes
of a task.

`rewards` makes a `Rewards`: calling it computes the parts of an episode and of its turns, and
`Rewards.group` those that compare the episodes of a task. Parts in processes of their own are in
`workers.py`; what a reward becomes in training is in `training/advantages.py`.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import pickle
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from turnwright.envs.env import Scores
from turnwright.envs.rewards.workers import Isolation, mark_running, run_isolated
from turnwright.envs.spec import FactoryOptions
from turnwright.envs.threads import run_in_thread
from turnwright.envs.user_code import LARGEST, as_number
from turnwright.errors import ConfigError, RewardError, first_exception, words
from turnwright.types import Task, Trajectory

Of = Literal["episode", "turn", "group"]
GroupReward = Callable[[Sequence[Trajectory]], Awaitable[Sequence["Scores"]]]

_COUNTS: ContextVar[dict[str, float] | None] = ContextVar("turnwright_reward_counts", default=None)


@dataclass(frozen=True, slots=True)
class RewardPart:
    """One named part of a reward.

    Example::

        tw.RewardPart(is_polite, 0.1, of="turn", range=(0, 1))
    """

    function: Callable[..., Any]
    """Sync or async. Per episode: `f(trajectory)` or `f(trajectory, task)`. Per turn:
    `f(trajectory, turn)` with the turn's index. Per group: `f(trajectories)`, returning one value
    each. The value None means "not computed"."""
    weight: float = 1.0
    """Factor of the values."""
    of: Of = "episode"
    range: tuple[float, float] | None = None
    """Minimum and maximum value before weighting; a value outside raises a `RewardError`."""
    isolation: Isolation = "thread"
    """Where the function runs: in a `thread`, or in a reusable `process`, killed with its
    descendants at the deadline of the reward. A process pickles function and trajectory: define the
    function at the top level of a file. Its changes to the trajectory are lost."""


def rewards(
    *,
    range: tuple[float, float] | None = None,
    isolation: Isolation = "thread",
    **parts: RewardPart | Callable[..., Any] | tuple[Callable[..., Any], float],
) -> Rewards:
    """Make a reward function of named parts, each a function, (function, weight), or a
    `RewardPart`.

    Example::

        >>> def correct(trajectory, task):
        ...     return float(trajectory.turns[-1].reply.text == task.answer)
        >>> def brief(trajectory):
        ...     return float(len(trajectory.turns) < 4)
        >>> rewards(correct=correct, brief=(brief, 0.2), range=(0, 1.2))
        rewards(correct, brief)

    Args:
        range: minimum and maximum of the weighted sum; a sum outside raises a `RewardError`.
        isolation: `process` for all parts, as `RewardPart.isolation`.
        parts: parts by name.

    Raises:
        ConfigError: for a part with the wrong signature, a non-finite weight, an inverted range, or
            a function that cannot be pickled.
    """
    if not parts:
        raise ConfigError(
            "rewards() has no parts; write rewards(correct=function) or "
            "rewards(correct=(function, 1.0))"
        )
    checked = {name: _part(name, part, isolation) for name, part in parts.items()}
    if range is not None:
        _check_range("rewards(range=...)", range)
    return Rewards(checked, range)


class Rewards:
    """Reward function made by `rewards`: call it with a finished trajectory, and `group` with all
    trajectories of a task."""

    def __init__(
        self, parts: Mapping[str, RewardPart], range: tuple[float, float] | None = None
    ) -> None:
        self.parts = dict(parts)
        self.range = range
        self.isolated_rewards = [
            part.function for part in self.parts.values() if part.isolation == "process"
        ]
        """Functions of the parts that run in a process."""
        self._with_task: set[str] = set()
        """Parts of episodes that are called with the task."""
        for name, part in self.parts.items():
            if part.of == "episode" and takes_task(part.function):
                self._with_task.add(name)

    def isolated(self) -> Rewards:
        """Return a copy with every part in a process."""
        parts = {name: replace(part, isolation="process") for name, part in self.parts.items()}
        return Rewards(parts, self.range)

    def __repr__(self) -> str:
        return f"rewards({', '.join(self.parts)})"

    async def __call__(self, trajectory: Trajectory, task: Task | None = None) -> Scores:
        """Compute the episode and turn parts; sync functions run one by one in a thread, async ones
        concurrently.

        Raises `RewardError`, naming the part, for a non-finite or out-of-range value.
        """
        turns = _trained_turns(trajectory)
        calls: dict[str, list[Callable[[], Any]]] = {}
        for name, part in self.parts.items():
            if part.of == "turn":
                calls[name] = [_call(name, part, trajectory, turn) for turn in turns]
            elif part.of == "episode":
                args = (task or trajectory.task,) if name in self._with_task else ()
                calls[name] = [_call(name, part, trajectory, *args)]
        with collect_counts() as counts:
            values = await _call_all(calls)

        episode_reward = 0.0
        turn_rewards = [0.0] * len(trajectory.turns)
        sums: dict[str, float] = {}
        for name, returned in values.items():
            part = self.parts[name]
            numbers = []
            for value in returned:
                number = _value(value, f"the reward {name!r}", part.range)
                if number is not None:
                    numbers.append(number)
            if len(numbers) < len(returned):
                counts[f"reward_missing/{name}"] = 1.0
                continue

            sums[name] = math.fsum(numbers)
            if part.of == "turn":
                for turn, number in zip(turns, numbers, strict=True):
                    turn_rewards[turn] += part.weight * number
            else:
                episode_reward += part.weight * sums[name]

        if len(sums) < len(values):
            return Scores(None, (), sums, counts)
        scores = Scores(
            episode_reward, tuple(turn_rewards) if any(turn_rewards) else (), sums, counts
        )
        if self.group is None:  # else group parts are added first
            _check_total(scores.total, self.range)
        return scores

    @property
    def group(self) -> GroupReward | None:
        """Function of a group's trajectories that computes the group parts; None without group
        parts."""
        return self._group if any(part.of == "group" for part in self.parts.values()) else None

    async def _group(self, trajectories: Sequence[Trajectory]) -> Sequence[Scores]:
        """Compute the group parts; return their scores by trajectory."""
        calls = {}
        for name, part in self.parts.items():
            if part.of == "group":
                calls[name] = [_call(name, part, trajectories)]
        with collect_counts() as counts:
            values = await _call_all(calls)

        # What was counted for the group is in the metrics of its first trajectory.
        size = len(trajectories)
        totals: list[float | None] = [0.0] * size
        parts: list[dict[str, float]] = [{} for _ in trajectories]
        metrics: list[dict[str, float]] = [{} for _ in trajectories]
        if metrics:
            metrics[0].update(counts)
        for name, (returned,) in values.items():
            part = self.parts[name]
            for number, value in enumerate(_one_each(returned, size, name)):
                reward = _value(value, f"the reward {name!r}", part.range)
                if reward is None:
                    totals[number] = None
                    metrics[number][f"reward_missing/{name}"] = 1.0
                    continue
                parts[number][name] = reward
                total = totals[number]
                if total is not None:
                    totals[number] = total + part.weight * reward

        for trajectory, total in zip(trajectories, totals, strict=True):
            if total is not None:
                _check_total(math.fsum((*self._earlier(trajectory), total)), self.range)
        scores = []
        for total, by_name, counted in zip(totals, parts, metrics, strict=True):
            scores.append(Scores(total, (), by_name, counted))
        return scores

    def _earlier(self, trajectory: Trajectory) -> Iterator[float]:
        """Yield the weighted parts of a trajectory that were computed without its group."""
        for name, value in trajectory.rewards.items():
            part = self.parts.get(name)
            if part is not None and part.of != "group":
                yield part.weight * value


def _trained_turns(trajectory: Trajectory) -> list[int]:
    """Return the turns that are rewarded: those of failed attempts are not trained."""
    is_trained = [span.trained for span in trajectory.spans]
    turns = []
    for number, turn in enumerate(trajectory.turns):
        if not turn.spans or any(is_trained[span] for span in turn.spans):
            turns.append(number)
    return turns


@dataclass(frozen=True, slots=True)
class RewardedFactory(FactoryOptions):
    """Factory of environments whose reward is a function of the finished trajectory, or of
    (trajectory, task)."""

    reward: Callable[..., Any] | None
    reward_takes_task: bool = field(init=False)

    def __post_init__(self) -> None:
        reward_takes_task = self.reward is not None and takes_task(self.reward)
        object.__setattr__(self, "reward_takes_task", reward_takes_task)

    @property
    def group_reward(self) -> Callable[..., Any] | None:
        """Part of `rewards(...)` that compares the episodes of a task."""
        return self.reward.group if isinstance(self.reward, Rewards) else None

    def reward_args(self, trajectory: Trajectory, task: Task) -> tuple[Any, ...]:
        """Return the arguments of the reward function."""
        return (trajectory, task) if self.reward_takes_task else (trajectory,)


@contextmanager
def collect_counts() -> Iterator[dict[str, float]]:
    """Collect the `count_metric` calls of the block, including tasks and threads started in it."""
    counts: dict[str, float] = {}
    token = _COUNTS.set(counts)
    try:
        yield counts
    finally:
        _COUNTS.reset(token)


def count_metric(name: str, amount: float = 1.0) -> None:
    """Add to a metric of the episode whose reward is being computed; no effect outside a reward."""
    counts = _COUNTS.get()
    if counts is not None:
        counts[name] = counts.get(name, 0.0) + amount


def takes_task(reward: Callable[..., Any]) -> bool:
    """Whether a reward function is called with (trajectory, task).

    Raises:
        ConfigError: if (trajectory) does not fit either.
    """
    if not callable(reward):
        raise ConfigError(
            f"the reward is {type(reward).__name__}; it is a function of the trajectory"
        )
    try:
        signature = inspect.signature(reward)
    except (TypeError, ValueError):
        return False

    # A second parameter is the task, unless it is an option of another name.
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [
        parameter for parameter in signature.parameters.values() if parameter.kind in kinds
    ]
    takes = False
    if len(positional) > 1:
        second = positional[1]
        takes = second.name == "task" or second.default is inspect.Parameter.empty

    try:
        signature.bind(*([None, None] if takes else [None]))
    except TypeError as error:
        name = getattr(reward, "__name__", "reward")
        raise ConfigError(
            f"{name} is called as {name}(trajectory) or {name}(trajectory, task): {error}"
        ) from error
    return takes


def _call(name: str, part: RewardPart, *args: Any) -> Callable[[], Any]:
    """Return a call of a part, in a process where it is isolated."""
    if part.isolation == "process":
        return partial(run_isolated, name, part.function, *args)
    return partial(part.function, *args)


def _part(name: str, given: Any, isolation: Isolation = "thread") -> RewardPart:
    """Return a part as `rewards` takes it, a function, (function, weight) or `RewardPart`,
    checked."""
    if isinstance(given, RewardPart):
        part = given
    elif isinstance(given, tuple):
        part = RewardPart(*given)
    else:
        part = RewardPart(given)
    if isolation != "thread":
        part = replace(part, isolation=isolation)

    if part.of not in ("episode", "turn", "group"):
        raise ConfigError(
            f'the reward {name!r}: of = {part.of!r}; write "episode", "turn" or "group"'
        )
    if not callable(part.function):
        raise ConfigError(
            f"the reward {name!r} is {type(part.function).__name__}; give a function of the "
            "trajectory"
        )
    _check_isolation(name, part)
    is_number = isinstance(part.weight, (int, float)) and not isinstance(part.weight, bool)
    if not is_number or not abs(part.weight) <= LARGEST:
        raise ConfigError(
            f"the reward {name!r} has the weight {part.weight!r}; a weight is a number of at most "
            f"{LARGEST:g}"
        )
    if part.range is not None:
        _check_range(f"the reward {name!r}", part.range)
    _check_signature(name, part)
    return part


def _check_isolation(name: str, part: RewardPart) -> None:
    """Check where a part runs, and that its function can be sent there."""
    if part.isolation not in ("thread", "process"):
        raise ConfigError(
            f'the reward {name!r}: isolation = {part.isolation!r}; write "thread" or "process"'
        )
    if part.isolation == "process":
        try:
            pickle.dumps(part.function)
        except Exception as error:
            raise ConfigError(
                f'the reward {name!r}: isolation = "process", and no other process can find its '
                f"function ({error}); define it at the top level of a file"
            ) from error


def _check_signature(name: str, part: RewardPart) -> None:
    """Check how a part of turns or of groups is called; `takes_task` checks those of episodes."""
    if part.of == "episode":
        return
    wanted = "(trajectory, turn)" if part.of == "turn" else "(trajectories)"
    args: list[Any] = [None, 0] if part.of == "turn" else [()]
    try:
        inspect.signature(part.function).bind(*args)
    except TypeError as error:
        raise ConfigError(
            f"the reward {name!r} of a {part.of} is called with {wanted}: {error}"
        ) from error


def _check_range(where: str, given: Any) -> None:
    is_range = isinstance(given, tuple) and len(given) == 2 and given[0] < given[1]
    if not is_range:
        raise ConfigError(f"{where}: the range is {given!r}; write (minimum, maximum)")


def _value(value: Any, what: str, allowed: tuple[float, float] | None) -> float | None:
    """Convert a value to a float in the allowed range; None stays None."""
    number = as_number(value, what)
    if number is not None and allowed is not None and not allowed[0] <= number <= allowed[1]:
        raise RewardError(
            f"{what} is {number:g}, outside its range of {allowed[0]:g} to {allowed[1]:g}"
        )
    return number


def _check_total(total: float | None, allowed: tuple[float, float] | None) -> None:
    """Check a weighted sum against the range, with tolerance for float rounding."""
    if total is None or allowed is None:
        return
    slack = 1e-9 * max(1.0, abs(allowed[0]), abs(allowed[1]))
    if not math.isfinite(total) or not allowed[0] - slack <= total <= allowed[1] + slack:
        raise RewardError(
            f"the rewards add up to {total:g}, outside their range of {allowed[0]:g} to "
            f"{allowed[1]:g}"
        )


def _one_each(returned: Any, size: int, name: str) -> Sequence[Any]:
    """Return the values of a group part, checked to be one for each of `size` trajectories."""
    try:
        values = list(returned)
    except TypeError:
        values = []
    if len(values) != size:
        raise RewardError(
            f"the reward {name!r} gave {returned!r:.80} for a group of {size}; give a value for "
            "each trajectory"
        )
    return values


@dataclass(frozen=True, slots=True)
class _PartCall:
    """One call of a part, and where its value belongs."""

    name: str
    number: int
    """Its index among the calls of the part."""
    function: Callable[[], Any]

    @property
    def is_async(self) -> bool:
        """Whether it returns a coroutine, for all that is known without calling it."""
        function = self.function.func if isinstance(self.function, partial) else self.function
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            type(function).__call__
        )


async def _call_all(calls: Mapping[str, Sequence[Callable[[], Any]]]) -> dict[str, list[Any]]:
    """Call functions: sync ones sequentially in a thread, async ones concurrently on the loop."""
    values: dict[str, list[Any]] = {}
    blocking: list[_PartCall] = []
    asynchronous: list[_PartCall] = []
    for name, functions in calls.items():
        values[name] = [None] * len(functions)
        for number, function in enumerate(functions):
            call = _PartCall(name, number, function)
            if call.is_async:
                asynchronous.append(call)
            else:
                blocking.append(call)

    # A sync function may return an awaitable, too.
    awaited: list[tuple[_PartCall, Awaitable[Any]]] = []
    results = await run_in_thread(_call_blocking, {"calls": blocking}) if blocking else []
    for call, result in zip(blocking, results, strict=True):
        values[call.name][call.number] = result
        if inspect.isawaitable(result):
            awaited.append((call, result))
    awaited += [(call, call.function()) for call in asynchronous]
    unfinished = [call.name for call, _ in awaited]

    async def finish(call: _PartCall, awaitable: Awaitable[Any]) -> None:
        try:
            with _named(call.name):
                values[call.name][call.number] = await awaitable
                unfinished.remove(call.name)
        except SystemExit as end:  # raised in a task, it would end the loop
            raise RuntimeError(f"the reward {call.name!r} raised {words(end, repr)}") from end

    try:
        async with asyncio.TaskGroup() as group:
            for call, awaitable in awaited:
                group.create_task(finish(call, awaitable))
    except BaseExceptionGroup as errors:
        raise first_exception(errors) from None
    if unfinished:  # a task group treats a cancelled task as finished
        raise RuntimeError(f"the reward {unfinished[0]!r} cancelled itself")
    return values


def _call_blocking(calls: Sequence[_PartCall]) -> list[Any]:
    """Call sync functions one after another; return what they return, in order."""
    results = []
    for call in calls:
        with _named(call.name):
            results.append(call.function())
    return results


@contextmanager
def _named(name: str) -> Iterator[None]:
    """List a reward as running within the block, and note its name on exceptions."""
    try:
        with mark_running(name):
            yield
    except Exception as error:
        error.add_note(f"in the reward {name!r}")
        raise
