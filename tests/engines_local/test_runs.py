"""Attention of a tower over many images: one call for images of one size, and the same
numbers as one call each."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from turnwright.engines.local.attention import run_attention


@pytest.mark.parametrize("sizes", [[4], [6, 6, 6], [4, 9, 4], [1, 16]])
def test_each_image_attends_to_itself_alone(sizes):
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, sum(sizes), 8, requires_grad=True) for _ in range(3))
    edges = torch.tensor([0, *sizes]).cumsum(0)
    out, weights = run_attention(
        torch.nn.Identity(), query, key, value, None, scaling=0.3, cu_seq_lens_q=edges
    )
    alone = [
        F.scaled_dot_product_attention(
            *(part[:, :, a:b] for part in (query, key, value)), scale=0.3
        ).transpose(1, 2)
        for a, b in pairwise(edges.tolist())
    ]
    assert weights is None
    assert out.shape == (1, sum(sizes), 2, 8)
    torch.testing.assert_close(out, torch.cat(alone, dim=1), atol=1e-6, rtol=1e-5)
    (gradient,) = torch.autograd.grad(out[0, : sizes[0]].sum(), key)
    assert gradient[:, :, : sizes[0]].abs().sum() > 0 or sizes[0] == 1
    assert gradient[:, :, sizes[0] :].abs().sum() == 0
