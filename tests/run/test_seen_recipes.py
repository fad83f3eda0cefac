"""Runs of models that see: the quickstart with images, slime's geo3k settings, and one file
for both kinds of model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kit.viewing import SentPage
from tokenizers import Tokenizer

from turnwright.cli.main import main
from turnwright.config import load
from turnwright.envs.builtin import BUILTIN
from turnwright.training import resolve_settings

ROOT = Path(__file__).resolve().parents[2]
SHORT = {
    "--warmup.demos": "8",
    "--warmup.steps": "2",
    "--warmup.batch": "4",
    "--warmup.gate-success": "0",
    "--warmup.gate-tasks": "4",
    "--rollout.groups": "2",
    "--rollout.group-size": "2",
    "--train.steps": "2",
    "--eval.tasks": "4",
    "--model.hidden": "32",
    "--model.heads": "4",
    "--display": "none",
}


def train(recipe: Path, out: Path, **more: str) -> dict[str, Any]:
    """A run with few of everything; its summary."""
    settings = SHORT | {
        f"--{key.replace('__', '.').replace('_', '-')}": value for key, value in more.items()
    }
    words = [word for pair in settings.items() for word in pair]
    assert main(["train", str(recipe), *words, "--out", str(out)]) == 0
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def shown(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The images of an episode's record, turn by turn."""
    messages = [message for turn in row["turns"] for message in turn["messages"]]
    return [part for message in messages for part in message["content"] if isinstance(part, dict)]


@pytest.mark.beside("view")
def test_the_quickstart_with_images_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    summary = train(ROOT / "recipes" / "quickstart_vlm.toml", out)
    for key in (
        "success_before",
        "success_after",
        "greedy_before",
        "greedy_after",
        "turns_after",
        "cpu_s",
        "wall_s",
    ):
        assert summary[key] is not None, key
    assert 0.0 <= summary["success_blind"] <= 1.0
    assert len(summary["success_blind_ci"]) == 2
    assert summary["single_turn_best"] == 0.0
    said = capsys.readouterr().out
    assert "blind      " in said
    assert "after, with every image gray" in said
    steps = [row for row in lines(out / "metrics.jsonl") if row["phase"] == "train"]
    assert len(steps) == 2
    assert all(row["mismatch_max"] < 1e-4 for row in steps if row.get("trajectories_trained"))
    rows = lines(out / "trajectories.jsonl")
    blind = [row for row in rows if row["key"]["phase"] == "eval-after-blind"]
    seeing = [row for row in rows if row["key"]["phase"] == "eval-after-sampled"]
    assert len(blind) == len(seeing) == 4
    assert len({part["image"] for row in blind for part in shown(row)}) == 1
    assert all(len({part["image"] for part in shown(row)}) == len(row["turns"]) for row in seeing)
    # Those of demonstrations too, which are not written down.
    kept = {path.stem for path in (out / "media").glob("*.png")}
    assert {part["image"] for row in rows for part in shown(row)} < kept
    page = SentPage((out / "report.html").read_text())
    assert len(page.images()) >= 5
    (overview,) = page.data["overviews"].values()
    assert ("after", "blind") in {(one["name"], one["mode"]) for one in overview["evaluations"]}


def test_one_environment_file_serves_both_kinds_of_model_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "world.py"
    file.write_text((ROOT / "src" / "turnwright" / "envs" / "builtin" / "radar.py").read_text())
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[[env]]\nuse = "world.py:Radar"\n[limits]\nturn_tokens = 4\n')
    rows = {}
    for name in ("true", "false"):
        out = tmp_path / f"sees-{name}"
        summary = train(recipe, out, model__vision=name)
        assert ("success_blind" in summary) == (name == "true")
        rows[name] = lines(out / "trajectories.jsonl")
        assert all(row["error"] is None for row in rows[name])
        assert (out / "media").exists() == (name == "true")
    both = {
        name: [row["task"]["id"] for row in found if row["key"]["phase"] == "train"]
        for name, found in rows.items()
    }
    assert sorted(both["true"]) == sorted(both["false"])  # the same tasks
    images = [part for row in rows["true"] for part in shown(row)]
    assert {part["type"] for part in images} == {"image"}
    texts = {
        message["content"]
        for row in rows["false"]
        for turn in row["turns"]
        for message in turn["messages"]
    }
    assert all(text.startswith("goal: ") for text in texts)
    # Told in the words that stand beside the images.
    assert texts <= {part["alt"] for part in images} | texts
    assert texts & {part["alt"] for part in images}


