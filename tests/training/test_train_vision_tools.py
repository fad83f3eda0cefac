"""Images and a clip that tools give, trained through; and ids that only an image may have,
sampled all the same."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
import torch
from kit.vision import tiny_vlm_directory

import turnwright as tw
from turnwright.config import Limits, ModelConfig, TrainConfig
from turnwright.engines.local import LocalEngine
from turnwright.engines.local.sampler import Sampler
from turnwright.records import read_json_lines, rebuild_trajectories
from turnwright.renderers import load_renderer
from turnwright.rollouts import Rollout, group_by_task, make_episode_specs
from turnwright.rollouts.rollout_settings import RolloutSettings
from turnwright.training import Trainer, load_model_and_renderer
from turnwright.types import Task, VideoRef


class Forced(Sampler):
    """Says what is told, by session and call; the logprobs are the model's own."""

    def __init__(self, replies):
        self.replies = replies

    def pick(self, cdf, draws):
        drawn = super().pick(cdf, draws)
        for row, draw in enumerate(draws):
            drawn[row] = self.replies[draw.request.call % len(self.replies)][draw.position]
        return drawn


class Camera(tw.StatefulTool):
    """A camera that shows where it stands, and what happened."""

    def create(self):
        self.noise = np.random.default_rng(5)
        return ["The camera shows:", self.image()]

    def image(self):
        return tw.Image(self.noise.integers(0, 256, (64, 64, 3), dtype=np.uint8))

    def execute(self, clip: bool):
        """Look.

        Args:
            clip: what happened lately, else what is there now.
        """
        return (
            ["It moved:", tw.Video([self.image().value for _ in range(6)], fps=2.0)]
            if clip
            else self.image()
        )


def call(clip):
    said = json.dumps({"name": "camera", "arguments": {"clip": clip}})
    return f"<tool_call>\n{said}\n</tool_call>"


@pytest.mark.parametrize(
    "tool_images", [True, False], ids=["shown in the result", "moved to a user's message"]
)
def test_a_clip_at_the_second_turn_and_an_image_at_creation_are_trained_through(
    tmp_path, tool_images
):
    directory = tiny_vlm_directory(tmp_path / "m", "qwen3_vl", tool_images=tool_images)
    model, renderer = load_model_and_renderer(directory, directory, ModelConfig())
    replies = [renderer.encode_reply(text) for text in (call(False), call(True), "It fell.")]
    engine = LocalEngine(model, renderer=renderer, sampler=Forced(replies))
    settings = TrainConfig(max_mismatch=1e-4, lr=1e-2, schedule="constant")
    trainer = Trainer(
        model, settings, banned_ids=renderer.banned_ids, template=renderer.fingerprint
    )
    rewards = iter((0.0, 1.0))
    env = tw.tool_env([Camera], reward=lambda t: next(rewards), max_turns=3)

    async def main():
        rollout = Rollout(engine, renderer, RolloutSettings(limits=Limits(turn_tokens=200), seed=1))
        trainer.pixels = rollout.pixels
        made = await rollout.play(
            make_episode_specs(env, [Task("Watch.", id="a")], phase="train", step=0, samples=2)
        )
        await engine.close()
        return made

    made = asyncio.run(main())
    assert [t.error for t in made] == [None, None]
    assert [len(t.turns) for t in made] == [3, 3]
    shown = [block.media for block in made[0].media_placements(made[0].leaves()[-1])]
    assert [isinstance(media, VideoRef) for media in shown] == [False, False, True]
    tower = {name: p.detach().clone() for name, p in trainer.forward.tower.vision_parameters()}
    figures = trainer.step(group_by_task(made), step=0, steps=1).metrics
    assert 0 < figures["mismatch_max"] < 1e-4
    assert figures["tokens_trained"] == 2 * sum(map(len, replies))
    assert any(
        not torch.equal(p, tower[name]) for name, p in trainer.forward.tower.vision_parameters()
    )


def test_a_sampled_placeholder_ends_the_turn_and_reaches_no_processor(tmp_path):
    """The engine is told never to sample one; one that does all the same is caught, and its ids
    are kept as they are."""
    directory = tiny_vlm_directory(tmp_path / "m", "qwen3_vl", weights=False)
    renderer = load_renderer(directory)
    pad = min(renderer.vision.pad_ids)
    assert pad in renderer.banned_ids

    class Look(tw.Env):
        def reset(self, task, *, seed=None):
            return [
                {"role": "user", "content": [tw.Image(np.zeros((64, 64, 3), np.uint8)), "What?"]}
            ]

        def step(self, action):
            raise AssertionError("the world heard of it")

    engine = tw.ScriptedEngine([[pad, pad, min(renderer.stop_ids)]])
    (trajectory,) = tw.rollout(Look, [tw.Task("x")], engine, renderer=renderer)
    assert trajectory.stop == "invalid_token", trajectory.error
    assert trajectory.reward == 0.0
    assert [list(span.ids) for span in trajectory.spans if span.sampled] == [
        [pad, pad, min(renderer.stop_ids)]
    ]
    assert [span.trained for span in trajectory.spans if span.sampled] == [0]


def test_what_was_sampled_before_a_placeholder_is_trained(tmp_path):
    directory = tiny_vlm_directory(tmp_path / "m", "qwen3_vl")
    model, renderer = load_model_and_renderer(directory, directory, ModelConfig())
    pad, stop, said = min(renderer.vision.pad_ids), min(renderer.stop_ids), renderer.encode("left")

    class Walk(tw.Env):
        def reset(self, task, *, seed=None):
            return "Where to?"

        def step(self, action):
            return tw.Step(None, 1.0, True)

    task, replies = tw.Task("x", id="x"), iter([[*said, pad, stop], [*said, stop]])
    engine = tw.ScriptedEngine(lambda messages, rng: next(replies))
    run = tw.rollout(Walk, [task], engine, renderer=renderer, samples=2, out=tmp_path / "run")
    assert sorted(t.reward for t in run) == [0.0, 1.0]
    trainer = Trainer(
        model,
        TrainConfig(max_mismatch=1e9),
        banned_ids=renderer.banned_ids,
        template=renderer.fingerprint,
    )
    figures = trainer.step(group_by_task(run), step=0, steps=1).metrics
    assert figures["tokens_banned_id"] == 2  # the placeholder, and the end behind it
    assert figures["tokens_trained"] == 2 * len(said) + 1
    recorded = rebuild_trajectories(
        read_json_lines(tmp_path / "run" / "journal.jsonl"), {"x": task}.get
    )
    assert {t.key: [s.trained for s in t.spans] for t in run} == {
        k: [s.trained for s in t.spans] for k, t in recorded.items()
    }
