"""Attention over cache slots; attention in the vision tower.

`attend` is registered with transformers, whose layers call it; an `AttentionPlan` says which rows
attend to which slot. `run_attention` is the tower's. The fused pass does not come here: its
attention is the kernel `attend` of `numba_kernels.py`.

In a step of the engine, rows are at different positions of different slots. A row is one token.
Each row attends alone, whether it decodes or belongs to a prompt, with the query heads of a key
head as its queries. So the arithmetic of a position is always the same, and its bits depend
only on the ids up to it.

Vision towers of the Qwen-VL kind concatenate the patches of all images and restrict
attention to each image. Without a flash kernel transformers makes one call per image and
layer, which for small images costs more than the arithmetic. Here images of one size attend
in one call, others one by one.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

from turnwright.engines.local.kv_cache import KVCache
from turnwright.errors import EngineError

FLASH: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
"""The kernel of scaled_dot_product_attention on CPUs, which also returns the log-sum-exp; None
where torch lacks it."""
ATTENTION_NAME = "turnwright_slots"
"""Name of this attention in transformers' registry."""


@dataclass(slots=True)
class AttentionRun:
    """Adjacent rows that attend in one call."""

    first: int
    """Batch index of the first row."""
    count: int
    length: int
    """Number of keys: those of the row with the most, rounded up."""
    slot: int | None = None
    """Slot of all rows, at consecutive positions; None where row i decodes in slot i."""


@dataclass(slots=True)
class PromptBatch:
    """Runs of different slots that attend in one call, where exact bits are not claimed."""

    rows: torch.Tensor
    """[runs, most rows of a run] batch indices; shorter runs repeat their last row."""
    slots: torch.Tensor
    """[runs] their slots."""
    length: int
    """Number of keys."""


MOST_KEYS = 1 << 16
"""Keys of all runs of a batch, which are copied; a longer run attends alone."""


def batch_prompts(runs: Sequence[AttentionRun], device: torch.device) -> list[PromptBatch]:
    """Return batches of the runs of prompts, whose rows are at most half padding."""
    prompts = [run for run in runs if run.slot is not None]
    prompts.sort(key=lambda run: (run.length, run.count))

    batches: list[list[AttentionRun]] = []
    rows = 0
    keys = 0
    for run in prompts:
        batch = batches[-1] if batches else []
        # Runs come in order of their counts, so that each pads the others to its own.
        padded_rows = (len(batch) + 1) * run.count
        if (
            not batch
            or batch[0].length != run.length
            or padded_rows > 2 * (rows + run.count)
            or keys + run.length > MOST_KEYS
        ):
            batch = []
            batches.append(batch)
            rows = 0
            keys = 0
        batch.append(run)
        rows += run.count
        keys += run.length
    return [_prompt_batch(batch, device) for batch in batches]


def _prompt_batch(runs: Sequence[AttentionRun], device: torch.device) -> PromptBatch:
    """Return runs of one length, the last with the most rows, as a batch."""
    most_rows = runs[-1].count
    indices: list[list[int]] = []
    for run in runs:
        last = run.count - 1
        indices.append([run.first + min(number, last) for number in range(most_rows)])
    rows = torch.tensor(indices, device=device)
    slots = torch.tensor([run.slot for run in runs], device=device)
    return PromptBatch(rows, slots, runs[0].length)


