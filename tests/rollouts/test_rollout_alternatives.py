"""Alternatives of sampled ids on their way from the engine to the records."""

from __future__ import annotations

import json
import math

import pytest
from kit.rollouts import Sampler, Talk, tasks

import turnwright as tw
from turnwright.errors import UsageError
from turnwright.records import RunDir, rebuild_trajectories, to_json, trajectory_row
from turnwright.records.journal import InterruptedEpisodes
from turnwright.records.serialization import read_trajectory, span_row
from turnwright.rollouts import Rollout, make_episode_specs
from turnwright.rollouts.resume import EarlierEpisodes
from turnwright.rollouts.rollout_settings import RolloutSettings
from turnwright.rollouts.standalone import run_sync
from turnwright.types import Span


class Unsure(Sampler):
    """Has two ids in mind at each position, is interrupted, and gets new weights meanwhile."""

    gives_alternatives = True

    def allowed(self, request):
        return [id_ for id_ in super().allowed(request) if id_ != 5]

    async def generate(self, request):
        reply = await super().generate(request)
        if request.alternatives:
            reply.alternatives = [
                sorted([(id_, p), (5, math.log1p(-math.exp(p)))], key=lambda pair: -pair[1])
                for id_, p in zip(reply.ids, reply.logprobs, strict=True)
            ]
        if len(reply.ids) > 3:
            reply.later_versions = [(2, reply.version + 1)]
        return reply


def engine():
    return Unsure(200, aborts=0.2, ends=0.97)


def play(run=None, *, alternatives=2, sampler=None, **more):
    return tw.rollout(
        Talk,
        tasks(6),
        sampler or engine(),
        limits=tw.Limits(turns=12, turn_tokens=60),
        alternatives=alternatives,
        out=run,
        **more,
    )


def sampled(trajectories) -> list[Span]:
    return [span for one in trajectories for span in one.spans if span.sampled]


def test_each_span_has_those_of_its_own_ids():
    spans = sampled(play())
    assert sum(span.start > 0 and span.version == 1 for span in spans) > 5  # replies of two spans
    for span in spans:
        assert len(span.alternatives) == len(span.ids)
        for id_, logprob, likely in zip(span.ids, span.logprobs, span.alternatives, strict=True):
            assert {other for other, _ in likely} == {id_, 5}
            assert dict(likely)[id_] == pytest.approx(logprob, rel=1e-6)


def test_without_them_records_are_as_they_were(tmp_path):
    with_none = play(tmp_path / "none", alternatives=0)
    assert not any(span.alternatives for span in sampled(with_none))
    assert "alternative" not in (tmp_path / "none" / "journal.jsonl").read_text()

    def bare(trajectories):
        return [(span.ids, span.logprobs, span.version) for span in sampled(trajectories)]

    assert bare(with_none) == bare(play())


def test_journal_and_record_give_them_back_exactly(tmp_path):
    played = play(tmp_path / "run")
    run = RunDir(tmp_path / "run")
    try:
        by_id = {one.task.id: one.task for one in played}
        rebuilt = rebuild_trajectories(run.events(), by_id.get)
    finally:
        run.close()

    renderer = tw.byte_renderer()
    for trajectory in played:
        assert rebuilt[trajectory.key].spans == trajectory.spans
        row = json.loads(to_json(trajectory_row(trajectory, renderer)))
        assert read_trajectory(row).spans == trajectory.spans
        for span in row["spans"]:
            if span["mask"]:
                texts = [
                    [renderer.token_texts([id_])[0] for id_, _ in likely]
                    for likely in span["alternatives"]
                ]
                assert span["alternative_tokens"] == texts
                logprobs = [logprob for likely in span["alternatives"] for _, logprob in likely]
                assert all(float(f"{logprob:.7g}") == logprob for logprob in logprobs)
            else:
                assert "alternatives" not in span


def test_a_resumed_episode_has_those_that_were_recorded(tmp_path):
    whole = play(tmp_path / "whole", seed=3)
    lines = (tmp_path / "whole" / "journal.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "journal.jsonl").write_bytes(b"".join(lines[: len(lines) // 2]))

    run = RunDir(tmp_path / "cut", trajectories=False)
    interrupted = InterruptedEpisodes()
    events = list(run.events())
    for event in events:
        interrupted.read(event)
    by_id = {task.id: task for task in tasks(6)}.get
    earlier = EarlierEpisodes(rebuild_trajectories(events, by_id), interrupted.episodes(by_id))
    settings = RolloutSettings(limits=tw.Limits(turns=12, turn_tokens=60), seed=3, alternatives=2)
    rollout = Rollout(engine(), tw.byte_renderer(), settings, run=run, earlier=earlier)
    specs = make_episode_specs(Talk, tasks(6), phase="rollout", step=0)
    resumed = run_sync(rollout.play(specs))
    run.close()
    assert interrupted.episodes(by_id)
    for before, after in zip(whole, resumed, strict=True):
        assert span_rows(after) == span_rows(before)


def span_rows(trajectory):
    return [span_row(span) for span in trajectory.spans]


def test_a_script_leaves_no_choice():
    (trajectory,) = tw.rollout(
        Talk, tasks(1), tw.ScriptedEngine(lambda messages, rng: "hi"), alternatives=3
    )
    for span in sampled([trajectory]):
        assert span.alternatives == tuple(((id_, 0.0),) for id_ in span.ids)


def test_an_engine_that_has_none_is_refused_before_it_samples():
    sampler = Sampler(200)
    with pytest.raises(UsageError, match="Sampler does not return the most likely ids"):
        play(sampler=sampler)
    pair = tw.PolicyEngine({"a": Unsure(200), "b": sampler})
    with pytest.raises(UsageError, match="PolicyEngine does not return"):
        play(sampler=pair)
    assert not sampler.calls
    with pytest.raises(UsageError, match="alternatives must be 0 to 20"):
        play(alternatives=21)


FAULTS = {
    "alternatives of 0 ids": lambda rows: rows.clear(),
    "2 were requested": lambda rows: rows[0].append((77, -50.0)),
    "not finite": lambda rows: rows.__setitem__(0, [(77, math.nan)]),
    "order of their logprobs": lambda rows: rows[0].reverse(),
    "of the same id among its": lambda rows: rows.__setitem__(
        slice(None), [[(id_, p - 1) for id_, p in row] for row in rows]
    ),
    "the alternatives": lambda rows: rows[0].__setitem__(1, rows[0][0]),
}


@pytest.mark.parametrize("what", FAULTS)
def test_what_does_not_fit_is_a_breach(what):
    class Wrong(Unsure):
        async def generate(self, request):
            reply = await super().generate(request)
            if reply.ids:
                FAULTS[what](reply.alternatives)
            return reply

    for trajectory in play(sampler=Wrong(200)):
        assert trajectory.stop == "engine_error"
        assert what in trajectory.error.message
