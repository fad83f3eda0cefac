"""Attention to ancestors, as transformers calls it: a loop over chains and hangs on CPUs, FlexAttention on CUDA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from turnwise.errors import ModelError
from turnwise.train.forward.tree.flex import flex_attend
from turnwise.train.forward.trie import PrefixTree

NAME = "turnwise_tree"
"""Under which transformers knows this attention."""
FLASH: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
"""The kernel behind scaled_dot_product_attention on CPUs, which also tells the log-sum-exp; None where torch has no such."""
REFUSED = ("sliding_window", "softcap", "s_aux", "position_bias")
"""What some models' attention has besides, which is not computed here."""
FLASH_BACK: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)


class TreeAttention(torch.autograd.Function):  # type: ignore[misc]
    """Attention of a tree's tokens, chain by chain and hang by hang.

    The parts of a query's attention are put together by their log-sum-exp, as FlashAttention does (arXiv 2205.14135, section
    3.1): with s = logaddexp(s_1, s_2), out = exp(s_1 - s) out_1 + exp(s_2 - s) out_2. Backwards each part is given the output
    and log-sum-exp of the whole, which makes its probabilities and its gradient those of the whole.
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
        for first, last, start, end in tree.hangs:
            here = slice(first, last)
            more, sum_more = _forward(query, key, value, here, slice(start, end), False, scale)
            mine, sum_mine = out[:, :, here], sums[:, :, here]
            mine.lerp_(more.to(wide), torch.sigmoid(sum_more - sum_mine)[..., None])
            torch.logaddexp(sum_mine, sum_more, out=sum_mine)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.tree, ctx.scale = tree, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of query, key and value."""
        query, key, value, out, sums = ctx.saved_tensors
        tree: PrefixTree = ctx.tree
        d_query, d_key, d_value = (torch.empty_like(part, dtype=sums.dtype) for part in (query, key, value))
        parts = [(slice(s, e), slice(s, e), True) for s, e in tree.chains]
        parts += [(slice(h.first, h.last), slice(h.key, h.keys), False) for h in tree.hangs]
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
    """Attention in the shape that transformers asks for; with no tree, as scaled_dot_product_attention has it.

    Args:
        query: [1, query heads, T, D]; key and value alike with their own number of heads.
        turnwise_tree: of the pass.

    Returns:
        [1, T, query heads, D], and None for the weights, which are not kept.
    """
    if turnwise_tree is None:
        own = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return own(module, query, key, value, attention_mask, scaling=scaling, **kwargs)  # type: ignore[no-any-return]
    for name in REFUSED:
        if kwargs.get(name) is not None:
            raise ModelError(f"{type(module).__name__} uses '{name}'")
    tree, heads, width = turnwise_tree, key.shape[1], value.shape[3]
    if width != key.shape[3]:
        raise ModelError(f"{type(module).__name__} has keys of {key.shape[3]} numbers and values of {width}")
    tree.kept["layers"] = tree.kept.get("layers", 0) + 1
    if query.device.type != "cpu":
        return flex_attend(query, key, value, tree, scaling).transpose(1, 2), None
    grouped = query.view(heads, -1, *query.shape[2:]).transpose(0, 1)
    out = TreeAttention.apply(grouped, key, value, tree, scaling)
    return out.permute(2, 1, 0, 3).reshape(1, tree.size, -1, width), None


AttentionInterface.register(NAME, attend)
