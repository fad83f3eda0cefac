"""A worker that is slow, cannot play, or sends what does not fit is named, and its groups
are asked for elsewhere."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from kit.workers import write_recipe

import turnwright as tw
from turnwright.config import load
from turnwright.engines import tokens
from turnwright.envs.resolve import resolve_env
from turnwright.errors import TraceError, TurnwrightError
from turnwright.records import RunDir
from turnwright.records.serialization import rebuild_trajectories
from turnwright.renderers import load_renderer
from turnwright.rollouts import EpisodeSpec, Rollout
from turnwright.rollouts.rollout_settings import RolloutSettings
from turnwright.types import EpisodeKey
from turnwright_cluster.code import code_of
from turnwright_cluster.pool import WorkerPool
from turnwright_cluster.server import WORKER
from turnwright_cluster.worker import RunLink, WorkerProcess

SAMPLES = 3


def say(messages, rng):
    return str(rng.randrange(1000))


@asynccontextmanager
async def run_with_workers(folder, alone, *more, seed=0, elsewhere=True, recipe=None):
    """A stream whose groups go to workers that join in this process, and what the run notes."""
    config = load(recipe or write_recipe(folder), ["--scale.listen=127.0.0.1:0", *more]).config
    specs = [resolve_env(env) for env in config.env]
    notes = []
    with RunDir(folder / "run") as run:
        pool = (
            WorkerPool(
                config, specs, run, alone / "model", recipe=folder.resolve(), note=notes.append
            )
            if elsewhere
            else None
        )
        settings = RolloutSettings(limits=config.limits, seed=seed)
        renderer = load_renderer(alone / "model")
        rollout = Rollout(tw.ScriptedEngine(say), renderer, settings, run=run, elsewhere=pool)
        async with rollout.stream() as stream:
            url = None if pool is None else pool._server.url
            yield SimpleNamespace(
                stream=stream,
                spec=specs[0],
                notes=notes,
                pool=pool,
                run=run,
                url=url,
                rollout=rollout,
            )


def group(spec, number=0):
    task = spec.tasks("train", 4, 0)[number]
    return [
        EpisodeSpec.of(spec, task, EpisodeKey("train", 0, task.id, sample))
        for sample in range(SAMPLES)
    ]


def worker(open_run, link=RunLink, name="true"):
    """Start a worker in this process; the link is what it says."""
    process = WorkerProcess(open_run.url, name=name, note=lambda _: None)
    process._link = link(open_run.url, name)
    return asyncio.create_task(process.run(patience_s=30))


async def end(*tasks):
    for task in tasks:
        task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)


def sampled(trajectories):
    return [[(span.ids, span.logprobs) for span in t.spans if span.sampled] for t in trajectories]


async def play_alone(folder, alone):
    async with run_with_workers(folder, alone, elsewhere=False) as here:
        return await here.stream.submit(group(here.spec))


async def until(holds):
    while not holds():
        await asyncio.sleep(0.01)


class AnotherGroup(RunLink):
    def answer(self, lease, row):
        super().answer(lease, {**row, "group": ["train", 0, "train-3"]})


class Sibling(RunLink):
    """Sends the end of an episode that it was not asked for."""

    def event(self, lease, event):
        super().event(
            lease,
            {**event, "k": ["train", 0, "train-3", 0, 0]} if event["e"] == "closed" else event,
        )


class HalfAnEpisode(RunLink):
    """Leaves a turn out."""

    def event(self, lease, event):
        if not (event["e"] == "turn" and event["n"] == 1):
            super().event(lease, event)


class HalfAGroup(RunLink):
    """Does not end an episode, and counts its events as if it did not matter."""

    left = 0

    def event(self, lease, event):
        if event["e"] == "closed" and event["k"][3] == 1:
            self.left += 1
            return
        super().event(lease, event)

    def answer(self, lease, row):
        super().answer(lease, {**row, "events": row["events"] - self.left})


class Unknown(RunLink):
    """Sends an event of a kind that there is not, and one without a kind."""

    def event(self, lease, event):
        if event["e"] == "closed":
            event = {
                name: value for name, value in event.items() if name != "e" or event["k"][3]
            } | {"e": "over"}
        super().event(lease, event)


FAULTS = {
    AnotherGroup: "to group ('train', 0, 'train-0')",
    Sibling: "its episode was not asked for",
    HalfAnEpisode: "does not fit those before it",
    HalfAGroup: "of which 1 of 3 episodes did not end",
    Unknown: "there is no event 'over'",
}


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.__name__ for fault in FAULTS])
def test_a_worker_that_sends_what_does_not_fit_is_named_and_others_are_asked(
    fault, alone, tmp_path
):
    async def play():
        async with run_with_workers(tmp_path, alone) as here:
            faulty = worker(here, fault, "faulty")
            await until(lambda: any("faulty joined" in note for note in here.notes))
            submitted = here.stream.submit(group(here.spec))
            await until(lambda: here.pool.asked_again)
            fine = worker(here)
            found = await submitted
            await end(fine, faulty)
            return found, here.notes, here.pool

    found, notes, pool = asyncio.run(play())
    assert any("worker faulty:" in note and FAULTS[fault] in note for note in notes), notes
    assert set(pool.asked_again) == {"failed"}
    assert sampled(found) == sampled(asyncio.run(play_alone(tmp_path / "alone", alone)))
    assert all(t.stop is not None and not t.stop.failed for t in found)
    spec = resolve_env(load(tmp_path / "recipe.toml").config.env[0])
    tasks = {task.id: task for task in spec.tasks("train", 4, 0)}
    journal = [
        json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()
    ]
    rebuilt = rebuild_trajectories(journal, tasks.get)
    assert sampled(rebuilt[t.key] for t in found) == sampled(found)


async def post(link, body, more=0):
    """Report these bytes, under a length of some more; return the status line, or nothing where the
    bytes do not suffice."""
    parts = urlsplit(link.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    heads = {
        "host": parts.netloc,
        "authorization": f"Bearer {tokens.lookup(link.url)}",
        "content-type": "application/json",
    }
    heads |= link._id | {"content-length": str(len(body) + more)}
    writer.write(
        b"POST /report HTTP/1.1\r\n"
        + "".join(f"{name}: {value}\r\n" for name, value in heads.items()).encode()
    )
    writer.write(b"\r\n" + body)
    await writer.drain()
    status = b"" if more else await reader.readline()
    writer.close()
    await writer.wait_closed()
    return status.decode()


BODIES = {
    "half": b'{"number": 1, "entries": [["',
    "a list": b"[1]",
    "no entries": b'{"number": 1}',
    "another report": b'{"number": 7, "entries": []}',
    "an entry without a lease": b'{"number": 1, "entries": [["event", 7, {}]]}',
    "an entry of another form": b'{"number": 1, "entries": [["event", "x", 7]]}',
    "an entry of no kind": b'{"number": 1, "entries": [[["event"], "x", {}]]}',
}


def test_a_body_of_another_form_is_refused_and_nothing_of_it_is_taken(alone, tmp_path):
    async def play():
        async with run_with_workers(tmp_path, alone) as here:
            link = RunLink(here.url, "by hand")
            await link.hello()
            await link.join(1, code_of([]))
            await post(link, BODIES["half"], more=100)  # its end never comes
            found = {name: await post(link, body) for name, body in BODIES.items()}
            taken = here.pool._server.workers[link._id[WORKER]].reported
            await link.close()
            return found, taken

    found, taken = asyncio.run(play())
    assert {name: status.split()[1] for name, status in found.items()} == dict.fromkeys(
        BODIES, "400"
    )
    assert taken == 0


class Slow(RunLink):
    """Answers nothing after its first turns."""

    def event(self, lease, event):
        if event["e"] != "closed":
            super().event(lease, event)

    def answer(self, lease, row):
        pass


def test_a_slow_worker_is_named_and_its_turns_are_not_sampled_again(alone, tmp_path):
    async def play():
        async with run_with_workers(tmp_path, alone, "--scale.stall_s=3") as here:
            slow = worker(here, Slow, "slow")
            await until(lambda: any("slow joined" in note for note in here.notes))
            submitted = here.stream.submit(group(here.spec))
            await asyncio.sleep(0.1)
            honest = worker(here)
            found = await submitted
            await end(honest, slow)
            return found, here.notes, here.pool

    found, notes, pool = asyncio.run(play())
    assert any("worker slow: slow: it did nothing for" in note for note in notes)
    assert pool.asked_again == {"failed": 1}
    assert sampled(found) == sampled(asyncio.run(play_alone(tmp_path / "alone", alone)))
    events = [
        json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()
    ]
    assert sum("resumed" in event for event in events) == 3 * SAMPLES  # three turns of each episode


class CannotPlay(RunLink):
    def event(self, lease, event):
        pass

    def answer(self, lease, row):
        super().answer(lease, {"fault": "ImportError: no module named world"})


def test_a_group_that_no_worker_can_play_stops_the_run(alone, tmp_path):
    async def play():
        async with run_with_workers(tmp_path, alone) as here:
            unable = worker(here, CannotPlay, "unable")
            try:
                await here.stream.submit(group(here.spec))
            finally:
                await end(unable)

    with pytest.raises(
        TurnwrightError,
        match=r"failed on workers 5 times, the last unable: could not play it: ImportError",
    ):
        asyncio.run(play())


def test_calls_of_workers_wait_without_their_clocks_while_training_calls_are_held(alone, tmp_path):
    async def play():
        async with run_with_workers(
            tmp_path, alone, "--limits.generate_s=0.3", "--limits.wall_clock_s=0.5"
        ) as here:
            honest = worker(here)
            await until(lambda: any("true joined" in note for note in here.notes))
            here.stream.gate.hold_new()
            submitted = here.stream.submit(group(here.spec), training=True)
            await asyncio.sleep(1.0)
            assert not submitted.done()
            here.stream.gate.resume()
            found = await submitted
            await end(honest)
            return found

    found = asyncio.run(play())
    assert all(t.error is None and len(t.turns) == 3 for t in found)


def test_without_a_worker_the_run_stops_after_a_while(alone, tmp_path):
    async def play():
        async with run_with_workers(tmp_path, alone, "--scale.wait_s=0.5") as here:
            await here.stream.submit(group(here.spec))

    with pytest.raises(
        TurnwrightError,
        match=r"no worker for 0.5 s \(scale.wait_s\): start some with turnwright worker --join",
    ):
        asyncio.run(play())


def test_a_journal_that_cannot_be_written_ends_the_run_and_blames_no_worker(alone, tmp_path):
    async def play():
        async with run_with_workers(tmp_path, alone) as here:
            honest = worker(here)
            await until(lambda: any("true joined" in note for note in here.notes))
            here.run.journal.broken = "the disk is full"
            try:
                await here.stream.submit(group(here.spec))
            finally:
                await end(honest)
                assert not here.pool.asked_again

    with pytest.raises(TraceError, match="the disk is full"):
        asyncio.run(play())


def test_the_engine_forgets_an_episode_when_it_is_closed(alone, tmp_path):
    async def play():
        async with run_with_workers(tmp_path, alone) as here:
            released = []
            here.rollout.engine.release = released.append
            honest = worker(here)
            found = await here.stream.submit(group(here.spec))
            await end(honest)
            return found, released

    found, released = asyncio.run(play())
    assert sorted(released) == sorted(f"train/0/{t.key.task}/{t.key.sample}/0" for t in found)
