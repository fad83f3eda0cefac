"""A transformer in float64 throughout, for tests whose bounds are below
what float32 norms allow."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Causal attention with two heads, then a gated layer, each behind a norm without weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x_btd: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (2, -1)).transpose(1, 2)
            for part in self.qkv(_norm(x_btd)).chunk(3, -1)
        )
        score = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        later = torch.ones(score.shape[-2:], dtype=torch.bool).triu(1)
        mixed = score.masked_fill(later, -torch.inf).softmax(-1) @ v
        x_btd = x_btd + self.out(mixed.transpose(1, 2).flatten(-2))
        return x_btd + self.down(torch.tanh(self.up(_norm(x_btd))))


class Body(nn.Module):
    """Embeddings of ids and positions, and the blocks."""

    def __init__(self, vocabulary: int, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.ids = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, input_ids, position_ids, attention_mask=None, use_cache=False):
        x_btd = self.ids(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            x_btd = block(x_btd)
        return SimpleNamespace(last_hidden_state=x_btd)


class Model64(nn.Module):
    """A causal model of the shape that the trainer wants.

    `logits` keeps every pass's whole logits, with their gradients.
    """

    base_model_prefix = "model"

    def __init__(
        self,
        vocabulary: int = 50,
        width: int = 16,
        layers: int = 2,
        *,
        context: int = 256,
        whole: bool = False,
    ) -> None:
        super().__init__()
        self.model = Body(vocabulary, width, layers, context)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.whole = whole
        self.logits: list[Tensor] = []
        generator = torch.Generator().manual_seed(3)
        for parameter in self.parameters():
            parameter.data = (
                torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3
            )

    def get_output_embeddings(self):
        return None if self.whole else self.lm_head

    def forward(self, input_ids, position_ids, attention_mask=None, use_cache=False):
        logits = self.lm_head(self.model(input_ids, position_ids).last_hidden_state)
        if logits.requires_grad:
            logits.retain_grad()
            self.logits.append(logits)
        return SimpleNamespace(logits=logits)


def _norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
