"""Attention over cache slots; attention in the vision tower.

Attention of one step of the engine: its rows stand at unlike positions of unlike slots.

A row is one token. Each row attends alone, with the query heads that share a key head as its queries, whether it decodes or is
one of a prompt: so the arithmetic of a position is the same on either way, and its bits depend on the ids up to it alone.

Attention of a vision tower over many images at once.

A tower of the Qwen-VL kind strings the patches of all images together and lets each image attend to itself alone. Without a
flash kernel transformers does that by one call per image and layer, which on small images costs more than the arithmetic.
Here images of one size attend in one call; others, one by one.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

from turnwise.engines.local.kv_cache import KVCache
from turnwise.errors import EngineError

FLASH: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
"""The kernel behind scaled_dot_product_attention on CPUs, which also tells the log-sum-exp; None where torch has no such."""
ATTENTION_NAME = "turnwise_slots"
"""Under which transformers knows this attention."""


@dataclass(slots=True)
class AttentionRun:
    """Neighbouring rows that attend in one call."""

    first: int
    """Index of the first of its rows in the batch."""
    count: int
    length: int
    """Keys that the call looks at: those of its furthest row, rounded up."""
    slot: int | None = None
    """The slot that all its rows belong to, at consecutive positions; None where row i belongs to slot i, and decodes."""


@dataclass(slots=True)
class AttentionPlan:
    """What one forward pass computes."""

    cache: KVCache
    positions: torch.Tensor
    """[rows] position of each row within its slot."""
    slots: torch.Tensor
    """[rows] slot that each row writes to."""
    parts: list[AttentionRun]
    chunk: int | None
    """Keys are looked at this many at a time, the rows of a prompt one by one, for exact bits; None where that is no aim."""
    touched: int = 0
    """Layers that attended."""
    places: dict[int, torch.Tensor] = field(default_factory=dict)
    masks: dict[int | None, list[torch.Tensor]] = field(default_factory=dict)
    blinds: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def place(self, heads: int) -> torch.Tensor:
        """[rows * heads] where each row's keys go in the storage taken as rows of one head each; made once a step."""
        found = self.places.get(heads)
        if found is None:
            each = torch.arange(heads, device=self.slots.device)
            places = (self.slots[:, None] * heads + each) * self.cache.capacity + self.positions[:, None]
            found = self.places[heads] = places.reshape(-1)
        return found

    def mask(self, window: int | None, dtype: torch.dtype) -> list[torch.Tensor]:
        """Additive masks [count, 1, 1, length] of the parts, made once a step for each window size."""
        found = self.masks.get(window)
        if found is None:
            longest = max((part.length for part in self.parts), default=0)
            keys = torch.arange(longest, device=self.positions.device)
            positions = self.positions[:, None]
            hidden = keys > positions
            if window is not None:
                hidden |= keys <= positions - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)[:, None, None]
            found = [mask[part.first : part.first + part.count, ..., : part.length] for part in self.parts]
            self.masks[window] = found
        return found

    def fully_masked(self, window: int | None, chunk: int, count: int) -> torch.Tensor:
        """[count, rows] whether a row sees no key of a chunk, made once a step for each window size."""
        found = self.blinds.get(window)
        if found is None:
            starts = torch.arange(0, count * chunk, chunk, device=self.positions.device)[:, None]
            found = starts > self.positions
            if window is not None:
                found |= starts + chunk <= self.positions - window + 1
            self.blinds[window] = found
        return found


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    turnwise_plan: AttentionPlan | None = None,
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
    place = plan.place(kv)
    keys.view(-1, key.shape[3]).index_copy_(0, place, key[0].transpose(0, 1).reshape(-1, key.shape[3]))
    values.view(-1, value.shape[3]).index_copy_(0, place, value[0].transpose(0, 1).reshape(-1, value.shape[3]))
    folded = query[0].transpose(0, 1).reshape(rows, kv, -1, query.shape[3])
    masks = plan.mask(sliding_window, query.dtype)
    if plan.chunk is not None and any(part.length > plan.chunk for part in plan.parts):
        out = _in_chunks(plan, sliding_window, folded, keys, values, masks, scaling)
        return out.view(1, rows, -1, value.shape[3]), None
    out = query.new_zeros(rows, kv, folded.shape[2], value.shape[3])
    for part, mask in zip(plan.parts, masks, strict=True):
        here = slice(part.first, part.first + part.count)
        their = _of(part, keys, 0, part.length), _of(part, values, 0, part.length)
        if part.slot is None or plan.chunk is not None:
            out[here] = F.scaled_dot_product_attention(folded[here], *their, attn_mask=mask, scale=scaling)
        else:
            out[here] = _together(folded[here], *their, mask, scaling)
    return out.view(1, rows, -1, value.shape[3]), None


