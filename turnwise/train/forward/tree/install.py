"""Whether a model's attention can be led along a tree, and leading it there."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from turnwise.errors import ModelError
from turnwise.train.forward.tree.attention import FLASH, FLASH_BACK, NAME
from turnwise.train.forward.trie import PackedPrefixTree, SortedRows, build_prefix_tree

PROOF = ((0, 1, 2, 3, 4, 5), (0, 1, 2, 5, 1), (0, 1, 2, 5, 2), (0, 3, 1))
"""Rows on which attention along their tree is held against the rows themselves."""
PROOF_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4}
"""Largest difference of a hidden state, relative to the largest number in it; norms are in float32 at best. Of narrower types
0.1."""


def install_tree_attention(decoder: nn.Module) -> str:
    """Give a decoder, in place, attention that follows a tree where a pass has one and is its own where it has none.

    Models that were made from one config share the object, and what attention they use stands in it, so this one is given a
    copy.

    Args:
        decoder: of transformers, with layers that look up their attention by its name.

    Returns:
        Why it cannot be done; empty where it was.
    """
    config = getattr(decoder, "config", None)
    name = getattr(config, "_attn_implementation", None)
    if config is None or name is None:
        return f"{type(decoder).__name__} has no attention of transformers"
    if name not in ("sdpa", NAME):
        return f"its attention is {name!r}, only 'sdpa' is replaced"
    if FLASH is None or FLASH_BACK is None:
        return "this torch has no flash attention for CPUs"
    before = [(module, module.config) for module in decoder.modules() if getattr(module, "config", None) is config]
    own = copy.copy(config)
    own._attn_implementation = NAME
    for module, _ in before:
        module.config = own
    why = _unlike(decoder)
    if why:
        for module, mine in before:
            module.config = mine
    return why


def _unlike(decoder: nn.Module) -> str:
    """How attention along a tree differs from that of its rows; empty where it does not."""
    shared = SortedRows.of(PROOF)
    made = build_prefix_tree(shared, 0, len(PROOF))
    first = next(decoder.parameters())
    try:
        with torch.no_grad():
            got = _hidden(decoder, *_tokens(made, first.device), turnwise_tree=made.tree)
            largest = 0.0
            for number, row in enumerate(PROOF):
                ids_bt = torch.tensor([row], device=first.device)
                own = _hidden(decoder, ids_bt, torch.arange(len(row), device=first.device)[None])
                mine = got[0, torch.from_numpy(made.places[number]).to(first.device)]
                largest = max(largest, float((own[0] - mine).abs().max() / own.abs().max()))
    except (ModelError, TypeError) as error:
        return str(error)
    layers = getattr(decoder.config, "num_hidden_layers", None)
    if made.tree.kept.get("layers") != layers:
        return f"{made.tree.kept.get('layers', 0)} of its {layers} layers look attention up by its name"
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
