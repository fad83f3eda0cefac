"""Low precision on the quickstart: what trainer and engine differ by, what is learned, and whether
files have the same bits.

    python benchmarks/low_precision.py [--out DIR] [--only NAME ...] [--gpu]

Trains recipes/quickstart.toml, seed 0, in full precision, with int4 and fp8 in trainer and engine,
and with an engine alone in low precision: int4 under the default guards, which must refuse it
(`refused`); without a correction, where a `max_mismatch` allows it (a filter that takes every
episode stands for none, which the recipe refuses); and with `train.correction = "tis"`. A finished
run in DIR is used again.

`mismatch_*` and `ess_min` are the extremes of steps, `share_over_1e3` is of all trained ids.
`cpu_s_ratio` compares the CPU time of the 80 steps, since warm-ups end at different steps.
`kl_grid` is the mean KL(full precision || grid) over the ids of the last steps' episodes, those of
the environment included, and over sampled ids. `stale` counts updates after which the probe finds
an engine that kept the weights of before, and does not refuse one that has the new ones.
`resume_bits_equal` compares runs that were killed with undisturbed ones. `experts_*` train a
mixture of experts with its experts replayed. Exports are read back and compared with the trainer's
grid, bit for bit; `transformers_bits_equal` is null without compressed-tensors (int4), and with a
GPU (fp8). fp8 products are emulated. Last line JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from kill_resume import RECIPE as KILLED
from kill_resume import compare, events, instants
from kill_resume import trained as trained_spans

from turnwright.cli.main import main as turnwright
from turnwright.config import ModelConfig, QuantConfig, TrainConfig
from turnwright.engines import Request
from turnwright.engines.local import LocalEngine
from turnwright.errors import SyncError
from turnwright.records.serialization import rebuild_trajectories
from turnwright.rollouts import group_by_task
from turnwright.training import Trainer, load_model_and_renderer
from turnwright.training.model.models import create_tiny_model, load
from turnwright.training.model.packed import quant_of, write_packed
from turnwright.training.model.quantize import (
    OnGrid,
    grid_of,
    quantize_for_sampling,
    quantize_for_training,
    quantized_names,
)
from turnwright.types import EpisodeKey, Group, Origin, Span, StopReason, Task, Trajectory

ROOT = Path(__file__).resolve().parents[1]
INT4, FP8 = (
    ("--quant.kind", "int4", "--quant.group", "32"),
    ("--quant.kind", "fp8", "--quant.block", "64"),
)
ENGINE_ALONE = ("--quant.train", "false", "--train.correction", "tis")
ALLOWED = ("--train.max-mismatch", "100", "--train.max-mismatch-kl", "1")
UNCORRECTED = (
    "--train.correction",
    "sequence_mis_mean",
    "--train.correction-low",
    "0",
    "--train.correction-high",
    "1e9",
)
RUNS: dict[str, tuple[str, ...]] = {
    "fp32": (),
    "int4_qat": INT4,
    "fp8": FP8,
    "int4_ptq_guarded": (*INT4, *ENGINE_ALONE),
    "int4_ptq": (*INT4, "--quant.train", "false", *UNCORRECTED, *ALLOWED),
    "int4_ptq_tis": (*INT4, *ENGINE_ALONE, *ALLOWED),
    "fp8_tis": (*FP8, *ENGINE_ALONE, *ALLOWED),
}


def trained(name: str, out: Path) -> dict[str, Any]:
    """Train a run unless it is finished; return its figures, or that it was refused."""
    run = out / name
    if not (run / "summary.json").is_file():
        shutil.rmtree(run, ignore_errors=True)
        command = [
            sys.executable,
            "-m",
            "turnwright",
            "train",
            str(ROOT / "recipes" / "quickstart.toml"),
            *RUNS[name],
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        done = subprocess.run(
            [*command, "--out", str(run)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            refused = "disagree on sampled ids" in done.stderr + done.stdout
            return {
                "refused": refused,
                "message": done.stderr.strip().splitlines()[-1][:300] if done.stderr else "",
            }
    summary = json.loads((run / "summary.json").read_text())
    rows = [
        row
        for row in map(json.loads, (run / "metrics.jsonl").open())
        if row.get("mismatch_max") is not None
    ]
    over = [row["mismatch_max"] for row in rows]
    gaps = mismatches(run)
    return {
        "success": summary["success_after"],
        "greedy": summary["greedy_after"],
        "cpu_s": round(summary["cpu_s"], 1),
        "cpu_s_steps": round(rows[-1]["cpu_s"] - rows[0]["cpu_s"], 1),
        "warmup_steps": summary["warmup_steps"],
        "mismatch_max": max(over),
        "mismatch_k3": max(row["mismatch_kl"] for row in rows),
        "ess_min": min(row["importance_ess"] for row in rows),
        "steps_over_1e3": sum(one > 1e-3 for one in over),
        "share_over_1e3": sum(gap > 1e-3 for gap in gaps) / len(gaps),
        "refused": False,
    }


def mismatches(run: Path) -> list[float]:
    """Return |logprob of trainer - of engine| of every trained id."""
    engine, found = trained_spans(run), []
    for row in map(json.loads, (run / "training.jsonl").open()):
        spans = engine[tuple(row["key"][1:4])]
        for number, logprobs in row["logprobs"].items():
            found += [
                abs(a - b)
                for a, b in zip(logprobs, spans[int(number)][2], strict=True)
                if a is not None
            ]
    return found


def checkpoint_of(run: Path) -> Path:
    """Return a run's last checkpoint."""
    return max((run / "checkpoints").glob("step-*"))


