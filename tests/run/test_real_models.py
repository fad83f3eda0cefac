"""The same recipe trains any Hugging Face causal model by one line, and says in one line what is
wrong with a directory."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kit.architectures import FAMILIES, make
from kit.runs import train

from turnwright.cli.main import main

RECIPE = """\
[[env]]
use = "hop"
args = { rules = true }
[limits]
turns = 3
turn_tokens = 6
[rollout]
groups = 2
group_size = 3
[train]
steps = 2
lr = 1e-4
[eval]
tasks = 4
[checkpoint]
every = 1
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("family", FAMILIES)
def test_trains_and_evaluates(
    family: str, tmp_path: Path, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = make(family, tmp_path / "model"), tmp_path / "run"
    train(recipe, out, "--model.path", str(model))
    steps = [row for row in rows(out) if row["phase"] == "train"]
    assert len(steps) == 2
    assert all(row["mismatch"] < 1e-4 for row in steps if "mismatch" in row)
    capsys.readouterr()
    assert main(["eval", "--run", str(out)]) == 0
    assert "success" in capsys.readouterr().out


def test_bfloat16_on_a_cpu(tmp_path: Path, recipe: Path) -> None:
    model, out = make("Qwen3", tmp_path / "model"), tmp_path / "run"
    words = [
        "--model.path",
        str(model),
        "--model.dtype",
        "bfloat16",
        "--out",
        str(out),
        "--display",
        "none",
    ]
    assert main(["train", str(recipe), *words]) == 0
    assert (out / "summary.json").exists()


def no_template(model: Path) -> None:
    (model / "chat_template.jinja").unlink(missing_ok=True)
    file = model / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config.pop("chat_template", None)
    file.write_text(json.dumps(config))


def larger_tokenizer(model: Path) -> None:
    file = model / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    first = 1 + max(
        [
            *tokenizer["model"]["vocab"].values(),
            *(token["id"] for token in tokenizer["added_tokens"]),
        ]
    )
    tokenizer["added_tokens"] += [
        flags | {"id": first + number, "content": f"<|more{number}|>", "special": True}
        for number in range(10)
    ]
    file.write_text(json.dumps(tokenizer))


MISTAKES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no template": (no_template, "no chat template"),
    "another tokenizer": (larger_tokenizer, "does not fit the model"),
    "no weights": (lambda model: (model / "model.safetensors").unlink(), "no weights"),
    "no directory": (shutil.rmtree, "no such directory"),
    "cut weights": (lambda model: os.truncate(model / "model.safetensors", 2000), "cannot load it"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_one_line(
    mistake: str, tmp_path: Path, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = make("Qwen3", tmp_path / "model"), tmp_path / "run"
    spoil, said = MISTAKES[mistake]
    spoil(model)
    capsys.readouterr()
    command = [
        "train",
        str(recipe),
        "--model.path",
        str(model),
        "--out",
        str(out),
        "--display",
        "none",
    ]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert said in error
    assert str(model) in error
    assert not out.exists()  # the same command works once the mistake is mended


def test_full_disk_keeps_the_last_checkpoint(
    tmp_path: Path,
    recipe: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A file may not grow beyond a limit that the journal keeps to and the
    optimizer's state does not."""
    resource = pytest.importorskip("resource")
    model = make("Qwen3", tmp_path / "model")
    out, peace = tmp_path / "run", tmp_path / "peace"
    words = ["--model.path", str(model), "--display", "none"]
    assert main(["train", str(recipe), "--out", str(peace), *words]) == 0
    assert main(["train", str(recipe), "--out", str(out), "--train.steps", "1", *words]) == 0
    # The same run with a second step to go, as if it had been stopped behind the first.
    config = json.loads((out / "config.json").read_text())
    config["config"]["train"]["steps"] = 2
    (out / "config.json").write_text(json.dumps(config))
    good = (out / "checkpoints" / "step-00001" / "model.safetensors").read_bytes()
    most = (peace / "journal.jsonl").stat().st_size + 4096
    limit = max(most, len(good) // 2)
    again = ["train", "--resume", str(out), "--display", "none"]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    capsys.readouterr()
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # else modules would be cut off too
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        status = main(again)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capsys.readouterr().err
    assert status == 2, said
    assert said.count("\n") == 1
    assert "step-00001, remains" in said
    assert (out / "checkpoints" / "step-00001" / "model.safetensors").read_bytes() == good
    assert main(again) == 0
    assert (out / "checkpoints" / "step-00002" / "optimizer.safetensors").exists()
