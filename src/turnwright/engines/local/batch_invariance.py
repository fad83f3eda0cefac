"""Start-up check of whether a row's bits are independent of its batch, and
with which slice lengths."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from turnwright.engines.local.attention import FLASH, AttentionRun
from turnwright.engines.local.model import CHUNK, EngineModel

_GRANULES = (32, 64, 128, 256)


@torch.inference_mode()  # type: ignore[untyped-decorator]
def calibrate_batch_invariance(model: EngineModel) -> bool:
    """Set the model's granule to the smallest safe one and check that
    batching does not change bits.

    Takes some milliseconds for a tiny model, and a few forward passes of up to 128
    rows for any. Return whether a sequence had the same bits alone and in a batch,
    computed at once and in pieces.
    """
    model.reserve(8, min(model.context, 64))
    if model.adapters is not None:
        for slot in range(8):
            model.adapters.assign(slot, 1)
    _probe(model, [(0, 0, 2)], 0, [])  # allocates the layers, which sets their shapes
    if not model.on_cpu:
        return False
    if model.fused is None:
        heads = int(model.config.num_attention_heads)
        sizes = {
            (k.shape[1], heads // k.shape[1], k.shape[3], v.shape[3], k.dtype)
            for k, v in model.cache.layers.values()
        }
        granules = [
            g
            for g in _GRANULES
            if FLASH is not None and all(_is_granule_safe(g, CHUNK, *size) for size in sizes)
        ]
        if granules:
            model.granule = granules[0]
        else:  # no slice is safe: always attend over the full capacity in one call
            model.granule = -(-(model.context + 1) // CHUNK) * CHUNK
            model.chunk = 2 * model.granule
    model.cache.clear()
    model.reserve(8, min(model.context, 64))
    same = _same_bits(model)
    model.cache.zero()
    return same


def _is_granule_safe(
    granule: int, reach: int, kv: int, shared: int, size: int, value_size: int, dtype: torch.dtype
) -> bool:
    """Return whether attention has the same bits for all slice lengths up to `reach` that are
    multiples of `granule`."""
    random = torch.Generator().manual_seed(0)
    query = torch.randn(3, kv, shared, size, generator=random).to(dtype)
    keys = torch.randn(3, kv, reach, size, generator=random).to(dtype)
    values = torch.randn(3, kv, reach, value_size, generator=random).to(dtype)
    for valid in (1, granule - 1, 40, 70, 100, 150, 200, 250):
        full, start = None, -(-valid // granule) * granule
        for length in {start, start + granule, (start + reach) // 2 // granule * granule, reach}:
            if not valid <= length <= reach:
                continue
            mask = torch.zeros(3, 1, 1, length, dtype=dtype)
            mask[..., valid:] = -torch.inf
            part = keys[:, :, :length], values[:, :, :length]
            for out in (
                F.scaled_dot_product_attention(query, *part, attn_mask=mask),
                FLASH(query, *part, attn_mask=mask)[0],
            ):
                full = out if full is None else full
                if not torch.equal(out, full):
                    return False
    return True


def _probe(
    model: EngineModel, runs: list[tuple[int, int, int]], decode: int, keep: list[int]
) -> torch.Tensor:
    """Run a pass over synthetic ids: `decode` rows of slots 0, 1, ... at one position, then runs of
    (slot, start, count)."""

    def word(slot: int, position: int) -> int:
        return (
            17 + 131 * position + 37 * (slot if slot > 1 else 0)
        ) % model.vocabulary  # slots 0 and 1 hold the same ids

    slots = [0, 1] if decode else []
    tokens, positions = [word(slot, decode) for slot in slots], [decode for _ in slots]
    parts = [AttentionRun(0, len(tokens), decode + 1)] if tokens else []
    for slot, start, count in runs:
        parts.append(AttentionRun(len(tokens), count, start + count, slot))
        tokens += [word(slot, position) for position in range(start, start + count)]
        positions += range(start, start + count)
        slots += [slot] * count
    return model.forward(tokens, positions, slots, parts, keep)


def _same_bits(model: EngineModel) -> bool:
    """Compare logits and cache of a sequence computed at once in slot 0 and in pieces
    beside others in slot 1."""
    length = min(20, model.context)
    if length < 4:
        return True
    expected = _probe(model, [(0, 0, length)], 0, [length - 2, length - 1])[:2].clone()
    others = [(slot, 0, min(model.context, 12 + slot)) for slot in range(2, 8)]
    _probe(model, [*others, (1, 0, length - 2)], 0, [])
    runs = [(slot, 3, 1) for slot in range(2, 8)]
    found = [_probe(model, runs, position, [1])[0].clone() for position in (length - 2, length - 1)]
    if not torch.equal(expected, torch.stack(found)):
        return False
    units = -(-length // model.cache.unit)  # positions after the last are zero in both
    return all(
        torch.equal(store[0, :, :units], store[1, :, :units])
        for pair in model.cache.layers.values()
        for store in pair
    )