def kl_grid(run: Path, steps: int = 5) -> dict[str, float]:
    """Return the mean KL(full-precision weights || grid) in nats over the last
    steps' episodes (chains)."""
    source = checkpoint_of(run)
    model, _ = load(source)
    on_grid = quantize_for_sampling(model, quant_of(source))
    episodes = trained_spans(run)
    last = max(step for step, _, _ in episodes)
    found: dict[str, list[torch.Tensor]] = {"all_ids": [], "sampled_ids": []}
    for spans in (spans for (step, _, _), spans in episodes.items() if step > last - steps):
        ids = torch.tensor([[one for span in spans for one in span[1]]])
        sampled = torch.tensor([span[2] is not None for span in spans for _ in span[1]])[1:]
        with torch.no_grad():
            full, rounded = (
                m(ids, use_cache=False).logits[0, :-1].log_softmax(-1) for m in (model, on_grid)
            )
        kl = (full.exp() * (full - rounded)).sum(-1)
        found["all_ids"].append(kl)
        found["sampled_ids"].append(kl[sampled])
    return {name: float(torch.cat(parts).mean()) for name, parts in found.items()}


def stale(run: Path, updates: int = 10) -> dict[str, int]:
    """Train further on a run's episodes; ask the probe about an engine with old weights, then
    about an updated one."""
    source = checkpoint_of(run)
    quant = quant_of(source)
    model, renderer = load_model_and_renderer(source, source, ModelConfig(path=str(source)))
    names, engine = (
        quantized_names(model, quant),
        LocalEngine(quantize_for_sampling(model, quant), renderer=renderer),
    )
    quantize_for_training(model, quant)
    config = TrainConfig(lr=2e-3, schedule="constant", max_mismatch=1e9)
    trainer = Trainer(model, config, banned_ids=renderer.banned_ids, template=renderer.fingerprint)
    trainer.transforms += [OnGrid(grid, names)] if (grid := grid_of(quant)) else []
    episodes = rebuild_trajectories(events(run), lambda name: Task("", id=name)).values()
    found = {"updates": 0, "found": 0, "false_alarms": 0}

    async def refused(probe: Any, weights: Any, version: int) -> bool:
        await engine.update(weights, version)
        try:
            await probe.ask(engine, version, renderer.banned_ids, 60.0)
        except SyncError:
            return True
        return False

    async def play() -> None:
        for step in range(80):
            if found["updates"] == updates:
                break
            before = list(trainer.weights())
            groups = group_by_task(
                [t for t in episodes if t.key.phase == "train" and t.key.step == step]
            )
            trainer.step(groups, step=step, steps=80)
            probe = trainer.take_probe()
            if probe is None or int((probe.before_kv != probe.after_kv).any(1).sum()) < 12:
                continue
            found["updates"] += 1
            found["found"] += await refused(probe, before, step + 1)
            found["false_alarms"] += await refused(probe, trainer.weights(), step + 1)
        await engine.close()

    asyncio.run(play())
    return found


QUANTS = {"int4": 'kind = "int4"\ngroup = 32\n', "fp8": 'kind = "fp8"\nblock = 32\n'}
"""`[quant]` for models of width 64."""


def resumed(kind: str) -> bool:
    """Return whether a run that is killed four times ends with the ids, weights and metrics
    of an undisturbed one."""
    recipe = KILLED.replace("steps = 16", "steps = 6") + f"\n[quant]\n{QUANTS[kind]}"
    with tempfile.TemporaryDirectory() as name:
        return compare(Path(name), list(instants(4, 0.9, random.Random(0))), recipe).good


