"""Prefix-tree batches: estimate the cost of rows and trees, and build the cheaper.

A pass, forward and backward, is estimated in multiplications of one forward pass of the decoder:

    rows = sum over passes of  B * T * (matrices + around) + layers * (B * T (T + 1) / 2 * pair + PASS)
    tree = sum over passes of  U * (matrices + around)     + layers * (pairs * pair + calls * CALL + PASS)

B rows padded to T; U tokens of the trie, `pairs` of a query and a key in it, `calls` chains and side branches. `matrices` is
the number of matrix elements per token (of experts, the share the token is routed to). `around` is the cost of its norms and
activations, ``AROUND * layers * width``; `pair` is ``PAIR * 2 * query heads * head size``. The head costs both the same and is
omitted. A tree is chosen if ``tree * MARGIN <= rows``.
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
"""Cost of a forward pass per layer, besides its tokens. On the CPU of docs/benchmarks.md 1.6 to 2.3 ms, where a
multiplication takes 0.05 ns of a pass forward and backward; that of CUDA is 1 ms at 3e13 a second, and was not measured."""
CALL = 1.8e6
"""Cost of one more attention call per layer: 90 us on that CPU. On CUDA the full tree is one call."""
AROUND = 1800
"""Cost of norms, rotary positions and activations of a token, per unit of width and layer: 0.09 us on that CPU."""
PAIR = 2.0
"""Cost of a multiplication in attention relative to one in a matrix."""
MARGIN = 1.1
"""Minimum saving of a tree; estimates are no more accurate."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Cost of a token, of a (query, key) pair, of an attention call and of a pass."""

    token: float
    pair: float
    call: float
    once: float

    @classmethod
    def of(cls, decoder: nn.Module) -> CostModel:
        """Estimate it for a decoder of transformers on its device."""
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
        """Estimate passes of (B, T) padded rows."""
        tokens = sum(b * t for b, t in shapes)
        pairs = sum(b * t * (t + 1) / 2 for b, t in shapes)
        return tokens * self.token + pairs * self.pair + len(shapes) * self.once

    def tree(self, tokens: int, pairs: float, calls: int) -> float:
        """Estimate one pass of a trie."""
        return tokens * self.token + pairs * self.pair + calls * self.call + self.once


def shared_prefixes(rows: Sequence[TrainingRow]) -> SortedRows:
    """Sort rows by prefix. At image placeholders, rows share a prefix if the pixels are equal, with routing replay if the
    experts are equal too."""
    return SortedRows.of(
        keys_with_routes(
            [ids_with_media_keys(row.ids, row.media) if row.media else row.ids for row in rows], [r.routes for r in rows]
        )
    )


def split_passes(shared: SortedRows, cost_model: CostModel, micro_tokens: int) -> tuple[list[tuple[int, int]], float]:
    """Split sorted rows into passes of minimum total cost, each of at most `micro_tokens` unique tokens or a single row.

    A split recomputes the prefix that both sides share. So splits fall between tasks first, then at short prefixes. Dynamic
    programming over the rows' order finds the minimum.

    Returns:
        Ranges of sorted rows, and their cost.
    """
    count = len(shared.lengths)
    # Cost that a row adds to its pass: tokens, pairs, and calls (its chain, and the side branch it opens).
    pairs = [length * (length + 1) / 2 for length in shared.lengths]
    added = [
        (
            (length - common) * cost_model.token
            + (own - common * (common + 1) / 2) * cost_model.pair
            + cost_model.call * (2 if common else 1)
        )
        for length, common, own in zip(shared.lengths, shared.common, pairs, strict=True)
    ]
    single = [cost_model.tree(length, own, 1) for length, own in zip(shared.lengths, pairs, strict=True)]
    best, where = [0.0], [0]
    for end in range(1, count + 1):
        # Walk back over the possible starts of the last pass.
        minimum, begin, tokens, later_cost = float("inf"), end - 1, 0, 0.0
        for first in range(end - 1, -1, -1):
            if first < end - 1 and tokens + shared.lengths[first] > micro_tokens:
                break
            cost = best[first] + single[first] + later_cost
            if cost < minimum:
                minimum, begin = cost, first
            tokens += shared.lengths[first] - shared.common[first]
            later_cost += added[first]
        best.append(minimum)
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
    vision: VisionProcessor | None,
) -> MicroBatch:
    """Build one pass over the trie of the sorted rows from `lo` to `hi`.

    Args:
        first_token: index of each row's first token among the batch's tokens.
    """
    made = build_prefix_tree(shared, lo, hi)
    ids_t = np.empty(made.tree.size, dtype=np.int64)
    for node in made.nodes:
        ids_t[node.start : node.start + node.end - node.begin] = rows[node.row].ids[node.begin : node.end]
    chosen = sorted(shared.order[lo:hi])
    before = np.concatenate([made.places[i][np.asarray(rows[i].places) - 1] for i in chosen])
    tokens = np.concatenate([np.arange(first_token[i], first_token[i] + len(rows[i].places)) for i in chosen])

    def long(numbers: object) -> Tensor:
        return torch.as_tensor(numbers, dtype=torch.long).to(device)

    return MicroBatch(
        ids_bt=long(ids_t[None]),
        positions=_positions(rows, made, vision).to(device),
        before_m=long(before),
        targets_m=long([target for i in chosen for target in rows[i].targets]),
        tokens_m=long(tokens),
        media=_media(rows, chosen, made, vision),
        tree=made.tree,
        routes=pack_routes(((rows[i].routes, made.places[i]) for i in chosen), made.tree.size, device),
    )


