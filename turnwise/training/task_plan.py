"""Tasks of each step; dynamic sampling; failure threshold."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from turnwise.config import RunConfig
from turnwise.envs.resolve import resolve_env
from turnwise.envs.spec import EnvSpec
from turnwise.envs.tasks import check_disjoint
from turnwise.envs.user_code import passing
from turnwise.errors import ConfigError, TaskError, TurnwiseError
from turnwise.rollouts import EpisodeSpec, group_by_task
from turnwise.training.trainer.objective import Objective
from turnwise.types import EpisodeKey, Task, Trajectory


def may_pass(trajectory: Trajectory) -> bool:
    """Whether the world, the engine or a deadline failed an episode, so that another play of it may go well."""
    error, stop = trajectory.error, trajectory.stop
    return stop is not None and stop.failed and error is not None and passing(error)


def to_play_again(episodes: Sequence[EpisodeSpec], found: Sequence[Trajectory], accepted: Collection[EpisodeKey]) -> list[int]:
    """The numbers of episodes that are to be played again; of a group that is rewarded together all.

    Args:
        found: how the episodes ended.
        accepted: of those whose failure counts already.
    """
    failed = {t.key for t in found if may_pass(t) and t.key not in accepted}
    groups = {(k.phase, k.step, k.task) for k in failed}
    return [
        number
        for number, episode in enumerate(episodes)
        if episode.key in failed or (episode.group_reward and (episode.key.phase, episode.key.step, episode.key.task) in groups)
    ]


def check_failures(trajectories: Sequence[Trajectory], where: str, run: Path | None, most: float) -> None:
    """See that enough of some episodes came to an end of their own.

    Args:
        where: what they were played for.
        run: the run directory, where tracebacks stand; None where nothing is written down.
        most: share of them that may fail.

    Raises:
        TurnwiseError: when more of them failed: the run would train on whatever is left.
    """
    failed = [t for t in trajectories if t.stop is not None and t.stop.failed]
    if len(failed) <= most * len(trajectories):
        return
    kinds = Counter((str(t.stop), t.error.type if t.error else "") for t in failed)
    error = next((t.error for t in failed if t.error is not None), None)
    told = f"; the first in {error.phase}: {error.type}: {error.message}" if error else ""
    counts = ", ".join(f"{stop} {kind} x{count}" for (stop, kind), count in kinds.most_common(3))
    what = "mend the cause, and try again"
    if run is not None:
        what = f"Tracebacks stand in {run / 'trajectories.jsonl'}; mend the cause, then "
        what += f"go on with --resume {run}, which plays them again" if any(map(may_pass, failed)) else "start a new run"
    raise TurnwiseError(f"{len(failed)} of {len(trajectories)} episodes of {where} failed ({counts}){told}. {what}")


@dataclass(frozen=True, slots=True)
class TaskChoice:
    """One task with the world that it belongs to."""

    world: EnvSpec
    task: Task

    def episode(self, phase: str, step: int, sample: int) -> EpisodeSpec:
        """One episode of it."""
        world = self.world
        make = None if world.agent_function is not None else world.factory
        compare = world.group_reward if phase == "train" else None
        return EpisodeSpec(
            self.task,
            EpisodeKey(phase, step, self.task.id, sample),
            make,
            world.agent_function,
            world.max_turns,
            world.rules,
            compare,
        )

    def episodes(self, phase: str, step: int, samples: int) -> list[EpisodeSpec]:
        """`samples` episodes of it."""
        return [self.episode(phase, step, sample) for sample in range(samples)]


class TaskPlan:
    """The tasks of a run."""

    def __init__(self, worlds: Sequence[EnvSpec], *, steps: int, groups: int, held_out: int, seed: int) -> None:
        """
        Args:
            worlds: the environments, each with its weight.
            steps: of reinforcement.
            groups: tasks per step, all worlds together.
            held_out: tasks to evaluate on, all worlds together; fewer where there are not so many.
            seed: of the draws.

        Raises:
            TaskError: when a world has no training tasks, or a task is on both sides.
        """
        self._seed = seed
        self._groups = groups
        shares = _shares([world.weight for world in worlds], held_out)
        self.train: list[TaskChoice] = []
        self.held_out: list[TaskChoice] = []
        self._lanes: list[list[TaskChoice]] = []
        for world, share in zip(worlds, shares, strict=True):
            # Enough to last the run: a generated source then never repeats a task, a finite one gives what it has.
            train, held = (
                world.train_and_eval_tasks(steps * groups or groups, share, seed)
                if share
                else (world.tasks("train", groups, seed), [])
            )
            if not train:
                raise TaskError(f"{world.name} has no training tasks; give its tasks hook or file at least one")
            if len(worlds) > 1:
                # Two worlds may have the same tasks, in rules of their own; an episode is named by its task's id.
                train, held = _renamed(world, train), _renamed(world, held)
            self._lanes.append([TaskChoice(world, task) for task in train])
            self.train.extend(self._lanes[-1])
            self.held_out.extend(TaskChoice(world, task) for task in held)
        if len(worlds) > 1:
            check_disjoint([choice.task for choice in self.train], [choice.task for choice in self.held_out])
        self.by_id = {choice.task.id: choice.task for choice in (*self.train, *self.held_out)}
        self._weights = [world.weight for world in worlds]

    def preview(self, count: int) -> list[TaskChoice]:
        """Up to `count` training tasks, worlds by weight also where one of them has few: the same ones each time."""
        whole = sum(self._weights)
        most = min(len(lane) * whole / weight for lane, weight in zip(self._lanes, self._weights, strict=True))
        shares = _shares(self._weights, max(len(self._lanes), min(count, int(most))))
        return [choice for lane, share in zip(self._lanes, shares, strict=True) for choice in lane[:share]]

    def restrict_to(self, fits: set[str]) -> None:
        """Leave out every task whose id is not among these.

        Raises:
            TaskError: when no training task of a world is left.
        """
        self._lanes = [[choice for choice in lane if choice.task.id in fits] for lane in self._lanes]
        if not all(self._lanes):
            raise TaskError("no training task of an environment has an opening prompt within limits.prompt_tokens; raise it")
        self.train = [choice for lane in self._lanes for choice in lane]
        self.held_out = [choice for choice in self.held_out if choice.task.id in fits]

    def step(self, number: int) -> list[TaskChoice]:
        """The tasks of one step: different ones, worlds by weight; a finite source is gone through in a new order each pass."""
        shares = self._draw_shares(number)
        chosen: list[TaskChoice] = []
        for index, lane in enumerate(self._lanes):
            before = sum(self._draw_shares(earlier)[index] for earlier in range(number)) if len(self._lanes) > 1 else None
            start = before if before is not None else number * shares[index]
            chosen.extend(self._slice(index, lane, start, min(shares[index], len(lane))))
        return chosen

    def refill(self, number: int, turn: int, used: Sequence[TaskChoice], flat: Sequence[TaskChoice]) -> list[TaskChoice]:
        """Tasks in place of those of a step that gave no signal: as many of the same worlds, none of them used in the step.

        Args:
            number: the step.
            turn: how often it was refilled, this time included.
            used: all tasks of the step so far.
            flat: those to be replaced; fewer come back where a world has no more.
        """
        taken = {choice.task.id for choice in used}
        found: list[TaskChoice] = []
        for index, lane in enumerate(self._lanes):
            wanted = sum(choice.world is lane[0].world for choice in flat)
            left = [choice for choice in lane if choice.task.id not in taken]
            rng = random.Random(f"{self._seed}/refill/{number}/{turn}/{index}")
            found += rng.sample(left, min(wanted, len(left)))
        return found

    def _draw_shares(self, number: int) -> list[int]:
        return _shares(self._weights, self._groups, random.Random(f"{self._seed}/shares/{number}"))

    def _slice(self, index: int, lane: Sequence[TaskChoice], start: int, count: int) -> Iterator[TaskChoice]:
        order: list[int] = []
        last = -1
        seen: set[str] = set()
        while len(seen) < count:
            turn, place = divmod(start, len(lane))
            start += 1
            if turn != last:
                order, last = list(range(len(lane))), turn
                if turn:
                    random.Random(f"{self._seed}/order/{index}/{turn}").shuffle(order)
            choice = lane[order[place]]
            if choice.task.id not in seen:  # at the seam of two passes
                seen.add(choice.task.id)
                yield choice


def _renamed(world: EnvSpec, tasks: Sequence[Task]) -> list[Task]:
    return [replace(task, id=f"{world.name}/{task.id}") for task in tasks]


def _shares(weights: Sequence[float], total: int, rng: random.Random | None = None) -> list[int]:
    """Whole numbers that add up to `total` in proportion to weights; what is left over goes by remainder, or by lot."""
    exact = [weight * total / sum(weights) for weight in weights]
    shares = [int(value) for value in exact]
    rest = [value - share for value, share in zip(exact, shares, strict=True)]
    for _ in range(total - sum(shares)):
        if rng is None:
            index = max(range(len(rest)), key=rest.__getitem__)
        else:
            index = rng.choices(range(len(rest)), [max(value, 1e-9) for value in rest])[0]
        shares[index] += 1
        rest[index] = 0.0
    return shares


def make_env_specs(config: RunConfig) -> list[EnvSpec]:
    """The environments that a recipe names.

    Raises:
        ConfigError: for one that cannot be found, or none at all.
    """
    if not config.env and config.rollout.function is None:
        raise ConfigError(
            "no environment is named: a recipe needs [[env]] with use = a built-in name or file.py:Name, and a run that "
            "turnwise.train() began with objects goes on with the same call and resume=True"
        )
    if not config.env:
        return [resolve_env("", play=config.rollout.function)]
    return [resolve_env(env, play=config.rollout.function) for env in config.env]


async def play_with_dynamic_sampling(
    plan: TaskPlan, objective: Objective, step: int, play: Callable[[Sequence[TaskChoice]], Awaitable[Sequence[Trajectory]]]
) -> tuple[list[Trajectory], int]:
    """The episodes of a step, and how many groups were played in place of others (DAPO, arXiv 2503.14476, section 3.2).

    At most `train.refill` times, and only while a world has tasks that the step has not used. Which tasks those are follows
    from the seed and from what was played, so a run that goes on comes to the same ones.

    Args:
        play: plays the groups of tasks.

    Raises:
        RewardError, UsageError: as `Objective.ledger`.
    """
    latest = plan.step(step)
    used = list(latest)
    found = list(await play(latest))
    for turn in range(1, objective.settings.refill + 1):
        flat = objective.tied_groups(group_by_task(found))
        latest = plan.refill(step, turn, used, [choice for choice in latest if choice.task.id in flat])
        if not latest:
            break
        used += latest
        found += await play(latest)
    return found, len(used) - len(plan.step(step))
