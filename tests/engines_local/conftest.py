"""One thread, as the application sets it: the promise of equal bits is made for that."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kit.sight import TEXTS, Gallery

from turnwright.config import ModelConfig
from turnwright.engines.local.fused_decoder import make_fused_decoder
from turnwright.engines.local.mixed_precision import multiplies_bfloat16, use_mixed_products
from turnwright.training.model import models

torch.set_num_threads(1)


@pytest.fixture(scope="module", params=["fused", "modules"])
def both_ways(request: pytest.FixtureRequest) -> Iterator[None]:
    """The tests of a module with the fused forward pass, then with transformers' modules as
    where numba is missing."""
    with pytest.MonkeyPatch.context() as patch:
        use_way(patch, request.param)
        yield


@pytest.fixture(
    scope="module",
    params=[
        "fused",
        "modules",
        *(["fused mixed", "modules mixed"] if multiplies_bfloat16() else []),
    ],
)
def all_ways(request: pytest.FixtureRequest) -> Iterator[None]:
    """`both_ways` in float32, then with products in bfloat16 where the processor has them."""
    with pytest.MonkeyPatch.context() as patch:
        use_way(patch, request.param)
        yield


def use_way(patch: pytest.MonkeyPatch, way: str) -> None:
    """Let engines compute in the way."""

    def make(module: Any, context: int, cache: Any, tower: Any = None) -> Any:
        if "mixed" in way:
            use_mixed_products(module.model if tower is None else tower.text, module.lm_head)
        return None if "modules" in way else make_fused_decoder(module, context, cache, tower)

    patch.setattr("turnwright.engines.local.model.make_fused_decoder", make)


@pytest.fixture(scope="module", params=["fused", "modules"])
def gallery(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Gallery:
    """A tiny Qwen3-VL of sizes that the fused forward pass takes, and one of others."""
    sizes = ModelConfig(
        hidden=64 if request.param == "fused" else 32, heads=4, vision=True, image_side=64
    )
    return Gallery(
        models.create_tiny_model(sizes, TEXTS, tmp_path_factory.mktemp("sees") / "model")
    )