def _positions(rows: Sequence[TrainingRow], made: PackedPrefixTree, vision: VisionProcessor | None) -> Tensor:
    """Return path positions: (1, T), or (3, 1, T) if a row has images in a model with 3D positions."""
    size = made.tree.size
    plain_t = np.empty(size, dtype=np.int64)
    for node in made.nodes:
        plain_t[node.start : node.start + node.end - node.begin] = np.arange(node.begin, node.end)
    multimodal = {i: found for i in made.places if (found := positions_of(rows[i], vision)) is not None}
    if not multimodal:
        return torch.from_numpy(plain_t[None])
    positions = np.broadcast_to(plain_t, (3, 1, size)).copy()
    for i, found in multimodal.items():
        positions[:, 0, made.places[i]] = found
    return torch.from_numpy(positions)


def _media(
    rows: Sequence[TrainingRow], chosen: Sequence[int], made: PackedPrefixTree, vision: VisionProcessor | None
) -> tuple[tuple[Media, tuple[int, ...]], ...]:
    """Return each image or video once per position in the trie, in layout order."""
    found: dict[int, tuple[Media, tuple[int, ...]]] = {}
    for i in chosen:
        for block, at in placeholder_positions(rows[i], vision):
            places = tuple(made.places[i][at].tolist())
            if places:
                found[places[0]] = (block.media, places)
    return tuple(found[first] for first in sorted(found))


Batching = Literal["auto", "rows", "tree"]


@dataclass(frozen=True, slots=True)
class BatchingChoice:
    """Choice for one batch, and its reason."""

    tree: bool
    tokens: int
    """Tokens of all rows, without padding."""
    unique: int
    """Of those, tokens counted once if rows share them."""
    gain: float
    """Estimated cost of rows / cost of the tree; 0 if not estimated."""
    why: str


class BatchPacker:
    """Packs rows into passes by `train.batching`.

    Args:
        decoder: module whose attention follows trees; None if the model does not expose it.

    Raises:
        ConfigError: for `tree` with a model whose attention cannot follow one.
    """

    def __init__(self, batching: Batching, decoder: nn.Module | None) -> None:
        self.batching = batching
        self.why_not = ""
        """Why trees are not possible."""
        self.choices: list[BatchingChoice] = []
        """Choices for the step's batches, in order."""
        self._reported = False
        self.cost_model: CostModel | None = None
        """None if trees are not possible."""
        if batching == "rows":
            self.why_not = 'train.batching = "rows"'
        elif decoder is None:
            self.why_not = "the model does not expose its decoder separately from its head"
        else:
            self.why_not = install_tree_attention(decoder)
        if self.why_not and batching == "tree":
            raise ConfigError(f'train.batching = "tree" is not possible with this model: {self.why_not}; use "auto"')
        if not self.why_not and decoder is not None:
            self.cost_model = CostModel.of(decoder)

    def pack(
        self, rows: Sequence[TrainingRow], micro_tokens: int, device: torch.device | str, vision: VisionProcessor | None
    ) -> list[MicroBatch]:
        """Pack rows into passes of at most `micro_tokens` positions: padded, or unique ones of a tree."""
        passes = row_passes(rows, micro_tokens)
        if self.cost_model is None or not rows:
            self.choices.append(BatchingChoice(False, *_sizes(rows), 0.0, self.why_not))
            return pack_rows(rows, passes, device, vision)
        shared = shared_prefixes(rows)
        ranges, cost = split_passes(shared, self.cost_model, micro_tokens)
        shapes = [(len(chosen), max(len(rows[i].ids) for i in chosen)) for chosen in passes]
        gain = self.cost_model.rows(shapes) / cost
        tree = self.batching == "tree" or gain >= MARGIN
        tokens, unique = sum(shared.lengths), shared.unique(0, len(rows))
        why = f"{unique} of {tokens} tokens are unique; a tree is estimated to cost {1 / gain:.2f} times the cost of rows"
        self.choices.append(BatchingChoice(tree, tokens, unique, gain, why))
        if not tree:
            return pack_rows(rows, passes, device, vision)
        first = row_offsets(rows)
        return [tree_micro(rows, first, shared, lo, hi, device, vision) for lo, hi in ranges]

    def start_step(self) -> None:
        """Start a step: `figures` and `summary` cover the batches from here on."""
        self.choices.clear()

    def summary(self) -> str:
        """Describe the choice for the step's first batch in one sentence; empty if there is none or after the first call."""
        if self._reported or not self.choices:
            return ""
        self._reported = True
        if self.choices[0].tree:
            return f"batching: shared prefixes are computed once, as a tree: {self.choices[0].why}"
        return f"batching: rows are computed separately, not as a tree: {self.choices[0].why}"

    def figures(self) -> dict[str, float]:
        """Return metrics of the step's choices; empty if nothing was packed.

        Returns:
            `tree_share`: share of batches that are trees; `tree_gain`: mean estimated cost of rows / of trees;
            `tree_unique_share`: unique tokens as a share of all.
        """
        choices = self.choices
        if not choices:
            return {}
        estimated = [choice.gain for choice in choices if choice.gain]
        figures = {"tree_share": sum(choice.tree for choice in choices) / len(choices)}
        if estimated:
            figures["tree_gain"] = sum(estimated) / len(estimated)
            figures["tree_unique_share"] = sum(choice.unique for choice in choices) / sum(choice.tokens for choice in choices)
        return figures


def _sizes(rows: Sequence[TrainingRow]) -> tuple[int, int]:
    size = sum(len(row.ids) for row in rows)
    return size, size
