"""A worker that says what cannot be true is named, and nothing that it said is used (and one that is slow is named too)."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from scale_kit import write_recipe

import turnwright as tw
from turnwright.config import load
from turnwright.engines import tokens
from turnwright.envs.resolve import resolve_env
from turnwright.errors import TraceError, TurnwrightError
from turnwright.records import RunDir
from turnwright.records.journal import InterruptedEpisodes
from turnwright.records.serialization import rebuild_trajectories
from turnwright.renderers import load_renderer
from turnwright.rollouts import EpisodeSpec, Rollout
from turnwright.types import EpisodeKey
from turnwright_cluster.pool import WorkerPool
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
            WorkerPool(config, specs, run, alone / "model", recipe=folder.resolve(), note=notes.append) if elsewhere else None
        )
        options = {"limits": config.limits, "seed": seed, "run": run, "elsewhere": pool}
        rollout = Rollout(tw.ScriptedEngine(say), load_renderer(alone / "model"), **options)
        async with rollout.stream() as stream:
            url = None if pool is None else pool._server.url
            yield SimpleNamespace(stream=stream, spec=specs[0], notes=notes, pool=pool, run=run, url=url, rollout=rollout)


def group(spec, number=0):
    task = spec.tasks("train", 4, 0)[number]
    return [EpisodeSpec.of(spec, task, EpisodeKey("train", 0, task.id, sample)) for sample in range(SAMPLES)]


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


class AnotherGroup(RunLink):
    def answer(self, lease, row):
        super().answer(lease, {**row, "group": ["train", 0, "train-3"]})


class Twice(RunLink):
    def answer(self, lease, row):
        super().answer(lease, row)
        super().answer(lease, row)


class Invented(RunLink):
    """Says that other ids were sampled."""

    def event(self, lease, event):
        if event["e"] == "turn" and event["n"] == 1:
            event = json.loads(json.dumps(event))
            for span in event["spans"]:
                if "logprobs" in span:
                    span["ids"][0] += 1
        super().event(lease, event)


class Renamed(RunLink):
    """Says that another agent's policy sampled a reply."""

    def event(self, lease, event):
        if event["e"] == "turn" and event["n"] == 1:
            event = json.loads(json.dumps(event))
            event["turn"]["agent"] = "other"
            for span in event["spans"]:
                span["agent"] = "other"
        super().event(lease, event)


class Sibling(RunLink):
    """Sends an episode that it was not asked for."""

    def event(self, lease, event):
        super().event(lease, {**event, "k": ["train", 0, "train-3", 0, 0]} if event["e"] == "closed" else event)


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


async def send_raw(link, body, more=0):
    """Send a report of these bytes, under a length of some more, and wait for an answer if the length is right."""
    parts = urlsplit(link.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    heads = {"host": parts.netloc, "authorization": f"Bearer {tokens.found(link.url)}", "content-type": "application/json"}
    heads |= link._id | {"content-length": str(len(body) + more)}
    writer.write(b"POST /report HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in heads.items()).encode())
    writer.write(b"\r\n" + body)
    await writer.drain()
    if not more:
        await reader.readline()
    writer.close()
    await writer.wait_closed()


class HalfABody(RunLink):
    ends = False

    def answer(self, lease, row):
        self.ends = True
        super().answer(lease, row)

    async def _until_taken(self, body):
        if self.ends:
            await send_raw(self, b'{"number": 1, "entries": [["', more=100)  # its end never comes: the run takes nothing of it
            await send_raw(self, b'{"number": 3, "entries": [["')
        await super()._until_taken(body)


LIES = {
    AnotherGroup: "answered group train/0/train-3 where another was asked for",
    Invented: "sent ids that the engine did not sample for it",
    Renamed: "sent ids that the engine did not sample for it",
    Sibling: "which it was not asked for",
    HalfAnEpisode: "does not fit those before it",
    HalfAGroup: "of which 1 of 3 episodes did not end",
    HalfABody: "that are not JSON",
}


@pytest.mark.parametrize("lie", LIES, ids=[lie.__name__ for lie in LIES])
def test_a_lying_worker_is_named_and_nothing_it_said_is_used(lie, alone, tmp_path):
    async def play():
        async with run_with_workers(tmp_path, alone) as here:
            liar = worker(here, lie, "liar")
            await asyncio.wait_for(asyncio.shield(until(lambda: any("liar joined" in note for note in here.notes))), 30)
            submitted = here.stream.submit(group(here.spec))
            (refused,) = await asyncio.gather(liar, return_exceptions=True)
            honest = worker(here)
            found = await submitted
            again = worker(here, RunLink, "liar")
            (banned,) = await asyncio.gather(again, return_exceptions=True)
            await end(honest)
            return found, refused, banned, here.notes

    found, refused, banned, notes = asyncio.run(play())
    assert isinstance(refused, TurnwrightError)
    assert isinstance(banned, TurnwrightError)
    assert any(note.startswith("worker liar") and LIES[lie] in note for note in notes), notes
    assert sampled(found) == sampled(asyncio.run(play_alone(tmp_path / "alone", alone)))
    assert all(t.stop is not None and not t.stop.failed for t in found)
    journal = [json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    spec = resolve_env(load(tmp_path / "recipe.toml").config.env[0])
    tasks = {task.id: task for task in spec.tasks("train", 4, 0)}
    before = [event for event in journal[: next(n for n, e in enumerate(journal) if e["e"] == "asked_again")]]
    interrupted = InterruptedEpisodes()
    for event in before:
        interrupted.read(event)
    assert not rebuild_trajectories(before, tasks.get)  # also where it closed episodes
    assert not interrupted.episodes(tasks.get)
    rebuilt = rebuild_trajectories(journal, tasks.get)
    assert sampled(rebuilt[t.key] for t in found) == sampled(found)


async def until(holds):
    while not holds():
        await asyncio.sleep(0.01)


def test_a_second_answer_is_a_lie_too(alone, tmp_path):
    async def play():
        async with run_with_workers(tmp_path, alone) as here:
            liar = worker(here, Twice, "liar")
            found = await here.stream.submit(group(here.spec))  # the first answer was true
            (refused,) = await asyncio.gather(liar, return_exceptions=True)
            return found, refused, here.notes

    found, refused, notes = asyncio.run(play())
    assert isinstance(refused, TurnwrightError)
    assert any("worker liar answered a group twice" in note for note in notes)
    assert len(found) == SAMPLES


class Slow(RunLink):
    """Answers nothing after its first turns."""

    def event(self, lease, event):
        if event["e"] != "closed":
            super().event(lease, event)

    def answer(self, lease, row):
        pass


def test_a_slow_worker_is_named_and_its_turns_are_not_sampled_again(alone, tmp_path):
    async def play():
        async with run_with_workers(tmp_path, alone, "--scale.stall_s=0.5") as here:
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
    events = [json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
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

    with pytest.raises(TurnwrightError, match=r"failed on workers 5 times, the last unable: could not play it: ImportError"):
        asyncio.run(play())


def test_calls_of_workers_wait_without_their_clocks_while_training_calls_are_held(alone, tmp_path):
    async def play():
        async with run_with_workers(tmp_path, alone, "--limits.generate_s=0.3", "--limits.wall_clock_s=0.5") as here:
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
        TurnwrightError, match=r"no worker for 0.5 s \(scale.wait_s\): start some with turnwright worker --join"
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
                assert not here.pool._server.banned

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
