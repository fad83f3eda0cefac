"""Peak memory of logprobs, entropy and gradients, in chunks of targets and all at once; and of a step against its estimate.

Each case runs in a process of its own, whose highest resident size (on a GPU: the most that torch had allocated) is read before
and after.

    python benchmarks/memory.py                 # a vocabulary of 151,936, 4096 targets of width 1024, in float32
    python benchmarks/memory.py --targets 8192 --device cuda

The last line is JSON: bytes at the peak beyond hidden states, weights and the gradients of both, seconds of CPU, and for the
steps the estimate over what was measured.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

import torch
from torch import nn

from turnwise.config import TrainConfig
from turnwise.training import LogitDistribution, Trainer
from turnwise.training.forward.forward import OutputHead, target_stats
from turnwise.training.trainer.memory import GIB, estimate
from turnwise.types import EpisodeKey, Group, Origin, Span, StopReason, Task, Trajectory

STEPS = {
    "wide head": {"hidden_size": 256, "num_hidden_layers": 4, "vocab_size": 151_936},
    "deep": {"hidden_size": 384, "num_hidden_layers": 12, "vocab_size": 4096},
}


def peak(device: str) -> int:
    """The most bytes that this process has had."""
    if device == "cuda":
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def head(args: argparse.Namespace) -> dict[str, float]:
    """Forward and backward of the head."""
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    linear = nn.Linear(args.width, args.vocabulary, bias=False, device=args.device, dtype=dtype)
    hidden_md = torch.randn(args.targets, args.width, device=args.device, dtype=dtype).requires_grad_()
    targets_m = torch.randint(args.vocabulary, (args.targets,), device=args.device)
    linear.weight.grad, hidden_md.grad = torch.zeros_like(linear.weight), torch.zeros_like(hidden_md)
    before, began, clock = peak(args.device), time.process_time(), time.perf_counter()
    most = None if args.case == "chunks" else 1 << 62
    found = target_stats(hidden_md, OutputHead(linear), targets_m, LogitDistribution(1.0, {7}), entropy=True, max_logits=most)
    found.logprobs_m.sum().backward()
    mean = float(found.logprobs_m.detach().mean())
    spent = {"cpu_s": time.process_time() - began, "wall_s": time.perf_counter() - clock}
    return {"peak": peak(args.device) - before, "logprob": mean, "gradient": float(linear.weight.grad.norm())} | spent


def step(args: argparse.Namespace) -> dict[str, float]:
    """A training step of a model with random weights, and what was expected of it."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = STEPS[args.case]
    config = Qwen3Config(
        **sizes, intermediate_size=3 * sizes["hidden_size"], num_attention_heads=4, num_key_value_heads=2, head_dim=64
    )
    small = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1
    )
    warm = Trainer(Qwen3ForCausalLM(small), TrainConfig(max_mismatch=1e9))  # what torch loads at its first step
    warm.step([_group(64, 16)], step=0, steps=1)
    before = peak(args.device)
    model = Qwen3ForCausalLM(config).to(args.device)
    trainer = Trainer(model, TrainConfig(micro_tokens=2048, max_mismatch=1e9, max_mismatch_kl=1e9))
    expected = estimate(trainer, longest=512, engine=False)
    groups = [_group(4096, 512)]
    trainer.step(groups, step=0, steps=2)
    trainer.step(groups, step=1, steps=2)
    return {"peak": peak(args.device) - before, "estimate": expected.total}


def _group(vocabulary: int, length: int) -> Group:
    """Eight episodes of this length, all but eight ids of them sampled."""
    torch.manual_seed(1)
    task = Task("t", id="t")
    rows = []
    for sample in range(8):
        ids = torch.randint(vocabulary - 1, (length,)).tolist()
        spans = [Span(Origin.PROMPT, ids[:8], -1, 0), Span(Origin.MODEL, ids[8:], 0, 8, [-1.0] * (length - 8), 0)]
        key = EpisodeKey("train", 0, "t", sample)
        rows.append(Trajectory(task, key, spans, reward=float(sample % 2), stop=StopReason.DONE))
    return Group(task, rows)


def child(kind: str, case: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run one case in a process of its own."""
    command = [sys.executable, __file__, "--kind", kind, "--case", case, "--targets", str(args.targets)]
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
    done = subprocess.run([*command, "--threads", str(args.threads)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{case}: {done.stderr.strip()}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", type=int, default=4096)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kind", choices=["head", "step"], help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.kind is not None:
        print(json.dumps((head if args.kind == "head" else step)(args)))
        return
    heads = {case: child("head", case, args) for case in ("chunks", "at once")}
    print(f"logprobs of {args.targets} targets over {args.vocabulary} ids, width {args.width}, {args.dtype}, {args.device}")
    for case, row in heads.items():
        print(f"  {case:8} {row['peak'] / GIB:6.2f} GiB at the peak, {row['cpu_s']:.1f} s of CPU")
    steps = {case: child("step", case, args) for case in STEPS}
    for case, row in steps.items():
        print(f"  a step, {case}: {row['peak'] / GIB:.2f} GiB, estimated {row['estimate'] / GIB:.2f} GiB")
    ratios = {case: row["estimate"] / row["peak"] for case, row in steps.items()}
    print(json.dumps({"head": heads, "estimate_over_measured": ratios}))


if __name__ == "__main__":
    main()