@pytest.mark.parametrize("view", ["image", "positions"])
def test_sokoban_is_trained_as_pictures_and_as_text(view: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'[[env]]\nuse = "sokoban"\nargs = {{ moves = 4, shaped = true, view = "{view}" }}\n'
        "[limits]\nturns = 8\nturn_tokens = 4\n[model]\nimage_side = 48\n"
    )
    out = tmp_path / "run"
    sees = view == "image"
    summary = train(recipe, out, model__vision=str(sees).lower())
    assert ("success_blind" in summary) == sees
    rows = lines(out / "trajectories.jsonl")
    assert all(row["error"] is None for row in rows)
    for row in rows:
        images = shown(row)
        assert bool(images) == sees  # not in every turn: a reply that is no move has a text
        assert all(part["alt"].startswith("# # # # # #\n# ") for part in images)


@pytest.mark.parametrize(
    ("recipe", "turns", "tokens"), [("geo3k_short", 3, 4096), ("geo3k_long", 20, 32_000)]
)
def test_slime_s_settings_hold_for_a_real_directory(
    recipe: str, turns: int, tokens: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    path = ROOT / "recipes" / f"{recipe}.toml"
    config = load(path, ["--model.path", str(tmp_path)], envs=tuple(BUILTIN)).config
    assert (config.limits.turns, config.limits.episode_tokens, config.env[0].args) == (
        turns,
        tokens,
        {"turns": turns},
    )
    assert (config.rollout.groups, config.rollout.group_size, config.rollout.temperature) == (
        64,
        8,
        1.0,
    )
    assert (config.train.lr, config.train.schedule, config.train.weight_decay) == (
        1e-6,
        "constant",
        0.1,
    )
    assert (config.train.betas, config.train.clip_low, config.train.clip_high) == (
        (0.9, 0.98),
        0.2,
        0.28,
    )
    assert (config.train.steps, config.train.epochs, config.train.minibatches, config.train.kl) == (
        3000,
        1,
        1,
        0.0,
    )
    settled = resolve_settings(config.train)
    assert (settled.aggregation, settled.advantage, config.warmup.demos) == ("trajectory", "std", 0)


@pytest.mark.parametrize("recipe", ["geo3k_short", "geo3k_long"])
def test_slime_s_settings_run_two_steps_with_a_tiny_model_of_the_same_architecture(
    recipe: str, tmp_path: Path
) -> None:
    """With words to say from demonstrations, so that turns are many and tools are called."""
    out = tmp_path / "run"
    summary = train(
        ROOT / "recipes" / f"{recipe}.toml", out, limits__turn_tokens="24", model__image_side="32"
    )
    assert summary["rl_steps"] == 2
    rows = [row for row in lines(out / "trajectories.jsonl") if row["key"]["phase"] == "train"]
    assert len(rows) == 8
    assert all(row["error"] is None and shown(row) for row in rows)
    assert json.loads((out / "model" / "config.json").read_text())["architectures"] == [
        "Qwen3VLForConditionalGeneration"
    ]


@pytest.mark.parametrize("recipe", ["geometry_tiny_short", "geometry_tiny_long"])
@pytest.mark.beside("view")
def test_the_tiny_geometry_recipes_run_and_only_images_have_the_radii(
    recipe: str, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    use = f"{ROOT / 'recipes' / 'geometry_tiny.py'}:Shuffled"
    few = {"warmup__steps": "20", "warmup__demos": "32", "warmup__batch": "8"}
    summary = train(
        ROOT / "recipes" / f"{recipe}.toml", out, **few, env__use=use, env__name="Figures"
    )
    assert summary["rl_steps"] == 2
    rows = lines(out / "trajectories.jsonl")
    assert rows
    tokenizer = Tokenizer.from_file(str(out / "model" / "tokenizer.json"))
    for row in rows:
        assert row["error"] is None
        images = [part for part in shown(row) if part["type"] == "image"]
        assert images
        assert all(part["alt"].startswith("a circle with the radius ") for part in images)
        read = "".join(
            tokenizer.decode(span["ids"], skip_special_tokens=False)
            for span in row["spans"]
            if span["origin"] != "model"
        )
        assert "radius" not in read
        assert "<|image_pad|>" in read
    page = SentPage((out / "report.html").read_text())
    (overview,) = page.data["overviews"].values()
    last = [row for row in overview["rows"] if row["phase"] == "train"][-1]
    for name in (
        "reward",
        "repetition",
        "reply_tokens.mean",
        "tokens_per_s",
        "rollout_s",
        "train_s",
    ):
        assert name in last, name


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_tiny_geometry_recipe_learns_and_its_control_does_not() -> None:
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "geometry.py"),
        "--quick",
        "--only",
        "short",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["holds"]


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_quickstart_with_images_learns() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "honesty_vlm.py"), "--seeds", "0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["learned"]
