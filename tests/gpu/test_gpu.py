"""The local engine, the trainer and runs on a CUDA device (`make test-gpu`;
TURNWRIGHT_TEST_DEVICE=cpu tries them without)."""

from __future__ import annotations

import asyncio
import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.adapters import send, shapes
from kit.architectures import make
from kit.expert_models import WANT, moe, told
from kit.local_engines import matrices, model, request, run, talk, words
from kit.training import distance, learn, random_groups
from kit.trees import small
from transformers import Qwen3Config

from turnwright.cli.main import main
from turnwright.engines import Generation
from turnwright.engines.local import LocalEngine
from turnwright.errors import ConfigError

pytestmark = pytest.mark.gpu
DEVICE = os.environ.get("TURNWRIGHT_TEST_DEVICE", "cuda")
ROOT = Path(__file__).resolve().parents[2]
BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 0.3}
"""Largest |difference of logprobs| to a full pass in nats: sums in another order,
and rounded activations."""


async def together(engine: LocalEngine) -> list[list[Generation]]:
    """Conversations side by side, in groups that share a prompt."""
    return await asyncio.gather(*(talk(engine, seed, group="g") for seed in range(12)))


@pytest.mark.parametrize("speculate", [0, 3])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_replies_have_the_logprobs_of_a_full_pass(dtype: torch.dtype, speculate: int) -> None:
    module = model().to(DEVICE, dtype)

    async def check(engine: LocalEngine) -> float:
        assert engine.fused == (DEVICE == "cpu" and dtype == torch.float32)
        worst, context = 0.0, {number: words(20 + number, number) for number in range(8)}
        for _ in range(3):
            asked = [
                request(ids, f"s{number}", seed=number, max_tokens=12)
                for number, ids in context.items()
            ]
            for number, answer in enumerate(await asyncio.gather(*map(engine.generate, asked))):
                ids = context[number] + list(answer.ids)
                with torch.no_grad():
                    rows = (
                        module(torch.tensor([ids], device=DEVICE), use_cache=False)
                        .logits[0]
                        .float()
                        .log_softmax(-1)
                    )
                known = [
                    float(rows[at - 1, ids[at]]) for at in range(len(context[number]), len(ids))
                ]
                worst = max(
                    worst, *(abs(a - b) for a, b in zip(known, answer.logprobs, strict=True))
                )
                context[number] = ids + words(5, number)
        return worst

    assert (
        run(LocalEngine(module, device=DEVICE, dtype=dtype, speculate=speculate), check)
        <= BOUNDS[dtype]
    )


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs")
def test_recorded_passes_follow_new_weights_and_a_cache_that_grew() -> None:
    """The same replies as without graphs, of short and long contexts, before and after an
    update, for 1 to 40 calls."""
    other = model(seed=3)

    async def work(engine: LocalEngine) -> list[list[int]]:
        found = []
        for number, count in enumerate((1, 5, 40, 3)):
            asked = [
                request(words(10 + 90 * number + n, n), f"{number}/{n}", seed=n, max_tokens=30)
                for n in range(count)
            ]
            found += [
                list(answer.ids) for answer in await asyncio.gather(*map(engine.generate, asked))
            ]
            if number == 1:
                await engine.update(other.state_dict().items(), version=1)
        return found

    engine = LocalEngine(model(), device=DEVICE)
    graphs = engine._model.graphs
    assert graphs is not None
    recorded = run(engine, work)
    assert graphs.usable
    assert len(graphs._graphs) > 1
    engine = LocalEngine(model(), device=DEVICE)
    engine._model.graphs = None
    plain = run(engine, work)
    # Draws within the rounding of a boundary.
    assert sum(a == b for a, b in zip(recorded, plain, strict=True)) >= len(plain) - 2


def test_adapters_of_several_policies_have_the_ids_of_a_cpu() -> None:
    """In recorded passes too, before and after an update of one."""
    module = model()
    given = shapes(module)
    weights = [matrices(module, shape, number) for number, shape in enumerate(given)]

    async def work(engine: LocalEngine) -> list[list[int]]:
        policies, found = await send(engine, weights), []
        for turn in range(2):
            asked = [request(words(12, n), f"{turn}/{n}", seed=n, max_tokens=12) for n in range(6)]
            heard = await asyncio.gather(
                *(policy.generate(one) for one in asked for policy in policies)
            )
            found += [list(answer.ids) for answer in heard]
            await policies[1].update(
                [(name, 0.5 * tensor) for name, tensor in weights[0]], version=2
            )
        return found

    here, there = (
        run(LocalEngine(module, device=device, adapters=given), work) for device in (DEVICE, "cpu")
    )
    assert sum(a == b for a, b in zip(here, there, strict=True)) >= len(here) - 2


