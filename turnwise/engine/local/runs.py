"""Attention of a vision tower over many images at once.

A tower of the Qwen-VL kind strings the patches of all images together and lets each image attend to itself alone. Without a
flash kernel transformers does that by one call per image and layer, which on small images costs more than the arithmetic.
Here images of one size attend in one call; others, one by one.
"""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

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
