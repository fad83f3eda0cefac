"""A stream: submissions share places, oldest policy first, then most turns; nothing that waits
for a place loses time."""

from __future__ import annotations

import asyncio
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.rollouts import AsyncTalk, Sampler, Talk, facts, tasks

import turnwright as tw
from turnwright.rollouts import Rollout, make_episode_specs
from turnwright.rollouts.rollout_settings import RolloutSettings
from turnwright.rollouts.timeouts import CallGate, Deadline, EpisodePlace


def specs(env, count, step=0, phase="train"):
    return make_episode_specs(env, tasks(count), phase=phase, step=step, samples=2)


class Slow(Sampler):
    """Takes a moment for each reply."""

    async def generate(self, request):
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            await asyncio.sleep(0.002)
        finally:
            self.running -= 1
        return await super().generate(request)


@pytest.mark.parametrize("concurrency", [1, 3, 256])
def test_submissions_give_what_separate_rollouts_give(concurrency):
    async def play():
        rollout = Rollout(Slow(), tw.byte_renderer(), RolloutSettings(concurrency=concurrency))
        async with rollout.stream() as stream:
            found = [stream.submit(specs(AsyncTalk, 3, step)) for step in range(3)]
            inside = await rollout.play(specs(Talk, 2, 3))
            return [await one for one in found], inside

    streamed, inside = asyncio.run(play())
    for step, found in enumerate(streamed):
        alone = asyncio.run(Rollout(Sampler(), tw.byte_renderer()).play(specs(AsyncTalk, 3, step)))
        assert [facts(one) for one in found] == [facts(one) for one in alone]
    alone = asyncio.run(Rollout(Sampler(), tw.byte_renderer()).play(specs(Talk, 2, 3)))
    assert [facts(one) for one in inside] == [facts(one) for one in alone]


def test_a_submission_has_its_own_sampling_and_oldest_version():
    seen = {}

    class Sees(Sampler):
        async def generate(self, request):
            seen[request.session.split("/")[1]] = (
                request.min_version,
                request.sampling.temperature,
                sorted(request.extras),
            )
            return await super().generate(request)

    async def play():
        rollout = Rollout(Sees(version=5), tw.byte_renderer())
        async with rollout.stream() as stream:
            first = stream.submit(specs(AsyncTalk, 1, 0), min_version=2, extras=["routes"])
            second = stream.submit(
                specs(AsyncTalk, 1, 1), min_version=4, sampling=tw.Sampling(temperature=0.5)
            )
            await asyncio.gather(first, second)

    asyncio.run(play())
    assert seen == {"0": (2, 1.0, ["routes"]), "1": (4, 0.5, [])}


def test_an_environment_at_work_needs_no_place():
    """Two environments that wait for each other, and one place: neither holds it while it waits."""

    async def play():
        both = asyncio.Barrier(2)

        class Meets(AsyncTalk):
            turns = 2

            async def step(self, action):
                await asyncio.wait_for(both.wait(), 20)
                return await super().step(action)

        engine = Slow()
        rollout = Rollout(engine, tw.byte_renderer(), RolloutSettings(concurrency=1))
        found = await rollout.play(
            make_episode_specs(Meets, tasks(2), phase="train", step=0, samples=1)
        )
        assert engine.peak == 1
        return found

    assert [one.error for one in asyncio.run(play())] == [None, None]


def test_no_more_environments_are_alive_than_asked_for():
    alive = Counter()

    class Counted(AsyncTalk):
        async def reset(self, task, *, seed=None):
            alive["now"] += 1
            alive["most"] = max(alive["most"], alive["now"])
            return await super().reset(task, seed=seed)

        async def close(self):
            alive["now"] -= 1

    tw.rollout(Counted, tasks(12), Slow(), environments=3)
    assert alive["most"] <= 3
    tw.rollout(Counted, tasks(12), Slow())
    assert alive["most"] > 3
    with pytest.raises(tw.UsageError, match="environments must be at least 1, or None, not 0"):
        tw.rollout(Counted, tasks(1), Slow(), environments=0)


