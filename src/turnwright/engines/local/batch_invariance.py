"""Start-up check of whether a row's bits are independent of its batch, and with which slice
lengths."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from turnwright.engines.local.attention import FLASH, AttentionRun
from turnwright.engines.local.model import CHUNK, EngineModel

_GRANULES = (32, 64, 128, 256)


@torch.inference_mode()  # type: ignore[untyped-decorator]
def calibrate_batch_invariance(model: EngineModel) -> bool:
    """Set the model's granule to the smallest safe one and check that batching does not change
    bits.

    Takes some milliseconds for a tiny model, and a few forward passes of up to 128 rows for any.
    Return whether a sequence had the same bits alone and in a batch, computed at once and in
    pieces.
    """
    model.reserve(8, min(model.context, 64))
    if model.adapters is not None:
        for slot in range(8):
            model.adapters.assign(slot, 1)
    _probe(model, [(0, 0, 2)], 0, [])  # allocates the layers, which sets their shapes
    if not model.on_cpu:
        return False

    if model.fused is None:
        granule = _safe_granule(model)
        if granule is not None:
            model.granule = granule
        else:  # no slice is safe: always attend over the full capacity in one call
            model.granule = -(-(model.context + 1) // CHUNK) * CHUNK
            model.chunk = 2 * model.granule

    model.cache.clear()
    model.reserve(8, min(model.context, 64))
    same = _same_bits(model)
    model.cache.zero()
    return same


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes of a layer's attention: key heads, query heads for each of them, and head sizes."""

    kv: int
    shared: int
    key_size: int
    value_size: int
    dtype: torch.dtype


def _safe_granule(model: EngineModel) -> int | None:
    """Return the smallest granule that is safe for every layer."""
    if FLASH is None:
        return None
    heads = int(model.config.num_attention_heads)
    shapes: set[AttentionShape] = set()
    for keys, values in model.cache.layers.values():
        kv = keys.shape[1]
        shapes.add(AttentionShape(kv, heads // kv, keys.shape[3], values.shape[3], keys.dtype))
    for granule in _GRANULES:
        if all(_is_granule_safe(granule, CHUNK, shape) for shape in shapes):
            return granule
    return None


def _is_granule_safe(granule: int, reach: int, shape: AttentionShape) -> bool:
    """Return whether attention has the same bits for all slice lengths up to `reach` that are
    multiples of `granule`."""
    generator = torch.Generator().manual_seed(0)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(3, shape.kv, *sizes, generator=generator).to(shape.dtype)

    query = random(shape.shared, shape.key_size)
    keys = random(reach, shape.key_size)
    values = random(reach, shape.value_size)
    for valid in (1, granule - 1, 40, 70, 100, 150, 200, 250):
        expected = None
        start = -(-valid // granule) * granule
        for length in {start, start + granule, (start + reach) // 2 // granule * granule, reach}:
            if not valid <= length <= reach:
                continue
            mask = torch.zeros(3, 1, 1, length, dtype=shape.dtype)
            mask[..., valid:] = -torch.inf
            part = (keys[:, :, :length], values[:, :, :length])
            for out in (
                F.scaled_dot_product_attention(query, *part, attn_mask=mask),
                FLASH(query, *part, attn_mask=mask)[0],
            ):
                if expected is None:
                    expected = out
                if not torch.equal(out, expected):
                    return False
    return True


def _probe(
    model: EngineModel, runs: list[tuple[int, int, int]], decode: int, keep: list[int]
) -> torch.Tensor:
    """Run a pass over synthetic ids: rows of slots 0 and 1 at position `decode`, unless it is 0,
    then runs of (slot, start, count)."""

    def synthetic_id(slot: int, position: int) -> int:
        distinct = slot if slot > 1 else 0  # slots 0 and 1 hold the same ids
        return (17 + 131 * position + 37 * distinct) % model.vocabulary

    slots = [0, 1] if decode else []
    tokens = [synthetic_id(slot, decode) for slot in slots]
    positions = [decode for _ in slots]
    parts = [AttentionRun(0, len(tokens), decode + 1)] if tokens else []
    for slot, start, count in runs:
        parts.append(AttentionRun(len(tokens), count, start + count, slot))
        tokens += [synthetic_id(slot, position) for position in range(start, start + count)]
        positions += range(start, start + count)
        slots += [slot] * count
    return model.forward(tokens, positions, slots, parts, keep)


def _same_bits(model: EngineModel) -> bool:
    """Compare logits and cache of a sequence computed at once in slot 0 and in pieces beside
    others in slot 1."""
    length = min(20, model.context)
    if length < 4:
        return True
    last_two = [length - 2, length - 1]
    expected = _probe(model, [(0, 0, length)], 0, last_two)[:2].clone()

    # All but two positions beside six prompts, then two decoded beside rows of these.
    others = [(slot, 0, min(model.context, 12 + slot)) for slot in range(2, 8)]
    _probe(model, [*others, (1, 0, length - 2)], 0, [])
    runs = [(slot, 3, 1) for slot in range(2, 8)]
    in_pieces = [_probe(model, runs, position, [1])[0].clone() for position in last_two]
    if not torch.equal(expected, torch.stack(in_pieces)):
        return False

    units = -(-length // model.cache.unit)  # positions after the last are zero in both
    for pair in model.cache.layers.values():
        for store in pair:
            if not torch.equal(store[0, :, :units], store[1, :, :units]):
                return False
    return True
