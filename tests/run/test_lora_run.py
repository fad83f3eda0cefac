"""Runs whose adapters are trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kit.long_world import LONG
from kit.runs import RECIPE, rows, train

from turnwright.cli.main import main

pytest.importorskip("peft")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "lora.toml"
    path.write_text(RECIPE)
    (tmp_path / "long.py").write_text(LONG)
    return path


def test_a_run_with_adapters_goes_on_and_its_checkpoint_is_a_model(
    tmp_path: Path, recipe: Path, capsys: Any
) -> None:
    out, other = tmp_path / "run", tmp_path / "other"
    train(recipe, out)
    assert [row["step"] for row in rows(out, "train")] == [1, 2, 3]
    assert max(row["mismatch_max"] for row in rows(out, "train")) < 1e-4
    last = out / "checkpoints" / "step-00003"
    assert (last / "adapter_model.safetensors").is_file()
    assert not (last / "model.safetensors").exists()
    assert json.loads((out / "summary.json").read_text())["best"][0] == "step-00003"
    # Going on from before the last step comes to the same adapter, bit for bit.
    expected = (last / "adapter_model.safetensors").read_bytes()
    for path in sorted(last.iterdir()):
        path.unlink()
    last.rmdir()
    assert main(["train", "--resume", str(out), "--display", "none"]) == 0
    assert (last / "adapter_model.safetensors").read_bytes() == expected
    capsys.readouterr()
    assert main(["eval", "--run", str(out)]) == 0
    # A run may begin where an adapter ended; its model is the adapted one.
    words = [
        "--model.path",
        str(last),
        "--out",
        str(other),
        "--train.steps",
        "1",
        "--display",
        "none",
    ]
    assert main(["train", str(recipe), *words]) == 0
    assert (other / "model" / "model.safetensors").is_file()
    assert (other / "checkpoints" / "step-00001" / "adapter_model.safetensors").is_file()
