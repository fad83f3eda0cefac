"""Steps of training count from 1 wherever a person reads them, though keys count from 0."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import pytest

import turnwright as tw
from turnwright.errors import UsageError
from turnwright.records import to_json, trajectory_row
from turnwright.rollouts import EpisodeSpec, Rollout
from turnwright.rollouts.watchdog import describe_pending
from turnwright.training.trainer.mismatch import check_fingerprints

FIRST = tw.EpisodeKey("train", 0, "TASK", 3)


def test_an_episode_has_a_name_for_people() -> None:
    assert FIRST.label == "train 1 / TASK / 3"
    assert tw.EpisodeKey("eval-before-sampled", 0, "TASK", 3).label == (
        "eval-before-sampled 0 / TASK / 3"
    )


def test_pending_episodes_are_named_by_the_step_of_the_metrics() -> None:
    release = threading.Event()

    async def wait(task: tw.Task, model: tw.Model) -> float:
        while not release.is_set():
            await asyncio.sleep(0.01)
        return 1.0

    engine = tw.ScriptedEngine(["x"])
    rollout = Rollout(engine, tw.byte_renderer())
    episode = EpisodeSpec(task=tw.Task("Wait.", id="TASK"), key=FIRST, play=wait)
    playing = threading.Thread(target=lambda: asyncio.run(rollout.play([episode])))
    playing.start()
    try:
        end = time.monotonic() + 30
        while not rollout.pending() and time.monotonic() < end:
            time.sleep(0.01)
        assert "train 1 / TASK / 3  turn 1" in describe_pending(rollout.pending())
    finally:
        release.set()
        playing.join()


def test_messages_about_an_episode_name_the_step_of_the_metrics() -> None:
    trajectory = tw.Trajectory(tw.Task("x", id="TASK"), FIRST, template="other")
    with pytest.raises(UsageError, match=r"episode \(train 1 / TASK / 3\) of another chat"):
        check_fingerprints("this", [trajectory], "here")


@pytest.mark.beside("view")
def test_the_lists_of_the_viewer_count_training_from_1() -> None:
    from turnwright_view.web.episode_rows import key_of

    steps = []
    for phase in ("train", "gate"):
        trajectory = tw.Trajectory(tw.Task("x"), tw.EpisodeKey(phase, 4, "TASK", 0))
        trajectory.stop = tw.StopReason.DONE
        record = json.loads(to_json(trajectory_row(trajectory, tw.byte_renderer())))
        steps.append(key_of(record["key"]).step)
    assert steps == [5, 4]
