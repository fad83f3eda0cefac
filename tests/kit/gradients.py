"""Where the gradient of a step is, and its loss beside it."""

from __future__ import annotations

import torch

from kit.double_precision import Model64
from kit.training import learn
from turnwright.training.advantages import advantages


def loss_and_gradient(model, made, **settings):
    """The loss and the gradient of one step that leaves the weights as they are."""
    metrics, slope = learn(model, made, **settings)
    return metrics["loss"], slope


def check_probe(made, shift=0, model=None):
    """d loss / d logits is 0 but for the positions before a sampled id whose advantage is
    not 0, moved by `shift`."""
    model = model or Model64(whole=True)
    learn(model, made, micro_tokens=1)  # one row a pass, so that passes can be told apart
    rows = [
        (sample, credit.advantage)
        for credit in advantages(made).trained
        for sample in credit.trajectory.samples()
    ]
    probed = [
        ([place for place, weight in enumerate(sample.weights) if weight and place], value)
        for sample, value in rows
    ]
    # Passes come sorted by length; rows of the same length keep their order.
    probed = sorted(
        ((places, value) for places, value in probed if places), key=lambda row: row[0][-1]
    )
    for (places, value), logits in zip(probed, model.logits, strict=True):
        size = logits.grad[0].abs().amax(-1)
        assert size.shape == (places[-1],)
        expected = {place - 1 + shift for place in places} if value else set()
        for position in range(places[-1]):
            if position in expected:
                assert size[position] > 0, f"no gradient at position {position} of {places[-1]}"
            else:
                assert size[position] == 0, f"a gradient at position {position} of {places[-1]}"


def disturbed(model, size, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data += size * torch.randn(
            parameter.shape, generator=generator, dtype=torch.float64
        )
    return model
