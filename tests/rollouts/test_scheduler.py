"""The scheduler of asynchronous training: its bound holds in every schedule, and nothing is
lost or trained twice."""

from __future__ import annotations

import heapq
import json
import statistics
import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from scheduling import DiscardingScheduler, FifoScheduler

from turnwright.errors import UsageError
from turnwright.rollouts.group_scheduler import BatchScheduler

NUMBER = int(sys.argv[1]) if __name__ == "__main__" else 200
EXAMPLES = settings(max_examples=NUMBER, deadline=None)


@dataclass
class Run:
    """A run on a clock of whole numbers: groups take the next of `durations`,
    updates take `update`."""

    groups: int
    staleness: int
    steps: int
    durations: Sequence[int]
    places: int = 4
    update: int = 3
    refill: int = 0
    kind: type[BatchScheduler] = BatchScheduler
    restarts: dict[int, int] = field(default_factory=dict)
    """Number of the event before which the process is killed, and of the updates
    since its checkpoint."""
    trained: dict[int, list[int]] = field(default_factory=dict)
    entered: dict[int, int] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    discarded: list[int] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    duration_of: dict[int, int] = field(default_factory=dict)

    def scheduler(self) -> BatchScheduler:
        return self.kind(self.groups, self.staleness, steps=self.steps, refill=self.refill)

    def restarted(self, scheduler: BatchScheduler, lost: int) -> BatchScheduler:
        fresh = self.scheduler()
        version = max(0, scheduler.version - lost)  # that of the checkpoint
        before = {
            group for step, batch in self.trained.items() if step < version for group in batch
        }
        left = [(group, at) for group, at in self.entered.items() if group not in before]
        fresh.restore(json.loads(json.dumps({"version": version, "open": left})))
        return fresh

    def play(self) -> Run:
        """Run to the end; fail when nothing can happen and steps are left."""
        scheduler, now, numbers, count = self.scheduler(), 0, 0, 0
        events: list[tuple[int, int, int]] = []  # time, number, group or -1 for an update
        training, restarts = False, dict(self.restarts)
        while scheduler.version < self.steps:
            if count in restarts:
                scheduler, events, training = (
                    self.restarted(scheduler, restarts.pop(count)),
                    [],
                    False,
                )
            while len(events) - training < self.places and (group := scheduler.admit()) is not None:
                known = self.entered.setdefault(group, scheduler.version)
                assert known <= scheduler.version, (
                    "a group of an earlier process entered before its policy"
                )
                duration = self.durations[numbers % len(self.durations)]
                self.duration_of[group] = duration
                heapq.heappush(events, (now + duration, numbers, group))
                numbers += 1
            step, batch = scheduler.version, None
            if not training:
                batch = scheduler.take(self.trained.get(step))
            if batch is not None:
                assert self.trained.setdefault(step, batch) == batch, (
                    "a resumed run trains the batches of before"
                )
                assert len(batch) == self.groups
                self.lags += [step - self.entered[group] for group in batch]
                training = True
                numbers += 1
                heapq.heappush(events, (now + self.update, numbers, -1))
                continue
            assert events, (
                f"deadlock at version {scheduler.version}: nothing runs, enters or trains"
            )
            now, _, group = heapq.heappop(events)
            count += 1
            if group < 0:
                training = False
                scheduler.advance()
                self.discarded = (
                    scheduler.discarded if isinstance(scheduler, DiscardingScheduler) else []
                )
            elif group in self.discarded:
                pass
            elif self.durations[numbers % len(self.durations)] % 3 == 0 and scheduler.replace(
                group, "no_signal"
            ):
                numbers += 1
                heapq.heappush(
                    events, (now + self.durations[numbers % len(self.durations)], numbers, group)
                )
            else:
                scheduler.complete(group)
                self.finished.add(group)
        return self


def random_runs(**fixed: Any) -> st.SearchStrategy[Run]:
    """Return a strategy of runs that have not been played."""
    drawn: dict[str, Any] = {
        "groups": st.integers(1, 5),
        "staleness": st.integers(0, 4),
        "steps": st.integers(1, 8),
        "durations": st.lists(st.integers(0, 5) | st.integers(0, 200), min_size=1, max_size=40),
        "places": st.integers(1, 30),
        "update": st.integers(0, 40),
        "refill": st.integers(0, 3),
        "restarts": st.dictionaries(st.integers(1, 100), st.integers(0, 3), max_size=4),
    }
    return st.builds(Run, **drawn | {name: st.just(value) for name, value in fixed.items()})


def check(run: Run) -> None:
    """Assert what every run promises."""
    trained = [group for batch in run.trained.values() for group in batch]
    assert max(run.lags) <= run.staleness
    assert sorted(trained) == sorted(run.entered) == list(range(run.groups * run.steps)), (
        "once each"
    )
    assert run.finished == set(trained), "no finished group is discarded"
    assert not run.discarded


@EXAMPLES
@given(random_runs())
def test_every_group_that_enters_trains_once_within_the_bound_in_any_order_of_completion(
    run: Run,
) -> None:
    check(run.play())
    event(f"lag_max {max(run.lags)} of {run.staleness}")


@EXAMPLES
@given(random_runs(kind=FifoScheduler))
def test_first_in_first_out_keeps_the_bound_too(run: Run) -> None:
    check(run.play())
    for step, batch in run.trained.items():
        assert batch == list(range(step * run.groups, (step + 1) * run.groups))


@EXAMPLES
@given(random_runs(kind=DiscardingScheduler, restarts={}))
def test_discarding_keeps_the_bound_by_dropping_groups_and_counts_them(run: Run) -> None:
    run.play()
    trained = [group for batch in run.trained.values() for group in batch]
    assert max(run.lags) <= run.staleness
    assert len(set(trained)) == len(trained) == run.groups * run.steps
    assert set(trained) | set(run.discarded) == set(run.entered)
    assert not set(trained) & set(run.discarded)


