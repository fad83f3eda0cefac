"""Environments are made under a deadline, and one that blocks does not hold up the others."""

from __future__ import annotations

import threading
import time

import turnwright as tw


class Slow(tw.Env):
    """Blocks in its constructor."""

    threads: set[int] = set()  # noqa: RUF012 - shared on purpose

    def __init__(self) -> None:
        self.threads.add(threading.get_ident())
        time.sleep(0.2)

    def reset(self, task: tw.Task, *, seed: int | None = None) -> str:
        return "Hello."

    def step(self, action: tw.Action) -> tw.Step:
        return tw.Step(reward=1.0, terminated=True)


def test_constructors_run_side_by_side_off_the_loop() -> None:
    Slow.threads.clear()
    found = tw.rollout(Slow, [tw.Task(answer=i) for i in range(8)], tw.ScriptedEngine(["x"]))
    assert [trajectory.reward for trajectory in found] == [1.0] * 8
    assert len(Slow.threads) > 1
    assert threading.get_ident() not in Slow.threads


def test_a_constructor_that_outlasts_its_deadline_is_a_timeout_of_that_episode() -> None:
    limits = tw.Limits(env_s=0.05)
    (found,) = tw.rollout(Slow, [tw.Task(answer=0)], tw.ScriptedEngine(["x"]), limits=limits)
    assert found.stop == "timeout"
    assert found.reward is None
