"""Part `roofline` of `real_model.py`: what the processor allows.

Measured in the run, on one thread: the speed of products at the engine's shapes (64 rows by each
matrix of each layer, one layer after another, so that every pass streams all weights; the head
apart); the speed of the three products of a linear layer in training (forward, gradient of the
input, gradient of the weight; 2,048 rows by a layer's matrices, 512 rows by the head); and the
memory's bandwidth (a sum over 1 GiB). Weights in bfloat16 are also tried in the layout that oneDNN
prefers; the faster counts. Each is the fastest of three repeats.

Allowed for the engine at 64 calls: ids / max(products, memory), where

    products = 2 * layer weights * rows / speed(layers) + 2 * head weights * ids / speed(head)
    memory   = (ids / 64 * bytes of all weights + bytes of keys and values read) / bandwidth

Rows are the positions that must be computed: prompts once a group, replies, observations but for
the last. Each sampled id reads the keys and values of its context once, in the type in which the
engine keeps them. Attention, sampling and all else are free in this bound.

Needed by the trainer, of which the share is what is needed by what was measured:

    seconds of a step = 6 * layer weights * positions / speed(layers)
                        + 6 * head weights * predicting positions / speed(head)

Positions are those of the passes as the trainer packed them, shared prefixes once; those before an
id that carries loss predict.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from real_model_common import Kind, timed
from real_model_engine import Episode, sampled_ids
from torch.nn.functional import linear

ENGINE_ROWS = 64
TRAINER_ROWS, TRAINER_HEAD_ROWS = 2048, 512
BANDWIDTH_VALUES = 2**28  # 1 GiB of float32, more than any cache
BYTES = {"float32": 4, "mixed": 2}
DTYPES = {"float32": torch.float32, "mixed": torch.bfloat16}


@dataclass(frozen=True)
class Shape:
    """Matrices of the model, [outputs, inputs]; those with the same input are one."""

    layers: int
    matrices: tuple[tuple[int, int], ...]
    head: tuple[int, int]
    kv_values: int
    """Values of keys and values of one position, all layers."""

    @classmethod
    def read(cls, directory: Path) -> Shape:
        """Read the shape of a Llama from its configuration."""
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(directory)
        hidden, inner, width = config.hidden_size, config.intermediate_size, config.head_dim
        queries, keys = config.num_attention_heads * width, config.num_key_value_heads * width
        matrices = (
            (queries + 2 * keys, hidden),
            (hidden, queries),
            (2 * inner, hidden),
            (hidden, inner),
        )
        layers = config.num_hidden_layers
        return cls(layers, matrices, (config.vocab_size, hidden), 2 * keys * layers)

    @property
    def layer_weights(self) -> int:
        """Weights of all layers."""
        return self.layers * sum(outputs * inputs for outputs, inputs in self.matrices)

    @property
    def head_weights(self) -> int:
        """Weights of the head."""
        return self.head[0] * self.head[1]


@dataclass(frozen=True)
class Speeds:
    """Floating-point operations in a CPU second, by where they are needed."""

    engine_layers: float
    engine_head: float
    trainer_layers: float
    trainer_head: float


def best_time(work: Callable[[], object], repeats: int = 3) -> float:
    """Return the CPU seconds of the fastest of some repeats, after one that does not count."""
    work()
    return min(timed(work)[1] for _ in range(repeats))


def speed_of_passes(shapes: Sequence[tuple[int, int]], rows: int, dtype: torch.dtype) -> float:
    """Return the speed of one pass of rows over matrices, each with weights of its own."""
    inputs = {width: torch.randn(rows, width, dtype=dtype) for _, width in shapes}
    weights = [torch.randn(shape, dtype=dtype) for shape in shapes]
    operations = 2 * rows * sum(outputs * width for outputs, width in shapes)

    def plain() -> None:
        for weight in weights:
            linear(inputs[weight.shape[1]], weight)

    seconds = best_time(plain)
    if dtype == torch.bfloat16:
        packed = [torch.ops.mkldnn._reorder_linear_weight(weight, rows) for weight in weights]
        pairs = [(inputs[width], weight) for (_, width), weight in zip(shapes, packed, strict=True)]

        def reordered() -> None:
            for rows_in, weight in pairs:
                torch.ops.mkldnn._linear_pointwise(rows_in, weight, None, "none", [], "")

        seconds = min(seconds, best_time(reordered))
    return operations / seconds


def speed_of_training(shapes: Sequence[tuple[int, int]], rows: int, dtype: torch.dtype) -> float:
    """Return the speed of the three products that a linear layer takes in training."""
    seconds, operations = 0.0, 0
    for outputs, width in shapes:
        inputs, weight = (
            torch.randn(rows, width, dtype=dtype),
            torch.randn(outputs, width, dtype=dtype),
        )
        slopes = torch.randn(rows, outputs, dtype=dtype)
        seconds += best_time(partial(linear, inputs, weight))
        seconds += best_time(partial(torch.mm, slopes, weight))
        seconds += best_time(partial(torch.mm, slopes.t(), inputs))
        operations += 6 * rows * outputs * width
    return operations / seconds


def measure_speeds(shape: Shape, kind: Kind) -> Speeds:
    """Measure the speed of products of a kind."""
    dtype = DTYPES[kind]
    return Speeds(
        engine_layers=speed_of_passes(shape.matrices * shape.layers, ENGINE_ROWS, dtype),
        engine_head=speed_of_passes([shape.head], ENGINE_ROWS, dtype),
        trainer_layers=speed_of_training(shape.matrices, TRAINER_ROWS, dtype),
        trainer_head=speed_of_training([shape.head], TRAINER_HEAD_ROWS, dtype),
    )


def measure_bandwidth() -> float:
    """Return the bytes that one thread reads in a CPU second."""
    values = torch.ones(BANDWIDTH_VALUES)
    return values.nbytes / best_time(values.sum)


class LimitsPart:
    """The limits of each kind, measured once a round."""

    def __init__(self, directory: Path, kinds: Sequence[Kind]) -> None:
        self.shape = Shape.read(directory)
        self.kinds = kinds
        self.measured: dict[Kind, list[Speeds]] = {kind: [] for kind in kinds}
        self.bandwidths: list[float] = []

    @torch.inference_mode()
    def play_round(self, number: int) -> None:
        """Measure all limits once."""
        self.bandwidths.append(measure_bandwidth())
        print(f"round {number + 1}: memory {self.bandwidths[-1] / 1e9:.1f} GB/s", flush=True)
        for kind in self.kinds:
            speeds = measure_speeds(self.shape, kind)
            self.measured[kind].append(speeds)
            engine = f"{speeds.engine_layers / 1e9:.0f} and {speeds.engine_head / 1e9:.0f}"
            trainer = f"{speeds.trainer_layers / 1e9:.0f} and {speeds.trainer_head / 1e9:.0f}"
            text = f"engine {engine}, trainer {trainer} GFLOPS in layers and head"
            print(f"round {number + 1}: products {kind}: {text}", flush=True)

    def speed(self, kind: Kind, name: str) -> float:
        """Return the median of a speed."""
        return statistics.median(getattr(speeds, name) for speeds in self.measured[kind])

    def engine_ids_allowed(self, kind: Kind, episodes: Sequence[Episode]) -> float:
        """Return the ids a CPU second that the lower of both bounds allows for some work."""
        ids, context_positions = sampled_ids(episodes), 0
        prompts = {episode.group: len(episode.prompt) for episode in episodes}
        rows = sum(prompts.values())
        for episode in episodes:
            length = len(episode.prompt)
            for reply, observation in zip(episode.lengths, episode.observations, strict=True):
                context_positions += sum(range(length, length + reply))
                length += reply + len(observation)
            rows += length - len(episode.prompt) - len(episode.observations[-1])

        shape = self.shape
        products_s = 2 * shape.layer_weights * rows / self.speed(kind, "engine_layers")
        products_s += 2 * shape.head_weights * ids / self.speed(kind, "engine_head")
        read = ids / ENGINE_ROWS * (shape.layer_weights + shape.head_weights) * BYTES[kind]
        read += context_positions * shape.kv_values * BYTES[kind]
        memory_s = read / statistics.median(self.bandwidths)
        text = f"{ids / products_s:.0f} ids a CPU second at 64 calls, memory {ids / memory_s:.0f}"
        print(f"engine {kind}: products allow {text}")
        return ids / max(products_s, memory_s)

    def trainer_seconds_needed(self, kind: Kind, positions: int, predicting: int) -> float:
        """Return the CPU seconds that the products of a step take at the least."""
        layers_s = 6 * self.shape.layer_weights * positions / self.speed(kind, "trainer_layers")
        head_s = 6 * self.shape.head_weights * predicting / self.speed(kind, "trainer_head")
        print(f"trainer {kind}: products of a step take {layers_s + head_s:.1f} CPU seconds")
        return layers_s + head_s
