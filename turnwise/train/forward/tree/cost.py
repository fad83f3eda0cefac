"""What a layout of rows is estimated to cost, so that a tree is built only where it saves something. No tensors here.

A pass, forward and backward, is estimated in multiplications of one forward pass of the decoder:

    rows = sum over passes of  B * T * (matrices + around) + layers * (B * T (T + 1) / 2 * pair + PASS)
    tree = sum over passes of  U * (matrices + around)     + layers * (pairs * pair + calls * CALL + PASS)

B rows padded to T; U tokens of the trie, `pairs` of a query and a key in it, `calls` chains and hangs. `matrices` are the
numbers in the decoder's matrices that one token meets (of experts, the share that it is routed to), `around` what its norms and
activations cost, ``AROUND * layers * width``; `pair` is ``PAIR * 2 * query heads * head size``. The head is left out: it costs
each layout the same. A tree is chosen where ``tree * MARGIN <= rows``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

PASS = {"cpu": 3.5e7, "cuda": 3e10}
"""What a forward pass costs beside its tokens, for each layer. On the CPU of docs/benchmarks.md 1.6 to 2.3 ms, where a
multiplication takes 0.05 ns of a pass forward and backward; that of CUDA is 1 ms at 3e13 a second, and was not measured."""
CALL = 1.8e6
"""What one more call of attention costs, for each layer: 90 us there. On CUDA the whole tree is one call."""
AROUND = 1800
"""What norms, rotary positions and activations of a token cost, for each number of the width and layer: 0.09 us there."""
PAIR = 2.0
"""What a multiplication in attention costs against one in a matrix."""
MARGIN = 1.1
"""What a tree must save to be chosen: estimates are not better than that."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """What a token, a pair of query and key, a call and a pass cost."""

    token: float
    pair: float
    call: float
    once: float

    @classmethod
    def of(cls, decoder: nn.Module) -> CostModel:
        """Of a decoder of transformers, where it is."""
        device = next(decoder.parameters()).device.type
        config: Any = decoder.config
        layers, width = int(config.num_hidden_layers), int(config.hidden_size)
        heads = int(config.num_attention_heads)
        head = int(getattr(config, "head_dim", None) or width // heads)
        routed = int(getattr(config, "num_experts_per_tok", None) or 1)
        matrices = 0.0
        for name, parameter in decoder.named_parameters():
            if parameter.ndim == 2 and "embed" not in name:
                matrices += parameter.numel()
            elif parameter.ndim == 3:  # experts
                matrices += parameter.numel() * min(1.0, routed / parameter.shape[0])
        return cls(
            token=matrices + AROUND * layers * width,
            pair=PAIR * 2 * heads * head * layers,
            call=CALL * layers if device == "cpu" else 0.0,
            once=PASS.get(device, PASS["cuda"]) * layers,
        )

    def rows(self, shapes: Sequence[tuple[int, int]]) -> float:
        """Of passes of (B, T) padded rows."""
        tokens = sum(b * t for b, t in shapes)
        pairs = sum(b * t * (t + 1) / 2 for b, t in shapes)
        return tokens * self.token + pairs * self.pair + len(shapes) * self.once

    def tree(self, tokens: int, pairs: float, calls: int) -> float:
        """Of one pass of a trie."""
        return tokens * self.token + pairs * self.pair + calls * self.call + self.once
