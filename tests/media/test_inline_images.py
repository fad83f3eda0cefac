"""Images inside the model's own message, as SkyRL's second path continues it: ids,
masks, records and replays."""

from __future__ import annotations

import asyncio

import pytest
from kit.pictures import noise
from kit.rollouts import facts
from kit.seeing import shown

import turnwright as tw
from turnwright.errors import EnvError
from turnwright.records import RunDir, read_json_lines, rebuild_trajectories
from turnwright.rollouts import Rollout, make_episode_specs
from turnwright.rollouts.resume import EarlierEpisodes
from turnwright.rollouts.rollout_settings import RolloutSettings


class Album(tw.Env):
    """Shows a picture in each step, in several forms, then ends."""

    def reset(self, task, *, seed=None):
        self.steps = 0
        return ["Look: ", tw.Image(noise(28, 28), alt="first")]

    def step(self, action):
        self.steps += 1
        first, second = tw.Image(noise(56, 56), alt="a map"), tw.Image(noise(28, 56), alt="a road")
        shown_now = [
            ["see <|image_pad|> ", first, second, "then ", "go"],
            tw.InlineObservation(["back ", second], keep_chars=2),
            [{"role": "tool", "content": "ok"}, {"role": "user", "content": [first, "x"]}],
            None,
        ][self.steps - 1]
        return tw.Step(shown_now, 0.0, self.steps == 4)


REPLIES = ["One.", "Two.", "Three.", "Four."]


def test_the_blocks_stand_among_the_continued_ids(vlm):
    (trajectory,) = tw.rollout(
        Album,
        [tw.Task("Go.")],
        tw.ScriptedEngine(REPLIES),
        renderer=vlm,
        history="inline",
        sanity_share=1.0,
    )
    assert trajectory.error is None, trajectory.error
    texts = []
    for number, turn in enumerate(trajectory.turns):
        ids, placed = trajectory.prompt_ids(number), trajectory.media_placements(turn.prompt)
        vlm.vision.check(ids, placed)
        for block in placed:
            assert tuple(ids[block.start : block.end]) == vlm.vision.block(block.media).ids
        conversation = trajectory.conversation(number)
        assert [block.media for block in placed] == shown(conversation)
        pads = {i for block in placed for i in range(block.start, block.end)}
        texts.append(vlm.decode([token for i, token in enumerate(ids) if i not in pads]))

    image = "<|vision_start|><|vision_end|>"
    assert texts[1].endswith(f"assistant\nOne.see <|image_pad|> {image}{image}then go")
    assert texts[2].endswith(f"then goTwback {image}")
    assert texts[3].endswith(f"back {image}Three.ok\n{image}x")
    assert trajectory.metrics["neutralised"] == 1  # the placeholder that is text
    assert trajectory.metrics["render_mismatch_inline"] >= 1
    assert "render_mismatch_image" not in trajectory.metrics

    for sample in trajectory.samples():
        vlm.vision.check(sample.ids, sample.media)
        assert not any(
            sample.mask[i] for block in sample.media for i in range(block.start, block.end)
        )


def record(out, vlm, recorded=None):
    with RunDir(out) as run:
        settings = RolloutSettings(seed=3, sanity="off", history="inline")
        rollout = Rollout(
            tw.ScriptedEngine(REPLIES),
            vlm,
            settings,
            run=run,
            earlier=EarlierEpisodes(recorded or {}),
        )
        specs = make_episode_specs(Album, [tw.Task("Go.", id="t0")], phase="train", step=0)
        return asyncio.run(rollout.play(specs))


def test_records_and_resumed_runs_have_them_too(tmp_path, vlm):
    by_id = {"t0": tw.Task("Go.", id="t0")}.get
    (played,) = record(tmp_path / "run", vlm)
    journal = tmp_path / "run" / "journal.jsonl"
    found = rebuild_trajectories(read_json_lines(journal), by_id)
    assert facts(found[played.key]) == facts(played)
    assert found[played.key] == played

    lines = journal.read_bytes().splitlines(keepends=True)
    for kept in range(1, len(lines)):
        journal.write_bytes(b"".join(lines[:kept]))
        left = rebuild_trajectories(read_json_lines(journal), by_id)
        (again,) = record(tmp_path / "run", vlm, recorded=left)
        assert facts(again) == facts(played), kept


def test_a_process_of_its_own_shows_the_same(vlm):
    inside, outside = (
        tw.rollout(
            Album,
            [tw.Task("Go.", id="t0")],
            tw.ScriptedEngine(REPLIES),
            renderer=vlm,
            history="inline",
            rules=tw.EnvRules(isolation=isolation),
        )[0]
        for isolation in ("thread", "process")
    )
    assert inside.error is None
    assert facts(inside) == facts(outside)


def test_a_model_without_eyes_reads_the_words():
    (trajectory,) = tw.rollout(
        Album, [tw.Task("Go.")], tw.ScriptedEngine(REPLIES), history="inline"
    )
    assert trajectory.error is None
    assert trajectory.turns[1].inserted == "see <|image_pad|> a map\na road\nthen go"
    assert trajectory.turns[2].inserted == "back a road"


def test_parts_that_are_none_are_refused():
    with pytest.raises(EnvError, match="InlineObservation: a content part must be text"):
        tw.InlineObservation(["x", 3])
    with pytest.raises(EnvError, match="text must be a string, or a list"):
        tw.InlineObservation(3)
