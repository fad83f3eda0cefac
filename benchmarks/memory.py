"""Peak memory of logprobs, entropy and gradients, in chunks of targets and all at once; and of a
step against its estimate.

Each case runs in a process of its own, whose highest resident size (on a GPU: the most that torch
had allocated) is read before and after. Steps are estimated before the first of them, as in a run,
and measured over three.

    python benchmarks/memory.py                 # a vocabulary of 151,936, 4096 targets of width 1024, in float32
    python benchmarks/memory.py --targets 8192 --device cuda
    python benchmarks/memory.py --only steps --case "a LoRA adapter"

The last line is JSON: bytes at the peak beyond hidden states, weights and the gradients of
both, seconds of CPU, for the steps the estimate over what was measured, and the worst of
these ratios either way.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from turnwright.config import LoraConfig, TrainConfig
from turnwright.training import LogitDistribution, Trainer, add_lora
from turnwright.training.forward.forward import OutputHead, target_stats
from turnwright.training.trainer.memory import GIB, estimate
from turnwright.types import EpisodeKey, Group, Origin, Span, StopReason, Task, Trajectory

DEEP = {"hidden_size": 384, "num_hidden_layers": 12, "vocab_size": 4096}
WIDE = {"hidden_size": 256, "num_hidden_layers": 4, "vocab_size": 151_936}
REAL = {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "vocab_size": 49_152,
    "tie_word_embeddings": True,
}
REAL |= {"num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536}
WIDER = {"hidden_size": 640, "num_hidden_layers": 8, "vocab_size": 32_000}


@dataclass(frozen=True)
class StepCase:
    """A model and settings whose step is estimated and measured."""

    sizes: dict[str, Any]
    train: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    lora: bool = False
    attention: str = "sdpa"
    common: int = 8
    """Ids of the prompt that all episodes share."""
    length: int = 512


STEPS = {
    "tiny": StepCase({"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 512}),
    "deep": StepCase(DEEP),
    "bfloat16": StepCase(DEEP, dtype="bfloat16"),
    "a LoRA adapter": StepCase(DEEP, lora=True),
    "trees": StepCase(DEEP, {"batching": "tree"}, common=256),
    "gradient checkpointing": StepCase(DEEP, {"gradient_checkpointing": True}),
    "a reference policy": StepCase(DEEP, {"kl": 0.1}),
    "attention that keeps its weights": StepCase(DEEP, attention="eager"),
    "wide head": StepCase(WIDE),
    "wide head, bfloat16": StepCase(WIDE, dtype="bfloat16"),
    "135M parameters": StepCase(REAL, length=256),
    "135M parameters, bfloat16, LoRA": StepCase(REAL, dtype="bfloat16", lora=True, length=256),
    # Not looked at when the constants were chosen.
    "eight wider layers, LoRA": StepCase(WIDER, lora=True, length=384),
    "eight wider layers, bfloat16, LoRA": StepCase(WIDER, dtype="bfloat16", lora=True, length=384),
    "eight wider layers, checkpointing": StepCase(
        WIDER, {"gradient_checkpointing": True}, length=384
    ),
    "eight wider layers, trees": StepCase(WIDER, {"batching": "tree"}, common=128, length=384),
}


def peak(device: str) -> int:
    """The most bytes that this process has had."""
    if device == "cuda":
        return int(torch.cuda.max_memory_allocated())
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def forget_peak(device: str) -> None:
    """Count the peak from here."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def head(args: argparse.Namespace) -> dict[str, float]:
    """Forward and backward of the head."""
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    linear = nn.Linear(args.width, args.vocabulary, bias=False, device=args.device, dtype=dtype)
    hidden_md = torch.randn(
        args.targets, args.width, device=args.device, dtype=dtype
    ).requires_grad_()
    targets_m = torch.randint(args.vocabulary, (args.targets,), device=args.device)
    linear.weight.grad, hidden_md.grad = (
        torch.zeros_like(linear.weight),
        torch.zeros_like(hidden_md),
    )
    before, began, clock = peak(args.device), time.process_time(), time.perf_counter()
    most = None if args.case == "chunks" else 1 << 62
    found = target_stats(
        hidden_md,
        OutputHead(linear),
        targets_m,
        LogitDistribution(1.0, {7}),
        entropy=True,
        max_logits=most,
    )
    found.logprobs_m.sum().backward()
    mean = float(found.logprobs_m.detach().mean())
    spent = {"cpu_s": time.process_time() - began, "wall_s": time.perf_counter() - clock}
    return {
        "peak": peak(args.device) - before,
        "logprob": mean,
        "gradient": float(linear.weight.grad.norm()),
    } | spent


