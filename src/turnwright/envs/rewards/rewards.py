"""Rewards of weighted, named parts, sync or async: per episode, per turn, or per group
of episodes of a task."""

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
    """Make a reward function of named parts, each a function, (function,
    weight), or a `RewardPart`.

    Example::

        reward = tw.rewards(correct=(correct, 1.0), brief=(brief, 0.2), range=(0, 1.2))
        env = tw.tool_env(tools=[search], reward=reward)

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
    made = {name: _part(name, part, isolation) for name, part in parts.items()}
    if range is not None:
        _check_range("rewards(range=...)", range)
    return Rewards(made, range)


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
        self._with_task = {
            name
            for name, part in self.parts.items()
            if part.of == "episode" and takes_task(part.function)
        }

    def isolated(self) -> Rewards:
        """Return a copy with every part in a process."""
        return Rewards(
            {name: replace(part, isolation="process") for name, part in self.parts.items()},
            self.range,
        )

    def __repr__(self) -> str:
        return f"rewards({', '.join(self.parts)})"

    async def __call__(self, trajectory: Trajectory, task: Task | None = None) -> Scores:
        """Compute the episode and turn parts; sync functions run one by one in a thread,
        async ones concurrently.

        Raises `RewardError`, naming the part, for a non-finite or out-of-range value.
        """
        # Turns of failed attempts are excluded from training.
        trained = [span.trained for span in trajectory.spans]
        turns = [
            n
            for n, turn in enumerate(trajectory.turns)
            if not turn.spans or any(trained[span] for span in turn.spans)
        ]
        calls = {
            name: [_call(name, part, trajectory, number) for number in turns]
            if part.of == "turn"
            else [
                _call(
                    name,
                    part,
                    trajectory,
                    *((task or trajectory.task,) if name in self._with_task else ()),
                )
            ]
            for name, part in self.parts.items()
            if part.of != "group"
        }
        with collect_counts() as counts:
            values = await _call_all(calls)
        own, by_turn, found = 0.0, [0.0] * len(trajectory.turns), {}
        for name, given in values.items():
            part = self.parts[name]
            read = [_value(value, f"the reward {name!r}", part.range) for value in given]
            known = [value for value in read if value is not None]
            if len(known) < len(read):
                counts[f"reward_missing/{name}"] = 1.0
                continue
            found[name] = math.fsum(known)
            if part.of == "turn":
                for number, value in zip(turns, known, strict=True):
                    by_turn[number] += part.weight * value
            else:
                own += part.weight * found[name]
        if len(found) < len(values):
            return Scores(None, (), found, counts)
        scores = Scores(own, tuple(by_turn) if any(by_turn) else (), found, counts)
        if self.group is None:
            _check_total(scores.total, self.range)
        return scores

    @property
    def group(self) -> GroupReward | None:
        """Function of a group's trajectories that computes the group parts;
        None without group parts."""
        return self._group if any(part.of == "group" for part in self.parts.values()) else None

    async def _group(self, trajectories: Sequence[Trajectory]) -> Sequence[Scores]:
        calls = {
            name: [_call(name, part, trajectories)]
            for name, part in self.parts.items()
            if part.of == "group"
        }
        with collect_counts() as counts:
            answers = await _call_all(calls)
        own: list[float | None] = [0.0] * len(trajectories)
        found: list[dict[str, float]] = [{} for _ in trajectories]
        missing: list[dict[str, float]] = [
            dict(counts) if number == 0 else {} for number in range(len(trajectories))
        ]
        for name, (given,) in answers.items():
            part = self.parts[name]
            for number, value in enumerate(_one_each(given, len(trajectories), name)):
                read, before = _value(value, f"the reward {name!r}", part.range), own[number]
                if read is None:
                    own[number], missing[number][f"reward_missing/{name}"] = None, 1.0
                else:
                    found[number][name] = read
                    own[number] = None if before is None else before + part.weight * read
        for trajectory, added in zip(trajectories, own, strict=True):
            if added is not None:
                computed = [
                    (self.parts[name], value)
                    for name, value in trajectory.rewards.items()
                    if name in self.parts
                ]
                earlier = (part.weight * value for part, value in computed if part.of != "group")
                _check_total(math.fsum((*earlier, added)), self.range)
        return [Scores(*row) for row in zip(own, [()] * len(own), found, missing, strict=True)]


@dataclass(frozen=True, slots=True)
class RewardedFactory(FactoryOptions):
    """Factory of environments whose reward is a function of the finished trajectory, or
    of (trajectory, task)."""

    reward: Callable[..., Any] | None
    reward_takes_task: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "reward_takes_task", self.reward is not None and takes_task(self.reward)
        )

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
    """Whether a reward function is called with (trajectory, task); raise `ConfigError` if
    (trajectory) does not fit either."""
    if not callable(reward):
        raise ConfigError(
            f"the reward is {type(reward).__name__}; it is a function of the trajectory"
        )
    try:
        signature = inspect.signature(reward)
    except (TypeError, ValueError):
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    second = [parameter for parameter in signature.parameters.values() if parameter.kind in kinds][
        1:2
    ]
    takes = bool(second) and (
        second[0].name == "task" or second[0].default is inspect.Parameter.empty
    )
    try:
        signature.bind(*([None, None] if takes else [None]))
    except TypeError as error:
        name = getattr(reward, "__name__", "reward")
        raise ConfigError(
            f"{name} is called as {name}(trajectory) or {name}(trajectory, task): {error}"
        ) from error
    return takes


def _call(name: str, part: RewardPart, *args: Any) -> Callable[[], Any]:
    return (
        partial(run_isolated, name, part.function, *args)
        if part.isolation == "process"
        else partial(part.function, *args)
    )


def _part(name: str, given: Any, isolation: Isolation = "thread") -> RewardPart:
    part = (
        given
        if isinstance(given, RewardPart)
        else RewardPart(*given)
        if isinstance(given, tuple)
        else RewardPart(given)
    )
    part = replace(part, isolation=isolation) if isolation != "thread" else part
    if part.of not in ("episode", "turn", "group"):
        raise ConfigError(
            f'the reward {name!r}: of = {part.of!r}; write "episode", "turn" or "group"'
        )
    if not callable(part.function):
        raise ConfigError(
            f"the reward {name!r} is {type(part.function).__name__}; give a function of the "
            "trajectory"
        )
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
    is_number = isinstance(part.weight, (int, float)) and not isinstance(part.weight, bool)
    if not is_number or not abs(part.weight) <= LARGEST:
        raise ConfigError(
            f"the reward {name!r} has the weight {part.weight!r}; a weight is a number of at most "
            f"{LARGEST:g}"
        )
    if part.range is not None:
        _check_range(f"the reward {name!r}", part.range)
    if part.of != "episode":
        try:
            inspect.signature(part.function).bind(*([None, 0] if part.of == "turn" else [()]))
        except TypeError as error:
            wanted = "(trajectory, turn)" if part.of == "turn" else "(trajectories)"
            raise ConfigError(
                f"the reward {name!r} of a {part.of} is called with {wanted}: {error}"
            ) from error
    return part


def _check_range(where: str, given: Any) -> None:
    if not (isinstance(given, tuple) and len(given) == 2 and given[0] < given[1]):
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


def _one_each(given: Any, n: int, name: str) -> Sequence[Any]:
    try:
        values = list(given)
    except TypeError:
        values = []
    if len(values) != n:
        raise RewardError(
            f"the reward {name!r} gave {given!r:.80} for a group of {n}; give a value for each "
            "trajectory"
        )
    return values


async def _call_all(calls: Mapping[str, Sequence[Callable[[], Any]]]) -> dict[str, list[Any]]:
    """Call functions: sync ones sequentially in a thread, async ones concurrently on the loop."""

    def is_async(call: Callable[[], Any]) -> bool:
        function = call.func if isinstance(call, partial) else call
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            type(function).__call__
        )

    found: dict[str, list[Any]] = {name: [None] * len(group) for name, group in calls.items()}
    flat = [
        (name, number, call) for name, group in calls.items() for number, call in enumerate(group)
    ]
    blocking = [row for row in flat if not is_async(row[2])]

    def one_after_another() -> list[Any]:
        results = []
        for name, _, call in blocking:
            with _named(name):
                results.append(call())
        return results

    async def one(name: str, number: int, waiting: Awaitable[Any]) -> None:
        try:
            with _named(name):
                found[name][number] = await waiting
                missing.remove(name)
        except SystemExit as end:  # raised in a task, it would end the loop
            raise RuntimeError(f"the reward {name!r} raised {words(end, repr)}") from end

    results = await run_in_thread(one_after_another, {}) if blocking else []
    waiting: list[tuple[str, int, Awaitable[Any]]] = []
    for (name, number, _), value in zip(blocking, results, strict=True):
        found[name][number] = value
        if inspect.isawaitable(value):
            waiting.append((name, number, value))
    waiting += [(name, number, call()) for name, number, call in flat if is_async(call)]
    missing = [name for name, _, _ in waiting]
    try:
        async with asyncio.TaskGroup() as group:
            for row in waiting:
                group.create_task(one(*row))
    except BaseExceptionGroup as errors:
        raise first_exception(errors) from None
    if missing:  # a task group treats a cancelled task as finished
        raise RuntimeError(f"the reward {missing[0]!r} cancelled itself")
    return found


@contextmanager
def _named(name: str) -> Iterator[None]:
    """List a reward as running within the block, and note its name on exceptions."""
    try:
        with mark_running(name):
            yield
    except Exception as error:
        error.add_note(f"in the reward {name!r}")
        raise
