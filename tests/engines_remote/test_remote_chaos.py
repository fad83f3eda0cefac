"""Everything that goes wrong with servers at once: four of them, 128 episodes, and
nothing is lost or made up."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter

import pytest
from kit import remote_engines as kit
from kit.fleets import fleet, until, weights

import turnwright as tw
from turnwright.config import Limits
from turnwright.rollouts import arollout

EPISODES, TURNS, TOKENS = 128, 6, 8
FAULTS = (
    dict(kind="status", status=500, times=6),
    dict(kind="status", status=503, times=6),
    dict(kind="garbage", times=6),
    dict(kind="truncated", times=6),
    dict(kind="reset", times=6),
    dict(kind="count", times=6),
    dict(kind="nan", times=3),
    dict(kind="no_logprobs", times=3),
    dict(kind="echo", times=3),
    dict(kind="version", times=3),
    dict(kind="slow", times=6, seconds=0.5),
)


class Long(tw.Env):
    """Six turns, whatever is said."""

    def reset(self, task, *, seed=None):
        self.turn = 0
        return task.id

    async def step(self, action):
        self.turn += 1
        await asyncio.sleep(0.02)
        return tw.Step(f"go on {self.turn}", reward=1.0, terminated=self.turn == TURNS)


def play(engine):
    tasks = [tw.Task("go", id=f"t{n}") for n in range(EPISODES)]
    limits = Limits(turns=TURNS, turn_tokens=TOKENS, on_turn_length="continue", generate_s=120.0)
    return arollout(Long, tasks, engine, limits=limits, concurrency=EPISODES)


def wrong(trajectories, version):
    """Sampled ids that would be trained and whose logprob is not the one that
    these weights give them."""
    rows, found = kit.table(version), 0
    for trajectory in trajectories:
        for sample in trajectory.samples():
            for place, weight in enumerate(sample.weights):
                if weight:
                    want = rows[sample.ids[place - 1] % kit.IDS][sample.ids[place]]
                    found += sample.logprobs[place] != pytest.approx(want)
    return found


async def storm(servers):
    """What goes wrong, while they are asked."""
    for number, fault in enumerate(FAULTS):
        await asyncio.to_thread(servers[number % 4].fault, **fault)
    await asyncio.sleep(0.3)
    servers[1].signal(signal.SIGSTOP)
    await asyncio.to_thread(servers[0].kill)
    await asyncio.sleep(1.0)
    servers[0].weights = 2  # it comes back with weights that are nobody's
    await asyncio.to_thread(servers[0].start)
    await asyncio.to_thread(servers[2].kill)
    await asyncio.sleep(1.0)
    servers[1].signal(signal.SIGCONT)
    await asyncio.to_thread(servers[2].start)


def test_four_servers_under_every_fault_lose_no_episode_and_train_no_wrong_id(directories):
    with kit.servers("vllm", "sglang", "vllm", "sglang") as servers:

        async def work():
            engine = fleet(servers, directories=directories, most=64)
            await engine.update(weights(3), 3)
            began = time.monotonic()
            calm = await play(engine)
            middle = time.monotonic()
            playing = asyncio.create_task(play(engine))
            await storm(servers)
            stormy = await playing
            ended = time.monotonic()
            await until(lambda: all(member.state == "up" for member in engine.members))
            after = await play(engine)
            counts = [dict(member.counts) for member in engine.members]
            await engine.close()
            return calm, stormy, after, (middle - began, ended - middle), counts, engine.counts

        calm, stormy, after, times, counts, total = kit.run(work())
    print(f"calm {times[0]:.1f} s, under faults {times[1]:.1f} s; {dict(total)}")
    for played in (calm, stormy, after):
        assert len(played) == EPISODES
        stops = Counter(str(trajectory.stop) for trajectory in played)
        errors = [t.error for t in played if t.error is not None]
        # Each as trained, or with an error that names its fault.
        assert stops["done"] + len(errors) == EPISODES
        assert all(error.phase == "generate" and error.message for error in errors)
        assert wrong(played, 3) == 0
        assert all({s.version for s in t.spans if s.sampled} <= {3} for t in played)
        assert all(
            sum(map(len, (s.ids for s in t.spans if s.sampled))) == TURNS * TOKENS
            for t in played
            if t.error is None
        )
    assert not any(t.error for t in (*calm, *after))
    assert len([t for t in stormy if t.error]) <= EPISODES // 20
    assert sum(row.get("reloaded", 0) for row in counts) >= 2
    assert sum(row.get("answers", 0) for row in counts) >= sum(
        len(t.turns) for t in (*calm, *stormy, *after)
    )
    assert sum(count for name, count in total.items() if name.startswith("asked_again")) > 0
