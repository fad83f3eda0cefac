"""Which tasks each step trains on: in passes over all of them, or by samplers that observe finished
groups.

`Curriculum` draws the tasks of every step of a run, from a `Lane` for each environment; how likely
a task is, is for the samplers (`samplers.py`) to say. A recipe without samplers has none of this:
its tasks come in passes (`in_passes`), from `TaskPlan`.

The draw of step k depends on the groups of steps under k - lag alone, observed in the order of
steps; `lag` is 0, or with `schedule.mode = "async"` the staleness, since step k is admitted when
that many steps before it are not trained. A resumed run restores the state of its checkpoint and
observes the steps that it trains again from the journal, so it draws the same.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

from turnwright.config import RunConfig
from turnwright.config.schema import EnvConfig
from turnwright.envs.spec import EnvSpec
from turnwright.envs.user_code import user_location
from turnwright.errors import ConfigError, TraceError
from turnwright.training.samplers import FADE, TaskSampler, checked_weights, make_sampler
from turnwright.types import Group, Task
from turnwright.types.seeds import derive_seed

T = TypeVar("T")
FLOOR = 0.1
"""Share of the draws that is uniform, so that every task is drawn again."""


def split(weights: Sequence[float], total: int, rng: random.Random | None = None) -> list[int]:
    """Split `total` into integers proportional to weights; the remainder goes to the largest
    fractions, or by lot."""
    exact = [weight * total / sum(weights) for weight in weights]
    shares = [int(value) for value in exact]
    fractions = [value - share for value, share in zip(exact, shares, strict=True)]
    for _ in range(total - sum(shares)):
        if rng is None:
            index = max(range(len(fractions)), key=fractions.__getitem__)
        else:
            odds = [max(fraction, 1e-9) for fraction in fractions]
            index = rng.choices(range(len(fractions)), odds)[0]
        shares[index] += 1
        fractions[index] = 0.0
    return shares


def split_of_step(weights: Sequence[float], groups: int, seed: int, number: int) -> list[int]:
    """Split the groups of a step over environments."""
    return split(weights, groups, random.Random(f"{seed}/shares/{number}"))


def in_passes(size: int, start: int, count: int, seed: int, index: int) -> Iterator[int]:
    """Yield `count` distinct places of `size`, from draw `start` on; each pass over environment
    `index` is reshuffled, but for the first."""
    order: list[int] = []
    last_turn = -1
    seen: set[int] = set()
    while len(seen) < count:
        turn, position = divmod(start, size)
        start += 1
        if turn != last_turn:
            order = list(range(size))
            last_turn = turn
            if turn:
                random.Random(f"{seed}/order/{index}/{turn}").shuffle(order)

        # A step may span two passes, which both have each place.
        place = order[position]
        if place not in seen:
            seen.add(place)
            yield place


class Lane:
    """Tasks of one environment with their sampler."""

    def __init__(self, env: EnvConfig, name: str, weight: float) -> None:
        self.name = name
        self.key = env.key
        self.weight = weight
        self._where = f"env.sampler = {env.sampler!r}"
        self.sampler = self.guarded(lambda: make_sampler(env.sampler))
        self.start = 0
        """Tasks that the environment's shares of earlier steps came to."""
        self.taken: Counter[str] = Counter()
        """Tasks drawn of each key, which are taken in order, so that none comes twice before all of
        the key came."""
        self.signal = (0.0, 0.0)
        """Faded sums of 4 p (1 - p) and of groups."""
        self.by_key: dict[str, list[str]] = {}
        self.key_of: dict[str, str] = {}

    def fill(self, tasks: Sequence[Task]) -> None:
        """Take the training tasks."""
        for task in tasks:
            if self.key is not None and self.key not in task.info:
                raise ConfigError(
                    f"env.key = {self.key!r}: task {task.id} of {self.name} has no such entry in "
                    f"info; it has {', '.join(map(repr, task.info)) or 'none'}"
                )
            key = task.id if self.key is None else str(task.info[self.key])
            self.by_key.setdefault(key, []).append(task.id)
            self.key_of[task.id] = key

    def guarded(self, call: Callable[[], T]) -> T:
        """Call a sampler, which may be the user's; an error names it."""
        try:
            return call()
        except ConfigError:
            raise
        except Exception as error:
            location = user_location(error)
            where = f" ({location})" if location else ""
            raise ConfigError(
                f"{self._where}: {_in_one_line(error)}{where}; correct it, then resume with "
                "--resume"
            ) from error

    def draw(self, share: int, seed: int, step: int, index: int) -> list[str]:
        """Return the distinct tasks of a step."""
        ids = list(self.key_of)
        count = min(share, len(ids))
        start = self.start
        self.start += share
        if self.sampler is None:
            return [ids[place] for place in in_passes(len(ids), start, count, seed, index)]

        # Weighted sampling without replacement (Efraimidis and Spirakis 2006): the tasks with the
        # largest log(u) / weight. A key's chance is shared by its tasks.
        chances = self._chances(self.sampler)
        rng = random.Random(derive_seed(seed, "curriculum", step, index))
        races: dict[str, float] = {}
        for id, key in self.key_of.items():
            races[id] = math.log(1.0 - rng.random()) * len(self.by_key[key]) / chances[key]
        winners = sorted(ids, key=races.__getitem__, reverse=True)[:count]

        # The race says how often each key comes, and its tasks come in their order.
        drawn = []
        for id in winners:
            key = self.key_of[id]
            tasks_of_key = self.by_key[key]
            drawn.append(tasks_of_key[self.taken[key] % len(tasks_of_key)])
            if len(tasks_of_key) > 1:
                self.taken[key] += 1
        return drawn

    def _chances(self, sampler: TaskSampler) -> dict[str, float]:
        """Return how likely each key is, a share of which is uniform."""
        keys = list(self.by_key)
        weights = self.guarded(lambda: checked_weights(sampler.weights(keys), len(keys)))
        total = sum(weights) or 1.0
        return {
            key: (1 - FLOOR) * weight / total + FLOOR / len(keys)
            for key, weight in zip(keys, weights, strict=True)
        }

    def observe(self, id: str, rate: float) -> None:
        """Observe a finished group."""
        sampler = self.sampler
        if sampler is not None:
            self.guarded(lambda: sampler.observe(self.key_of[id], rate))

        # Of an environment many more groups come than of one of its keys.
        keep = 1 - (1 - FADE) / 8
        signal, groups = self.signal
        self.signal = (keep * signal + 4 * rate * (1 - rate), keep * groups + 1)

    def factor(self) -> float:
        """Return the mean of 4 p (1 - p), which begins at 1."""
        signal, groups = self.signal
        return (signal + 1) / (groups + 1)

    def state(self) -> dict[str, Any]:
        """Return the state as JSON."""
        sampler = self.sampler
        sampler_state = None
        if sampler is not None:
            sampler_state = self.guarded(
                lambda: json.loads(json.dumps(sampler.state(), allow_nan=False))
            )
        return {
            "start": self.start,
            "taken": {key: count for key, count in self.taken.items() if count},
            "signal": list(self.signal),
            "sampler": sampler_state,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state; raise ValueError or another error of a bad one."""
        self.start = _natural(state["start"])
        self.taken = Counter({key: _natural(count) for key, count in state["taken"].items()})
        signal, groups = map(float, state["signal"])
        if not 0 <= signal <= groups < math.inf:
            raise ValueError(f"the signal is {state['signal']}")
        self.signal = (signal, groups)
        if self.sampler is not None:
            self.sampler.load(state["sampler"])


class Curriculum:
    """Draws of all steps of a run."""

    def __init__(self, config: RunConfig, env_specs: Sequence[EnvSpec]) -> None:
        # Environments that are given as objects have no sampler of their own.
        envs = config.env or [EnvConfig()] * len(env_specs)
        self._lanes = [
            Lane(env, spec.name, spec.weight) for env, spec in zip(envs, env_specs, strict=True)
        ]
        self._groups = config.rollout.groups
        self._seed = config.seed
        self._success = config.eval.success
        self._floor = config.rollout.adapt
        self._lag = config.schedule.staleness if config.schedule.mode == "async" else 0
        self._observed = 0
        """Steps observed."""
        self._drawn: dict[int, list[str]] = {}
        """Tasks of each step that was drawn and may have groups that are not trained."""

    @classmethod
    def of(cls, config: RunConfig, env_specs: Sequence[EnvSpec]) -> Self | None:
        """Return the curriculum of a recipe; None without one, as all tasks then come in passes."""
        in_passes_only = all(env.sampler == "uniform" for env in config.env)
        if config.rollout.adapt is None and in_passes_only:
            return None
        return cls(config, env_specs)

    def begin(self, lanes: Sequence[Sequence[Task]], state: Any, step: int) -> None:
        """Take each environment's tasks and the state of a checkpoint after `step` steps, which is
        not read at step 0.

        Raises:
            TraceError: when the state is not of this run.
        """
        for lane, tasks in zip(self._lanes, lanes, strict=True):
            lane.fill(tasks)
        if step == 0:
            for number in range(self._lag + 1):
                self._draw(number)
            return

        try:
            self._load(state, step)
        except Exception as error:
            raise TraceError(
                f"the checkpoint of step {step} has no state of this curriculum "
                f"({_in_one_line(error)}): resume with the samplers and tasks that the run began "
                "with, or start a new run"
            ) from error

    def _load(self, state: Any, step: int) -> None:
        """Restore the state after `step` steps; raise ValueError or another error of a bad one."""
        self._observed = _natural(state["observed"])
        self._drawn = {}
        for number, ids in state["drawn"].items():
            self._drawn[_natural(int(number))] = [str(id) for id in ids]
        for lane, lane_state in zip(self._lanes, state["lanes"], strict=True):
            lane.load(lane_state)

        task_ids = {id for lane in self._lanes for id in lane.key_of}
        for ids in self._drawn.values():
            for id in ids:
                if id not in task_ids:
                    raise ValueError(f"no task {id!r}")
        if self._observed != step or self._observed + self._lag not in self._drawn:
            raise ValueError(f"{self._observed} steps were observed")

    def step(self, number: int) -> list[str]:
        """Return the tasks of a step."""
        return self._drawn[number]

    def observe(self, step: int, groups: Sequence[Group]) -> dict[str, Any]:
        """Observe the groups that a step trains on and those that they replaced, once each, and
        return metrics; draw the step that depends on them."""
        assert step == self._observed, (step, self._observed)
        self._observed += 1
        rates: dict[str, list[float]] = {lane.name: [] for lane in self._lanes}
        for group in groups:
            lane = next(lane for lane in self._lanes if group.task.id in lane.key_of)
            rewards = [
                trajectory.reward
                for trajectory in group.trajectories
                if trajectory.reward is not None
            ]
            if rewards:
                rate = sum(reward >= self._success for reward in rewards) / len(rewards)
                lane.observe(group.task.id, rate)
                rates[lane.name].append(rate)

        self._draw(self._observed + self._lag)
        # Groups of older nominal steps than these are trained.
        oldest = self._observed - self._lag
        self._drawn = {number: ids for number, ids in self._drawn.items() if number >= oldest}

        weights = self._weights()
        figures: dict[str, dict[str, float]] = {}
        for lane, weight in zip(self._lanes, weights, strict=True):
            figures[lane.name] = {"share": weight / sum(weights)}
            passed = rates[lane.name]
            if passed:
                figures[lane.name]["pass_rate"] = sum(passed) / len(passed)
        return figures

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON."""
        return {
            "observed": self._observed,
            "drawn": {str(number): ids for number, ids in self._drawn.items()},
            "lanes": [lane.state() for lane in self._lanes],
        }

    @property
    def adapts(self) -> bool:
        """Whether the environments' shares change."""
        return self._floor is not None

    def size(self, number: int) -> int | None:
        """Return the number of tasks of a step that was drawn; None of another."""
        return len(self._drawn[number]) if number in self._drawn else None

    def _weights(self) -> list[float]:
        """Return the environments' weights, with `adapt` times their signal, at least the floor."""
        floor = 1.0 if self._floor is None else self._floor
        best = max(lane.factor() for lane in self._lanes)
        return [lane.weight * (floor + (1 - floor) * lane.factor() / best) for lane in self._lanes]

    def _draw(self, step: int) -> None:
        shares = split_of_step(self._weights(), self._groups, self._seed, step)
        ids: list[str] = []
        for index, (lane, share) in enumerate(zip(self._lanes, shares, strict=True)):
            ids += lane.draw(share, self._seed, step, index)
        self._drawn[step] = ids


def _natural(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _in_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
