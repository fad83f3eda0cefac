"""Choose and build prefix-tree batches.

What a layout of rows is estimated to cost, so that a tree is built only where it saves something. No tensors here.

A pass, forward and backward, is estimated in multiplications of one forward pass of the decoder:

    rows = sum over passes of  B * T * (matrices + around) + layers * (B * T (T + 1) / 2 * pair + PASS)
    tree = sum over passes of  U * (matrices + around)     + layers * (pairs * pair + calls * CALL + PASS)

B rows padded to T; U tokens of the trie, `pairs` of a query and a key in it, `calls` chains and hangs. `matrices` are the
numbers in the decoder's matrices that one token meets (of experts, the share that it is routed to), `around` what its norms and
activations cost, ``AROUND * layers * width``; `pair` is ``PAIR * 2 * query heads * head size``. The head is left out: it costs
each layout the same. A tree is chosen where ``tree * MARGIN <= rows``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from turnwise.errors import ConfigError
from turnwise.renderers.vision import VisionProcessor
from turnwise.training.forward.batch import (
    MicroBatch,
    TrainingRow,
    pack_rows,
    placeholder_positions,
    positions_of,
    row_offsets,
    row_passes,
)
from turnwise.training.forward.prefix_tree import PackedPrefixTree, SortedRows, build_prefix_tree
from turnwise.training.forward.routing_replay import keys_with_routes, pack_routes
from turnwise.training.forward.tree_attention import install_tree_attention
from turnwise.types import Media
from turnwise.types.media import ids_with_media_keys

PASS = {"cpu": 3.5e7, "cuda": 3e10}
"""What a forward pass costs beside its tokens, for each layer. On the CPU of docs/benchmarks.md 1.6 to 2.3 ms, where a
multiplication takes 0.05 ns of a pass forward and backward; that of CUDA is 1 ms at 3e13 a second, and was not measured."""
CALL = 1.8e6
"""What one more call of attention costs, for each layer: 90 us there. On CUDA the whole tree is one call."""
AROUND = 1800
"""What norms, rotary positions and activations of a token cost, for each number of the width and layer: 0.09 us there."""
PAIR = 2.0
"""What a multiplication in attention costs against one in a matrix."""
MARGIN = 1.1
"""What a tree must save to be chosen: estimates are not better than that."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """What a token, a pair of query and key, a call and a pass cost."""

    token: float
    pair: float
    call: float
    once: float

    @classmethod
    def of(cls, decoder: nn.Module) -> CostModel:
        """Of a decoder of transformers, where it is."""
        device = next(decoder.parameters()).device.type
        config: Any = decoder.config
        layers, width = int(config.num_hidden_layers), int(config.hidden_size)
        heads = int(config.num_attention_heads)
        head = int(getattr(config, "head_dim", None) or width // heads)
        routed = int(getattr(config, "num_experts_per_tok", None) or 1)
        matrices = 0.0
        for name, parameter in decoder.named_parameters():
            if parameter.ndim == 2 and "embed" not in name:
                matrices += parameter.numel()
            elif parameter.ndim == 3:  # experts
                matrices += parameter.numel() * min(1.0, routed / parameter.shape[0])
        return cls(
            token=matrices + AROUND * layers * width,
            pair=PAIR * 2 * heads * head * layers,
            call=CALL * layers if device == "cpu" else 0.0,
            once=PASS.get(device, PASS["cuda"]) * layers,
        )

    def rows(self, shapes: Sequence[tuple[int, int]]) -> float:
        """Of passes of (B, T) padded rows."""
        tokens = sum(b * t for b, t in shapes)
        pairs = sum(b * t * (t + 1) / 2 for b, t in shapes)
        return tokens * self.token + pairs * self.pair + len(shapes) * self.once

    def tree(self, tokens: int, pairs: float, calls: int) -> float:
        """Of one pass of a trie."""
        return tokens * self.token + pairs * self.pair + calls * self.call + self.once


def shared_prefixes(rows: Sequence[TrainingRow]) -> SortedRows:
    """What rows share; at an image's placeholders they share what shows the same pixels, not what has the same id, and where
    experts are replayed what took the same ones."""
    return SortedRows.of(
        keys_with_routes(
            [ids_with_media_keys(row.ids, row.media) if row.media else row.ids for row in rows], [r.routes for r in rows]
        )
    )


def split_passes(shared: SortedRows, price: CostModel, micro_tokens: int) -> tuple[list[tuple[int, int]], float]:
    """Cut sorted rows into passes that together cost least, each of at most so many unique tokens; one row may be longer.

    A cut is paid for by what its sides share, which both then compute: so cuts fall between tasks first, then where branches
    are short. The least sum over all cuts is found by dynamic programming over the rows' order.

    Returns:
        Ranges of sorted rows, and their cost.
    """
    count = len(shared.lengths)
    # Of a row behind others in its pass: tokens and pairs that it adds, and calls (its chain, and the hang that it opens).
    pairs = [length * (length + 1) / 2 for length in shared.lengths]
    added = [
        ((length - common) * price.token + (own - common * (common + 1) / 2) * price.pair + price.call * (2 if common else 1))
        for length, common, own in zip(shared.lengths, shared.common, pairs, strict=True)
    ]
    whole = [price.tree(length, own, 1) for length, own in zip(shared.lengths, pairs, strict=True)]
    best, where = [0.0], [0]
    for end in range(1, count + 1):
        # Walk back over where the last pass may begin.
        least, begin, tokens, behind = float("inf"), end - 1, 0, 0.0
        for first in range(end - 1, -1, -1):
            if first < end - 1 and tokens + shared.lengths[first] > micro_tokens:
                break
            here = best[first] + whole[first] + behind
            if here < least:
                least, begin = here, first
            tokens += shared.lengths[first] - shared.common[first]
            behind += added[first]
        best.append(least)
        where.append(begin)
    ranges: list[tuple[int, int]] = []
    end = count
    while end:
        ranges.append((where[end], end))
        end = where[end]
    return ranges[::-1], best[-1]


def tree_micro(
    rows: Sequence[TrainingRow],
    first_token: Sequence[int],
    shared: SortedRows,
    lo: int,
    hi: int,
    device: torch.device | str,
    eyes: VisionProcessor | None,
) -> MicroBatch:
    """One pass over the trie of the sorted rows from `lo` to `hi`.

    Args:
        first_token: of each row, where its tokens begin among the batch's.
    """
    made = build_prefix_tree(shared, lo, hi)
    ids_t = np.empty(made.tree.size, dtype=np.int64)
    for piece in made.pieces:
        ids_t[piece.start : piece.start + piece.end - piece.begin] = rows[piece.row].ids[piece.begin : piece.end]
    chosen = sorted(shared.order[lo:hi])
    before = np.concatenate([made.places[i][np.asarray(rows[i].places) - 1] for i in chosen])
    tokens = np.concatenate([np.arange(first_token[i], first_token[i] + len(rows[i].places)) for i in chosen])

    def long(numbers: object) -> Tensor:
        return torch.as_tensor(numbers, dtype=torch.long).to(device)

    return MicroBatch(
        ids_bt=long(ids_t[None]),
        positions=_positions(rows, made, eyes).to(device),
        before_m=long(before),
        targets_m=long([target for i in chosen for target in rows[i].targets]),
        tokens_m=long(tokens),
        media=_media(rows, chosen, made, eyes),
        tree=made.tree,
        routes=pack_routes(((rows[i].routes, made.places[i]) for i in chosen), made.tree.size, device),
    )


def _positions(rows: Sequence[TrainingRow], made: PackedPrefixTree, eyes: VisionProcessor | None) -> Tensor:
    """Those of a token's path: (1, T), or (3, 1, T) where some row shows images to a model that counts in three."""
    size = made.tree.size
    plain_t = np.empty(size, dtype=np.int64)
    for piece in made.pieces:
        plain_t[piece.start : piece.start + piece.end - piece.begin] = np.arange(piece.begin, piece.end)
    turned = {i: found for i in made.places if (found := positions_of(rows[i], eyes)) is not None}
    if not turned:
        return torch.from_numpy(plain_t[None])
    positions = np.broadcast_to(plain_t, (3, 1, size)).copy()
    for i, found in turned.items():
        positions[:, 0, made.places[i]] = found
    return torch.from_numpy(positions)


