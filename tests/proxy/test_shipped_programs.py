"""The programs of recipes/ get what the loop gets: equal conversations have equal ids, logprobs and
rewards at equal seeds."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
from kit.proxy import account, contexts

import turnwright as tw
from turnwright.config import ModelConfig
from turnwright.config.schema import EnvConfig
from turnwright.engines.local import LocalEngine
from turnwright.envs import resolve_env
from turnwright.envs.isolation.sandbox import sandbox_problem
from turnwright.rollouts import Rollout, make_episode_specs
from turnwright.rollouts.rollout_settings import RolloutSettings
from turnwright.training import create_tiny_model, load_model_and_renderer

RECIPES = Path(__file__).parents[2] / "recipes"
pytestmark = pytest.mark.filterwarnings(
    "ignore:local engine. on this machine the last bits:UserWarning"
)


def calls(trajectories: list[tw.Trajectory]) -> list[Any]:
    """Return the context, the ids and the logprobs of every call of every episode."""

    def replies(one: tw.Trajectory) -> list[Any]:
        return [
            [(one.spans[number].ids, one.spans[number].logprobs) for number in turn.spans]
            for turn in one.turns
        ]

    return [(contexts(one), replies(one), len(list(one.samples()))) for one in trajectories]


def test_the_react_program_samples_what_the_loop_samples(tmp_path: Path) -> None:
    spec = resolve_env(EnvConfig(use="hop"), base=RECIPES, play="react_hop_play.py:play")
    sizes = ModelConfig(hidden=32, layers=1)
    path = create_tiny_model(sizes, spec.texts(50), tmp_path / "model")
    model, renderer = load_model_and_renderer(path, path, sizes)
    limits = tw.Limits(turns=6, turn_tokens=4, on_turn_length="continue")

    async def play(target: Any) -> list[tw.Trajectory]:
        engine = LocalEngine(model, renderer=renderer, context=1024, slots=8)
        specs = make_episode_specs(
            target, spec.tasks("train", 8), phase="rollout", step=0, samples=2
        )
        try:
            return await Rollout(engine, renderer, RolloutSettings(limits=limits, seed=1)).play(
                specs
            )
        finally:
            await engine.close()

    found, loop = (asyncio.run(play(target)) for target in (spec.agent_function, spec.factory))
    assert [one.error for one in found] == [None] * 16
    for one in found:
        account(one)
    # A fresh model samples anything.
    same = [number for number, one in enumerate(loop) if one.stop != "invalid_token"]
    assert len(same) >= 4
    mine, theirs = calls(found), calls(loop)
    assert [mine[number] for number in same] == [theirs[number] for number in same]
    assert max(len(one.turns) for one in found) == 6


@pytest.mark.skipif(
    sandbox_problem() is not None, reason="the sandbox does not work on this machine"
)
def test_the_bash_program_has_the_conversations_of_its_demonstrations() -> None:
    spec = resolve_env(
        EnvConfig(use="bash_agent_play.py:Files"), base=RECIPES, play="bash_agent_play.py:play"
    )
    assert spec.solver is not None
    tasks = spec.tasks("eval", 6)
    found, loop = (
        tw.rollout(target, tasks, tw.ScriptedEngine(spec.solver))
        for target in (spec.agent_function, spec.factory)
    )
    assert [one.error for one in found] == [None] * 6
    assert [one.reward for one in found] == [1.0] * 6
    assert calls(found) == calls(loop)
    assert len({len(one.turns) for one in found}) > 1
    prompts = [len(tw.byte_renderer().open(one.turns[0].messages, ()).ids) for one in found]
    assert max(prompts) <= 200
