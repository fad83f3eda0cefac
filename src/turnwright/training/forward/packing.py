"""Whether the rows of a step are computed one by one, or their common prefixes once, as a tree.

The tree is taken where it is estimated to be cheaper (`CostModel` in `prefix_tree.py`). Both give
the same loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import nn

from turnwright.config.schema import Batching
from turnwright.errors import ConfigError
from turnwright.renderers.vision import VisionProcessor
from turnwright.training.forward.passes import (
    OVERHEAD_TOKENS,
    MicroBatch,
    make_pass,
    pack_rows,
    row_passes,
)
from turnwright.training.forward.prefix_tree import (
    CostModel,
    SortedRows,
    build_prefix_tree,
    install_tree_attention,
    split_passes,
)
from turnwright.training.forward.routing_replay import keys_with_routes
from turnwright.training.forward.training_rows import TrainingRow
from turnwright.types.media import ids_with_media_keys

MARGIN = 1.1
"""Minimum saving of a tree; estimates are no more accurate."""


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
    """Packs rows into passes by `train.batching`."""

    def __init__(self, batching: Batching, decoder: nn.Module | None) -> None:
        """`decoder` is None if the model does not expose it.

        Raises:
            ConfigError: for `tree` with a decoder whose attention cannot follow a tree.
        """
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
            raise ConfigError(
                f'train.batching = "tree" is not possible with this model: {self.why_not}; use '
                '"auto"'
            )
        self.overhead: float = OVERHEAD_TOKENS
        """Cost of one more pass of rows, in tokens."""
        if decoder is not None:
            if not self.why_not:
                self.cost_model = CostModel.of(decoder)
            if next(decoder.parameters()).device.type != "cpu":
                with suppress(AttributeError):  # not a transformer with heads
                    costs = CostModel.of(decoder)
                    self.overhead = costs.once / costs.token

    def pack(
        self,
        rows: Sequence[TrainingRow],
        micro_tokens: int,
        device: torch.device | str,
        vision: VisionProcessor | None,
    ) -> list[MicroBatch]:
        """Pack rows into passes of at most `micro_tokens` positions: padded, or unique ones of a
        tree."""
        passes = row_passes(rows, micro_tokens, self.overhead)
        if self.cost_model is None or not rows:
            size = sum(len(row.ids) for row in rows)
            self.choices.append(BatchingChoice(False, size, size, 0.0, self.why_not))
            return pack_rows(rows, passes, device, vision)

        # What both ways are estimated to cost.
        shared = shared_prefixes(rows)
        ranges, tree_cost = split_passes(shared, self.cost_model, micro_tokens)
        shapes = []
        for indices in passes:
            shapes.append((len(indices), max(len(rows[index].ids) for index in indices)))
        gain = self.cost_model.rows(shapes) / tree_cost

        is_tree = self.batching == "tree" or gain >= MARGIN
        tokens = sum(shared.lengths)
        unique = shared.unique(0, len(rows))
        why = (
            f"{unique} of {tokens} tokens are unique; a tree is estimated to cost "
            f"{1 / gain:.2f} times the cost of rows"
        )
        self.choices.append(BatchingChoice(is_tree, tokens, unique, gain, why))
        if not is_tree:
            return pack_rows(rows, passes, device, vision)
        return [tree_micro(rows, shared, lo, hi, device, vision) for lo, hi in ranges]

    def pack_plainly(
        self,
        rows: Sequence[TrainingRow],
        micro_tokens: int,
        device: torch.device | str,
        vision: VisionProcessor | None,
    ) -> list[MicroBatch]:
        """Pack rows as `pack` does without a tree; `figures` does not count them."""
        return pack_rows(rows, row_passes(rows, micro_tokens, self.overhead), device, vision)

    def start_step(self) -> None:
        """Start a step: `figures` and `summary` cover the batches from here on."""
        self.choices.clear()

    def summary(self) -> str:
        """Describe the choice for the step's first batch in one sentence; empty if there is none or
        after the first call."""
        if self._reported or not self.choices:
            return ""
        self._reported = True
        if self.choices[0].tree:
            return f"batching: shared prefixes are computed once, as a tree: {self.choices[0].why}"
        return f"batching: rows are computed separately, not as a tree: {self.choices[0].why}"

    def figures(self) -> dict[str, float]:
        """Return the shares of batches that are trees and of unique tokens, and the mean estimated
        cost of rows / of trees."""
        choices = self.choices
        if not choices:
            return {}

        figures = {"tree_share": sum(choice.tree for choice in choices) / len(choices)}
        gains = [choice.gain for choice in choices if choice.gain]
        if gains:
            unique = sum(choice.unique for choice in choices)
            tokens = sum(choice.tokens for choice in choices)
            figures["tree_gain"] = sum(gains) / len(gains)
            figures["tree_unique_share"] = unique / tokens
        return figures


def tree_micro(
    rows: Sequence[TrainingRow],
    shared: SortedRows,
    lo: int,
    hi: int,
    device: torch.device | str,
    vision: VisionProcessor | None,
) -> MicroBatch:
    """Build one pass over the trie of the sorted rows from `lo` to `hi`."""
    built = build_prefix_tree(shared, lo, hi)
    places = {index: built.places[index] for index in sorted(shared.order[lo:hi])}
    return make_pass(rows, places, (1, built.tree.size), device, vision, built.tree)


def shared_prefixes(rows: Sequence[TrainingRow]) -> SortedRows:
    """Sort rows by prefix.

    At image placeholders, rows share a prefix if the pixels are equal, with routing replay if the
    experts are equal too.
    """
    keys = []
    for row in rows:
        keys.append(ids_with_media_keys(row.ids, row.media) if row.media else row.ids)
    routes = [row.routes for row in rows]
    if all(route is None for route in routes):
        return SortedRows.of(keys)
    return SortedRows.of(keys_with_routes(keys, routes))
