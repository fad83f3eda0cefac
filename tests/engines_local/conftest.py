"""One thread, as the application sets it: the promise of equal bits is made for that."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)


@pytest.fixture(scope="module", params=["fused", "modules"])
def both_ways(request: pytest.FixtureRequest) -> Iterator[None]:
    """The tests of a module with the fused forward pass, then with transformers' modules as where numba is missing."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "modules":
            patch.setattr("turnwright.engines.local.model.make_fused_decoder", lambda *parts: None)
        yield
