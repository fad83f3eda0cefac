"""`simple.py` and `turnwright train`: from the same warmed weights, the same episodes, losses and
weights to the last bit."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import turnwright as tw
from turnwright import simple
from turnwright.config.dump import load_run_config
from turnwright.records.serialization import read_trajectories
from turnwright.training.setup import load_model_and_renderer
from turnwright.training.task_plan import TaskPlan


def trained(out: Path, env: str, vision: bool) -> Path:
    """A run with the default settings, but for its warm-up and its number of steps."""
    return tw.train(
        env,
        out=out,
        model=tw.tiny(vision=True) if vision else None,
        warmup={"demos": 600, "steps": 60, "rounds": 1, "gate_success": 0.02, "gate_tasks": 32},
        train={"steps": simple.STEPS},
        eval={"tasks": 4, "samples": 1, "greedy": False},
        checkpoint={"every": simple.STEPS, "keep": 3},
        display="none",
    )


async def learned(
    run: Path, env: str
) -> tuple[torch.nn.Module, list[list[tw.Trajectory]], list[float]]:
    """What the page makes of the warmed weights of a run."""
    config = load_run_config(run).config
    env_spec = tw.resolve_env(env)
    plan = TaskPlan(
        [env_spec],
        steps=simple.STEPS,
        groups=simple.GROUPS,
        held_out=config.eval.tasks,
        seed=config.seed,
    )
    model, renderer = load_model_and_renderer(
        run / "model", run / "checkpoints" / "warmed", config.model
    )
    tasks = [choice.task for choice in plan.train]

    episodes, losses = [], []
    async for step, played, loss in simple.learn(
        env_spec, tasks, model, renderer, seed=config.seed
    ):
        assert step == len(losses)
        episodes.append(played)
        losses.append(loss)
    return model, episodes, losses


def sampled(trajectory: tw.Trajectory) -> list[tuple[list[int], list[float] | None]]:
    return [(list(span.ids), span.logprobs and list(span.logprobs)) for span in trajectory.spans]


@pytest.mark.parametrize(("env", "vision"), [("hop", False), ("radar", True)])
def test_the_page_gives_the_bits_of_a_run(tmp_path, env, vision):
    run = trained(tmp_path / "run", env, vision)
    model, episodes, losses = asyncio.run(learned(run, env))

    # The same ids, logprobs and rewards.
    recorded = {t.key: t for t in read_trajectories(run) if t.key.phase == "train"}
    played = {t.key: t for step in episodes for t in step}
    assert len(played) == simple.STEPS * simple.GROUPS * simple.GROUP_SIZE
    assert played.keys() == recorded.keys()
    for key, trajectory in played.items():
        assert sampled(trajectory) == sampled(recorded[key])
        assert trajectory.reward == recorded[key].reward

    # The same losses, and most steps learn from something.
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert losses == [row["loss"] for row in rows if row["phase"] == "train"]
    assert sum(loss != 0 for loss in losses) > simple.STEPS / 2

    # The same weights, which are not those of the start.
    last = load_file(run / "checkpoints" / f"step-{simple.STEPS:05d}" / "model.safetensors")
    first = load_file(run / "checkpoints" / "warmed" / "model.safetensors")
    weights = model.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in last.items())
    assert not all(torch.equal(weights[name], tensor) for name, tensor in first.items())
