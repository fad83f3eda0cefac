"""The modes of `[schedule]` on a clock that jumps: the shipped stream and batches, sleeping engine,
environment and trainer."""

from __future__ import annotations

import pytest
import scheduling
from scheduling import MODES, BatchScheduler, DiscardingScheduler, Schedule, figures, hop_shares


@pytest.fixture(autouse=True)
def _few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "PLACES", 16)


@pytest.mark.parametrize("name", [name for name in MODES if not name.startswith("discard")])
def test_every_mode_trains_each_group_once_within_its_bound(name: str) -> None:
    run = Schedule(steps=4, groups=5, train_s=1.0, **MODES[name]).run()
    row = figures(run)
    assert sorted(group for batch in run.trained for group in batch) == list(range(20))
    assert row["lag_max"] <= {"sync": 0, "one_step_off": 1}.get(name, run.staleness)
    assert row["turns_trained"] == row["turns_sampled"]
    assert row["busy"] == pytest.approx(row["useful"]), (
        "nothing is sampled twice, also across pauses"
    )
    assert row["useful"] <= row["ideal_busy"]
    if run.mode != "async" or run.staleness == 0:
        assert all(
            batch == list(range(step * 5, step * 5 + 5)) for step, batch in enumerate(run.trained)
        )


def test_overlap_saves_time_in_the_order_of_the_modes() -> None:
    useful = [
        figures(Schedule(steps=4, groups=5, **MODES[name]).run())["useful"]
        for name in ("sync", "one_step_off", "async_2")
    ]
    assert useful[0] < useful[1] < useful[2]


def test_a_synchronous_batch_takes_as_long_as_its_longest_episode_allows() -> None:
    run = Schedule(
        steps=1, groups=2, **MODES["sync"]
    ).run()  # 16 episodes and 16 places: no call waits
    assert figures(run)["ratio_to_list"] == pytest.approx(1.0, abs=1e-6)
    assert run.waits == [pytest.approx(scheduling.bound(range(2)), abs=1e-6)]


def test_discarding_loses_the_tasks_with_the_most_look_ups() -> None:
    shares = hop_shares(20, 1, DiscardingScheduler)
    assert shares["trained"][3] < shares["entered"][3] - 0.02
    shares = hop_shares(10, 1, BatchScheduler)
    assert shares["trained"] == shares["entered"]
