"""Runs of small recipes by the command line, and their files."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from kit.forks import Forked
from turnwright.cli.main import main

RECIPE = """\
[model]
hidden = 32
[[env]]
use = "long.py:Long"
[limits]
turns = 2
turn_tokens = 4
on_turn_length = "continue"
[rollout]
groups = 4
group_size = 4
[train]
steps = 3
lr = 1e-2
kl = 0.01
[lora]
rank = 4
[checkpoint]
every = 1
[eval]
tasks = 4
"""


def train(recipe: Path | str, out: Path | str, *words: str) -> None:
    """Train in this process, as `turnwright train` does."""
    assert main(["train", str(recipe), "--out", str(out), "--display", "none", *words]) == 0


def rows(out: Path, phase: str) -> list[dict[str, Any]]:
    return [
        row
        for row in map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        if row["phase"] == phase
    ]


ROOT = Path(__file__).resolve().parents[2]
SMALL = """\
[model]
hidden = 32
[[env]]
use = "hop"
[limits]
turns = 3
turn_tokens = 6
[rollout]
groups = 2
group_size = 2
[warmup]
demos = 20
steps = 2
batch = 4
gate_success = 0.0
gate_every = 1
gate_tasks = 4
[train]
steps = 2
[eval]
tasks = 4
"""


def benchmark(*, fresh: bool = False) -> ModuleType:
    """Import `benchmarks/kill_resume.py`; its processes are forked unless each is to be
    a `fresh` interpreter."""
    spec = importlib.util.spec_from_file_location(
        "kill_resume", ROOT / "benchmarks" / "kill_resume.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kill_resume"] = module
    spec.loader.exec_module(module)
    module.finish = finish
    if not fresh:
        module.start = lambda words, **outputs: Forked(words, env=module.environment(), **outputs)
    return module


def finish(words: Sequence[str]) -> None:
    """Run a command that is not killed in this process, which has imported what
    each other one has to."""
    assert main(list(words[words.index("train") :])) == 0
