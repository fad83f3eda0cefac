"""Checks of gradients: by finite differences, and of every weight."""

from __future__ import annotations

import torch

from kit.double_precision import Model64
from kit.training import gradient
from turnwright.config import TrainConfig
from turnwright.training import Trainer
from turnwright.training.advantages import advantages

STILL = {
    "lr": 0.0,
    "schedule": "constant",
    "max_grad_norm": 1e9,
    "max_mismatch": 1e9,
    "weight_decay": 0.0,
}


def learn(model, made, **settings):
    """One step that leaves the weights as they are: its loss, and the gradient
    that it left on them."""
    trainer = Trainer(model, TrainConfig(**{**STILL, **settings}))
    figures = trainer.step(made, step=0, steps=10).metrics
    return figures["loss"], gradient(model)


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