def _of(part: AttentionRun, store: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """[count, heads, end - start, size]: the keys or values that the rows of a part look at."""
    if part.slot is None:
        return store[part.first : part.first + part.count, :, start:end]
    return store[part.slot, :, start:end].expand(part.count, -1, -1, -1)


def _in_chunks(
    plan: AttentionPlan,
    window: int | None,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    masks: list[torch.Tensor],
    scaling: float | None,
) -> torch.Tensor:
    """Attention over chunks of keys that begin at fixed positions, joined by their log-sum-exp.

    The kernel cuts long key ranges where their length tells it to, so that the length would enter the bits; up to the size of a
    chunk it does not. A chunk behind a row's last key has the weight exp(-inf) = 0 and leaves the row's bits alone.
    """
    assert plan.chunk is not None
    (rows, kv, shared, _), chunk = query.shape, plan.chunk
    count = -(-max(part.length for part in plan.parts) // chunk)
    outs = torch.zeros((count, rows, kv, shared, values.shape[3]), dtype=torch.float32, device=query.device)
    sums = torch.zeros((count, rows, kv, shared), dtype=torch.float32, device=query.device)
    for part, mask in zip(plan.parts, masks, strict=True):
        here = slice(part.first, part.first + part.count)
        for number, start in enumerate(range(0, part.length, chunk)):
            end = min(start + chunk, part.length)
            outs[number, here], sums[number, here] = FLASH(
                query[here],
                _of(part, keys, start, end),
                _of(part, values, start, end),
                attn_mask=mask[..., start:end],
                scale=scaling,
            )
    sums.masked_fill_(plan.fully_masked(window, chunk, count)[:, :, None, None], -torch.inf)
    weights = (sums - sums.amax(0)).exp_()
    total, norm = outs[0] * weights[0, ..., None], weights[0].clone()
    for number in range(1, count):
        total.addcmul_(outs[number], weights[number, ..., None])
        norm += weights[number]
    return total.div_(norm[..., None]).to(query.dtype)


def _together(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scaling: float | None) -> torch.Tensor:
    many, kv, shared, size = q.shape
    folded = q.permute(1, 2, 0, 3).reshape(1, kv, shared * many, size)
    mask = mask.view(1, 1, many, -1).expand(1, shared, many, -1).reshape(1, 1, shared * many, -1)
    out = F.scaled_dot_product_attention(folded, k[:1], v[:1], attn_mask=mask, scale=scaling)
    return out.view(kv, shared, many, -1).permute(2, 0, 1, 3)


AttentionInterface.register(ATTENTION_NAME, attend)


RUNS_NAME = "turnwise_flash_runs"
"""transformers tells a tower's attention where its runs begin only where the name says "flash"."""


def run_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention within runs, for transformers' attention interface.

    Args:
        query, key, value: [1, heads, patches, size].
        cu_seq_lens_q: [runs + 1] where runs begin, and the end.

    Returns:
        [1, patches, heads, size], and None for the weights, which are not kept.
    """
    assert cu_seq_lens_q is not None
    edges = cu_seq_lens_q.tolist()
    sizes = [end - start for start, end in pairwise(edges)]
    if len(set(sizes)) == 1:
        shape = (len(sizes), sizes[0])
        q, k, v = (part[0].unflatten(1, shape).transpose(0, 1) for part in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, scale=scaling)
        return out.transpose(1, 2).flatten(0, 1)[None], None
    parts = zip(*(part.split(sizes, dim=2) for part in (query, key, value)), strict=True)
    outs = [F.scaled_dot_product_attention(q, k, v, scale=scaling).transpose(1, 2) for q, k, v in parts]
    return torch.cat(outs, dim=1), None


def use_run_attention(module: nn.Module) -> None:
    """Let the towers inside of a module attend so, where their attention takes runs and is transformers' default one."""
    for part in module.modules():
        config = getattr(part, "config", None)
        takes = "cu_seqlens" in inspect.signature(part.forward).parameters and hasattr(part, "qkv")
        if takes and getattr(config, "_attn_implementation", None) == "sdpa":
            config._attn_implementation = RUNS_NAME  # type: ignore[union-attr]


AttentionInterface.register(RUNS_NAME, run_attention)
