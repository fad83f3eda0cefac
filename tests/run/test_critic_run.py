"""Whole runs with a critic: after kills, with several policies and asynchronously."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from kit.runs import benchmark
from test_policies_run import check_last_step_again, rows, trained

from turnwright.records import read_json_lines

BY_TURN = 'algorithm = "turn_ppo"'


def with_critic(text: str, body: str = "own", **more: int) -> str:
    keys = "".join(f"critic.{key} = {value}\n" for key, value in more.items())
    return text.replace("[train]\n", f'[train]\n{BY_TURN}\ncritic.body = "{body}"\n{keys}')


def steps_of(out: Path) -> list[dict[str, Any]]:
    return [row for row in read_json_lines(out / "metrics.jsonl") if row["phase"] == "train"]


@pytest.mark.parametrize("body", ["own", "policy"])
def test_a_killed_run_has_the_bits_of_one_that_was_not(tmp_path: Path, body: str) -> None:
    bench = benchmark()
    text = bench.RECIPE.replace("steps = 16", "steps = 5")
    recipe = with_critic(text, body, warmup_steps=1)
    outcome = bench.compare(tmp_path, ["checkpoint", "mid-episode"], recipe)
    assert outcome.kills
    assert outcome.good
    steps = steps_of(tmp_path / "war")
    assert steps[0]["optimizer_steps"] == 0.0  # the critic alone
    assert steps[-1]["optimizer_steps"] == 1.0
    assert any("critic.explained_variance" in step for step in steps)


def test_asynchronous_groups_teach_a_critic_once(tmp_path: Path) -> None:
    bench = benchmark()
    text = bench.RECIPE.replace("steps = 16", "steps = 6")
    recipe = with_critic(bench.with_schedule(text, "async", staleness=2))
    kills = ["checkpoint", random.Random(3).uniform(0.2, 0.8)]
    stream = bench.besiege_stream(tmp_path, kills, recipe)
    assert stream.kills
    assert stream.good, stream


def test_each_policy_has_its_own_critic(tmp_path: Path) -> None:
    out = trained(tmp_path, f"train = {{ {BY_TURN} }}")
    for row in rows(out, "train"):
        assert row["policy/other/critic.loss"] >= 0
        assert "policy/asker/critic.loss" not in row
    last = out / "checkpoints" / "step-00004"
    assert [path.parent.name for path in sorted(last.rglob("critic.safetensors"))] == ["other"]
    check_last_step_again(out)
