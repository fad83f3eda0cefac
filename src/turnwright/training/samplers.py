"""Samplers of training tasks: how likely each is drawn, by the pass rates of its finished groups.

The built-in ones (`Window`, `Progress`, `Pools`) keep two numbers for each key, in `Rates`. A
sampler of the user's own is a class with the methods of `TaskSampler`; `make_sampler` finds it.
Which tasks are drawn with these weights is decided by `curriculum.Lane.draw`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from turnwright.envs.resolve import load_object
from turnwright.errors import ConfigError

FADE = 0.5
"""Share of a statistic that an observation of the same key keeps."""
PRIOR = 0.1
"""Groups at a pass rate of a half that every estimate begins with, so that an unseen key is as
likely as the best."""
POOLS = {"normal": 0.8, "solved": 0.1, "unsolved": 0.1}
"""Share of the draws from each pool."""


class TaskSampler(Protocol):
    """Chooses tasks of one environment.

    A key is the id of a task, or the value of `env.key` in its info.
    """

    def observe(self, key: str, pass_rate: float) -> None:
        """Take the share of a finished group's episodes that succeeded."""

    def weights(self, keys: Sequence[str]) -> Sequence[float]:
        """Return how likely each key is drawn next, relative to the others, at least 0."""

    def state(self) -> Mapping[str, Any]:
        """Return all that `weights` depends on, as JSON."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state; raise ValueError when it is not one of `state`."""


class Rates:
    """Two numbers per key, faded with each observation; the base of the built-in samplers."""

    def __init__(self) -> None:
        self.of: dict[str, tuple[float, float]] = {}
        """The numbers of each key that was observed."""

    def observe(self, key: str, pass_rate: float) -> None:
        """Add to the exponential counts of passes and of groups."""
        passes, groups = self.of.get(key, (0.0, 0.0))
        self.of[key] = (FADE * passes + pass_rate, FADE * groups + 1.0)

    def weights(self, keys: Sequence[str]) -> list[float]:
        return [self.weight(*self.of.get(key, (0.0, 0.0))) for key in keys]

    def weight(self, first: float, second: float) -> float:
        """Return the weight of a key with these numbers, which are 0 when it is unseen."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        return {key: list(pair) for key, pair in self.of.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        most = 1.0 / (1.0 - FADE)
        for key, pair in state.items():
            is_pair = isinstance(pair, list) and len(pair) == 2
            if not is_pair or not all(
                isinstance(number, float) and 0.0 <= number <= most for number in pair
            ):
                raise ValueError(f"the statistics of {key!r} are {pair!r}")
        self.of = {key: (first, second) for key, (first, second) in state.items()}


class Window(Rates):
    """Pass rates near a half: ``(4 p (1 - p)) ** 2``.

    After the learnability p (1 - p) of arXiv 2408.15099; the square makes tasks that are never
    solved a thirtieth as likely as the best.
    """

    def weight(self, first: float, second: float) -> float:
        """Return 1 at a half, and for an unseen key."""
        p = (first + PRIOR / 2) / (second + PRIOR)
        return (4 * p * (1 - p)) ** 2


class Progress(Rates):
    """Pass rates that change: |fast mean - slow mean|, both from 0 (teacher-student curriculum
    learning, arXiv 1707.00183)."""

    def observe(self, key: str, pass_rate: float) -> None:
        """Move the fast mean by a half and the slow one by a tenth."""
        fast, slow = self.of.get(key, (0.0, 0.0))
        self.of[key] = (fast + 0.5 * (pass_rate - fast), slow + 0.1 * (pass_rate - slow))

    def weights(self, keys: Sequence[str]) -> list[float]:
        """Return 0.5 for an unseen key: more than one observation can reach."""
        weights = []
        for key in keys:
            if key in self.of:
                fast, slow = self.of[key]
                weights.append(abs(fast - slow))
            else:
                weights.append(0.5)
        return weights


class Pools(Rates):
    """Three pools by the latest pass rate, each with its share of the draws (as prime-rl's pools of
    easy, normal and hard)."""

    def observe(self, key: str, pass_rate: float) -> None:
        """Keep the latest pass rate."""
        self.of[key] = (pass_rate, 1.0)

    def weights(self, keys: Sequence[str]) -> list[float]:
        """Split the share of a pool between its keys; an unseen key is normal."""
        names = {0.0: "unsolved", 1.0: "solved"}
        pools = []
        for key in keys:
            rate, _ = self.of.get(key, (0.5, 0.0))
            pools.append(names.get(rate, "normal"))

        sizes = Counter(pools)
        return [POOLS[pool] / sizes[pool] for pool in pools]


BUILT_IN = {"window": Window, "pools": Pools, "progress": Progress}


def make_sampler(name: str) -> TaskSampler | None:
    """Make the sampler of `env.sampler`; None for `uniform`, which needs no statistics."""
    if name == "uniform":
        return None
    if name in BUILT_IN:
        return BUILT_IN[name]()

    cls = load_object(name)
    missing = []
    for method in ("observe", "weights", "state", "load"):
        if not hasattr(cls, method):
            missing.append(method)
    if missing or not callable(cls):
        raise ConfigError(
            f"env.sampler = {name!r}: no sampler; it needs the methods "
            f"{', '.join(missing) or 'of a class'}"
        )
    try:
        sampler: TaskSampler = cls()
    except Exception as error:
        raise ConfigError(
            f"env.sampler = {name!r}: cannot be made without arguments ({type(error).__name__}: "
            f"{error})"
        ) from error
    return sampler


def checked_weights(values: Sequence[float], count: int) -> list[float]:
    """Return weights as floats; raise ValueError when they are not one finite number of at least 0
    for each key."""
    weights = [float(value) for value in values]
    if len(weights) != count:
        raise ValueError(f"weights() returned {len(weights)} numbers for {count} keys")
    for weight in weights:
        if not math.isfinite(weight) or weight < 0:
            raise ValueError(f"weights() returned {weight}; weights are finite and at least 0")
    return weights
