"""An interrupted episode goes on from its recorded turns: none is sampled again, and no step with
effects is taken twice."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.play_functions import best_of_two, edited, planner_and_worker, verbatim
from kit.rollouts import AsyncTalk, Sampler, Talk, facts, tasks

import turnwright as tw
from turnwright.config import EnvRules
from turnwright.errors import TraceError
from turnwright.records import JsonLines, RunDir, rebuild_trajectories
from turnwright.records.journal import InterruptedEpisodes
from turnwright.rollouts import Rollout, make_episode_specs
from turnwright.rollouts.resume import EarlierEpisodes
from turnwright.rollouts.rollout_settings import RolloutSettings

LIMITS = tw.Limits(turns=30, turn_tokens=200)


class Inserts(AsyncTalk):
    """Rewinds replies and continues them, and rejects some actions."""

    async def step(self, action):
        step = await super().step(action)
        if self.rng.random() < 0.2:
            raise tw.InvalidAction("not like that")
        tail = self.rng.choice(["trained", "untrained"])
        kept = self.rng.randint(0, len(action.raw))
        return step._replace(observation=tw.InlineObservation("so ", keep_chars=kept, tail=tail))


class Compared(AsyncTalk):
    """Its group reward needs all episodes of a task."""

    @staticmethod
    def group_reward(trajectories):
        return [float(len(t.turns)) for t in trajectories]


WORLDS = (Talk, AsyncTalk, Inserts, Compared, best_of_two, planner_and_worker, edited, verbatim)


def play(run, env, rows, engine, rules=None, samples=1):
    """Play as a resumed run does: what the journal has is not played, or not sampled, again."""
    by_id = {task.id: task for task in rows}.get
    interrupted = InterruptedEpisodes()
    events = list(run.events())
    for event in events:
        interrupted.read(event)
    recorded = rebuild_trajectories(events, by_id)
    if events:
        run.journal.append({"e": "resumed"})
    specs = make_episode_specs(env, rows, phase="rollout", step=0, rules=rules, samples=samples)
    settings = RolloutSettings(limits=LIMITS, concurrency=5, seed=3)
    earlier = EarlierEpisodes(recorded, interrupted.episodes(by_id))
    rollout = Rollout(engine, tw.byte_renderer(), settings, run=run, earlier=earlier)
    return rollout.play(specs)


def rules_of(env):
    return EnvRules(on_invalid="resample", rejected_replies="untrained") if env is Inserts else None


def engine():
    return Sampler(200, aborts=0.2, ends=0.97)


def sampled(path):
    """Sampled ids of the turns that were not taken from an earlier process, by episode and seed."""
    found, spans = {}, {}
    for line in (path / "journal.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["e"] == "opened":
            spans[tuple(event["k"])] = []
        mine = spans[tuple(event["k"])] if "k" in event else []
        mine += event.get("spans", ())
        if event["e"] == "turn" and "resumed" not in event:
            name = *event["k"], event["seed"]
            assert name not in found, "a turn of the journal was sampled again"
            found[name] = [i for index in event["turn"]["spans"] for i in mine[index]["ids"]]
    return found


def content(trajectory, concurrent):
    """All of a trajectory; of one with concurrent calls what does not depend on the
    order of their spans."""
    if not concurrent:
        return facts(trajectory)
    turns = [
        (
            t.agent,
            trajectory.prompt_ids(n),
            [trajectory.spans[i].ids for i in t.spans],
            t.messages,
            t.reply,
            t.finish,
        )
        for n, t in enumerate(trajectory.turns)
    ]
    return trajectory.key, sorted(turns, key=repr), trajectory.reward, trajectory.stop


@settings(max_examples=40, deadline=None)
@given(env=st.sampled_from(WORLDS), cuts=st.lists(st.floats(0, 1), min_size=1, max_size=3))
def test_a_run_cut_off_anywhere_ends_as_one_that_was_not(tmp_path_factory, env, cuts):
    rows, out = tasks(3), tmp_path_factory.mktemp("run")
    with RunDir(out) as run:
        straight = asyncio.run(play(run, env, rows, engine(), rules_of(env), 2))
    start = 0
    for cut in cuts:
        path = out / "journal.jsonl"
        text = path.read_bytes()
        start += int(cut * (len(text) - start))  # after the last kill
        path.write_bytes(text[:start])
        asked = engine()
        with RunDir(out) as run:
            known = sampled(out)
            played = asyncio.run(play(run, env, rows, asked, rules_of(env), 2))
        concurrent = env in (best_of_two, planner_and_worker)
        assert [content(t, concurrent) for t in played] == [
            content(t, concurrent) for t in straight
        ]
        new = [i for name, ids in sampled(out).items() if name not in known for i in ids]
        assert sorted(new) == sorted(i for call in asked.calls for i in call.ids)
        found = {t.key: t for t in played}
        with RunDir(out) as run:
            read = rebuild_trajectories(run.events(), {task.id: task for task in rows}.get)
        assert {key: facts(t) for key, t in read.items()} == {
            key: facts(t) for key, t in found.items()
        }


# Worlds with effects


append = JsonLines.append


class Killed:
    """Kills a run at the n-th instant it passes: nothing happens after it, and the
    journal is as it was then."""

    def __init__(self, path, instants):
        self.path, self.left, self.dead = path, instants, False
        self.journal = b""
        self.in_doubt = Counter()

    async def run(self, work):
        """What the work returns; None if it was killed."""
        self.event, work = asyncio.Event(), asyncio.ensure_future(work)
        event = asyncio.ensure_future(self.event.wait())
        await asyncio.wait([work, event], return_when=asyncio.FIRST_COMPLETED)
        event.cancel()
        if not self.dead:
            return await work
        work.cancel()
        await asyncio.wait([work])
        return None

    def append(self, lines, value):
        """Write a line, unless it is too late for that."""
        if not self.dead:
            append(lines, value)
            self.count()

    async def passes(self, done=None):
        self.count(done)
        if self.dead:
            self.event.set()
            await asyncio.get_running_loop().create_future()

    def count(self, done=None):
        self.left -= 1
        if self.left < 0 and not self.dead:
            self.dead, self.journal = True, self.path.read_bytes()
            self.in_doubt[done] += 1


class Asked(Sampler):
    """May be killed with a call in flight."""

    async def generate(self, request):
        await Ledger.kill.passes()
        found = await super().generate(request)
        await Ledger.kill.passes()
        return found


class Ledger(tw.Env):
    """Writes a line for each step into a file that outlasts the episode."""

    folder = kill = None
    executed = None

    async def reset(self, task, *, seed=None):
        self.file, self.seed, rng = (
            Ledger.folder / task.id,
            seed,
            random.Random(f"{task.id}/{seed}"),
        )
        self.turns = rng.randint(1, 6)
        await Ledger.kill.passes()
        self.file.write_text("")
        return "Begin."

    async def step(self, action):
        await Ledger.kill.passes()
        lines = self.file.read_text().splitlines()
        self.file.write_text("".join(f"{line}\n" for line in [*lines, len(lines)]))
        step = self.file.name, self.seed, len(lines)
        Ledger.executed[step] += 1
        await Ledger.kill.passes(step)
        if len(action.raw) % 5 == 0:
            raise tw.InvalidAction("not five")
        said = tw.InlineObservation("so ") if len(lines) % 3 == 1 else f"{len(lines)} lines"
        info = {"info": {"lines": len(lines)}} if len(lines) % 2 else {}
        return tw.Step(said, reward=len(lines) / 7, terminated=len(lines) + 1 >= self.turns, **info)

    async def reward(self, trajectory):
        await Ledger.kill.passes()
        return float(len(self.file.read_text().splitlines()))


class Restorable(Ledger):
    """Takes lines back."""

    async def snapshot(self):
        return {"lines": self.file.read_text().splitlines()}

    async def restore(self, state):
        await Ledger.kill.passes()
        self.file.write_text("".join(f"{line}\n" for line in state["lines"]))


class Forgetful(Restorable):
    """Its snapshots are no JSON."""

    async def snapshot(self):
        return {"lines": tuple(self.file.read_text().splitlines())}


@settings(max_examples=100, deadline=None)
@given(
    env=st.sampled_from((Restorable, Ledger, Forgetful)),
    count=st.integers(1, 3),
    instants=st.lists(st.integers(0, 40), min_size=1, max_size=5),
)
def test_no_step_with_effects_is_taken_twice(tmp_path_factory, env, count, instants):
    rows, out = tasks(count), tmp_path_factory.mktemp("run")
    rules = EnvRules(effects=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JsonLines, "append", lambda lines, value: Ledger.kill.append(lines, value))
        check_effects(env, rows, out, rules, instants)


def check_effects(env, rows, out, rules, instants):
    path = out / "journal.jsonl"
    Ledger.folder, Ledger.kill, Ledger.executed = out, Killed(path, 10**6), Counter()
    with RunDir(out) as run:
        straight = asyncio.run(Ledger.kill.run(play(run, env, rows, Asked(200, aborts=0.2), rules)))
    path.write_bytes(b"")
    Ledger.executed, in_doubt = Counter(), Counter()
    for number in (*instants, 10**6):
        Ledger.kill = Killed(path, number)
        with RunDir(out) as run:
            played = asyncio.run(
                Ledger.kill.run(play(run, env, rows, Asked(200, aborts=0.2), rules))
            )
        if Ledger.kill.dead:
            path.write_bytes(Ledger.kill.journal)
            in_doubt += Ledger.kill.in_doubt
        sampled(out)
    if env is not Restorable:
        assert max(Ledger.executed.values()) == 1
        for trajectory in played:
            failed = [failure.type for failure in trajectory.failures]
            assert set(failed) <= {"ResumeDiffers"}
            assert (
                trajectory.metrics.get("resume_new_attempts", 0) == bool(failed)
                or trajectory.failed_turns
            )
        return
    del in_doubt[None]
    assert Ledger.executed - in_doubt == Counter(dict.fromkeys(Ledger.executed, 1)), (
        "a step was taken twice"
    )
    for trajectory in played:
        lines = (out / trajectory.task.id).read_text().splitlines()
        assert lines == [str(n) for n in range(len(trajectory.turns))]
        trajectory.metrics.pop("resume_steps_in_doubt", None)
    assert [facts(t) for t in played] == [facts(t) for t in straight]


def test_a_turn_is_on_the_disk_before_its_step_and_one_flush_serves_a_tick(tmp_path, monkeypatch):
    synced, real = [], os.fdatasync
    path = tmp_path / "journal.jsonl"

    def fdatasync(file):
        size = os.fstat(file).st_size
        real(file)
        synced.append(size)

    class Looks(AsyncTalk):
        async def step(self, action):
            text = path.read_bytes()[: max(synced, default=0)]
            turns = [json.loads(line) for line in text.splitlines() if b'"e":"turn"' in line]
            assert any(turn["turn"]["reply"]["content"] == action.message.text for turn in turns)
            return await super().step(action)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    played = tw.rollout(Looks, tasks(20), Sampler(), out=tmp_path, rules=EnvRules(effects=True))
    assert {t.stop for t in played} == {"done"}
    turns = sum(len(t.turns) for t in played)
    assert 0 < len(synced) < turns / 2
    synced.clear()
    tw.rollout(AsyncTalk, tasks(3), Sampler(), out=tmp_path / "plain")
    assert not synced


def test_lines_that_cannot_be_flushed_are_an_error(tmp_path, monkeypatch):
    def fails(file):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fails)
    lines = JsonLines(tmp_path / "lines.jsonl")
    lines.append({"a": 1})
    with pytest.raises(TraceError, match="cannot be written"):
        asyncio.run(lines.durable())
    lines.close()


# Records that an episode cannot go on from


class Drifts(AsyncTalk):
    """Another world in each process."""

    kind = "text"
    process = 0

    async def step(self, action):
        step = await super().step(action)
        if Drifts.process and Drifts.kind == "end":
            return step._replace(terminated=True)
        changed = {
            "text": {"observation": f"now {Drifts.process}"},
            "reward": {"reward": 9.0 + Drifts.process},
        }
        return step._replace(**changed.get(Drifts.kind, {}))


@pytest.mark.parametrize(
    ("kind", "reason"), [("text", "context"), ("reward", "reward"), ("end", "ended before turn")]
)
def test_a_world_that_differs_starts_over_and_is_counted(tmp_path, kind, reason):
    Drifts.kind, Drifts.process, rows = kind, 0, tasks(1)
    with RunDir(tmp_path) as run:
        asyncio.run(play(run, Drifts, rows, engine()))
    path = tmp_path / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: [b'"n":3' in line for line in lines].index(True) + 1]))
    Drifts.process = 1
    with RunDir(tmp_path) as run:
        (trajectory,) = asyncio.run(play(run, Drifts, rows, engine()))
    assert trajectory.stop == "done"
    (failure,) = trajectory.failures
    assert (failure.type, failure.recovery) == ("ResumeDiffers", "attempt")
    assert reason in failure.message
    assert trajectory.metrics["resume_new_attempts"] == 1
    assert trajectory.metrics["resume_lost_turns"] + len(trajectory.failed_turns) == 4