LENGTH = """\
import turnwright as tw

class Length(tw.Env):
    def reset(self, task, *, seed=None):
        return None

    def step(self, action):
        return tw.Step(None, reward=min(1.0, len(action.text) / 40), terminated=True)

    @staticmethod
    def tasks(split, n, seed):
        return [tw.Task(f"Say {split} {number}.") for number in range(n)]
"""
EXPERTS = """\
[[env]]
use = "length.py:Length"
[limits]
turns = 1
turn_tokens = 8
on_turn_length = "continue"
[rollout]
groups = 4
group_size = 8
sanity = "off"
[warmup]
demos = 0
[train]
steps = 20
lr = 1e-2
schedule = "constant"
routing_replay = "replay"
[eval]
tasks = 4
[quant]
"""


def mixture(directory: Path) -> Path:
    """Write a model of 8 experts per layer, of which 2 are taken, and its tokenizer."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    create_tiny_model(ModelConfig(heads=4), ["Say it at length."] * 20, directory)
    rows = load(directory)[0].get_input_embeddings().num_embeddings
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 64,
        "head_dim": 16,
        "vocab_size": rows,
    }
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    }
    config = Qwen3MoeConfig(**sizes, **heads, num_hidden_layers=2, tie_word_embeddings=True)
    Qwen3MoeForCausalLM(config).save_pretrained(directory)
    return directory


def experts(kind: str, folder: Path) -> dict[str, Any]:
    """Train a mixture of experts to write longer, its experts on their grids and those that the
    engine took replayed."""
    run, recipe = folder / "run", folder / "experts.toml"
    (folder / "length.py").write_text(LENGTH)
    recipe.write_text(EXPERTS + QUANTS[kind] + ("activations = false\n" if kind == "fp8" else ""))
    words = [
        "train",
        str(recipe),
        "--out",
        str(run),
        "--model.path",
        str(mixture(folder / "model")),
        "--display",
        "none",
    ]
    assert turnwright(words) == 0
    rows = [
        row for row in map(json.loads, (run / "metrics.jsonl").open()) if row["phase"] == "train"
    ]
    before, after = (load(path)[0].state_dict() for path in (folder / "model", checkpoint_of(run)))
    stacked = [
        name
        for name in quantized_names(load(checkpoint_of(run))[0], quant_of(checkpoint_of(run)))
        if "experts" in name
    ]
    return {
        "reward_first": sum(row["reward"] for row in rows[:5]) / 5,
        "reward_last": sum(row["reward"] for row in rows[-5:]) / 5,
        "mismatch_max": max(row["mismatch_max"] for row in rows if "mismatch_max" in row),
        "stacked": len(stacked),
        "stacked_changed": sum(not torch.equal(before[name], after[name]) for name in stacked),
    }


BILLION = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "head_dim": 128}
BILLION |= {"num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000}


def speed(
    sizes: dict[str, int], device: str, dtype: torch.dtype, size: int, tokens: int
) -> dict[str, Any]:
    """Measure tokens per second of the local engine (64 requests) and seconds of a step of a
    random model, by number format; also of transformers' `generate` of 64 rows, which draws
    without cuts as well."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    found: dict[str, Any] = {}
    for name, quant in {
        "bf16": QuantConfig(),
        "fp8": QuantConfig(kind="fp8", block=size),
        "int4": QuantConfig(kind="int4", group=size),
    }.items():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(Qwen3Config(**sizes)).to(device, dtype).eval()
        engine = LocalEngine(quantize_for_sampling(model, quant), context=4 * tokens)

        async def sample(engine: LocalEngine = engine, prompt: int = 16) -> list[tuple[int, ...]]:
            requests = [
                Request([n + 1] * prompt, tokens, frozenset(), seed=n, session=str(n))
                for n in range(64)
            ]
            replies = await asyncio.gather(*(engine.generate(one) for one in requests))
            return [tuple(reply.ids) for reply in replies]

        asyncio.run(sample())
        if name == "bf16":
            rows = torch.arange(1, 65, device=device)[:, None].expand(-1, 17)
            for _ in range(2):
                began = time.perf_counter()
                with torch.no_grad():
                    model.generate(
                        rows,
                        attention_mask=torch.ones_like(rows),
                        max_new_tokens=tokens,
                        min_new_tokens=tokens,
                        do_sample=True,
                        top_k=0,
                    )
                if device == "cuda":
                    torch.cuda.synchronize()
                found["tokens_per_s_generate"] = 64 * tokens / (time.perf_counter() - began)
        began = time.perf_counter()
        replies = asyncio.run(sample(prompt=17))
        found[f"tokens_per_s_{name}"] = sum(map(len, replies)) / (time.perf_counter() - began)
        if name == "int4":
            continue
        quantize_for_training(model, quant)
        trainer = Trainer(model, TrainConfig(max_mismatch=1e9, lr=1e-6))
        rows = []
        for number, ids in enumerate(replies):
            spans = [
                Span(Origin.PROMPT, [number + 1] * 17),
                Span(Origin.MODEL, list(ids), 0, 17, [-1.0] * len(ids), 0),
            ]
            key = EpisodeKey("train", 0, "t", number)
            rows.append(
                Trajectory(
                    Task("t", id="t"), key, spans, reward=float(number % 2), stop=StopReason.DONE
                )
            )
        steps = [
            trainer.step([Group(Task("t", id="t"), rows)], step=step, steps=3).metrics["train_s"]
            for step in range(3)
        ]
        found[f"step_s_{name}"] = min(steps)
        del model, engine, trainer
    return found


