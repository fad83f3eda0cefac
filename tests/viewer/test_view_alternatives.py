"""What the page of an episode has of the ids that the model could have said."""

from __future__ import annotations

import math

import pytest

import turnwright as tw
from turnwright.records import to_json, trajectory_row
from turnwright.types import EpisodeKey, Origin, Span, Trajectory
from turnwright_view import replay_loop
from turnwright_view.web import episode as episode_module
from turnwright_view.web.episode import episode_page
from turnwright_view.web.index import RunIndex

LIKELY = [[(97, -0.5), (98, -1.25)], [(98, -0.125)], [(99, -0.25), (0xE2, -2.0), (97, -3.0)]]


def spans_of_page(folder, alternatives):
    """Write an episode with two replies, the second without alternatives."""
    trajectory = Trajectory(tw.Task("t", id="t"), EpisodeKey("rollout", 0, "t", 0))
    trajectory.stop = tw.StopReason.DONE
    trajectory.spans = [
        Span(Origin.PROMPT, (104, 105)),
        Span(
            Origin.MODEL,
            (97, 98, 99),
            parent=0,
            start=2,
            logprobs=(-0.5, -0.125, -0.25),
            version=0,
            alternatives=alternatives,
        ),
        Span(Origin.MODEL, (97,), parent=1, start=5, logprobs=(-1.0,), version=0),
    ]
    row = to_json(trajectory_row(trajectory, tw.byte_renderer()))
    (folder / "trajectories.jsonl").write_bytes(row + b"\n")
    index = RunIndex(folder)
    index.update()
    return episode_page(index, index.at(0))["spans"]


def test_each_id_has_those_that_were_recorded_with_their_texts(tmp_path):
    prompt, reply, other = spans_of_page(tmp_path, LIKELY)
    assert reply["alternatives"] == [
        [[97, "a", -0.5], [98, "b", -1.25]],
        [[98, "b", -0.125]],
        [[99, "c", -0.25], [0xE2, "\\xe2", -2.0], [97, "a", -3.0]],
    ]
    assert "alternatives" not in prompt
    assert "alternatives" not in other


@pytest.mark.parametrize(("most", "ids"), [(6, 3), (5, 2), (2, 1), (1, 0)])
def test_a_page_has_no_more_than_its_bound(tmp_path, monkeypatch, most, ids):
    monkeypatch.setattr(episode_module, "MAX_ALTERNATIVES", most)
    _, reply, _ = spans_of_page(tmp_path, LIKELY)
    assert len(reply["tokens"]) == 3
    assert len(reply.get("alternatives", ())) == ids


def test_a_record_without_texts_or_numbers_has_none(tmp_path):
    _, reply, _ = spans_of_page(tmp_path, [[(97, math.inf)], [(98, -1.0)], [(99, -1.0)]])
    assert reply["alternatives"] == [[], [[98, "b", -1.0]], [[99, "c", -1.0]]]


def test_a_replay_asks_for_none_and_finds_no_difference(tmp_path):
    tw.rollout(
        "hop",
        tw.resolve_env("hop").tasks("train", 3),
        tw.ScriptedEngine(lambda messages, rng: rng.choice(["lookup amber", "answer 7"])),
        limits=tw.Limits(turns=4),
        alternatives=2,
        out=tmp_path / "run",
    )
    assert '"alternatives"' in (tmp_path / "run" / "journal.jsonl").read_text()
    result = replay_loop(tmp_path / "run")
    assert (result.episodes, result.differences) == (3, [])