def test_the_engine_samples_the_ids_of_a_cpu() -> None:
    """In float32; a draw within the rounding of a boundary may differ, which ends that
    conversation's comparison."""
    here = run(LocalEngine(model(), device=DEVICE), together)
    there = run(LocalEngine(model(), device="cpu"), together)
    equal = [
        [a.ids == b.ids for a, b in zip(one, other, strict=True)]
        for one, other in zip(here, there, strict=True)
    ]
    assert sum(map(all, equal)) >= len(equal) - 1


def test_a_mixture_of_experts_reports_the_experts_of_each_id() -> None:
    module = moe()

    async def ask(engine: LocalEngine) -> Generation:
        return await engine.generate(request(words(20, 1), max_tokens=6, **WANT))

    found, wanted = (run(LocalEngine(module, device=device), ask) for device in (DEVICE, "cpu"))
    assert told(found)[0] == told(wanted)[0] == 0
    assert (told(found)[1] == told(wanted)[1]).mean() > 0.98


def test_sleep_frees_the_memory_of_the_device_and_new_weights_wake_it() -> None:
    async def check(engine: LocalEngine) -> None:
        before = await engine.generate(request(words(30, 1)))
        held = torch.cuda.memory_allocated() if DEVICE != "cpu" else 1
        await engine.sleep()
        assert (torch.cuda.memory_allocated() if DEVICE != "cpu" else 0) < held
        await engine.wake()
        assert (await engine.generate(request(words(30, 1)))).ids == before.ids
        await engine.sleep()
        weights = {name: tensor.to(DEVICE) for name, tensor in model(seed=1).state_dict().items()}
        await engine.update(weights.items(), version=1)
        assert (await engine.generate(request(words(30, 1)))).version == 1

    run(LocalEngine(model(), device=DEVICE), check)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_a_tree_has_the_loss_and_gradient_of_rows(dtype: torch.dtype) -> None:
    made = random_groups(groups=2, size=4, turns=3, vocabulary=50)
    first = model(Qwen3Config, vocab_size=50).to(DEVICE, dtype)
    second = copy.deepcopy(first)
    by_row, row_gradient = learn(first, made, batching="rows")
    by_tree, tree_gradient = learn(second, made, batching="tree")
    assert by_tree["tokens_trained"] == by_row["tokens_trained"] > 0
    assert distance(row_gradient.double().cpu(), tree_gradient.double().cpu()) < (
        1e-4 if dtype == torch.float32 else 0.05
    )


@pytest.mark.skipif(DEVICE == "cpu", reason="FlexAttention's kernels are those of GPUs")
def test_a_size_without_a_kernel_is_trained_by_rows_and_named() -> None:
    made, first = random_groups(groups=2, size=4, turns=3), small().to(DEVICE)
    figures, _ = learn(first, made, batching="auto")
    assert figures["tree_share"] == 0
    with pytest.raises(ConfigError, match=r"FlexAttention does not run here: .*at least 16"):
        learn(small().to(DEVICE), made, batching="tree")


PLAY = """\
import turnwright as tw

def tasks(split, n, seed):
    return [tw.Task(f"Say {split} {number}.") for number in range(12)]

async def play(task, model):
    replies = [await model.generate(task.messages), await model.generate("And now?")]
    return float(sum(sum(reply.ids) for reply in replies) % 3)
"""
RECIPE = """\
[[env]]
tasks = "play.py:tasks"
[limits]
turns = 2
turn_tokens = 6
on_turn_length = "continue"
[rollout]
function = "play.py:play"
groups = 4
group_size = 4
[train]
steps = 3
[eval]
tasks = 8
[checkpoint]
every = 2
"""
RUNS: dict[str, list[str]] = {
    "float32": ["--model.dtype", "float32"],
    "bfloat16": ["--model.dtype", "bfloat16"],
    "lora": ["--lora.rank", "4"],
    "int4": ["--quant.kind", "int4", "--quant.group", "32"],
    "fp8": ["--quant.kind", "fp8", "--quant.block", "32"],
    "rows": ["--train.batching", "rows"],
    "async": ["--schedule.mode", "async", "--train.correction", "tis"],
    "one_step_off": ["--schedule.mode", "one_step_off", "--train.correction", "tis"],
    "kl": [
        "--train.kl",
        "0.01",
        "--train.entropy",
        "0.001",
        "--train.gradient-checkpointing",
        "true",
    ],
    "colocate": ["--engine.colocate", "true"],
}


