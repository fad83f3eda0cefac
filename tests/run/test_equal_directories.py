"""Two runs of one seed with every random feature write equal directories, but for clocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kill_resume as bench
import pytest

from turnwright.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
DROPOUT = """\
[model]
path = "BASE"
[lora]
rank = 4
dropout = 0.2
[[env]]
use = "hop"
sampler = "window"
[[teacher]]
self = true
hint = "hints.py:hint"
[limits]
turns = 4
turn_tokens = 8
[rollout]
groups = 4
group_size = 4
top_p = 0.9
temperature = 1.2
[warmup]
demos = 40
steps = 4
batch = 8
gate_success = 0.0
gate_every = 2
gate_tasks = 4
[train]
steps = 3
minibatches = 2
[eval]
tasks = 4
[checkpoint]
every = 1
keep = 9
"""
SELF_PLAY = f"""\
[model]
hidden = 32
layers = 1
[[env]]
tasks = "{ROOT}/recipes/self_play.py:tasks"
[[policy]]
name = "player"
agents = ["first", "second"]
[rollout]
function = "{ROOT}/recipes/self_play.py:play"
groups = 4
group_size = 4
min_p = 0.05
[limits]
turn_tokens = 4
on_turn_length = "continue"
[warmup]
dataset = "{ROOT}/recipes/two_policies.jsonl"
steps = 4
gate_success = 0.0
gate_tasks = 4
[train]
steps = 3
advantage = "running"
[eval]
tasks = 4
"""
HINTS = """\
def hint(trajectory):
    return [{"role": "system", "content": f"The answer is {trajectory.task.answer}."}]
"""
BASE = """\
[model]
hidden = 32
layers = 1
[[env]]
use = "hop"
[limits]
turns = 4
turn_tokens = 8
[rollout]
groups = 2
group_size = 2
[warmup]
demos = 40
steps = 2
batch = 8
gate_success = 0.0
gate_every = 2
gate_tasks = 4
[train]
steps = 1
[eval]
tasks = 2
"""
CLOCKS = bench.TIMES | {
    "journal",
    "wall_s",
    "env_s",
    "generate_s",
    "reward_s",
    "time",
    "crc",
    "out",
    "began",
    "host",
    "pid",
}
"""Keys whose values are times, or depend on them: a line of the journal is
sealed with its times."""


def train(recipe: Path, out: Path) -> Path:
    assert main(["train", str(recipe), "--out", str(out), "--display", "none"]) == 0
    return out


@pytest.fixture(scope="module")
def recipes(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "hints.py").write_text(HINTS)
    (folder / "base.toml").write_text(BASE)
    base = train(folder / "base.toml", folder / "base") / "checkpoints" / "warmed"
    made = {"dropout": DROPOUT.replace("BASE", str(base)), "self_play": SELF_PLAY}
    for name, text in made.items():
        (folder / f"{name}.toml").write_text(text)
    return {name: folder / f"{name}.toml" for name in made}


def without_clocks(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: inner for key, inner in value.items() if key.rpartition("/")[2] not in CLOCKS}
        if isinstance(kept.get("answers"), list):  # each with the seconds of its step
            kept["answers"] = [[*answer[:3], *answer[4:]] for answer in kept["answers"]]
        return {key: without_clocks(inner) for key, inner in kept.items()}
    if isinstance(value, list):
        return [without_clocks(inner) for inner in value]
    return value


def content(run: Path, file: Path) -> Any:
    """What a file says, without times and its own place; lines in any order,
    for episodes end in any."""
    data = (run / file).read_bytes().replace(str(run).encode(), b"RUN")
    if file.suffix == ".jsonl":
        return sorted(
            json.dumps(without_clocks(json.loads(line)), sort_keys=True)
            for line in data.splitlines()
        )
    return without_clocks(json.loads(data)) if file.suffix == ".json" else data


@pytest.mark.parametrize("name", ["dropout", "self_play"])
def test_equal_seeds_write_equal_directories(name, recipes, tmp_path):
    first, second = (
        train(recipes[name], tmp_path / "first"),
        train(recipes[name], tmp_path / "second"),
    )
    files = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(second) for path in second.rglob("*") if path.is_file())
    differ = [str(file) for file in files if content(first, file) != content(second, file)]
    # The report draws times, and the log has one in each line.
    assert [file for file in differ if file not in ("report.html", "log.txt")] == []
    assert any(file.name == "optimizer.safetensors" for file in files)
