"""Models with experts, and the routes that they report."""

from __future__ import annotations

import numpy as np
from transformers import Qwen3MoeConfig

from kit.local_engines import model

SIZES = {
    "num_hidden_layers": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
WANT = {"extras": frozenset(["routes"])}


def moe(**changes):
    return model(Qwen3MoeConfig, **({"num_experts": 8, **SIZES} | changes))


def told(generation):
    start, routes = generation.extras["routes"]
    return start, np.asarray(routes)