@EXAMPLES
@given(random_runs(staleness=0))
def test_staleness_0_gives_the_batches_of_a_synchronous_run(run: Run) -> None:
    check(run.play())
    assert set(run.lags) == {0}
    for step, batch in run.trained.items():
        assert batch == list(range(step * run.groups, (step + 1) * run.groups))


@EXAMPLES
@given(random_runs())
def test_a_restart_from_a_checkpoint_trains_the_batches_of_before_again(run: Run) -> None:
    run.restarts = {number: max(1, lost) for number, lost in run.restarts.items()}
    check(run.play())  # `play` compares the batches of repeated steps


def test_a_group_at_its_bound_is_waited_for_and_an_overdue_rule_would_be_late() -> None:
    scheduler = BatchScheduler(2, 1, steps=4)
    groups = [scheduler.admit() for _ in range(4)]
    assert groups == [0, 1, 2, 3]
    assert scheduler.admit() is None
    for group in (1, 3):
        scheduler.complete(group)
    assert scheduler.take() == [1, 3]
    scheduler.advance()
    assert [scheduler.admit(), scheduler.admit(), scheduler.admit()] == [4, 5, None]
    for group in (4, 5):
        scheduler.complete(group)
    assert scheduler.take() is None, "0 and 2 entered at version 0: this step is their last"
    scheduler.complete(0)
    assert scheduler.take() is None
    scheduler.complete(2)
    assert scheduler.take() == [0, 2]


def test_groups_of_one_deadline_are_spread_over_the_steps_before_it() -> None:
    scheduler = BatchScheduler(2, 2, steps=9)
    for group in range(6):
        assert scheduler.admit() == group
    scheduler.complete(4)
    scheduler.complete(5)
    assert scheduler.take() == [4, 5]
    scheduler.advance()
    for group in (6, 7):
        assert scheduler.admit() == group
        scheduler.complete(group)
    assert scheduler.take() is None, (
        "0 to 3 are due in step 2, which has places for two: this one has to take the others"
    )
    scheduler.complete(3)
    scheduler.complete(1)
    assert scheduler.take() == [1, 3]


def test_replacements_are_counted_by_reason_up_to_the_refill_of_each_group() -> None:
    scheduler = BatchScheduler(1, 0, steps=1, refill=2)
    assert scheduler.admit() == 0
    assert [
        scheduler.replace(0, "no_signal"),
        scheduler.replace(0, "failed"),
        scheduler.replace(0, "no_signal"),
    ] == [
        True,
        True,
        False,
    ]
    assert scheduler.replaced == {"no_signal": 1, "failed": 1}
    scheduler.complete(0)
    assert scheduler.take() == [0]


def test_misuse_and_foreign_states_are_refused_with_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"groups=0.*at least 1"):
        BatchScheduler(0, 1, steps=1)
    scheduler = BatchScheduler(1, 1, steps=1)
    with pytest.raises(UsageError, match="step 0 was not taken"):
        scheduler.advance()
    scheduler.admit()
    scheduler.complete(0)
    assert scheduler.take() == [0]
    with pytest.raises(UsageError, match="step 0 was taken already"):
        scheduler.take()
    scheduler.advance()
    with pytest.raises(UsageError, match="last of 1 steps was taken already"):
        scheduler.take()
    with pytest.raises(UsageError, match="are not all those"):
        BatchScheduler(4, 1, steps=3).restore({"version": 0, "open": [[7, 0]]})
    with pytest.raises(UsageError, match=r"groups \[9\] of step 0 did not enter"):
        BatchScheduler(1, 1, steps=1).take([9])


def ks_statistic(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the largest distance of two empirical distribution functions (Kolmogorov-Smirnov)."""
    a, b = sorted(first), sorted(second)
    return max(
        abs(bisect_right(a, value) / len(a) - bisect_right(b, value) / len(b)) for value in {*a, *b}
    )


def long_tailed(kind: type[BatchScheduler], staleness: int) -> tuple[list[int], list[int]]:
    """Return the durations of groups that entered, and of those trained, with a long tail."""
    rng = Random(f"{kind.__name__}/{staleness}")
    durations = [min(400, round(rng.lognormvariate(2.5, 1.2))) for _ in range(4000)]
    run = Run(8, staleness, 300, durations, places=16, update=5, kind=kind).play()
    sampled = [run.duration_of[group] for group in run.entered]
    return sampled, [run.duration_of[group] for batch in run.trained.values() for group in batch]


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("kind", [BatchScheduler, FifoScheduler])
def test_what_is_trained_is_distributed_as_what_was_sampled(
    kind: type[BatchScheduler], staleness: int
) -> None:
    sampled, trained = long_tailed(kind, staleness)
    assert ks_statistic(sampled, trained) == 0
    assert statistics.fmean(trained) == pytest.approx(statistics.fmean(sampled), rel=0.01)


def test_discarding_trains_on_shorter_groups_than_were_sampled() -> None:
    sampled, trained = long_tailed(DiscardingScheduler, 1)
    bound = 1.63 * (1 / len(sampled) + 1 / len(trained)) ** 0.5  # 1% level
    assert ks_statistic(sampled, trained) > bound
    assert statistics.fmean(trained) < 0.9 * statistics.fmean(sampled)


if __name__ == "__main__":  # the properties by hand: python tests/rollouts/test_scheduler.py 10000
    for name, test in list(globals().items()):
        if hasattr(test, "hypothesis"):
            test()
            sys.stdout.write(f"{NUMBER} schedules: {name}\n")
