"""A run of a mixture of experts whose experts are replayed: recorded, trained, and read back from
the journal by a resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from kit.architectures import make
from kit.long_world import LONG
from test_real_models import rows

from turnwright.cli.main import main

RECIPE = """\
[[env]]
use = "long.py:Long"
[limits]
turns = 2
turn_tokens = 4
on_turn_length = "continue"
[rollout]
groups = 2
group_size = 3
[warmup]
demos = 0
[train]
steps = 2
lr = 1e-3
routing_replay = "replay"
[checkpoint]
every = 1
[eval]
tasks = 2
"""


@pytest.mark.filterwarnings("ignore:local engine. on this machine the last bits:UserWarning")
def test_a_run_replays_experts_and_goes_on_from_its_journal(tmp_path: Path, capsys: Any) -> None:
    model, out, recipe = (
        make("Qwen3Moe", tmp_path / "model"),
        tmp_path / "run",
        tmp_path / "moe.toml",
    )
    recipe.write_text(RECIPE)
    (tmp_path / "long.py").write_text(LONG)
    options = ["--model.path", str(model), "--display", "none"]
    assert main(["train", str(recipe), "--out", str(out), *options]) == 0, capsys.readouterr().err
    turns = [
        event
        for line in (out / "journal.jsonl").open()
        if (event := json.loads(line))["e"] == "turn"
    ]
    told = [event["turn"]["routes"] for event in turns if event["k"][0] == "train"]
    assert len(told) > 12
    assert {(row["layers"], row["k"], row["width"]) for row in told} == {(2, 2, 1)}
    assert not any("routes" in event["turn"] for event in turns if event["k"][0] != "train"), (
        "evaluations need none"
    )
    assert all(row["mismatch_max"] < 1e-4 for row in rows(out) if row["phase"] == "train")
    # Going on from before the last step trains on the journal's episodes, experts included: the
    # same weights, bit for bit.
    last = out / "checkpoints" / "step-00002"
    expected = (last / "model.safetensors").read_bytes()
    shutil.rmtree(last)
    assert main(["train", "--resume", str(out), "--display", "none"]) == 0, capsys.readouterr().err
    assert (last / "model.safetensors").read_bytes() == expected


def test_a_model_without_routers_is_refused_in_one_line(tmp_path: Path, capsys: Any) -> None:
    recipe = tmp_path / "dense.toml"
    recipe.write_text(RECIPE)
    (tmp_path / "long.py").write_text(LONG)
    assert (
        main(
            [
                "train",
                str(recipe),
                "--out",
                str(tmp_path / "run"),
                "--model.hidden",
                "32",
                "--display",
                "none",
            ]
        )
        == 2
    )
    told = capsys.readouterr().err
    assert "no router" in told
    assert "Traceback" not in told