def step(args: argparse.Namespace) -> dict[str, float]:
    """Training steps of a model with random weights, and what was expected of them."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    case = STEPS[args.case]
    common = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    config = Qwen3Config(
        **common | {"intermediate_size": 3 * case.sizes["hidden_size"]} | case.sizes
    )
    config._attn_implementation = case.attention
    small = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    settings = {"micro_tokens": 2048, "max_mismatch": 1e9, "max_mismatch_kl": 1e9}
    # What torch loads at its first step.
    warm = Trainer(Qwen3ForCausalLM(small), TrainConfig(**settings))
    warm.step([_group(64, 16, 8)], step=0, steps=1)
    model = Qwen3ForCausalLM(config).to(args.device, getattr(torch, case.dtype))
    if case.lora:
        add_lora(model, LoraConfig(rank=16), seed=0)
    trainer = Trainer(model, TrainConfig(**settings | case.train))

    began = time.process_time()
    expected = estimate(trainer, longest=case.length, sequences=8)
    spent = time.process_time() - began
    forget_peak(args.device)
    if trainer.keeps_reference:
        trainer.reference()
    groups = [_group(case.sizes["vocab_size"], case.length, case.common)]
    for number in range(3):
        trainer.step(groups, step=number, steps=3)
    return {"peak": peak(args.device), "estimate": expected.total, "cpu_s": spent}


def _group(vocabulary: int, length: int, common: int) -> Group:
    """Eight episodes of this length, of which all ids after the common ones are sampled."""
    torch.manual_seed(1)
    task = Task("t", id="t")
    prompt = torch.randint(vocabulary - 1, (common,)).tolist()
    rows = []
    for sample in range(8):
        ids = torch.randint(vocabulary - 1, (length - common,)).tolist()
        reply = Span(Origin.MODEL, ids, 0, common, [-1.0] * len(ids), 0)
        spans = [Span(Origin.PROMPT, prompt, -1, 0), reply]
        key = EpisodeKey("train", 0, "t", sample)
        rows.append(Trajectory(task, key, spans, reward=float(sample % 2), stop=StopReason.DONE))
    return Group(task, rows)


def child(kind: str, case: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run one case in a process of its own."""
    command = [
        sys.executable,
        __file__,
        "--kind",
        kind,
        "--case",
        case,
        "--targets",
        str(args.targets),
    ]
    command += [
        "--width",
        str(args.width),
        "--vocabulary",
        str(args.vocabulary),
        "--device",
        args.device,
        "--dtype",
        args.dtype,
    ]
    done = subprocess.run(
        [*command, "--threads", str(args.threads)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{case}: {done.stderr.strip()}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", type=int, default=4096)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kind", choices=["head", "step"], help=argparse.SUPPRESS)
    parser.add_argument(
        "--only", choices=["heads", "steps"], help="one of the two parts; both by default"
    )
    parser.add_argument("--case", help="one of the steps' cases; all by default")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.kind is not None:
        print(json.dumps((head if args.kind == "head" else step)(args)))
        return
    found: dict[str, Any] = {}
    if args.only != "steps":
        found["head"] = measure_heads(args)
    if args.only != "heads":
        found |= measure_steps(args)
    print(json.dumps(found))


def measure_heads(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the head in chunks and all at once."""
    heads = {case: child("head", case, args) for case in ("chunks", "at once")}
    print(
        f"logprobs of {args.targets} targets over {args.vocabulary} ids, width {args.width}, "
        f"{args.dtype}, {args.device}"
    )
    for case, row in heads.items():
        print(f"  {case:8} {row['peak'] / GIB:6.2f} GiB at the peak, {row['cpu_s']:.1f} s of CPU")
    return heads


def measure_steps(args: argparse.Namespace) -> dict[str, Any]:
    """Compare the estimates of steps with their peaks."""
    ratios: dict[str, float] = {}
    print("a step, the process included:")
    for case in STEPS if args.case is None else [args.case]:
        row = child("step", case, args)
        ratios[case] = row["estimate"] / row["peak"]
        print(
            f"  {case:34} {row['peak'] / GIB:5.2f} GiB, estimated {row['estimate'] / GIB:5.2f} GiB "
            f"({ratios[case]:.2f}) in {row['cpu_s']:.1f} s of CPU",
            flush=True,
        )
    worst = max(max(ratio, 1 / ratio) for ratio in ratios.values())
    return {"estimate_over_measured": ratios, "worst_ratio": worst}


if __name__ == "__main__":
    main()
