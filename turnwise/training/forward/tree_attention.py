"""Attention along a prefix tree."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from turnwise.errors import ModelError
from turnwise.training.forward.prefix_tree import PackedPrefixTree, PrefixTree, SortedRows, build_prefix_tree

BLOCK = 128
"""Queries and keys per block: FlexAttention's own size."""


def block_mask(tree: PrefixTree, device: torch.device | str) -> Any:
    """Return the BlockMask of a tree, built once per device.

    A token's descendants follow it directly. So a block of keys is partly visible to a later block of queries if the furthest
    end among its keys is after the first query, and fully if the nearest end is after the last query.

    Returns:
        A BlockMask [1, 1, T, T].
    """
    from torch.nn.attention.flex_attention import BlockMask

    name = f"flex {device}"
    if name not in tree.cache:
        some, every = _blocks(tree)
        ends_t = torch.from_numpy(tree.ends_t).to(device)

        def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query < ends_t[key])

        partial, full = (_listed(table, device) for table in (some & ~every, every))
        tree.cache[name] = BlockMask.from_kv_blocks(
            *partial, *full, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(tree.size, tree.size)
        )
    return tree.cache[name]


def _blocks(tree: PrefixTree) -> tuple[Any, Any]:
    """Return two tables [query blocks, key blocks]: whether some query sees some key, and whether each sees each."""
    count = -(-tree.size // BLOCK)
    spare = count * BLOCK - tree.size
    furthest = np.pad(tree.ends_t, (0, spare)).reshape(count, BLOCK).max(1)
    nearest = np.pad(tree.ends_t, (0, spare)).reshape(count, BLOCK).min(1)
    first = np.arange(count)[:, None] * BLOCK
    earlier = np.tri(count, k=-1, dtype=bool)
    some = (earlier & (furthest[None] > first)) | np.eye(count, dtype=bool)
    return some, earlier & (nearest[None] >= first + BLOCK)


def _listed(table: Any, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Return counts and indices of each query block's key blocks as BlockMask expects them, unused indices last."""
    counts = table.sum(1).astype(np.int32)
    indices = np.argsort(~table, axis=1, kind="stable").astype(np.int32)
    return torch.from_numpy(counts)[None, None].to(device), torch.from_numpy(indices)[None, None].to(device)


@cache
def _compiled() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    # Passes have many lengths; without this each would be compiled separately until torch gives up.
    return torch.compile(flex_attention, dynamic=True)  # type: ignore[no-any-return]


def flex_attend(
    query: Tensor, key: Tensor, value: Tensor, tree: PrefixTree, scale: float | None, run: Callable[..., Tensor] | None = None
) -> Tensor:
    """Attend to ancestors with FlexAttention.

    Args:
        query: [1, query heads, T, D]; key and value alike with their own number of heads.
        run: `flex_attention`; compiled by default.

    Returns:
        [1, query heads, T, D].
    """
    run = _compiled() if run is None else run
    grouped = query.shape[1] != key.shape[1]
    return run(query, key, value, block_mask=block_mask(tree, query.device), scale=scale, enable_gqa=grouped)


NAME = "turnwise_tree"
"""Name of this attention in transformers."""
FLASH: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
"""CPU kernel of scaled_dot_product_attention, which also returns the log-sum-exp; None if torch lacks it."""
REFUSED = ("sliding_window", "softcap", "s_aux", "position_bias")
"""Extensions of some models' attention that are not supported here."""
FLASH_BACK: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)


class TreeAttention(torch.autograd.Function):  # type: ignore[misc]
    """Attention of a tree's tokens, one call per chain and per side branch.

    A query's parts are combined by their log-sum-exp, as in FlashAttention (arXiv 2205.14135, section 3.1): with
    s = logaddexp(s_1, s_2), out = exp(s_1 - s) out_1 + exp(s_2 - s) out_2. In the backward pass each part gets the combined
    output and log-sum-exp, so its probabilities and gradient are those of the full attention.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, tree: PrefixTree, scale: float | None) -> Tensor:
        """
        Args:
            query: [G, K, T, D]: K key heads, each shared by G query heads.
            key, value: [1, K, T, D].

        Returns:
            [G, K, T, D], of which every [T, K, G, D] is contiguous.
        """
        shared, heads, size, width = query.shape
        wide = torch.promote_types(query.dtype, torch.float32)
        out = query.new_empty((size, heads, shared, width), dtype=wide).permute(2, 1, 0, 3)
        sums = query.new_empty((size, heads, shared), dtype=wide).permute(2, 1, 0)
        for start, end in tree.chains:
            here = slice(start, end)
            out[:, :, here], sums[:, :, here] = _forward(query, key, value, here, here, True, scale)
        for first, last, start, end in tree.branches:
            block = slice(first, last)
            side, side_sums = _forward(query, key, value, block, slice(start, end), False, scale)
            block_out, block_sums = out[:, :, block], sums[:, :, block]
            block_out.lerp_(side.to(wide), torch.sigmoid(side_sums - block_sums)[..., None])
            torch.logaddexp(block_sums, side_sums, out=block_sums)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.tree, ctx.scale = tree, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of query, key and value."""
        query, key, value, out, sums = ctx.saved_tensors
        tree: PrefixTree = ctx.tree
        d_query, d_key, d_value = (torch.empty_like(part, dtype=sums.dtype) for part in (query, key, value))
        parts = [(slice(s, e), slice(s, e), True) for s, e in tree.chains]
        parts += [(slice(h.first, h.last), slice(h.key, h.keys), False) for h in tree.branches]
        for rows, keys, causal in parts:
            many = (query.shape[0], -1, -1, -1)
            dq, dk, dv = FLASH_BACK(
                grad[:, :, rows],
                query[:, :, rows],
                key[:, :, keys].expand(many),
                value[:, :, keys].expand(many),
                out[:, :, rows],
                sums[:, :, rows],
                0.0,
                causal,
                attn_mask=None,
                scale=ctx.scale,
            )
            if causal:  # chains hold every token once
                d_query[:, :, rows] = dq
                d_key[:, :, keys] = dk.sum(0, keepdim=True, dtype=sums.dtype)
                d_value[:, :, keys] = dv.sum(0, keepdim=True, dtype=sums.dtype)
            else:
                d_query[:, :, rows] += dq
                d_key[:, :, keys] += dk.sum(0, keepdim=True, dtype=sums.dtype)
                d_value[:, :, keys] += dv.sum(0, keepdim=True, dtype=sums.dtype)
        return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), None, None


