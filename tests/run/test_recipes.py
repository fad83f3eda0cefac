"""Several environments in one run, play functions, and tasks from a file of
which some are too long."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from turnwright.cli.main import main
from turnwright.envs import resolve_env
from turnwright.training import TaskPlan

COMMON = """\
[limits]
turns = 2
turn_tokens = 6
{limits}
[rollout]
groups = 6
group_size = 2
{rollout}
[train]
steps = 2
[eval]
tasks = 8
"""
PLAY = """\
async def play(task, model):
    reply = await model.generate("say a number")
    return float(len(reply.text) % 2)
"""


def train(folder: Path, recipe: str) -> Path:
    file, out = folder / "recipe.toml", folder / "run"
    file.write_text(recipe)
    assert (
        main(["train", str(file), "--model.hidden", "32", "--out", str(out), "--display", "none"])
        == 0
    )
    return out


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_two_environments_by_weight(tmp_path: Path) -> None:
    envs = (
        '[[env]]\nuse = "hop"\nweight = 2\n[[env]]\nuse = "hop_json"\n[warmup]\ndemos = '
        "30\nsteps = 2\ngate_success = 0.0\n"
    )
    out = train(tmp_path, envs + COMMON.format(limits="", rollout=""))
    rows = lines(out / "trajectories.jsonl")
    trained = Counter(row["task"]["env"] for row in rows if row["key"]["phase"] == "train")
    assert trained == {"hop": 16, "hop_json": 8}
    gate = Counter(row["task"]["env"] for row in rows if row["key"]["phase"] == "gate")
    assert gate["hop"] > gate["hop_json"] > 0
    summary = json.loads((out / "summary.json").read_text())
    assert set(summary["success_before_by_env"]) == {"hop", "hop_json"}
    assert main(["eval", "--run", str(out)]) == 0


def test_the_same_environment_twice_has_tasks_of_two_names() -> None:
    worlds = [resolve_env("hop"), replace(resolve_env("hop"), name="other")]
    plan = TaskPlan(worlds, steps=2, groups=4, held_out=4, seed=0)
    assert len(plan.by_id) == len(plan.train) + len(plan.held_out)


def test_a_play_function(tmp_path: Path) -> None:
    (tmp_path / "player.py").write_text(PLAY)
    (tmp_path / "tasks.jsonl").write_text(
        "".join(json.dumps({"prompt": f"number {i}", "answer": "1"}) + "\n" for i in range(20))
    )
    recipe = '[[env]]\ntasks = "tasks.jsonl"\n' + COMMON.format(
        limits="", rollout='function = "player.py:play"'
    )
    out = train(tmp_path, recipe)
    steps = [row for row in lines(out / "metrics.jsonl") if row["phase"] == "train"]
    assert len(steps) == 2
    assert all(row["turns"] == 1 for row in steps)


def test_long_prompts_are_left_out_and_listed(tmp_path: Path) -> None:
    (tmp_path / "world.py").write_text(
        "import turnwright as tw\n\n\nclass World(tw.Env):\n"
        "    def reset(self, task, *, seed=None):\n        return None\n\n"
        "    def step(self, action):\n        return tw.Step(reward=0.0, terminated=True)\n"
    )
    rows = [
        {"id": f"t{i}", "prompt": "word " * (200 if i % 4 == 0 else 3) + str(i)} for i in range(40)
    ]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = '[[env]]\nuse = "world.py:World"\ntasks = "tasks.jsonl"\n'
    out = train(tmp_path, recipe + COMMON.format(limits="prompt_tokens = 100", rollout=""))
    left = json.loads((out / "left_out.json").read_text())
    assert left["count"] == len(left["tasks"]) > 0
    assert all(int(name[1:]) % 4 == 0 for name in left["tasks"])
    played = {row["key"]["task"] for row in lines(out / "trajectories.jsonl")}
    assert played
    assert played.isdisjoint(left["tasks"])
