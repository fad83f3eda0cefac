"""Scheduler of asynchronous training: which groups enter, and which of them each step trains on.

It needs neither a clock nor a tensor, so a simulation and a property test run the code of a
training run. A bound on staleness is a promise about every group: one that enters at policy version
`v` is trained at version `v + staleness` at the latest. Two rules keep it, for episodes of any
length, without dropping one:

- Group `g` enters when `g // groups - version <= staleness`. So at version `n`, at most
  `groups * (staleness + 1)` groups that entered are not trained yet.
- A step takes the oldest complete groups, if every group that is left can still meet its deadline:
  at version `n`, at most `groups * (d - n)` of the groups left have a deadline of `d` or earlier,
  for each `d` (earliest-deadline feasibility). Else it waits. The oldest complete groups are those
  of the earliest deadlines, so no other batch is feasible when that one is not.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from turnwright.errors import UsageError


class BatchScheduler:
    """Admits groups by number, from 0, and selects the batch of each step.

    A caller loops over `admit` (when a place for an episode is free) and `complete`, and once per
    step over `take` and, after the update, `advance`.
    """

    def __init__(self, groups: int, staleness: int, *, steps: int, refill: int = 0) -> None:
        """Plan `steps` batches of `groups` groups.

        Args:
            staleness: maximum updates between the entry of a group and the step that trains it.
            refill: maximum replacements of a group.

        Raises:
            UsageError: for a number of groups under 1, or a negative number of steps, staleness or
                refill.
        """
        if groups < 1 or min(staleness, steps, refill) < 0:
            arguments = f"groups={groups}, staleness={staleness}, steps={steps}, refill={refill}"
            raise UsageError(
                f"BatchScheduler({arguments}): groups must be at least 1, and the others at least 0"
            )
        self.groups = groups
        self.staleness = staleness
        self.steps = steps
        self.refill = refill
        self.version = 0
        """Number of updates, which is the step that trains next."""
        self.replaced: Counter[str] = Counter()
        """Replacements by reason."""
        self._next = 0
        """The group that enters next."""
        self._taken = 0
        """Step after the last one whose batch was taken."""
        self._open: dict[int, int] = {}
        """Policy version at the entry of each group that is in no batch yet, in the order of
        entry."""
        self._complete: dict[int, None] = {}
        """Complete ones among them, in the order of completion."""
        self._carried: deque[int] = deque()
        """Groups of an earlier process that have not entered again."""
        self._refills: Counter[int] = Counter()
        """Replacements of each group so far."""

    def admit(self) -> int | None:
        """Return the next group to play, or None until the next `advance`.

        After `restore` the unfinished groups of the earlier process come first, each at its own
        version or a later one.
        """
        if self._carried:
            if self._open[self._carried[0]] > self.version:
                return None
            return self._carried.popleft()

        planned = self.groups * min(self.version + self.staleness + 1, self.steps)
        if self._next >= planned:
            return None
        group = self._next
        self._next += 1
        self._open[group] = self.version
        return group

    @property
    def ready(self) -> bool:
        """Whether the groups of the next batch are complete, also while the last one trains."""
        batch = self._select(self._taken)
        return batch is not None and all(group in self._complete for group in batch)

    def complete(self, group: int) -> None:
        """Record that all episodes of a group ended."""
        if group in self._open:
            self._complete[group] = None
            self._refills.pop(group, None)

    def replace(self, group: int, reason: str) -> bool:
        """Count a replacement of a group by other episodes, which keep its deadline.

        Return False if it had all its replacements.
        """
        if group not in self._open or self._refills[group] >= self.refill:
            return False
        self._refills[group] += 1
        self.replaced[reason] += 1
        return True

    def take(self, known: Sequence[int] | None = None) -> list[int] | None:
        """Return the batch of the step of this version, or None until more groups are complete.

        A step that an earlier process trained has its batch `known`.

        Raises:
            UsageError: when the batch of this version was taken already, or all steps were; for a
                `known` batch of another run.
        """
        if not self._taken <= self.version < self.steps:
            step = f"step {self.version}"
            if self.version >= self.steps:
                step = f"the last of {self.steps} steps"
            raise UsageError(
                f"BatchScheduler.take: the batch of {step} was taken already; call advance() after "
                "each update"
            )

        batch = self._select(self.version) if known is None else list(known)
        unknown = [group for group in batch or () if group not in self._open]
        if unknown:
            raise UsageError(
                f"BatchScheduler.take: groups {unknown} of step {self.version} did not enter or "
                "were trained before: the journal is of another run or incomplete; start a new run"
            )
        if batch is None or not all(group in self._complete for group in batch):
            return None

        for group in batch:
            del self._open[group]
            del self._complete[group]
        self._taken = self.version + 1
        return batch

    def _select(self, version: int) -> list[int] | None:
        """Return the batch of a step, if it is complete."""
        complete = [group for group in self._open if group in self._complete]
        batch = complete[: self.groups]
        if len(batch) < self.groups or not self._feasible(batch, version):
            return None
        return batch

    def _feasible(self, batch: Iterable[int], version: int) -> bool:
        """Return whether the groups left after a batch can all be trained by their deadlines."""
        chosen = set(batch)
        entries = [entry for group, entry in self._open.items() if group not in chosen]

        # In the order of entry, deadlines ascend: the i-th group left is trained in step version +
        # 1 + i // groups or earlier.
        for number, entry in enumerate(entries):
            deadline = entry + self.staleness
            if version + 1 + number // self.groups > deadline:
                return False
        return True

    def advance(self) -> None:
        """Count an update.

        Raises:
            UsageError: when the batch of this version was not taken.
        """
        if self._taken != self.version + 1:
            raise UsageError(
                f"BatchScheduler.advance: the batch of step {self.version} was not taken"
            )
        self.version += 1

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue the run of an earlier process before the step `state["version"]`.

        `open` has the groups that entered and are in no batch of an earlier step, as pairs of group
        and policy version at its entry. They enter again. Steps that the earlier process trained
        get their batch by `take(known)`.

        Raises:
            UsageError: when the state contradicts itself.
        """
        self._open = {int(group): int(version) for group, version in sorted(state["open"])}
        self._carried = deque(self._open)
        self.version = int(state["version"])
        self._taken = self.version

        # Every group that entered is in a batch or open, and they are numbered without a gap.
        self._next = self.groups * self._taken + len(self._open)
        last = max(self._open, default=0)
        if last >= max(self._next, 1):
            raise UsageError(
                f"BatchScheduler.restore: {self._taken} batches of {self.groups} groups and "
                f"{len(self._open)} open groups are not all those up to {last}: the state is of "
                "another run, or rollout.groups changed"
            )
