"""Attention of one step of the engine: its rows stand at unlike positions of unlike slots.

A row is one token. Each row attends alone, with the query heads that share a key head as its queries, whether it decodes or is
one of a prompt: so the arithmetic of a position is the same on either way, and its bits depend on the ids up to it alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from transformers.modeling_utils import AttentionInterface

from turnwise.engine.local.cache import KeyValues
from turnwise.errors import EngineError

NAME = "turnwise_slots"
"""Under which transformers knows this attention."""


@dataclass(slots=True)
class Run:
    """Neighbouring rows that are consecutive positions of one slot: part of a prompt or of an observation."""

    slot: int
    first: int
    """Index of the first of its rows in the batch."""
    count: int
    start: int
    """Position of the first row."""


@dataclass(slots=True)
class Plan:
    """What one forward pass computes: `decode` rows for slots 0, 1, ..., then runs, then padding."""

    cache: KeyValues
    positions: torch.Tensor
    """[rows] position of each row within its slot."""
    slots: torch.Tensor
    """[rows] slot that each row writes to."""
    decode: int
    """Rows of the first part; row i attends to slot i."""
    decode_length: int
    """Keys that the first part looks at."""
    runs: list[Run]
    run_lengths: list[int]
    """Keys that each run looks at."""
    row_by_row: bool = True
    """Whether the rows of a run attend one by one (exact bits), or together (faster where that is no aim)."""
    touched: int = 0
    """Layers that attended."""
    masks: dict[int | None, tuple[torch.Tensor | None, list[torch.Tensor]]] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """Additive masks [rows, 1, 1, keys] of the first part and of each run, made once a step for each window size."""
        found = self.masks.get(window)
        if found is None:
            longest = max([self.decode_length, *self.run_lengths])
            keys = torch.arange(longest, device=self.positions.device)
            positions = self.positions[:, None]
            hidden = keys > positions
            if window is not None:
                hidden |= keys <= positions - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)[:, None, None]
            first = mask[: self.decode, ..., : self.decode_length] if self.decode else None
            rest = [
                mask[run.first : run.first + run.count, ..., :length]
                for run, length in zip(self.runs, self.run_lengths, strict=True)
            ]
            found = self.masks[window] = (first, rest)
        return found


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    turnwise_plan: Plan | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Store the new keys and values and attend, in the shape that transformers asks of an attention function.

    Args:
        query: [1, query heads, rows, head size]; key and value alike with their own number of heads.
        scaling: factor on the scores.
        sliding_window: how many keys a row sees, itself included; None for all.
        turnwise_plan: the step.

    Returns:
        [1, rows, query heads, value size], and None for the weights, which are not kept.

    Raises:
        EngineError: when the model's attention needs something that is not computed here.
    """
    if turnwise_plan is None:
        raise EngineError(
            f"{type(module).__name__} did not pass the engine's plan on to its attention; this model cannot be run"
        )
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise EngineError(f"{type(module).__name__} uses '{name}', which the local engine does not compute; use a server")
    plan, rows, kv = turnwise_plan, query.shape[2], key.shape[1]
    plan.touched += 1
    keys, values = plan.cache.layer(int(module.layer_idx), key, value)
    keys[plan.slots, :, plan.positions] = key[0].transpose(0, 1)
    values[plan.slots, :, plan.positions] = value[0].transpose(0, 1)
    folded = query[0].transpose(0, 1).reshape(rows, kv, -1, query.shape[3])
    out = query.new_zeros(rows, kv, folded.shape[2], value.shape[3])
    first, rest = plan.mask(sliding_window, query.dtype)
    if first is not None:
        end, length = plan.decode, plan.decode_length
        out[:end] = F.scaled_dot_product_attention(
            folded[:end], keys[:end, :, :length], values[:end, :, :length], attn_mask=first, scale=scaling
        )
    for run, length, mask in zip(plan.runs, plan.run_lengths, rest, strict=True):
        here = slice(run.first, run.first + run.count)
        their = keys[run.slot, :, :length], values[run.slot, :, :length]
        attend_run = _one_by_one if plan.row_by_row else _together
        out[here] = attend_run(folded[here], *their, mask, scaling)
    return out.view(1, rows, -1, value.shape[3]), None


def _one_by_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scaling: float | None) -> torch.Tensor:
    many = q.shape[0]
    return F.scaled_dot_product_attention(
        q, k.expand(many, -1, -1, -1), v.expand(many, -1, -1, -1), attn_mask=mask, scale=scaling
    )


def _together(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scaling: float | None) -> torch.Tensor:
    many, kv, shared, size = q.shape
    folded = q.permute(1, 2, 0, 3).reshape(1, kv, shared * many, size)
    mask = mask.view(1, 1, many, -1).expand(1, shared, many, -1).reshape(1, 1, shared * many, -1)
    out = F.scaled_dot_product_attention(folded, k[None], v[None], attn_mask=mask, scale=scaling)
    return out.view(kv, shared, many, -1).permute(2, 0, 1, 3)


AttentionInterface.register(NAME, attend)