def exported(run: Path) -> dict[str, Any]:
    """Pack a run's last checkpoint and compare what is read back with the trainer's values."""
    source = checkpoint_of(run)
    quant, directory = quant_of(source), Path(tempfile.mkdtemp()) / "packed"
    write_packed(source, directory, quant)
    dtype = getattr(torch, json.loads((source / "config.json").read_text())["dtype"])
    model, _ = load(source, dtype=dtype)
    names, want = quantized_names(model, quant), quantize_for_sampling(model, quant).state_dict()
    got, _ = load(directory, dtype=dtype)
    ids = torch.arange(200)[None] * 7 % 200
    from safetensors.torch import load_file

    tensors = load_file(directory / "model.safetensors")
    stems = tuple(name.removesuffix("weight") for name in names)
    packed_bytes = sum(
        t.numel() * t.element_size() for name, t in tensors.items() if name.startswith(stems)
    )
    linears = sum(want[name].numel() for name in names)
    found: dict[str, Any] = {
        "bits_equal": want.keys() == got.state_dict().keys()
        and all(torch.equal(want[name], tensor) for name, tensor in got.state_dict().items()),
        "bytes_fp32": 4 * linears,
        "bytes_bf16": 2 * linears,
        "bytes_packed": packed_bytes,
        "linears_ratio": packed_bytes / (4 * linears),
        "transformers_bits_equal": None,
    }
    with torch.no_grad():
        logits = got(ids).logits
        # A file holds weights alone.
        quantize_for_training(model, replace(quant, activations=False))
        gap = model(ids).logits.log_softmax(-1) - logits.log_softmax(-1)
        found["logp_max_diff"] = float(gap.abs().max())
        # With a GPU transformers computes fp8 by kernels that it would download.
        if (
            find_spec("compressed_tensors")
            if quant.kind == "int4"
            else not torch.cuda.is_available()
        ):
            from transformers import AutoModelForCausalLM

            other = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
            found["transformers_bits_equal"] = torch.equal(other(ids).logits, logits)
    shutil.rmtree(directory.parent)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Train, export, kill, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=None, help="directory of the runs; finished ones are used again"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=tuple(RUNS),
        default=tuple(RUNS),
        help="runs; no others, and no more",
    )
    parser.add_argument("--gpu", action="store_true", help="also measure speed on a CUDA device")
    args = parser.parse_args(argv)
    out = args.out or Path(tempfile.mkdtemp(prefix="turnwright-low-precision-"))
    torch.set_num_threads(1)
    result: dict[str, Any] = {}

    def show(name: str, value: Any) -> None:
        result[name] = value
        print(name, value, flush=True)

    for name in args.only:
        show(name, trained(name, out))
    for name, key in (("int4_qat", "int4_export"), ("fp8", "fp8_export")):
        if name in args.only and "success" in result[name]:
            show(key, exported(out / name))
            if "fp32" in args.only:
                result[name]["cpu_s_ratio"] = round(
                    result[name]["cpu_s_steps"] / result["fp32"]["cpu_s_steps"], 2
                )
    if set(args.only) == set(RUNS):
        result["fp8"]["emulated"] = True
        result["int4_ptq"]["refused"] = result.pop("int4_ptq_guarded")["refused"]
        show("kl_grid", {name: kl_grid(out / name) for name in ("int4_qat", "int4_ptq")})
        show("stale", {name: stale(out / name) for name in ("int4_qat", "fp8")})
        show("resume_bits_equal", all([resumed(kind) for kind in QUANTS]))
        for kind in QUANTS:
            with tempfile.TemporaryDirectory() as name:
                show(f"experts_{kind}", experts(kind, Path(name)))
    if args.gpu and torch.cuda.is_available():
        show("gpu", speed(BILLION, "cuda", torch.bfloat16, 128, 128))
    else:
        result["gpu"] = None
        print("gpu: not run")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
