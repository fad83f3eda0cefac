"""Runs of several policies: what a resumed one comes to, opponents that are not trained,
evaluation, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from turnwright.cli.main import main
from turnwright.config import load
from turnwright.engines.local import LocalEngine
from turnwright.records import read_json_lines
from turnwright.training import setup

pytest.importorskip("peft")

PLAY = """\
import asyncio
import turnwright as tw

def tasks(split, n, seed):
    return [tw.Task(f"Say {split} {number}.") for number in range(12)]

async def play(task, model):
    replies = [await model.generate(task.messages, agent=agent) for agent in ("asker", "solver-1", "solver-2")]
    values = [float(sum(reply.ids) % 3) for reply in replies]
    return tw.Scores(sum(values), agents=dict(zip(("asker", "solver-1", "solver-2"), values)))
"""  # noqa: E501
RECIPE = """\
[model]
hidden = 32
[[env]]
tasks = "play.py:tasks"
[[policy]]
name = "asker"
[[policy]]
name = "solver"
agents = ["solver-1"]
train = { lr = 5e-3, advantage = "running" }
[[policy]]
name = "other"
agents = ["solver-*"]
OTHER
[rollout]
function = "play.py:play"
groups = 3
group_size = 3
[limits]
turns = 3
turn_tokens = 3
on_turn_length = "continue"
[train]
steps = 4
lr = 1e-2
[lora]
rank = 4
[checkpoint]
every = 2
[eval]
tasks = 3
greedy = false
"""


def recipe(folder: Path, other: str, more: str = "") -> Path:
    (folder / "play.py").write_text(PLAY)
    (folder / "recipe.toml").write_text(RECIPE.replace("OTHER", other) + more)
    return folder / "recipe.toml"


def trained(folder: Path, other: str, name: str = "run", more: str = "", *words: str) -> Path:
    out = folder / name
    assert (
        main(
            [
                "train",
                str(recipe(folder, other, more)),
                "--out",
                str(out),
                "--display",
                "none",
                *words,
            ]
        )
        == 0
    )
    return out


def rows(out: Path, phase: str) -> list[dict[str, Any]]:
    return [row for row in read_json_lines(out / "metrics.jsonl") if row["phase"] == phase]


def versions(out: Path, agent: str) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for row in read_json_lines(out / "trajectories.jsonl"):
        if row["key"]["phase"] == "train":
            used = {
                span["version"] for span in row["spans"] if span["mask"] and span["agent"] == agent
            }
            found.setdefault(row["key"]["step"], set()).update(used)
    return found


def sampled(out: Path, step: int, agent: str) -> int:
    keyed = [
        row for row in read_json_lines(out / "trajectories.jsonl") if row["key"]["phase"] == "train"
    ]
    spans = [span for row in keyed if row["key"]["step"] == step for span in row["spans"]]
    return sum(len(span["ids"]) for span in spans if span["mask"] and span["agent"] == agent)


def state(checkpoint: Path) -> dict[Path, dict[str, torch.Tensor]]:
    """Weights and optimizers."""
    return {
        path.relative_to(checkpoint): load_file(path) for path in checkpoint.rglob("*.safetensors")
    }


PAST = 'past = { of = "solver", every = 1, keep = 2 }'


@pytest.mark.parametrize("mode", ["sync", "one_step_off"])
def test_a_resumed_run_comes_to_the_same_policies_and_opponents(tmp_path: Path, mode: str) -> None:
    more = "" if mode == "sync" else '[schedule]\nmode = "one_step_off"\n'
    words = () if mode == "sync" else ("--train.correction", "tis")
    out = trained(tmp_path, PAST, "run", more, *words)
    steps = rows(out, "train")
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert max(row.get("policy/asker/mismatch_max", 0.0) for row in steps) < 1e-4
    both = [row for row in steps if "policy/asker/lr" in row and "policy/solver/lr" in row]
    assert both
    assert all(row["policy/asker/lr"] == pytest.approx(2 * row["policy/solver/lr"]) for row in both)
    assert [row["untrained"]["frozen"] for row in steps] == [
        sampled(out, step, "solver-2") for step in range(4)
    ]
    lag = 0 if mode == "sync" else 1
    expected = {step: {step - lag, step - lag - 1} - {-1, -2} or {0} for step in range(4)}
    assert all(used <= expected[step] for step, used in versions(out, "solver-2").items())
    assert set().union(*versions(out, "solver-2").values()) >= {0, 1}
    kept = sorted(int(path.name[5:]) for path in (out / "past" / "other").iterdir())
    assert kept == [0, 1, 2, 3, 4][1 - lag :]  # a resume from step 2 draws versions from 1 - lag on
    last = out / "checkpoints" / "step-00004"
    assert sorted(path.name for path in last.iterdir()) == ["asker", "solver", "state.json"]
    assert json.loads((last / "state.json").read_text())["cursor"]["baselines"]["solver"]
    before = state(last)
    assert len(before) == 4  # adapter and optimizer of each
    episodes = (out / "trajectories.jsonl").read_bytes()
    # Without the last checkpoint, and without the episodes of the last step, the run is
    # played and trained again.
    shutil.rmtree(last)
    assert main(["train", "--resume", str(out), "--display", "none"]) == 0
    after = state(last)
    assert all(
        torch.equal(after[file][name], tensor)
        for file, tensors in before.items()
        for name, tensor in tensors.items()
    )
    assert (out / "trajectories.jsonl").read_bytes() == episodes


def test_policies_are_trained_while_their_weights_change_in_flight(tmp_path: Path) -> None:
    more = '[schedule]\nmode = "async"\nstaleness = 1\n'
    out = trained(tmp_path, PAST, "run", more, "--train.correction", "tis", "--train.steps", "6")
    steps = rows(out, "train")
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert max(row.get("lag_max", 0) for row in steps) <= 1
    for name in ("asker", "solver"):
        assert max(row.get(f"policy/{name}/mismatch_max", 0.0) for row in steps) < 1e-4
    for step, used in versions(
        out, "solver-2"
    ).items():  # an opponent exists before the oldest group of its step can begin
        assert used <= {max(0, step - 1), max(0, step - 2)}


def check_last_step_again(out: Path) -> None:
    """Resume a run from before its last step: it comes to the same bits."""
    last = out / "checkpoints" / "step-00004"
    before = state(last)
    shutil.rmtree(last)
    assert main(["train", "--resume", str(out), "--display", "none"]) == 0
    after = state(last)
    assert all(
        torch.equal(after[file][name], tensor)
        for file, tensors in before.items()
        for name, tensor in tensors.items()
    )


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_policies_that_are_adapters_of_one_model_play_in_one_engine(
    tmp_path: Path, monkeypatch: Any, mode: str
) -> None:
    """Two that are trained, and the model itself as an opponent."""
    made: list[LocalEngine] = []

    def recorded(*parts: Any, **options: Any) -> LocalEngine:
        made.append(LocalEngine(*parts, **options))
        return made[-1]

    monkeypatch.setattr(setup, "LocalEngine", recorded)
    more = "" if mode == "sync" else '[schedule]\nmode = "async"\nstaleness = 1\n'
    words = [
        "--engine.adapters",
        "rows",
        *(() if mode == "sync" else ("--train.correction", "tis")),
    ]
    out = trained(tmp_path, "trained = false", "run", more, *words)
    (engine,) = made
    assert [engine.adapter(number).version for number in range(3)] == [0, 4, 4]
    for name in ("asker", "solver"):
        assert (
            0
            < max(row.get(f"policy/{name}/mismatch_max", 0.0) for row in rows(out, "train"))
            < 1e-4
        )
    assert all(used == {0} for used in versions(out, "solver-2").values())
    if mode == "sync":
        check_last_step_again(out)


def test_adapters_of_other_layers_than_the_decoder_s_are_refused_in_one_engine(
    tmp_path: Path, capsys: Any
) -> None:
    path = recipe(tmp_path, "trained = false")
    path.write_text(path.read_text().replace("rank = 4", 'rank = 4\ntargets = ["lm_head"]'))
    words = ["--out", str(tmp_path / "run"), "--display", "none", "--engine.adapters", "rows"]
    assert main(["train", str(path), *words]) == 2
    assert 'engine.adapters = "rows": adapter: the decoder of' in capsys.readouterr().err


def test_a_policy_with_a_teacher_of_its_own_is_resumed_too(tmp_path: Path) -> None:
    base = trained(tmp_path, "trained = false", "base", "", "--train.steps", "1") / "model"
    teacher = f'[[teacher]]\npath = "{base}"\npolicies = ["solver"]\nsignal = "loss"\n'
    out = trained(tmp_path, "trained = false", "run", teacher, "--model.path", str(base))
    for row in rows(out, "train"):
        assert row["policy/solver/teacher.teacher.answered"] == 1.0
        assert "policy/asker/teacher.teacher.answered" not in row
    check_last_step_again(out)


@pytest.mark.beside("serve")
def test_a_run_is_evaluated_with_its_policies_and_each_is_a_model(
    tmp_path: Path, capsys: Any
) -> None:
    out = trained(tmp_path, "trained = false")
    assert all(used == {0} for used in versions(out, "solver-2").values())
    capsys.readouterr()
    assert main(["eval", "--run", str(out)]) == 0
    assert "success" in capsys.readouterr().out
    last = out / "checkpoints" / "step-00004"
    assert main(["serve", str(out), "--port", "0"]) == 2
    assert (
        f"it holds several policies; name one of {last / 'asker'}, {last / 'solver'}"
        in capsys.readouterr().err
    )
    words = ["--model.path", str(last / "asker"), "--train.steps", "1", "--eval.tasks", "1"]
    other = trained(tmp_path, f'path = "{last / "solver"}"', "other", "", *words)
    assert (other / "checkpoints" / "step-00001" / "other").is_dir()


def test_an_agent_without_a_policy_is_an_error_and_is_named(tmp_path: Path, capsys: Any) -> None:
    path = recipe(tmp_path, "")
    path.write_text(path.read_text().replace('agents = ["solver-*"]', 'agents = ["judge"]'))
    assert main(["train", str(path), "--out", str(tmp_path / "run"), "--display", "none"]) == 1
    assert (
        "no policy plays the agent 'solver-2'; the policies and their agents are asker: asker"
        in capsys.readouterr().err
    )
    # A function that tells its agents is refused before anything is played.
    (tmp_path / "play.py").write_text(PLAY + 'play.agents = ("asker", "solver-1", "solver-2")\n')
    assert main(["train", str(path), "--out", str(tmp_path / "told"), "--display", "none"]) == 2
    assert "solver-2" in capsys.readouterr().err
    assert not (tmp_path / "told" / "journal.jsonl").exists()
    world = (
        path.read_text()
        .replace('function = "play.py:play"\n', "")
        .replace('tasks = "play.py:tasks"', 'use = "hop"')
    )
    path.write_text(world)
    assert main(["train", str(path), "--out", str(tmp_path / "world"), "--display", "none"]) == 2
    assert "hop: no policy plays the agent 'main'" in capsys.readouterr().err


def test_policies_need_one_tokenizer(tmp_path: Path, capsys: Any) -> None:
    from turnwright.config import ModelConfig
    from turnwright.training.model.models import create_tiny_model

    create_tiny_model(ModelConfig(hidden=32), ["another text"], tmp_path / "model")
    path = recipe(tmp_path, 'path = "model"')
    assert load(path).config.policy[2].path == str(tmp_path / "model")
    assert main(["train", str(path), "--out", str(tmp_path / "run"), "--display", "none"]) == 2
    assert "policy other: the tokenizer of" in capsys.readouterr().err
