"""Garbage collection during rollouts: rare, and in time."""

from __future__ import annotations

import asyncio
import gc
import mmap
import multiprocessing

from kit.rollouts import AsyncTalk, Sampler, tasks

import turnwright as tw
from turnwright.rollouts import garbage
from turnwright.rollouts.garbage import GarbageWatch


class Payload:
    """Two megabytes that only a collection frees."""

    def __init__(self) -> None:
        # Which goes back to the system at once.
        self.itself, self.bytes = (
            self,
            mmap.mmap(-1, 2_000_000),
        )
        self.bytes.write(b"x" * 2_000_000)


class Leaky(AsyncTalk):
    """Leaves a reference cycle at every step."""

    async def step(self, action):
        Payload()
        SIZES.append(garbage.resident_bytes())
        await asyncio.sleep(0)
        return await super().step(action)


SIZES: list[int] = []


def leak_as_much_as_there_is():
    garbage.PERIOD_S = 0.0
    held = b"x" * 150_000_000  # so that what a rollout itself takes is little
    before = garbage.resident_bytes()
    tw.rollout(Leaky, tasks(before // 2_000_000), Sampler(), concurrency=4)
    assert len(SIZES) * 2_000_000 > 0.9 * before > 0.9 * len(held)
    assert max(SIZES) < 1.5 * before


def test_cycles_of_user_code_do_not_fill_the_memory():
    # A process of known size.
    process = multiprocessing.get_context("spawn").Process(target=leak_as_much_as_there_is)
    process.start()
    process.join()
    assert process.exitcode == 0


def test_a_rollout_collects_rarely_and_restores_the_thresholds():
    before, seen = gc.get_threshold(), []

    class Looks(AsyncTalk):
        async def step(self, action):
            seen.append(gc.get_threshold()[0])
            return await super().step(action)

    tw.rollout(Looks, tasks(1), Sampler())
    assert set(seen) == {garbage.NEW_OBJECTS}
    assert gc.get_threshold() == before


def test_of_two_rollouts_at_once_the_last_restores_the_thresholds():
    before = gc.get_threshold()

    async def run() -> None:
        first, second = GarbageWatch(), GarbageWatch()
        first.__enter__()
        second.__enter__()
        first.__exit__()
        assert gc.get_threshold()[0] == garbage.NEW_OBJECTS
        second.__exit__()

    asyncio.run(run())
    assert gc.get_threshold() == before
