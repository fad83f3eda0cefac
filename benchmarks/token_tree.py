"""What a token tree saves: forward and backward passes of rows against those of their trie.

    python benchmarks/token_tree.py [--rounds 3] [--shape NAME ...] [--device cuda]

Shapes are groups on a shared prompt, turns, and turns whose thinking is stripped from later
contexts, with random ids, on a Qwen3 of 3.2 million numbers (width 256, 4 layers) in float32 with
one thread. Timed is CPU time from rows of ids to gradients, packing included, in alternating
rounds; the median counts. Rows are the faster of length-sorted passes of 8, padded, and one row a
pass. On CUDA it is a Qwen3 of 0.4 billion numbers (width 1024, 24 layers, vocabulary 32,000) in
bfloat16 and wall-clock time, the first round not counted. JSON has `pass`, the time of a pass over
32 tokens, and `rate`, multiplications by matrices per second in padded rows.

The ideal is the ratio of operations, without padding:

    operations = tokens * matrices
               + pairs * 2 * query heads * head size * layers
               + trained * width * vocabulary

`tokens` of all rows, or unique ones; `matrices`: numbers in the decoder's matrices; `pairs` of a
query and a key that it sees; `trained`: tokens that carry loss. Loss and gradient are compared as
well (invariant 5). Last line JSON: `worst_of_ideal` over shapes whose ideal is over 2,
`worst_speedup` over all, and `shapes`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from turnwright.training import LogitDistribution, build_prefix_tree
from turnwright.training.forward.forward import ForwardPass
from turnwright.training.forward.packing import BatchPacker, shared_prefixes, tree_micro
from turnwright.training.forward.passes import MicroBatch, pack_rows
from turnwright.training.forward.prefix_tree import split_passes
from turnwright.training.forward.training_rows import TrainingRow

SIZES = {"cpu": (369, 256, 4, 4, 2, 64), "cuda": (32_000, 1024, 24, 16, 8, 64)}
"""Vocabulary, width, layers, heads, key heads and size of a head."""
IDS = SIZES["cpu"][0]
MOST = 16_384
"""Unique tokens of a pass."""
SIDE = 8
"""Rows of a padded pass."""
BOUNDS = {"cpu": (1e-5, 5e-6), "cuda": (1e-2, 5e-2)}
"""Invariant 5: largest difference of the loss, and relative L2 of the gradient's; in float32,
and in bfloat16 on CUDA."""


class Shapes:
    """Rows of ids, drawn anew from the same seed."""

    def __init__(self) -> None:
        self.chance = random.Random(0)

    def ids(self, count: int) -> list[int]:
        return [self.chance.randrange(IDS) for _ in range(count)]

    def row(
        self, context: Sequence[int], parts: Sequence[tuple[int, bool]]
    ) -> tuple[list[int], list[int]]:
        """A row of ids, and the places that carry loss; `parts` are (ids,
        whether they were sampled)."""
        ids, places = list(context), []
        for count, sampled in parts:
            if sampled:
                places += range(len(ids), len(ids) + count)
            ids += self.ids(count)
        return ids, places

    def group(self, prompt: int, size: int, low: int, high: int) -> list[Any]:
        context = self.ids(prompt)
        return [self.row(context, [(self.chance.randint(low, high), True)]) for _ in range(size)]

    def turns(self, prompt: int, size: int, turns: int) -> list[Any]:
        context = self.ids(prompt)
        return [self.row(context, [(32, True), (64, False)] * turns) for _ in range(size)]

    def stripped(self, turns: int, context: Sequence[int]) -> list[Any]:
        """Each turn thinks (96), answers (24) and sees (64); later contexts
        keep the answer alone."""
        trunk, rows = list(context), []
        for _ in range(turns):
            ids, places = self.row(trunk, [(120, True)])
            rows.append((ids, places))
            trunk = trunk + ids[-24:] + self.ids(64)
        return rows

    def four(self, turns: int) -> list[Any]:
        context = self.ids(256)
        return [row for _ in range(4) for row in self.stripped(turns, context)]


SHAPES: dict[str, Callable[[Shapes], list[Any]]] = {
    "group: prompt 256, 8 x 32-96": lambda s: s.group(256, 8, 32, 96),
    "group: prompt 1024, 8 x 64-192": lambda s: s.group(1024, 8, 64, 192),
    "group: prompt 1024, 16 x 64-192": lambda s: s.group(1024, 16, 64, 192),
    "multi-turn group: 256 + 8 x 4 x (32 + 64)": lambda s: s.turns(256, 8, 4),
    "multi-turn group: 256 + 16 x 4 x (32 + 64)": lambda s: s.turns(256, 16, 4),
    "stripped thinking: 256, 6 x (96 + 24 + 64)": lambda s: s.stripped(6, s.ids(256)),
    "stripped thinking: 12 turns": lambda s: s.stripped(12, s.ids(256)),
    "4 stripped trajectories of one prompt": lambda s: s.four(6),
    "4 stripped trajectories, 12 turns": lambda s: s.four(12),
}


def made_rows(shape: Callable[[Shapes], list[Any]]) -> list[TrainingRow]:
    """The rows, cut behind their last target as a trainer cuts them."""
    return [
        TrainingRow(
            ids[: places[-1]],
            places,
            [ids[at] for at in places],
            [1.0] * len(places),
            [-1.0] * len(places),
            number,
        )
        for number, (ids, places) in enumerate(shape(Shapes()))
    ]


def qwen3(device: str) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    vocabulary, width, layers, heads, key_heads, head = SIZES[device]
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=head,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        initializer_range=0.06 if device == "cpu" else 0.02,
    )
    return (
        Qwen3ForCausalLM(config)
        .to(device, torch.float32 if device == "cpu" else torch.bfloat16)
        .eval()
    )


class Bench:
    """One model, and the two ways through it."""

    def __init__(self, device: str) -> None:
        self.device, self.model = device, qwen3(device)
        self.clock = time.process_time if device == "cpu" else self.synchronized
        self.forward = ForwardPass(self.model)
        self.layout = BatchPacker("auto", self.forward.decoder)
        assert not self.layout.why_not, self.layout.why_not
        decoder = self.model.model
        self.matrices = sum(p.numel() for p in decoder.layers.parameters() if p.ndim == 2)

    def synchronized(self) -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    def operations(self, tokens: int, pairs: int, trained: int) -> float:
        vocabulary, width, layers, heads, _, head = SIZES[self.device]
        return (
            tokens * self.matrices
            + pairs * 2 * heads * head * layers
            + trained * width * vocabulary
        )

    def ideal(self, rows: Sequence[TrainingRow]) -> tuple[float, int, int]:
        """The ratio of operations; tokens of rows, and unique ones."""
        shared, trained = shared_prefixes(rows), sum(len(row.places) for row in rows)
        tree = build_prefix_tree(shared, 0, len(rows)).tree
        tokens, pairs = sum(shared.lengths), sum(n * (n + 1) // 2 for n in shared.lengths)
        ratio = self.operations(tokens, pairs, trained) / self.operations(
            tree.size, tree.pairs, trained
        )
        return ratio, tokens, tree.size

    def padded(self, rows: Sequence[TrainingRow], side: int) -> list[MicroBatch]:
        order = sorted(range(len(rows)), key=lambda i: len(rows[i].ids))
        return pack_rows(
            rows, [order[i : i + side] for i in range(0, len(order), side)], self.device, None
        )

    def tree(self, rows: Sequence[TrainingRow]) -> list[MicroBatch]:
        assert self.layout.cost_model is not None
        shared = shared_prefixes(rows)
        ranges, _ = split_passes(shared, self.layout.cost_model, MOST)
        return [tree_micro(rows, shared, lo, hi, self.device, None) for lo, hi in ranges]

    def run(self, pack: Callable[[], list[MicroBatch]]) -> tuple[float, float]:
        """Seconds from rows to gradients, and the loss: tokens' logprobs,
        weighted with both signs."""
        self.model.zero_grad()
        began, total = self.clock(), 0.0
        micros = pack()
        count = sum(micro.tokens_m.numel() for micro in micros)
        for micro in micros:
            logp_m = self.forward.stats(micro, None, LogitDistribution(), entropy=False).logprobs_m
            weights_m = torch.sin(micro.tokens_m.double()).to(logp_m.dtype) / count
            loss = -(logp_m * weights_m).sum()
            loss.backward()
            total += loss.item()
        return self.clock() - began, total

    def gradient(self) -> Tensor:
        return torch.cat(
            [p.grad.flatten().double() for p in self.model.parameters() if p.grad is not None]
        )

    def measure(self, shape: Callable[[Shapes], list[Any]], rounds: int) -> dict[str, Any]:
        rows = made_rows(shape)
        ways: dict[str, Callable[[], list[MicroBatch]]] = {
            "padded": lambda: self.padded(rows, SIDE),
            "loop": lambda: self.padded(rows, 1),
            "tree": lambda: self.tree(rows),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        found: dict[str, tuple[float, Tensor]] = {}
        for number in range(rounds if self.device == "cpu" else rounds + 1):
            for name, pack in ways.items():
                seconds, loss = self.run(pack)
                if number or self.device == "cpu":
                    times[name].append(seconds)
                if not number:
                    found[name] = (loss, self.gradient())
        (row_loss, row_gradient), (tree_loss, tree_gradient) = found["loop"], found["tree"]
        middle = {name: statistics.median(values) for name, values in times.items()}
        ideal, tokens, unique = self.ideal(rows)
        speedup = min(middle["padded"], middle["loop"]) / middle["tree"]
        self.layout.start_step()
        self.layout.pack(rows, MOST, self.device, None)
        return {
            "tokens": tokens,
            "unique": unique,
            "seconds": {name: round(value, 4) for name, value in middle.items()},
            "rate": self.operations(tokens, 0, sum(len(row.places) for row in rows))
            / middle["padded"],
            "ideal": round(ideal, 3),
            "speedup": round(speedup, 3),
            "of_ideal": round(speedup / ideal, 3),
            "chosen": "tree" if self.layout.choices[0].tree else "rows",
            "estimated": round(self.layout.choices[0].gain, 2),
            "loss_differs": abs(row_loss - tree_loss),
            "gradient_differs": float((row_gradient - tree_gradient).norm() / row_gradient.norm()),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--shape", nargs="*", default=list(SHAPES), choices=list(SHAPES), metavar="NAME"
    )
    parser.add_argument("--device", default="cpu", choices=list(SIZES))
    given = parser.parse_args()
    torch.set_num_threads(1)
    bench, shapes, (largest, relative) = Bench(given.device), {}, BOUNDS[given.device]
    # The first pass is always slow.
    bench.run(lambda: bench.tree(made_rows(SHAPES["group: prompt 256, 8 x 32-96"])))
    short = made_rows(lambda shapes: shapes.group(16, 1, 16, 16))
    once = min(bench.run(lambda: bench.padded(short, 1))[0] for _ in range(5))
    print(
        f"{'shape':44s} unique/tokens  ideal  speedup  of ideal  chosen (estimated)  padded, loop, "
        "tree s"
    )
    for name in given.shape:
        row = shapes[name] = bench.measure(SHAPES[name], given.rounds)
        seconds = ", ".join(f"{value:.2f}" for value in row["seconds"].values())
        print(
            f"{name:44s} {row['unique']:5d}/{row['tokens']:5d} {row['ideal']:7.2f} "
            f"{row['speedup']:7.2f} {row['of_ideal']:8.2f}   {row['chosen']} "
            f"({row['estimated']:.2f})         {seconds}",
            flush=True,
        )
        assert row["loss_differs"] < largest, (
            f"{name}: the loss differs by {row['loss_differs']:.2g}"
        )
        assert row["gradient_differs"] < relative, (
            f"{name}: the gradient differs by {row['gradient_differs']:.2g}"
        )
    large = [row["of_ideal"] for row in shapes.values() if row["ideal"] > 2]
    worst = {
        "worst_of_ideal": min(large, default=None),
        "worst_speedup": min(row["speedup"] for row in shapes.values()),
    }
    print(json.dumps(worst | {"pass": once, "shapes": shapes}))


if __name__ == "__main__":
    main()
