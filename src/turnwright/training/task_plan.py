"""Tasks of each step, dynamic sampling, and the failure threshold.

`TaskPlan` holds the tasks of a run: which are trained, in which step, and which are held out to
evaluate on. `play_with_dynamic_sampling` plays a step's tasks and replaces those without a signal;
`check_failures` ends a run in which too many episodes failed. Which tasks a recipe with samplers
draws is decided by `Curriculum`.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from turnwright.config import RunConfig
from turnwright.envs.resolve import resolve_env
from turnwright.envs.spec import EnvSpec
from turnwright.envs.tasks import check_disjoint
from turnwright.errors import ConfigError, TaskError, TurnwrightError
from turnwright.rollouts import EpisodeSpec, group_by_task
from turnwright.rollouts.play_again import may_pass
from turnwright.training.curriculum import Curriculum, in_passes, split, split_of_step
from turnwright.types import EpisodeKey, Group, Task, Trajectory


def check_failures(
    trajectories: Sequence[Trajectory],
    where: str,
    run: Path | None,
    max_share: float,
) -> None:
    """Raise `TurnwrightError` when a larger share of episodes failed: the run would train on an
    arbitrary rest."""
    failed = [
        trajectory
        for trajectory in trajectories
        if trajectory.stop is not None and trajectory.stop.failed
    ]
    if len(failed) <= max_share * len(trajectories):
        return

    kinds = Counter(
        (str(trajectory.stop), trajectory.error.type if trajectory.error else "")
        for trajectory in failed
    )
    counts = ", ".join(f"{stop} {kind} x{count}" for (stop, kind), count in kinds.most_common(3))

    first = ""
    errors = [trajectory.error for trajectory in failed if trajectory.error is not None]
    if errors:
        error = errors[0]
        first = f"; the first in {error.phase}: {error.type}: {error.message}"

    if run is None:
        remedy = "Fix the cause and retry"
    else:
        remedy = f"Tracebacks are in {run / 'trajectories.jsonl'}; fix the cause, then "
        if any(may_pass(trajectory) for trajectory in failed):
            remedy += f"resume with --resume {run}, which retries them"
        else:
            remedy += "start a new run"
    raise TurnwrightError(
        f"{len(failed)} of {len(trajectories)} episodes of {where} failed ({counts}){first}. "
        f"{remedy}"
    )


@dataclass(frozen=True, slots=True)
class TaskChoice:
    """Task with its environment."""

    env_spec: EnvSpec
    task: Task

    def episode(self, phase: str, step: int, sample: int) -> EpisodeSpec:
        """Specify one episode."""
        key = EpisodeKey(phase, step, self.task.id, sample)
        return EpisodeSpec.of(self.env_spec, self.task, key)

    def episodes(self, phase: str, step: int, samples: int) -> list[EpisodeSpec]:
        """Specify `samples` episodes."""
        return [self.episode(phase, step, sample) for sample in range(samples)]


class TaskPlan:
    """Tasks of a run."""

    def __init__(
        self,
        env_specs: Sequence[EnvSpec],
        *,
        steps: int | Sequence[int],
        groups: int,
        held_out: int,
        seed: int,
        overlap: bool = False,
        curriculum: Curriculum | None = None,
    ) -> None:
        """Plan `groups` tasks per step and up to `held_out` to evaluate on, both over all
        environments by their weights.

        Several `steps` are those of a run that was extended: its tasks come first, in their order.
        With `overlap`, tasks to evaluate on are trained too, last of all.

        Raises:
            TaskError: when an environment has no training tasks, or a task is on both sides.
        """
        self._totals = [steps] if isinstance(steps, int) else list(steps)
        self._seed = seed
        self._groups = groups
        self._restricted = False
        self._overlap = overlap
        self._curriculum = curriculum

        self.train: list[TaskChoice] = []
        self.held_out: list[TaskChoice] = []
        self._lanes: list[list[TaskChoice]] = []
        """Training tasks of each environment."""
        shares = split([env_spec.weight for env_spec in env_specs], held_out)
        for env_spec, share in zip(env_specs, shares, strict=True):
            train, held = self._tasks_of(env_spec, share)
            if len(env_specs) > 1:
                # Two environments may share task ids, but an episode's key holds only the id.
                train = [replace(task, id=f"{env_spec.name}/{task.id}") for task in train]
                held = [replace(task, id=f"{env_spec.name}/{task.id}") for task in held]
            lane = [TaskChoice(env_spec, task) for task in train]
            self._lanes.append(lane)
            self.train.extend(lane)
            self.held_out.extend(TaskChoice(env_spec, task) for task in held)

        if len(env_specs) > 1 and not overlap:
            check_disjoint(
                [choice.task for choice in self.train], [choice.task for choice in self.held_out]
            )
        self.by_id = {choice.task.id: choice.task for choice in (*self.train, *self.held_out)}
        self.figures: dict[str, Any] = {}
        """Metrics of the step observed last."""
        self._weights = [env_spec.weight for env_spec in env_specs]

    def _tasks_of(self, env_spec: EnvSpec, share: int) -> tuple[list[Task], list[Task]]:
        """Return the training tasks of an environment, and up to `share` to evaluate on."""
        # Enough for the full run, so a generated source never repeats a task; a finite one returns
        # what it has.
        *earlier_totals, total = self._totals
        count = total * self._groups or self._groups

        train: list[Task]
        held: list[Task] = []
        if self._overlap:
            train = list(env_spec.tasks("train", count, self._seed))
            if share:
                held = list(env_spec.tasks("eval", share, self._seed))
            train, held = [*train, *held], held or train[:share]
        elif share:
            train, held = env_spec.train_and_eval_tasks(count, share, self._seed)
        else:
            train = list(env_spec.tasks("train", self._groups, self._seed))

        # Before it was extended, a run had the tasks of its earlier ends.
        first: list[Task] = []
        for earlier_total in earlier_totals:
            earlier_count = earlier_total * self._groups or self._groups
            first += env_spec.tasks("train", earlier_count, self._seed)

        train = list({task.id: task for task in (*first, *train)}.values())
        if not train:
            raise TaskError(
                f"{env_spec.name} has no training tasks; give its tasks hook or file at least one"
            )
        return train, held

    def notes(self, config: RunConfig) -> Iterator[str]:
        """Describe what too few tasks change."""
        groups = config.rollout.groups
        size = config.rollout.group_size
        held = len(self.held_out)
        if len(self.train) < groups:
            episodes = self.group_size(0, size)
            yield (
                f"{len(self.train)} training tasks for {groups} groups: each is played "
                f"{episodes} times a step, not {size}"
            )

        samples = eval_samples(held, config.eval.tasks, config.eval.samples)
        if held and samples > config.eval.samples:
            yield (
                f"{held} held-out tasks where eval.tasks = {config.eval.tasks}: each is played "
                f"{samples} times"
            )

        if self._overlap:
            yield (
                'eval.overlap = "allowed": tasks of the evaluation are trained too, so it '
                "measures memory as well as skill"
            )

    def preview(self, count: int) -> list[TaskChoice]:
        """Return up to `count` training tasks in proportion to the environments' weights, the same
        ones each time."""
        # So many that no environment has fewer tasks than its share.
        total_weight = sum(self._weights)
        limit = min(
            len(lane) * total_weight / weight
            for lane, weight in zip(self._lanes, self._weights, strict=True)
        )
        shares = split(self._weights, max(len(self._lanes), min(count, int(limit))))

        choices: list[TaskChoice] = []
        for lane, share in zip(self._lanes, shares, strict=True):
            choices += lane[:share]
        return choices

    def demonstrated(self, env_spec: EnvSpec, count: int) -> list[TaskChoice]:
        """Return `count` training tasks of an environment for demonstrations, or all of a finite
        source; how many steps the run has does not change them."""
        lane = next(lane for lane in self._lanes if lane[0].env_spec is env_spec)
        if self._restricted:
            return lane

        held_out = set() if self._overlap else {choice.task.id for choice in self.held_out}
        tasks = env_spec.tasks("train", count, self._seed)
        if len(self._lanes) > 1:
            tasks = [replace(task, id=f"{env_spec.name}/{task.id}") for task in tasks]
        return [TaskChoice(env_spec, task) for task in tasks if task.id not in held_out] or lane

    def restrict_to(self, fitting: set[str]) -> None:
        """Drop every task whose id is not in `fitting`.

        Raises `TaskError` when an environment has no training task left.
        """
        self._restricted = True
        self._lanes = [
            [choice for choice in lane if choice.task.id in fitting] for lane in self._lanes
        ]
        if not all(self._lanes):
            raise TaskError(
                "no training task of an environment has a first prompt within "
                "limits.prompt_tokens; raise it"
            )
        self.train = [choice for lane in self._lanes for choice in lane]
        self.held_out = [choice for choice in self.held_out if choice.task.id in fitting]

    def begin(self, state: Any, step: int) -> None:
        """Begin or continue the curriculum, if there is one, with the state of a checkpoint; raise
        as `Curriculum.begin`."""
        if self._curriculum is not None:
            tasks = [[choice.task for choice in lane] for lane in self._lanes]
            self._curriculum.begin(tasks, state, step)

    def observe(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Observe all groups of a step, once, before any later step is drawn."""
        if self._curriculum is not None:
            figures = self._curriculum.observe(step, group_by_task(trajectories))
            self.figures = {"curriculum": figures}

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the curriculum; empty without one."""
        return {} if self._curriculum is None else {"curriculum": self._curriculum.state()}

    def sizes(self, steps: int) -> set[int]:
        """Return the numbers of tasks that the steps of a run can have."""
        if self._curriculum is not None and self._curriculum.adapts:
            return {min(self._groups, *map(len, self._lanes)), self._groups}
        return {self.size(step) for step in range(steps)}

    def size(self, number: int) -> int:
        """Return the number of tasks of one step."""
        if self._curriculum is not None:
            drawn = self._curriculum.size(number)
            if drawn is not None:
                return drawn
        shares = self._draw_shares(number)
        return sum(min(share, len(lane)) for share, lane in zip(shares, self._lanes, strict=True))

    def group_size(self, number: int, size: int) -> int:
        """Return the episodes of each task of a step: `size`, or more where there are fewer tasks
        than groups, so that the step has as many episodes."""
        return math.ceil(size * self._groups / max(self.size(number), 1))

    def step(self, number: int) -> list[TaskChoice]:
        """Return the distinct tasks of one step by environment weight; without a curriculum, a
        finite source is reshuffled for each pass."""
        if self._curriculum is not None:
            choices = {choice.task.id: choice for choice in self.train}
            return [choices[id] for id in self._curriculum.step(number)]

        shares = self._draw_shares(number)
        chosen: list[TaskChoice] = []
        for index, lane in enumerate(self._lanes):
            start = number * shares[index]
            if len(self._lanes) > 1:
                # Shares are drawn by lot, so those of the earlier steps differ.
                start = sum(self._draw_shares(earlier)[index] for earlier in range(number))
            count = min(shares[index], len(lane))
            for place in in_passes(len(lane), start, count, self._seed, index):
                chosen.append(lane[place])
        return chosen

    def refill(
        self,
        number: int,
        turn: int,
        used: Sequence[TaskChoice],
        flat: Sequence[TaskChoice],
    ) -> list[TaskChoice]:
        """Return replacements of zero-variance tasks from the same environments, none used in the
        step yet, in its refill `turn` (from 1); fewer if an environment has no more."""
        used_ids = {choice.task.id for choice in used}
        replacements: list[TaskChoice] = []
        for index, lane in enumerate(self._lanes):
            wanted = sum(choice.env_spec is lane[0].env_spec for choice in flat)
            unused = [choice for choice in lane if choice.task.id not in used_ids]
            rng = random.Random(f"{self._seed}/refill/{number}/{turn}/{index}")
            replacements += rng.sample(unused, min(wanted, len(unused)))
        return replacements

    def _draw_shares(self, number: int) -> list[int]:
        return split_of_step(self._weights, self._groups, self._seed, number)


FEWEST_EPISODES = 64
"""Sampled episodes of an evaluation below which its tasks are played more often."""


def eval_samples(tasks: int, asked: int, samples: int) -> int:
    """Return how often each of so many held-out tasks is played where `asked` were to be played
    `samples` times."""
    episodes = min(FEWEST_EPISODES, asked * samples)
    return max(samples, math.ceil(episodes / max(tasks, 1)))


def planned_steps(totals: Sequence[int], step: int) -> int:
    """Return how many steps the run had when it came to `step` (from 0), of its totals before and
    after each extension."""
    return min((total for total in totals if total > step), default=totals[-1])


def make_env_specs(config: RunConfig) -> list[EnvSpec]:
    """Resolve the environments of a recipe.

    Raises `ConfigError` when one cannot be found, or there is none.
    """
    if not config.env and config.rollout.function is None:
        raise ConfigError(
            "the recipe names no environment: it needs [[env]] with use = a built-in name or "
            "file.py:Name; resume a run that turnwright.train() started from objects with the "
            "same call and resume=True"
        )
    function = config.rollout.function
    if not config.env:
        return [resolve_env("", play=function)]
    return [resolve_env(env, play=function) for env in config.env]


def with_steps_of_epochs(config: RunConfig, env_specs: Sequence[EnvSpec]) -> RunConfig:
    """Return the configuration with the steps of `train.data_epochs` passes over all training
    tasks, rounded up; raise `ConfigError` when an environment makes tasks without end."""
    counts = [len(env_spec.tasks("train", 0, config.seed)) for env_spec in env_specs]
    if 0 in counts:
        raise ConfigError(
            f"train.data_epochs = {config.train.data_epochs:g}: {env_specs[counts.index(0)].name} "
            "has no finite list of training tasks; set train.steps instead"
        )

    steps = math.ceil((config.train.data_epochs or 0.0) * sum(counts) / config.rollout.groups)
    if config.train.lr_warmup_steps >= steps:
        raise ConfigError(
            f"train.lr_warmup_steps = {config.train.lr_warmup_steps}: must be under the {steps} "
            "steps of the run"
        )
    return replace(config, train=replace(config.train, steps=steps))


class Refilling(Protocol):
    """Tells which groups are replaced by others, and how often, as the `Policies` of a run do."""

    @property
    def refill(self) -> int:
        """Maximum number of times that groups without signal are replaced."""

    def tied_groups(self, groups: Sequence[Group]) -> set[str]:
        """Return task ids of the groups without signal."""


async def play_with_dynamic_sampling(
    plan: TaskPlan,
    policies: Refilling,
    step: int,
    play: Callable[[Sequence[TaskChoice]], Awaitable[Sequence[Trajectory]]],
) -> tuple[list[Trajectory], int]:
    """Play a step's episodes; replace zero-variance groups (dynamic sampling: DAPO, arXiv
    2503.14476, section 3.2) and count those.

    It refills at most `train.refill` times, while an environment has unused tasks. The tasks follow
    from the seed and from what was played, so a resumed run chooses the same ones.
    """
    latest = plan.step(step)
    planned = len(latest)
    used = list(latest)
    trajectories = list(await play(latest))
    for turn in range(1, policies.refill + 1):
        flat = policies.tied_groups(group_by_task(trajectories))
        replaced = [choice for choice in latest if choice.task.id in flat]
        latest = plan.refill(step, turn, used, replaced)
        if not latest:
            break
        used += latest
        trajectories += await play(latest)
    return trajectories, len(used) - planned
