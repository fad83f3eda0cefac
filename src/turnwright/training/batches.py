"""What each step trains on, by `schedule.mode`: `StepBatches` or `StreamBatches`.

`StepBatches` samples whole batches, before their step (`sync`) or while the last one trains
(`one_step_off`). Groups without a signal are replaced in rounds, after all groups ended. So which
tasks are played does not depend on the order in which groups finish, and equal runs give equal
bits. `StreamBatches` (`async`) samples groups all the time and replaces each when it ends.

Which groups may enter a batch, and how old they may be, is decided by `BatchScheduler`; tasks are
chosen by `TaskPlan`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from turnwright.errors import ConfigError
from turnwright.rollouts import group_by_task
from turnwright.rollouts.group_scheduler import BatchScheduler
from turnwright.rollouts.timeouts import CallGate
from turnwright.training.task_plan import (
    Refilling,
    TaskChoice,
    TaskPlan,
    play_with_dynamic_sampling,
)
from turnwright.types import Trajectory

T = TypeVar("T")

Play = Callable[[Sequence[TaskChoice], int], Awaitable[list[Trajectory]]]
"""Plays the groups of tasks of a nominal step with the engine's current policy or a later one."""
Progress = Callable[[Awaitable[Any]], Awaitable[Any]]
"""Awaits something while reporting what the episodes wait for."""


class Batch(NamedTuple):
    """Trajectories of one step."""

    trajectories: list[Trajectory]
    refilled: int
    """Groups that were played in place of ones without signal."""


class Batches(Protocol):
    """Source of batches."""

    async def settle(self) -> None:
        """Wait until weights may change and a checkpoint may be written."""

    async def next(self, step: int) -> Batch:
        """Return the batch of a step, after the weights of that step's policy
        were sent to the engine."""

    async def close(self) -> None:
        """End what runs in the background."""


class StepBatches:
    """Samples a step's batch as a whole, so that weights change between batches only.

    The batch is sampled before its step. With `ahead_until`, that of the next step is sampled while
    one trains, by the policy before it.
    """

    def __init__(
        self,
        plan: TaskPlan,
        policies: Refilling,
        play: Play,
        progress: Progress,
        *,
        ahead_until: int = 0,
    ) -> None:
        """`ahead_until` is the number of steps of a run that samples the next batch ahead."""
        self._plan = plan
        self._policies = policies
        self._play = play
        self._progress = progress
        self._ahead_until = ahead_until
        self._following: asyncio.Task[Batch] | None = None
        """The batch of the next step, while it is sampled ahead."""

    async def settle(self) -> None:
        if self._following is not None:
            await self._progress(self._following)

    async def next(self, step: int) -> Batch:
        sampling = self._sample(step) if self._following is None else self._following
        batch: Batch = await self._progress(sampling)
        self._plan.observe(step, batch.trajectories)

        following = step + 1
        self._following = None
        if following < self._ahead_until:
            self._following = asyncio.create_task(self._sample(following))
        return batch

    async def _sample(self, step: int) -> Batch:
        async def play(choices: Sequence[TaskChoice]) -> list[Trajectory]:
            return await self._play(choices, step)

        trajectories, refilled = await play_with_dynamic_sampling(
            self._plan, self._policies, step, play
        )
        return Batch(trajectories, refilled)

    async def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
            with suppress(BaseException):
                await self._following


@dataclass(slots=True)
class StreamRecord:
    """What the journal holds of an asynchronous run."""

    admitted: dict[int, int] = field(default_factory=dict)
    """Policy version at the admission of each group, by number."""
    replaced: dict[int, list[str]] = field(default_factory=dict)
    """Tasks that replaced the first one of a group."""
    batches: dict[int, list[int]] = field(default_factory=dict)
    """Groups of each step."""
    batched: set[tuple[int, str]] = field(default_factory=set)
    """Nominal step and task of everything in them."""
    consumed: set[tuple[int, str]] = field(default_factory=set)
    """Those of steps that the checkpoint covers."""

    def apply(self, event: Mapping[str, Any], trained: int) -> None:
        """Add an event of the journal; the checkpoint covers the steps under `trained`."""
        kind = event["e"]
        if kind == "admitted":
            self.admitted[event["group"]] = event["version"]
        elif kind == "replaced":
            self.replaced.setdefault(event["group"], []).append(event["task"])
        elif kind == "batch":
            self.batches[event["step"]] = event["groups"]
            keys = {(step, task) for step, task in event["keys"]}
            self.batched |= keys
            if event["step"] < trained:
                self.consumed |= keys

    def state(self, step: int) -> dict[str, Any]:
        """Return the state of the scheduler before a step: what was admitted and not trained."""
        trained: set[int] = set()
        for number, groups in self.batches.items():
            if number < step:
                trained.update(groups)

        open_groups = []
        for group, version in self.admitted.items():
            if group not in trained:
                open_groups.append((group, version))
        return {"version": step, "open": open_groups}


