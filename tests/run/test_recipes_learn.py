"""The recipes for JSON tool calls and for a judge: two steps of each always, and all of them
where there are minutes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from turnwright.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
SHORT = {
    "--warmup.demos": "60",
    "--warmup.steps": "2",
    "--warmup.gate-success": "0",
    "--warmup.gate-tasks": "8",
    "--train.steps": "2",
    "--eval.tasks": "40",
    "--model.hidden": "32",
    "--display": "none",
}


@pytest.mark.parametrize("recipe", ["json_tools", "judge"])
def test_the_recipe_runs(recipe: str, tmp_path: Path) -> None:
    settings = [word for pair in SHORT.items() for word in pair] + ["--out", str(tmp_path / "run")]
    assert main(["train", str(ROOT / "recipes" / f"{recipe}.toml"), *settings]) == 0
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    steps = [row for row in rows if row.get("phase") == "train"]
    assert len(steps) == 2
    if recipe == "judge":
        for row in steps:
            failed = row["reward_counts"]["judge_failed"]
            assert (
                failed
                == row["reward_counts"]["judge_failed/injected"]
                == row["reward_counts"]["reward_missing/judge"]
            )
            assert row["untrained"]["no_reward"] > 0
            assert 0 < failed < 40  # of 128
            assert set(row["rewards"]) == {"judge"}
            assert not row.get("failures")


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_both_recipes_learn() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "recipes_learn.py")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["learned"]
