"""Runs that train through real servers that they start themselves: the quickstart, and a
LoRA that goes out alone."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from kit import real_servers as kit
from kit.runs import train

from turnwright.cli.main import main
from turnwright.engines.remote.managed import ManagedFleet, how_to_install

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]
RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.toml"
# Heads of 32 numbers: vLLM's attention on a CPU has none of 16. At this size the recipe's own rate
# breaks one run of ten, in this process too; half of it for half as many steps more broke none. And
# what a run comes to depends on where it began: the gate is looked at once, at the end of the
# warm-up, so that all begin with the same model (benchmarks/results/README.md).
SIZE = ("--model.heads", "2", "--model.kv-heads", "2", "--train.lr", "1e-3", "--train.steps", "120")
SAME_START = ("--warmup.gate-every", "500")
HELD_OUT = ("--eval.tasks", "1024")


def trained(run, *words):
    """The quickstart at that size: its summary, and the largest |dlogp| of its steps."""
    train(RECIPE, run, *words, *SIZE, *SAME_START, *HELD_OUT)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (looked,) = [row["step"] for row in rows if row["phase"] == "gate"]
    assert looked == 500
    gap = max(row["mismatch_max"] for row in rows if row["phase"] == "train")
    summary = json.loads((run / "summary.json").read_text())
    print(
        {name: summary[name] for name in ("success_before", "success_after", "wall_s", "cpu_s")},
        f"max |dlogp| {gap}",
    )
    return summary, gap


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    print("in this process: ", end="")
    return trained(tmp_path_factory.mktemp("local") / "run")[0]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_the_quickstart_learns_through_a_server_what_it_learns_here(kind, local, tmp_path):
    if not (kit.PLACE / kind).is_dir():
        pytest.skip(f"{kit.PLACE / kind}: not installed; `{how_to_install(kind, gpu=False)}`")
    print(f"{kind}: ", end="")
    summary, gap = trained(
        tmp_path / "run", "--engine.kind", kind, "--engine.install-dir", str(kit.PLACE)
    )
    assert summary["success_before"] < 0.45
    assert summary["success_after"] > 0.88
    for name in (
        "success_before",
        "success_after",
    ):
        # Other draws: two points are one standard error at most.
        assert abs(summary[name] - local[name]) < 0.1, name
    assert gap < 1e-3


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_lora_goes_out_alone_and_comes_back_to_a_server_that_died(
    kind, tmp_path, monkeypatch, capsys
):
    """The server has the model from the start; each policy is an adapter of its own.

    One is killed between two steps.
    """
    pytest.importorskip("peft")
    if not (kit.PLACE / kind).is_dir():
        pytest.skip(f"{kit.PLACE / kind}: not installed; `{how_to_install(kind, gpu=False)}`")
    update = ManagedFleet.update

    async def killed_once(fleet, weights, version):
        weights = list(weights)
        assert all(".lora_" in name for name, _ in weights)
        if version == 2 and fleet.started[0].starts == 1:
            os.kill(fleet.started[0].pid, signal.SIGKILL)
        return await update(fleet, weights, version)

    monkeypatch.setattr(ManagedFleet, "update", killed_once)
    words, run = kit.train_long_world(tmp_path), tmp_path / "run"
    words += ["--lora.rank", "4", "--train.lr", "1e-2", "--engine.update", "lora"]
    words += ["--engine.kind", kind, "--engine.install-dir", str(kit.PLACE)]
    words += [
        "--train.steps",
        "4",
        "--rollout.groups",
        "4",
        "--rollout.group-size",
        "4",
        "--eval.tasks",
        "4",
    ]
    assert main([*words, "--out", str(run)]) == 0, capsys.readouterr().err
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    gaps = [
        row["mismatch_max"] for row in rows if row["phase"] == "train" and "mismatch_max" in row
    ]
    print(f"LoRA alone, {kind}: max |dlogp| {max(gaps, default=None)} in {len(gaps)} of 4 steps")
    assert len(gaps) == 4
    assert max(gaps) < 1e-3
    files = {path.name for folder in (run / "weights").iterdir() for path in folder.iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors"}
    episodes = [json.loads(line) for line in (run / "trajectories.jsonl").read_text().splitlines()]
    assert {
        span["version"] for row in episodes for span in row["spans"] if span["origin"] == "model"
    } == {0, 1, 2, 3, 4}
    log = (run / "engines" / f"{kind}-0.log").read_text()
    assert log.count(f"--max-lora-rank {8 if kind == 'vllm' else 4}") == 2
    monkeypatch.undo()
    for way in ("lora", "disk"):  # the checkpoint is an adapter; it is played as one, or merged
        said = ["eval", "--run", str(run), "--engine.update", way, "--tasks", "4", "--samples", "1"]
        assert main(said) == 0, capsys.readouterr().err


LLM_RECIPE = RECIPE.with_name("quickstart_llm.toml")
LLM = RECIPE.parents[1] / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.parametrize("kind", ["vllm", "llamacpp"])
def test_a_language_model_learns_through_a_server(kind, tmp_path):
    """`make quickstart-llm` in ten steps, with the real weights; llama.cpp is started
    again with each policy."""
    if not (kit.PLACE / kind).is_dir():
        pytest.skip(f"{kit.PLACE / kind}: not installed; `{how_to_install(kind, gpu=False)}`")
    if not LLM.is_file():
        pytest.skip(f"{LLM} is not there; `python contrib/smollm2.py` fetches it")
    run = tmp_path / "run"
    words = [
        "--model.path",
        str(LLM),
        "--train.steps",
        "10",
        "--out",
        str(run),
        "--display",
        "none",
    ]
    words += ["--engine.kind", kind, "--engine.install-dir", str(kit.PLACE)]
    words += ["--engine.missing-logprobs", "mask"] if kind == "llamacpp" else []
    assert main(["train", str(LLM_RECIPE), *words]) == 0

    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["phase"] == "train"]
    # A step that all solve trains nothing.
    gap = max(row["mismatch_max"] for row in steps if "mismatch_max" in row)
    summary = json.loads((run / "summary.json").read_text())
    before, after = summary["success_before"], summary["success_after"]
    print(f"{kind}: {before:.1%} to {after:.1%}, max |dlogp| {gap}, cpu {summary['cpu_s']:.0f} s")
    assert len(steps) == 10
    assert gap < 1e-2
    assert after >= before + 0.4