class StreamBatches:
    """Samples groups all the time, whatever weights the engine has by then; a step takes those that
    the scheduler selects."""

    def __init__(
        self,
        scheduler: BatchScheduler,
        plan: TaskPlan,
        policies: Refilling,
        play: Play,
        progress: Progress,
        gate: CallGate,
        record: Callable[[dict[str, Any]], None],
        recorded: StreamRecord,
    ) -> None:
        """`record` writes an event of the journal; `recorded` is what an earlier process wrote."""
        self._scheduler = scheduler
        self._plan = plan
        self._policies = policies
        self._play = play
        self._progress = progress
        self._gate = gate
        self._record = record
        self._recorded = recorded

        self._changed = asyncio.Event()
        """Set where a group may be admitted, or a batch may be complete."""
        self._finished: dict[int, list[Trajectory]] = {}
        """Episodes of each group that ended and is in no batch yet."""
        self._used: dict[int, list[TaskChoice]] = {}
        """Tasks of each nominal step so far."""
        self._refilled: dict[int, int] = {}
        """How often each group was replaced."""
        self._running: dict[int, asyncio.Task[None]] = {}
        self._fault: BaseException | None = None
        self._admission = asyncio.create_task(self._admit())

    async def settle(self) -> None:
        pass

    async def next(self, step: int) -> Batch:
        if self._scheduler.version < step:
            self._scheduler.advance()
        self._changed.set()
        groups: list[int] = await self._progress(self._take(step))

        if step not in self._recorded.batches:
            keys = set()
            for group in groups:
                for trajectory in self._finished[group]:
                    keys.add((trajectory.key.step, trajectory.key.task))
            self._record({"e": "batch", "step": step, "groups": groups, "keys": sorted(keys)})

        # No group of an older nominal step is replaced any more.
        oldest = step - self._scheduler.staleness
        self._used = {number: used for number, used in self._used.items() if number >= oldest}

        trajectories: list[Trajectory] = []
        refilled = 0
        for group in groups:
            trajectories += self._finished.pop(group)
            refilled += self._refilled.pop(group, 0)
        self._plan.observe(step, trajectories)
        return Batch(trajectories, refilled)

    async def close(self) -> None:
        tasks = [self._admission, *self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _take(self, step: int) -> list[int]:
        """Wait for the groups of a step; one that was recorded has those again."""
        recorded_groups = self._recorded.batches.get(step)
        while True:
            if self._fault is not None:
                raise self._fault
            groups = self._scheduler.take(recorded_groups)
            if groups is not None:
                return groups
            self._changed.clear()
            await self._changed.wait()

    async def _admit(self) -> None:
        """Admit groups while the scheduler allows it, each when a place is free."""
        try:
            while True:
                await self._gate.wait_free()
                group = self._scheduler.admit() if self._wants_more() else None
                if group is None:
                    self._changed.clear()
                    await self._changed.wait()
                    continue

                if group not in self._recorded.admitted:
                    version = self._scheduler.version
                    self._record({"e": "admitted", "group": group, "version": version})
                self._start(group)
        except Exception as error:
            self._fail(error)

    def _wants_more(self) -> bool:
        """Return whether the next batch is not complete yet; groups that enter earlier than needed
        only age until they are trained."""
        if not self._scheduler.ready:
            return True
        return any(step >= self._scheduler.version for step in self._recorded.batches)

    def _start(self, group: int) -> None:
        step, index = divmod(group, self._scheduler.groups)
        if step not in self._used:
            self._used[step] = self._plan.step(step)
        choice = self._used[step][index]

        # Submitted here and now: the next group is admitted only when the episodes of this one have
        # started.
        playing = self._play([choice], step)
        task = asyncio.create_task(self._finish(group, step, choice, playing))
        self._running[group] = task
        task.add_done_callback(lambda _: self._running.pop(group, None))

    async def _finish(
        self,
        group: int,
        step: int,
        choice: TaskChoice,
        playing: Awaitable[list[Trajectory]],
    ) -> None:
        """Await a group; while it has no signal, play another task in its place."""
        try:
            trajectories: list[Trajectory] = []
            while True:
                played = await playing
                trajectories += played
                tied = self._policies.tied_groups(group_by_task(played))
                replacement = self._replacement(group, step, choice) if tied else None
                if replacement is None:
                    break
                choice = replacement
                playing = self._play([choice], step)

            self._finished[group] = trajectories
            self._scheduler.complete(group)
            self._changed.set()
        except asyncio.CancelledError:
            raise  # the run ends
        except BaseException as error:
            self._fail(error)

    def _replacement(self, group: int, step: int, choice: TaskChoice) -> TaskChoice | None:
        """Return a task in place of one whose rewards are all equal; None when `train.refill` or
        the tasks are used up."""
        used = self._used[step]
        turn = self._refilled.get(group, 0)

        # A resumed run plays the task that replaced this one then.
        recorded_ids = self._recorded.replaced.get(group, [])
        is_recorded = turn < len(recorded_ids)
        if is_recorded:
            recorded_id = recorded_ids[turn]
            candidates = [
                candidate for candidate in self._plan.train if candidate.task.id == recorded_id
            ]
        else:
            candidates = self._plan.refill(step, turn + 1, used, [choice])
        if not candidates or not self._scheduler.replace(group, "no_signal"):
            return None

        replacement = candidates[0]
        if not is_recorded:
            self._record({"e": "replaced", "group": group, "task": replacement.task.id})
        self._refilled[group] = turn + 1
        used.append(replacement)
        return replacement

    def _fail(self, error: BaseException) -> None:
        self._fault = self._fault or error
        self._changed.set()


async def off_loop(work: Callable[[], T]) -> T:
    """Run work in a thread and wait for its end, even when cancelled: it must not continue while a
    run is being closed."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


def groups_per_step(plan: TaskPlan, steps: int) -> int:
    """Return the number of groups of each step; raise `ConfigError` when it differs between
    steps."""
    sizes = plan.sizes(steps)
    if len(sizes) > 1:
        raise ConfigError(
            f'schedule.mode = "async": steps have from {min(sizes)} to {max(sizes)} groups, '
            "because an environment has fewer tasks than its share of rollout.groups; give it "
            "more tasks, or lower rollout.groups or its weight"
        )
    return sizes.pop() if sizes else 1
