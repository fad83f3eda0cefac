"""Rollouts of models that see, and what every record of one keeps to."""

from __future__ import annotations

import asyncio
import json

import turnwright as tw
from turnwright.media import MediaStore
from turnwright.rollouts import Rollout, make_episode_specs
from turnwright.rollouts.rollout_settings import RolloutSettings
from turnwright.types import Media, placements_between


def call(name: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def play(env, renderer, engine, tasks=None, *, store=None, n=1, rules=None, run=None, **settings):
    """Episodes of an environment or a play function; the trajectories, their images in `store`."""
    engine = tw.ScriptedEngine(engine) if isinstance(engine, list) or callable(engine) else engine
    settings = RolloutSettings(sanity="off", **settings)
    rollout = Rollout(engine, renderer, settings, media=store or MediaStore(), run=run)
    found = make_episode_specs(
        env,
        tasks or [tw.Task("Begin.")],
        samples=n,
        phase="train",
        step=0,
        **({"rules": rules} if rules else {}),
    )
    played = asyncio.run(rollout.play(found))
    for trajectory in played:
        check_media(trajectory, renderer)
    return played


def shown(messages) -> list[Media]:
    return [part for message in messages for part in message.media]


def check_media(trajectory, renderer) -> None:
    """At every call the blocks among the ids are those of the conversation, whole, in
    order, with their own ids."""
    eyes = renderer.vision
    for number, turn in enumerate(trajectory.turns):
        ids = trajectory.prompt_ids(number)
        placed = placements_between(trajectory.media_placements(turn.prompt), 0, turn.context)
        eyes.check(ids, placed)
        conversation = trajectory.conversation(number)[:-1]
        assert [block.media for block in placed] == shown(conversation), number
        for block in placed:
            assert tuple(ids[block.start : block.end]) == eyes.block(block.media).ids
        assert not any(message.has_raw_media for message in (*conversation, *trajectory.final))
    for sample in trajectory.samples():
        eyes.check(sample.ids, sample.media)
        assert not any(
            sample.mask[i] for block in sample.media for i in range(block.start, block.end)
        )
