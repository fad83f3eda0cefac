"""From ids to logits at the positions that need them, for any Hugging Face causal model."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from turnwise.train.batch import Micro


class Forward:
    """Runs a causal model's body on whole rows and its head only on the positions asked for.

    With a vocabulary of 151k the logits of every position would be the largest tensor of a step by far, and a multi-turn row is
    mostly observations. Models that do more than a matrix product behind the body (soft-capped or scaled logits) are found by
    comparing one small forward pass bit by bit; for them the whole logits are computed.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.body, self.head = _parts(model)
        self.positions = "position_ids" in inspect.signature((self.body or model).forward).parameters
        if self.body is not None and not self._split_is_exact():
            self.body = self.head = None

    def logits(self, micro: Micro) -> Tensor:
        """The logits (M, vocabulary) that predict a pass's targets, in float32 or better."""
        if self.body is None or self.head is None:
            full_btv = self._call(self.model, micro.ids_bt, micro.positions_1t).logits
            chosen = full_btv.flatten(0, 1).index_select(0, micro.before_m)
        else:
            hidden_btd = self._call(self.body, micro.ids_bt, micro.positions_1t).last_hidden_state
            chosen = self.head(hidden_btd.flatten(0, 1).index_select(0, micro.before_m))
        return chosen.to(torch.promote_types(chosen.dtype, torch.float32))

    def _call(self, module: nn.Module, ids_bt: Tensor, positions_1t: Tensor) -> Any:
        # No mask: rows are padded on the right, where causal attention cannot look. No cache: with one, transformers would take
        # other paths through its masks.
        extra = {"position_ids": positions_1t} if self.positions else {}
        return module(input_ids=ids_bt, attention_mask=None, use_cache=False, **extra)

    def _split_is_exact(self) -> bool:
        assert self.body is not None
        assert self.head is not None
        device = next(self.model.parameters()).device
        ids_bt = torch.tensor([[0, 1, 2, 3]], device=device)
        positions_1t = torch.arange(4, device=device)[None]
        with torch.no_grad():
            whole = self._call(self.model, ids_bt, positions_1t).logits
            split = self.head(self._call(self.body, ids_bt, positions_1t).last_hidden_state)
        return bool(torch.equal(whole, split))


def _parts(model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """A model's body and head, or (None, None) where it does not tell."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    body = getattr(model, getattr(model, "base_model_prefix", "") or "model", None)
    if not isinstance(head, nn.Module) or not isinstance(body, nn.Module) or body is model:
        return None, None
    return body, head
