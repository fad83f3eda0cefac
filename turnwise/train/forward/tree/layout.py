"""How a trainer's rows are laid out: as rows, or as a tree where that is estimated to cost less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from turnwise.errors import ConfigError
from turnwise.render.vision import VisionProcessor
from turnwise.train.forward.batch import MicroBatch, TrainingRow, pack_rows, row_offsets, row_passes
from turnwise.train.forward.tree.cost import MARGIN, CostModel
from turnwise.train.forward.tree.install import install_tree_attention
from turnwise.train.forward.tree.pack import shared_prefixes, split_passes, tree_micro

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
