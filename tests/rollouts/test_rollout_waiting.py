"""Deadlines and threads by themselves: nothing waits for ever, nothing is lost, nothing is left."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwright.envs.threads import AbandonableThreads
from turnwright.rollouts.timeouts import Deadline

FEW = settings(max_examples=15, deadline=None)


def workers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("turnwright-env")]


def none_left():
    end = time.monotonic() + 20
    while workers():
        assert time.monotonic() < end, f"threads are left: {workers()}"
        time.sleep(0.002)


@FEW
@given(
    waits=st.lists(
        st.sampled_from(("now", "soon", "never", "raises", "swallows")), min_size=1, max_size=6
    )
)
def test_one_timer_serves_waits_of_every_kind_in_a_row(waits):
    async def kind(name):
        if name == "soon":
            await asyncio.sleep(1e-3)
        if name == "raises":
            raise KeyError(name)
        if name in ("never", "swallows"):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                if name == "never":
                    raise
        return name

    async def run():
        deadline = Deadline(60)
        for name in waits:
            seconds = 0.02 if name in ("never", "swallows") else 20
            if name == "never":
                with pytest.raises(TimeoutError):
                    await deadline.wait(kind(name), seconds)
            elif name == "raises":
                with pytest.raises(KeyError):
                    await deadline.wait(kind(name), seconds)
            else:
                assert await deadline.wait(kind(name), seconds) == name
            assert asyncio.current_task().cancelling() == 0
        deadline.close()
        await asyncio.sleep(0)

    asyncio.run(run())


def test_an_earlier_deadline_comes_first_though_the_timer_was_set_for_a_later_one():
    async def run():
        deadline = Deadline(60)
        assert await deadline.wait(asyncio.sleep(0, 1), 50) == 1
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            await deadline.wait(asyncio.sleep(40), 0.01)
        assert time.monotonic() - began < 30
        assert not deadline.expired
        deadline.close()

    asyncio.run(run())


def test_the_wall_clock_ends_any_wait_and_an_extension_gives_time_again():
    async def run():
        deadline = Deadline(0.01)
        with pytest.raises(TimeoutError):
            await deadline.wait(asyncio.sleep(40), 30)
        assert deadline.expired
        deadline.extend(30)
        assert await deadline.wait(asyncio.sleep(0.01, "done"), 30) == "done"
        deadline.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("outer", "inner", "which"), [(0.02, 60, "outer"), (60, 0.02, "inner"), (0.02, 0.02, "outer")]
)
def test_of_nested_deadlines_the_one_that_came_is_told(outer, inner, which):
    told = []

    async def work():
        deadline = Deadline(60)
        try:
            await deadline.wait(asyncio.sleep(40), inner)
        except TimeoutError:
            told.append("inner")
            raise
        finally:
            deadline.close()

    async def run():
        deadline = Deadline(60)
        with pytest.raises(TimeoutError):
            await deadline.wait(work(), outer)
        assert asyncio.current_task().cancelling() == 0
        deadline.close()

    asyncio.run(run())
    assert told == (["inner"] if which == "inner" else []) or outer == inner


def test_a_cancellation_from_outside_is_no_timeout():
    async def work():
        await Deadline(60).wait(asyncio.sleep(40), 30)

    async def run():
        task = asyncio.ensure_future(work())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()

    asyncio.run(run())


@FEW
@given(
    calls=st.lists(st.sampled_from(("quick", "slow", "raises", "hangs", "exits")), max_size=25),
    most=st.integers(1, 4),
)
def test_every_call_gets_its_own_result_and_no_thread_is_left(calls, most):
    release = threading.Event()
    ran = []

    def work(number, name):
        ran.append(number)
        if name == "slow":
            time.sleep(1e-3)
        if name == "hangs":
            release.wait(30)
        if name == "raises":
            raise LookupError(number)
        if name == "exits":
            raise SystemExit(number)
        return number

    async def run():
        threads = AbandonableThreads(most)
        futures = [threads.call(work, number, name) for number, name in enumerate(calls)]
        hangs = [future for future, name in zip(futures, calls, strict=True) if name == "hangs"]
        others = [future for future in futures if future not in hangs]
        given_up = 0
        while others and (await asyncio.wait(others, timeout=0.02))[1]:
            # Whoever hangs in a thread is given up by its deadline; another thread serves
            # those that queue behind it.
            running = [
                future for future in hangs if not future.done() and futures.index(future) in ran
            ]
            given_up += sum(future.cancel() for future in running)
        waiting = [future for future in hangs if not future.done()]
        await asyncio.sleep(0.005)
        begun = {number for number in ran if futures[number] in waiting}
        for future in waiting:
            future.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert given_up + len(begun) <= threads.abandoned <= len(hangs)
        assert len(workers()) <= most + threads.abandoned
        for number, (future, name) in enumerate(zip(futures, calls, strict=True)):
            if name in ("quick", "slow"):
                assert future.result() == number
            elif name != "hangs":
                assert isinstance(
                    future.exception(), LookupError if name == "raises" else RuntimeError
                )
        threads.close()
        release.set()

    asyncio.run(run())
    none_left()
    assert len(ran) == len(set(ran))


@pytest.mark.parametrize("run_all", [False, True])
def test_a_call_that_was_given_up_before_its_turn_runs_only_where_all_do(run_all):
    release, ran = threading.Event(), []

    async def run():
        threads = AbandonableThreads(1, run_all=run_all)
        first = threads.call(release.wait, 30)
        second = threads.call(ran.append, "second")
        third = threads.call(ran.append, "third")
        second.cancel()
        await asyncio.sleep(0)
        release.set()
        await asyncio.gather(first, third)
        assert threads.abandoned == 0
        threads.close()

    asyncio.run(run())
    none_left()
    assert ran == (["second", "third"] if run_all else ["third"])


def test_calls_that_wait_briefly_get_threads_although_one_returns_in_each_check():
    ran_in = set()

    def work():
        time.sleep(1.5e-3)
        ran_in.add(threading.get_ident())

    async def run():
        threads = AbandonableThreads()
        await asyncio.gather(*(threads.call(work) for _ in range(64)))
        threads.close()

    asyncio.run(run())
    none_left()
    assert len(ran_in) > 1


def test_results_that_come_after_the_loop_is_gone_harm_nobody():
    release = threading.Event()

    async def run():
        threads = AbandonableThreads()
        threads.call(release.wait, 30)
        threads.close()

    asyncio.run(run())
    release.set()
    none_left()
