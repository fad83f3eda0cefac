"""A run of two processes under torchrun: it trains, it can be killed, and one
process goes on with it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from kit.forks import run_ranks
from kit.long_world import LONG
from kit.runs import RECIPE

from turnwright.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("peft")


def start(*words: object) -> subprocess.Popen[str]:
    """`torchrun --nproc-per-node 2 -m turnwright ...`, in a process group of its own."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "turnwright",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    return subprocess.Popen(
        [*command, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def rows(out: Path) -> list[dict[str, Any]]:
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row for row in found if row["phase"] == "train"]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "long.py").write_text(LONG)
    path = tmp_path / "ranks.toml"
    path.write_text(RECIPE.replace("rank = 4", "rank = 0").replace("steps = 3", "steps = 8"))
    return path


def test_killed_with_two_processes_and_gone_on_with_one(tmp_path: Path, recipe: Path) -> None:
    out, alone = tmp_path / "run", tmp_path / "alone"
    running = start("train", recipe, "--out", out, "--display", "none")
    try:
        while len(rows(out)) < 3:
            assert running.poll() is None, running.communicate()[1][-2000:]
            time.sleep(0.02)
    finally:
        workers = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        # A rank that plays nothing and holds half of the model; torchrun ends the rest.
        os.kill(int(workers[-1]), signal.SIGKILL)
        running.communicate(timeout=240)
    assert len(workers) == 2
    assert running.returncode == 1
    assert len(rows(out)) < 8
    assert main(["train", "--resume", str(out), "--display", "none"]) == 0
    assert [row["step"] for row in rows(out)] == list(range(1, 9))
    assert (out / "summary.json").exists()
    # What two processes sampled and trained is what one samples and trains, until
    # rounding tells them apart.
    assert main(["train", str(recipe), "--out", str(alone), "--display", "none"]) == 0
    for mine, theirs in zip(rows(out)[:2], rows(alone)[:2], strict=True):
        assert mine["sampled_tokens"] == theirs["sampled_tokens"]
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


def train(words: list[str], folder: Path) -> None:
    """Run a command as one rank; write its status and what it reports."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        status = main(words)
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps([status, said.getvalue()]))


def test_what_stops_one_stops_all_with_one_line(tmp_path: Path, recipe: Path) -> None:
    words = [
        "train",
        str(recipe),
        "--out",
        str(tmp_path / "run"),
        "--display",
        "none",
        "--train.max-mismatch",
        "1e-12",
    ]
    run_ranks(train, 2, words, tmp_path)
    (status, said), (other, silent) = (
        json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)
    )
    assert (status, other) == (1, 0)
    assert said.count("turnwright: error: ") == 1
    assert "turnwright: error: " not in silent
    assert "engine and trainer disagree on sampled ids" in said
    assert rows(tmp_path / "run") == []