def _media(
    rows: Sequence[TrainingRow], chosen: Sequence[int], made: PackedPrefixTree, eyes: VisionProcessor | None
) -> tuple[tuple[Media, tuple[int, ...]], ...]:
    """Each image or video once for each place where it stands in the trie, in the order of the layout."""
    found: dict[int, tuple[Media, tuple[int, ...]]] = {}
    for i in chosen:
        for block, at in placeholder_positions(rows[i], eyes):
            places = tuple(made.places[i][at].tolist())
            if places:
                found[places[0]] = (block.media, places)
    return tuple(found[first] for first in sorted(found))


Batching = Literal["auto", "rows", "tree"]


@dataclass(frozen=True, slots=True)
class BatchingChoice:
    """What was chosen for one batch, and why."""

    tree: bool
    tokens: int
    """Of all rows, without padding."""
    unique: int
    """Of them, counted once where rows share them."""
    gain: float
    """The estimated cost of rows, divided by that of the tree; 0 where it was not estimated."""
    why: str


class BatchPacker:
    """Puts rows into passes, by `train.batching`.

    Args:
        decoder: the part of the model whose attention is to follow trees; None where it could not be told apart.

    Raises:
        ConfigError: for `tree` where the model's attention cannot be led along one.
    """

    def __init__(self, batching: Batching, decoder: nn.Module | None) -> None:
        self.batching = batching
        self.why_not = ""
        """Why trees are out of the question."""
        self.choices: list[BatchingChoice] = []
        """Of the step's batches, in their order."""
        self._said = False
        self.price: CostModel | None = None
        """What things cost on this model; None where trees are out of the question."""
        if batching == "rows":
            self.why_not = 'train.batching = "rows"'
        elif decoder is None:
            self.why_not = "the model's decoder could not be told apart from its head"
        else:
            self.why_not = install_tree_attention(decoder)
        if self.why_not and batching == "tree":
            raise ConfigError(f'train.batching = "tree" cannot be done with this model: {self.why_not}; leave it at "auto"')
        if not self.why_not and decoder is not None:
            self.price = CostModel.of(decoder)

    def pack(
        self, rows: Sequence[TrainingRow], micro_tokens: int, device: torch.device | str, eyes: VisionProcessor | None
    ) -> list[MicroBatch]:
        """Rows in forward passes, each of at most so many positions: padded ones, or unique ones of a tree."""
        passes = row_passes(rows, micro_tokens)
        if self.price is None or not rows:
            self.choices.append(BatchingChoice(False, *_sizes(rows), 0.0, self.why_not))
            return pack_rows(rows, passes, device, eyes)
        shared = shared_prefixes(rows)
        ranges, cost = split_passes(shared, self.price, micro_tokens)
        shapes = [(len(chosen), max(len(rows[i].ids) for i in chosen)) for chosen in passes]
        gain = self.price.rows(shapes) / cost
        tree = self.batching == "tree" or gain >= MARGIN
        tokens, unique = sum(shared.lengths), shared.unique(0, len(rows))
        why = f"{unique} of {tokens} tokens differ, and a tree is estimated to cost {1 / gain:.2f} times what rows cost"
        self.choices.append(BatchingChoice(tree, tokens, unique, gain, why))
        if not tree:
            return pack_rows(rows, passes, device, eyes)
        first = row_offsets(rows)
        return [tree_micro(rows, first, shared, lo, hi, device, eyes) for lo, hi in ranges]

    def start_step(self) -> None:
        """A step begins: `figures` and `told` are of the batches from here on."""
        self.choices.clear()

    def summary(self) -> str:
        """One sentence about the step's first batch: what was chosen, and why; empty before, and once it was told."""
        if self._said or not self.choices:
            return ""
        self._said = True
        if self.choices[0].tree:
            return f"what rows share is computed once, as a tree: {self.choices[0].why}"
        return f"rows are fed one by one, not as a tree: {self.choices[0].why}"

    def figures(self) -> dict[str, float]:
        """What was chosen in this step, for metrics; empty where nothing was packed.

        Returns:
            `tree_share`: the share of batches that were trees; `tree_gain`: estimated cost of rows / of trees, on average;
            `tree_unique`: unique tokens as a share of all.
        """
        choices = self.choices
        if not choices:
            return {}
        estimated = [choice.gain for choice in choices if choice.gain]
        figures = {"tree_share": sum(choice.tree for choice in choices) / len(choices)}
        if estimated:
            figures["tree_gain"] = sum(estimated) / len(estimated)
            figures["tree_unique"] = sum(choice.unique for choice in choices) / sum(choice.tokens for choice in choices)
        return figures


def _sizes(rows: Sequence[TrainingRow]) -> tuple[int, int]:
    size = sum(len(row.ids) for row in rows)
    return size, size
