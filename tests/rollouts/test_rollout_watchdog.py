"""What is said when nothing moves: by itself after a while, with stacks when
asked, and never else."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time

import pytest
from kit.rollouts import AsyncTalk, Sampler, Talk, tasks

import turnwright as tw
from turnwright.rollouts import Rollout, make_episode_specs
from turnwright.rollouts.rollout_settings import RolloutSettings


class Stuck(AsyncTalk):
    """Waits in its second step for longer than anybody's patience."""

    seconds = 0.7

    async def step(self, action):
        if self.left == self.turns - 1:
            await asyncio.sleep(self.seconds)
        return Talk.step(self, action)


class Blocks(Stuck):
    """Blocks the event loop there."""

    async def step(self, action):
        if self.left == self.turns - 1:
            time.sleep(self.seconds)
        return Talk.step(self, action)


def play(world, n=3, seconds=0.2, **settings):
    settings = RolloutSettings(watchdog_s=seconds, **settings)
    rollout = Rollout(Sampler(), tw.byte_renderer(), settings)
    return rollout, asyncio.run(
        rollout.play(make_episode_specs(world, tasks(n), phase="rollout", step=0))
    )


def test_without_progress_it_says_what_is_pending(capfd):
    play(Stuck)
    said = capfd.readouterr().err
    assert re.search(r"turnwright: no progress for \d+ s; 3 episodes pending", said)
    for number in range(3):
        assert re.search(rf"  rollout 0 / t{number} / 0  turn 2  step  \d+\.\d s\n", said)
    assert said.count("no progress") <= 3, "each time after twice as long"
    assert f"kill -USR1 {os.getpid()}" in said


def test_while_something_moves_it_is_silent(capfd):
    class Slow(AsyncTalk):
        async def step(self, action):
            await asyncio.sleep(0.05)
            return Talk.step(self, action)

    play(Slow, n=2, seconds=0.3)
    assert capfd.readouterr().err == ""


def test_a_blocked_event_loop_is_told_with_its_line(capfd):
    play(Blocks, n=1)
    said = capfd.readouterr().err
    assert "the event loop is blocked:" in said
    assert re.search(r"test_rollout_watchdog\.py:\d+ in step", said)


def test_asked_by_a_signal_it_shows_stacks_and_gives_the_signal_back(capfd):
    before = signal.getsignal(signal.SIGUSR1)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    play(Stuck, seconds=60.0)
    timer.join()
    said = capfd.readouterr().err
    assert "3 episodes pending" in said
    assert re.search(r"  rollout 0 / t0 / 0  turn 2  step", said)
    assert re.search(r"test_rollout_watchdog\.py:\d+ in Stuck\.step", said)
    assert "thread MainThread:" in said
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_handler_of_ones_own_is_left_alone():
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    try:
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1))
        timer.start()
        play(Stuck)
        timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard == [1]


@pytest.mark.parametrize("phase", ["reset", "step"])
def test_calls_that_never_return_are_named(phase):
    release = threading.Event()

    class Hangs(Talk):
        def reset(self, task, *, seed=None):
            if phase == "reset":
                release.wait(30)
            return Talk.reset(self, task, seed=seed)

        def step(self, action):
            release.wait(30)

    rollout, _ = play(Hangs, n=2, limits=tw.Limits(env_s=0.2))
    names = [thread.name for thread in threading.enumerate()]
    release.set()
    what = "test_calls_that_never_return_are_named.<locals>.Hangs"
    assert sorted(rollout.abandoned_calls) == [
        f"rollout/0/t{i}/0/0 {what}.{phase}" for i in range(2)
    ]
    assert rollout.abandoned == 2
    for call in rollout.abandoned_calls:
        assert f"turnwright-env abandoned in {call}" in names