@dataclass(slots=True)
class AttentionPlan:
    """Attention of one forward pass."""

    cache: KVCache
    positions: torch.Tensor
    """[rows] position of each row within its slot."""
    slots: torch.Tensor
    """[rows] slot that each row writes to."""
    runs: list[AttentionRun]
    chunk: int | None
    """Keys per attention call, with prompt rows attending one by one, for exact bits; None where
    these are not claimed."""
    touched: int = 0
    """Number of layers that attended."""
    batches: list[PromptBatch] = field(init=False)
    """Runs of prompts that attend together."""
    row_indices: dict[int, torch.Tensor] = field(default_factory=dict)
    """Results of `rows_of_keys`, which the layers share, as they do the next two: those of `mask`
    and of `fully_masked`."""
    masks: dict[int | None, tuple[list[torch.Tensor], list[torch.Tensor]]] = field(
        default_factory=dict
    )
    fully_masked_chunks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.batches = [] if self.chunk is not None else batch_prompts(self.runs, self.slots.device)
        if self.batches:
            self.runs = [run for run in self.runs if run.slot is None]

    def rows_of_keys(self, heads: int) -> torch.Tensor:
        """[rows * heads] storage indices of each row's keys, over single-head rows.

        They are computed once per step.
        """
        if heads not in self.row_indices:
            head_numbers = torch.arange(heads, device=self.slots.device)
            slot_heads = self.slots[:, None] * heads + head_numbers
            row_indices = slot_heads * self.cache.capacity + self.positions[:, None]
            self.row_indices[heads] = row_indices.reshape(-1)
        return self.row_indices[heads]

    def mask(
        self, window: int | None, dtype: torch.dtype
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Additive masks [count, 1, 1, length] of the runs and [runs, 1, rows, length] of the
        batches.

        They are computed once per step and window size.
        """
        masks = self.masks.get(window)
        if masks is not None:
            return masks

        # Which keys a row does not see: later ones, and those before its window.
        lengths = [run.length for run in self.runs] + [batch.length for batch in self.batches]
        keys = torch.arange(max(lengths, default=0), device=self.positions.device)
        positions = self.positions[:, None]
        hidden = keys > positions
        if window is not None:
            hidden |= keys <= positions - window
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        mask = mask.masked_fill_(hidden, -torch.inf)[:, None, None]

        run_masks: list[torch.Tensor] = []
        for run in self.runs:
            run_masks.append(mask[run.first : run.first + run.count, ..., : run.length])
        batch_masks = [mask[batch.rows, 0, 0, : batch.length][:, None] for batch in self.batches]
        masks = (run_masks, batch_masks)
        self.masks[window] = masks
        return masks

    def fully_masked(self, window: int | None, chunk: int, count: int) -> torch.Tensor:
        """[count, rows] whether a row attends to no key of a chunk.

        It is computed once per step and window size.
        """
        masked = self.fully_masked_chunks.get(window)
        if masked is None:
            starts = torch.arange(0, count * chunk, chunk, device=self.positions.device)[:, None]
            masked = starts > self.positions
            if window is not None:
                masked |= starts + chunk <= self.positions - window + 1
            self.fully_masked_chunks[window] = masked
        return masked


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    turnwright_plan: AttentionPlan | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Store new keys and values and attend, as an attention function of transformers.

    From [1, query heads, rows, head size], key and value likewise with their own number of heads,
    to [1, rows, query heads, value size]. `sliding_window` is the number of keys visible to a row,
    itself included; None for all.
    """
    if turnwright_plan is None:
        raise EngineError(
            f"{type(module).__name__} does not pass the engine's plan to its attention; use a "
            "server"
        )
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise EngineError(
                f"{type(module).__name__} uses '{name}', which the local engine does not support; "
                "use a server"
            )
    plan = turnwright_plan
    rows = query.shape[2]
    kv = key.shape[1]
    key_size = key.shape[3]
    value_size = value.shape[3]
    plan.touched += 1

    # Store the rows' own keys and values.
    keys, values = plan.cache.layer(int(module.layer_idx), key, value)
    rows_of_keys = plan.rows_of_keys(kv)
    new_keys = key[0].transpose(0, 1).reshape(-1, key_size)
    keys.view(-1, key_size).index_copy_(0, rows_of_keys, new_keys)
    new_values = value[0].transpose(0, 1).reshape(-1, value_size)
    values.view(-1, value_size).index_copy_(0, rows_of_keys, new_values)

    # Each row by itself, with the query heads of a key head as its queries.
    folded = query[0].transpose(0, 1).reshape(rows, kv, -1, query.shape[3])
    run_masks, batch_masks = plan.mask(sliding_window, query.dtype)
    if plan.chunk is not None and any(run.length > plan.chunk for run in plan.runs):
        out = _in_chunks(plan, sliding_window, folded, keys, values, run_masks, scaling)
        return out.view(1, rows, -1, value_size), None

    out = query.new_zeros(rows, kv, folded.shape[2], value_size)
    for run, mask in zip(plan.runs, run_masks, strict=True):
        run_rows = slice(run.first, run.first + run.count)
        run_keys = _keys_of(run, keys, 0, run.length)
        run_values = _keys_of(run, values, 0, run.length)
        out[run_rows] = F.scaled_dot_product_attention(
            folded[run_rows], run_keys, run_values, attn_mask=mask, scale=scaling
        )
    for batch, mask in zip(plan.batches, batch_masks, strict=True):
        _attend_together(batch, folded, keys, values, mask, scaling, out)
    return out.view(1, rows, -1, value_size), None


def _keys_of(run: AttentionRun, store: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Return [count, heads, end - start, size]: keys or values of a run's rows."""
    if run.slot is None:
        return store[run.first : run.first + run.count, :, start:end]
    return store[run.slot, :, start:end].expand(run.count, -1, -1, -1)


def _in_chunks(
    plan: AttentionPlan,
    window: int | None,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    masks: list[torch.Tensor],
    scaling: float | None,
) -> torch.Tensor:
    """Attend over chunks of keys that start at fixed positions, combined by their log-sum-exp.

    The kernel splits long key ranges depending on their length, which would affect the bits; up to
    a chunk's size it does not. A chunk after a row's last key has the weight exp(-inf) = 0 and
    leaves the row's bits unchanged.
    """
    chunk = plan.chunk
    assert chunk is not None
    rows, kv, shared, _ = query.shape
    count = -(-max(run.length for run in plan.runs) // chunk)

    # Attention over each chunk, and the log of the sum of its weights.
    outs = torch.zeros(
        (count, rows, kv, shared, values.shape[3]), dtype=torch.float32, device=query.device
    )
    log_sums = torch.zeros((count, rows, kv, shared), dtype=torch.float32, device=query.device)
    for run, mask in zip(plan.runs, masks, strict=True):
        run_rows = slice(run.first, run.first + run.count)
        for number, start in enumerate(range(0, run.length, chunk)):
            end = min(start + chunk, run.length)
            outs[number, run_rows], log_sums[number, run_rows] = FLASH(
                query[run_rows],
                _keys_of(run, keys, start, end),
                _keys_of(run, values, start, end),
                attn_mask=mask[..., start:end],
                scale=scaling,
            )
    fully_masked = plan.fully_masked(window, chunk, count)
    log_sums.masked_fill_(fully_masked[:, :, None, None], -torch.inf)

    # Their weighted mean, in order of the chunks.
    weights = (log_sums - log_sums.amax(0)).exp_()
    total = outs[0] * weights[0, ..., None]
    norm = weights[0].clone()
    for number in range(1, count):
        total.addcmul_(outs[number], weights[number, ..., None])
        norm += weights[number]
    return total.div_(norm[..., None]).to(query.dtype)


def _attend_together(
    batch: PromptBatch,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
    out: torch.Tensor,
) -> None:
    """Write the attention of a batch's runs, each over the keys of its slot, to `out` [rows, key
    heads, shared, size]."""
    runs, most = batch.rows.shape
    kv, shared, size = query.shape[1:]
    q = query[batch.rows].permute(0, 2, 3, 1, 4).reshape(runs, kv, shared * most, size)
    k = keys[batch.slots, :, : batch.length]
    v = values[batch.slots, :, : batch.length]
    mask = mask[:, :, None].expand(runs, 1, shared, most, -1).reshape(runs, 1, shared * most, -1)
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)

    # Back to one row after the other; repeated rows have equal results.
    by_row = mixed.view(runs, kv, shared, most, -1).permute(0, 3, 1, 2, 4).flatten(0, 1)
    out.index_copy_(0, batch.rows.view(-1), by_row)


AttentionInterface.register(ATTENTION_NAME, attend)


RUNS_NAME = "turnwright_flash_runs"
"""transformers passes a tower's attention the run boundaries only if the name contains "flash"."""


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
    """Attend within runs, as an attention function of transformers.

    From [1, heads, patches, size] to [1, patches, heads, size]; `cu_seq_lens_q` has the start of
    each run, and the end.
    """
    assert cu_seq_lens_q is not None
    edges = cu_seq_lens_q.tolist()
    sizes = [end - start for start, end in pairwise(edges)]

    # Runs of one size attend in one call.
    if len(set(sizes)) == 1:
        shape = (len(sizes), sizes[0])
        q, k, v = (tensor[0].unflatten(1, shape).transpose(0, 1) for tensor in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, scale=scaling)
        return out.transpose(1, 2).flatten(0, 1)[None], None

    outs: list[Tensor] = []
    parts = zip(*(tensor.split(sizes, dim=2) for tensor in (query, key, value)), strict=True)
    for q, k, v in parts:
        out = F.scaled_dot_product_attention(q, k, v, scale=scaling)
        outs.append(out.transpose(1, 2))
    return torch.cat(outs, dim=1), None


def use_run_attention(module: nn.Module) -> None:
    """Use `run_attention` in a module's towers whose attention takes runs and is transformers'
    default."""
    for part in module.modules():
        config = getattr(part, "config", None)
        takes_runs = "cu_seqlens" in inspect.signature(part.forward).parameters
        if (
            takes_runs
            and hasattr(part, "qkv")
            and getattr(config, "_attn_implementation", None) == "sdpa"
        ):
            config._attn_implementation = RUNS_NAME  # type: ignore[union-attr]


AttentionInterface.register(RUNS_NAME, run_attention)