def written(folder: Path) -> Path:
    (folder / "play.py").write_text(PLAY)
    (folder / "recipe.toml").write_text(RECIPE)
    return folder / "recipe.toml"


def steps_of(out: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["phase"] == "train"]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_trains_resumes_and_evaluates(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, out = written(tmp_path), tmp_path / "run"
    line = [
        "train",
        str(recipe),
        "--model.device",
        DEVICE,
        "--out",
        str(out),
        "--display",
        "none",
        *RUNS[name],
    ]
    assert main(line) == 0, capsys.readouterr()
    known = [row["mismatch_max"] for row in steps_of(out) if "mismatch_max" in row]
    assert known
    assert max(known) < (1e-3 if name == "float32" else 0.5)
    assert main(["train", "--resume", str(out), "--train.steps", "4", "--display", "none"]) == 0, (
        capsys.readouterr()
    )
    assert len(steps_of(out)) == 4
    assert main(["eval", "--run", str(out)]) == 0, capsys.readouterr()


@pytest.mark.parametrize("family", ["Qwen3Moe", "Llama"])
def test_a_model_of_ones_own(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, directory = written(tmp_path), make(family, tmp_path / "model")
    words = [
        "--model.path",
        str(directory),
        "--model.device",
        DEVICE,
        "--out",
        str(tmp_path / "run"),
        "--display",
        "none",
    ]
    if family == "Qwen3Moe":
        words += ["--train.routing-replay", "replay"]
    assert main(["train", str(recipe), *words]) == 0, capsys.readouterr()


@pytest.mark.parametrize("recipe", ["quickstart_vlm", "two_policies", "self_play"])
def test_a_shipped_recipe(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = {
        "warmup.steps": 10,
        "warmup.gate-success": 0,
        "rollout.groups": 4,
        "rollout.group-size": 4,
    }
    short |= {
        "train.steps": 2,
        "eval.tasks": 8,
        "model.device": DEVICE,
        "out": tmp_path / "run",
        "display": "none",
    }
    if recipe == "quickstart_vlm":
        short |= {"warmup.demos": 32, "warmup.gate-tasks": 8}
    if recipe == "two_policies":
        short |= {"lora.rank": 4}
    words = [word for key, value in short.items() for word in (f"--{key}", str(value))]
    assert main(["train", str(ROOT / "recipes" / f"{recipe}.toml"), *words]) == 0, (
        capsys.readouterr()
    )


@pytest.mark.skipif(DEVICE == "cpu", reason="minutes on a CPU, where make quickstart-llm shows it")
def test_a_language_model_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`make quickstart-llm` in bfloat16; prints what a step costs."""
    model_file = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert model_file.is_file(), "python contrib/smollm2.py fetches it"
    out = tmp_path / "run"
    words = [
        "--model.path",
        str(model_file),
        "--model.device",
        DEVICE,
        "--out",
        str(out),
        "--display",
        "none",
    ]
    assert main(["train", str(ROOT / "recipes" / "quickstart_llm.toml"), *words]) == 0, (
        capsys.readouterr()
    )

    summary = json.loads((out / "summary.json").read_text())
    steps = steps_of(out)
    sampled = sum(step["sampled_tokens"] for step in steps) / sum(
        step["rollout_s"] for step in steps
    )
    step_s = sorted(step["rollout_s"] + step["train_s"] for step in steps)[len(steps) // 2]
    before, after = summary["success_before"], summary["success_after"]
    mean = max(step["mismatch_mean"] for step in steps if "mismatch_mean" in step)
    with capsys.disabled():
        print(
            f"\n{before:.1%} to {after:.1%}; {step_s:.2f} s a step, {sampled:.0f} sampled ids a "
            f"second, mismatch {mean:.1e}"
        )
    assert after >= before + 0.4
    assert mean < 0.05
