"""The recipes of SkyRL-Gym's and verl's word problems, with fewer steps than
they are shipped with."""

from __future__ import annotations

import importlib.util
import json
import runpy
import shutil
from pathlib import Path

import pytest
from kit import originals
from tokenizers import Tokenizer

from turnwright.cli.main import main

RECIPES = Path(__file__).parents[2] / "recipes" / "compat"
SMALL = {
    "model": {"hidden": 32, "heads": 2, "kv-heads": 2},
    "warmup": {"demos": 96, "steps": 2, "gate-every": 2, "gate-success": 0, "gate-tasks": 8},
    "train": {"steps": 2},
    "rollout": {"groups": 2, "group-size": 4},
    "eval": {"tasks": 4},
}
WITHOUT = pytest.mark.skipif(
    importlib.util.find_spec("skyrl_gym") is not None, reason="skyrl-gym is installed"
)


@pytest.fixture
def folder(tmp_path):
    """A copy of the recipes, without rows that someone made."""
    return Path(
        shutil.copytree(RECIPES, tmp_path / "compat", ignore=shutil.ignore_patterns("gsm8k"))
    )


def train(folder, kind, capsys):
    """Make the rows and train two steps; return the conversations of the warm-up and the
    recorded lines of episodes."""
    runpy.run_path(str(folder / "gsm8k_rows.py"))["main"]([kind])
    words = [
        f"--{section}.{key}={value}"
        for section, keys in SMALL.items()
        for key, value in keys.items()
    ]
    run = folder / "run"
    code = main(
        [
            "train",
            str(folder / f"{kind}_gsm8k.toml"),
            "--out",
            str(run),
            "--display",
            "none",
            *words,
        ]
    )
    assert code == 0, capsys.readouterr().err
    assert "skipped" not in capsys.readouterr().err
    rows = [
        json.loads(line)
        for line in (folder / "gsm8k" / f"{kind}_warmup.jsonl").read_text().splitlines()
    ]
    return rows, [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", ["skyrl", "verl"])
def test_the_dry_run(kind, folder, capsys):
    without = kind == "skyrl" and importlib.util.find_spec("skyrl_gym") is None
    if without:
        (folder / "gsm8k").mkdir()
        for part in ("train", "eval", "warmup"):
            (folder / "gsm8k" / f"{kind}_{part}.jsonl").touch()
    else:
        runpy.run_path(str(folder / "gsm8k_rows.py"))["main"]([kind])
    assert main(["train", str(folder / f"{kind}_gsm8k.toml"), "--dry-run"]) == (2 if without else 0)
    shown = capsys.readouterr()
    assert "gsm8k" in shown.out
    assert ("pip install skyrl-gym" in shown.err) == without


def test_verls_recipe_trains(folder, capsys):
    rows, metrics = train(folder, "verl", capsys)
    tools = [m["content"] for row in rows for m in row["messages"] if m["role"] == "tool"]
    assert {text.partition("reward=")[2] for text in tools} == {"0.0", "1.0"}
    assert sum(row["phase"] == "train" for row in metrics) == 2
    tokenizer = Tokenizer.from_file(str(folder / "run" / "model" / "tokenizer.json"))
    words = ["arguments", "calc", "parameters", "reward"]  # of schemas and calls, in no task
    assert [len(tokenizer.encode(word).ids) for word in words] == [1] * 4


@WITHOUT
def test_skyrls_recipe_names_the_package_that_it_lacks(folder, capsys):
    with pytest.raises(SystemExit, match="pip install skyrl-gym"):
        train(folder, "skyrl", capsys)
    (folder / "gsm8k").mkdir(exist_ok=True)
    for split in ("train", "eval", "warmup"):
        (folder / "gsm8k" / f"skyrl_{split}.jsonl").write_text('{"prompt": "Go."}\n' * 9)
    assert (
        main(
            [
                "train",
                str(folder / "skyrl_gsm8k.toml"),
                "--out",
                str(folder / "run"),
                "--display",
                "none",
            ]
        )
        == 2
    )
    assert "skyrl-gym is not installed; pip install skyrl-gym" in capsys.readouterr().err


@pytest.mark.compat
def test_skyrls_recipe_trains_with_its_package(folder, capsys):
    originals.use()
    rows, metrics = train(folder, "skyrl", capsys)
    replies = [sum(message["role"] == "assistant" for message in row["messages"]) for row in rows]
    assert set(replies) == {1, 2, 3}
    assert sum(row["phase"] == "train" for row in metrics) == 2