def _forward(
    query: Tensor, key: Tensor, value: Tensor, rows: slice, keys: slice, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    many = (query.shape[0], -1, -1, -1)
    k, v = key[:, :, keys].expand(many), value[:, :, keys].expand(many)
    found: tuple[Tensor, Tensor] = FLASH(query[:, :, rows], k, v, 0.0, causal, attn_mask=None, scale=scale)
    return found


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    turnwise_tree: PrefixTree | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend with transformers' signature; without a tree, call scaled_dot_product_attention.

    Args:
        query: [1, query heads, T, D]; key and value alike with their own number of heads.
        turnwise_tree: prefix tree of the pass.

    Returns:
        [1, T, query heads, D], and None for the attention weights.
    """
    if turnwise_tree is None:
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return sdpa(module, query, key, value, attention_mask, scaling=scaling, **kwargs)  # type: ignore[no-any-return]
    for name in REFUSED:
        if kwargs.get(name) is not None:
            raise ModelError(f"{type(module).__name__} uses '{name}'")
    tree, heads, width = turnwise_tree, key.shape[1], value.shape[3]
    if width != key.shape[3]:
        raise ModelError(f"{type(module).__name__} has key size {key.shape[3]} and value size {width}")
    tree.cache["layers"] = tree.cache.get("layers", 0) + 1
    if query.device.type != "cpu":
        return flex_attend(query, key, value, tree, scaling).transpose(1, 2), None
    grouped = query.view(heads, -1, *query.shape[2:]).transpose(0, 1)
    out = TreeAttention.apply(grouped, key, value, tree, scaling)
    return out.permute(2, 1, 0, 3).reshape(1, tree.size, -1, width), None


AttentionInterface.register(NAME, attend)


PROOF = ((0, 1, 2, 3, 4, 5), (0, 1, 2, 5, 1), (0, 1, 2, 5, 2), (0, 3, 1))
"""Rows on which tree attention is compared with row attention."""
PROOF_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4}
"""Maximum difference of a hidden state, relative to the largest number in it; norms are in float32 at best. 0.1 for narrower
types."""


def install_tree_attention(decoder: nn.Module) -> str:
    """Replace a decoder's attention in place: it follows a tree if a pass has one, and is unchanged otherwise.

    The attention's name is in the config, which models created from one config share, so this decoder gets a copy.

    Args:
        decoder: of transformers, with layers that look up their attention by name.

    Returns:
        The reason why it is not possible; empty on success.
    """
    config = getattr(decoder, "config", None)
    name = getattr(config, "_attn_implementation", None)
    if config is None or name is None:
        return f"{type(decoder).__name__} does not use transformers' attention"
    if name not in ("sdpa", NAME):
        return f"its attention is {name!r}, only 'sdpa' is replaced"
    if FLASH is None or FLASH_BACK is None:
        return "this torch has no flash attention for CPUs"
    before = [(module, module.config) for module in decoder.modules() if getattr(module, "config", None) is config]
    own = copy.copy(config)
    own._attn_implementation = NAME
    for module, _ in before:
        module.config = own
    reason = _difference(decoder)
    if reason:
        for module, original in before:
            module.config = original
    return reason


def _difference(decoder: nn.Module) -> str:
    """Describe how tree attention differs from that of the rows; empty if it does not."""
    shared = SortedRows.of(PROOF)
    made = build_prefix_tree(shared, 0, len(PROOF))
    first = next(decoder.parameters())
    try:
        with torch.no_grad():
            got = _hidden(decoder, *_tokens(made, first.device), turnwise_tree=made.tree)
            largest = 0.0
            for number, row in enumerate(PROOF):
                ids_bt = torch.tensor([row], device=first.device)
                expected = _hidden(decoder, ids_bt, torch.arange(len(row), device=first.device)[None])
                actual = got[0, torch.from_numpy(made.places[number]).to(first.device)]
                largest = max(largest, float((expected[0] - actual).abs().max() / expected.abs().max()))
    except (ModelError, TypeError) as error:
        return str(error)
    layers = getattr(decoder.config, "num_hidden_layers", None)
    if made.tree.cache.get("layers") != layers:
        return f"{made.tree.cache.get('layers', 0)} of its {layers} layers look up their attention by name"
    if not largest <= PROOF_TOLERANCE.get(first.dtype, 0.1):
        return f"hidden states of a small tree differ from those of its rows by {largest:.2g}"
    return ""


def _tokens(made: PackedPrefixTree, device: torch.device) -> tuple[Tensor, Tensor]:
    ids_t, positions_t = np.empty(made.tree.size, dtype=np.int64), np.empty(made.tree.size, dtype=np.int64)
    for number, row in enumerate(PROOF):
        ids_t[made.places[number]], positions_t[made.places[number]] = row, np.arange(len(row))
    return torch.from_numpy(ids_t)[None].to(device), torch.from_numpy(positions_t)[None].to(device)


def _hidden(decoder: nn.Module, ids_bt: Tensor, positions_1t: Tensor, **more: Any) -> Tensor:
    output = decoder(input_ids=ids_bt, position_ids=positions_1t, attention_mask=None, use_cache=False, **more)
    hidden: Tensor = output.last_hidden_state
    return hidden