def test_held_calls_wait_outside_every_deadline_and_others_go_on():
    limits = tw.Limits(wall_clock_s=0.5, generate_s=0.2)

    async def play_agent(task, model):
        first = await model.generate(task.messages)
        await asyncio.gather(model.generate("a"), model.generate("b"))
        return float(bool(first.ids))

    async def play():
        rollout = Rollout(Slow(), tw.byte_renderer(), RolloutSettings(limits=limits))
        async with rollout.stream() as stream:
            stream.gate.hold_new()
            held = [stream.submit(specs(env, 2), training=True) for env in (AsyncTalk, play_agent)]
            others = await stream.submit(specs(AsyncTalk, 2, phase="eval"))
            await asyncio.sleep(0.8)
            assert not any(one.done() for one in held)
            assert rollout.pending() == []
            stream.gate.resume()
            await asyncio.sleep(0.003)
            await stream.gate.hold()
            assert stream.gate.calls == 0
            others += await asyncio.wait_for(stream.submit(specs(AsyncTalk, 2, phase="eval")), 20)
            await asyncio.sleep(0.8)
            stream.gate.resume()
            return [*others, *await held[0], *await held[1]]

    assert [one.error for one in asyncio.run(play())] == [None] * 16


def test_the_oldest_policy_enters_first_then_the_most_turns():
    async def order():
        gate, entered = CallGate(1), []
        assert gate.try_enter(True)

        async def call(version, turns):
            await gate.enter(True, version, turns)
            entered.append((version, turns))
            gate.leave(True)

        calls = [
            asyncio.create_task(call(*one)) for one in [(3, 9), (2, 0), (2, 4), (3, 1), (1, 0)]
        ]
        await asyncio.sleep(0)
        gate.leave(True)
        await asyncio.gather(*calls)
        return entered

    assert asyncio.run(order()) == [(1, 0), (2, 4), (2, 0), (3, 9), (3, 1)]


@given(
    places=st.integers(1, 5),
    most=st.none() | st.integers(1, 4),
    plan=st.lists(
        st.tuples(
            st.booleans(),
            st.integers(0, 3),
            st.lists(st.integers(0, 3), max_size=4),
            st.integers(0, 9),
        )
    ),
    holds=st.lists(st.integers(0, 12), max_size=3),
)
@settings(max_examples=150, deadline=None)
def test_places_are_never_exceeded_nor_lost(places, most, plan, holds):
    """Episodes that start, call, are cancelled at any instant, while training is held now and then:
    in the end all is free."""

    async def run():
        gate, alive, calls = CallGate(places, most), Counter(), Counter()

        async def episode(training, version, durations):
            place = EpisodePlace(gate, training, version)
            deadline = Deadline(math.inf)
            await place.start()
            try:
                alive["now"] += 1
                assert most is None or alive["now"] <= most
                for turn, ticks in enumerate(durations):
                    if not place.try_enter():
                        await place.enter(turn, deadline)
                    try:
                        calls["now"] += 1
                        assert calls["now"] <= places
                        for _ in range(ticks):
                            await asyncio.sleep(0)
                    finally:
                        calls["now"] -= 1
                        place.leave()
                    await asyncio.sleep(0)
            finally:
                alive["now"] -= 1
                place.end()
                deadline.close()

        running = [
            asyncio.create_task(episode(training, version, ticks))
            for training, version, ticks, _ in plan
        ]
        cancels = [(tick, task) for (*_, tick), task in zip(plan, running, strict=True) if tick > 4]
        for tick in range(14):
            for at, task in cancels:
                if at == tick:
                    task.cancel()
            if tick in holds:
                gate.hold_new()
            elif tick - 1 in holds:
                gate.resume()
            await asyncio.sleep(0)
        gate.resume()
        for outcome in await asyncio.gather(*running, return_exceptions=True):
            assert outcome is None or isinstance(outcome, (asyncio.CancelledError, RuntimeError)), (
                outcome
            )
        assert (gate.calls, gate.starting, gate.alive, gate.training_calls) == (0, 0, 0, 0)
        await asyncio.wait_for(gate.wait_free(), 5)

    asyncio.run(run())
