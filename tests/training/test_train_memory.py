"""Memory that runs out: passes are halved once, and said; and what is told of it before a run."""

import pytest
import torch
from train_kit import distance, gradient, random_groups
from train_model64 import Model64

from turnwise.config import TrainConfig
from turnwise.errors import ConfigError, TurnwiseError
from turnwise.training import Trainer
from turnwise.training.trainer.memory import GIB, MemoryEstimate, activation_bytes, available_bytes, check_memory, estimate

STILL = {"lr": 0.0, "schedule": "constant", "max_grad_norm": 1e9, "max_mismatch": 1e9, "weight_decay": 0.0}


class Full(Model64):
    """Has memory for so many tokens in a pass; what it raises is what CUDA does."""

    room = 10**9
    in_backward = False

    def __init__(self, **options):
        super().__init__(**options)
        self.model.register_forward_hook(self.measure, with_kwargs=True)
        self.failed = 0

    def measure(self, module, args, kwargs, output):
        if (kwargs["input_ids"] if kwargs else args[0]).numel() <= self.room or not torch.is_grad_enabled():
            return  # what keeps no activations has room

        def fail(grad):
            self.failed += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.64 GiB. GPU 0 has ...")

        if not self.in_backward:
            fail(None)
        elif output.last_hidden_state.requires_grad:
            output.last_hidden_state.register_hook(fail)


def steps(model, **config):
    told = []
    return Trainer(model, TrainConfig(**STILL | {"micro_tokens": 64} | config), on_note=told.append), told


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("config", [{}, {"epochs": 2, "minibatches": 2, "correction": "tis"}, {"kl": 0.1, "algorithm": "gspo"}])
def test_passes_are_halved_once_and_the_result_is_the_same(in_backward, config):
    model = Full()
    trainer, _ = steps(model, **config)
    trainer.reference()
    expected = trainer.step(random_groups(1), step=0, steps=1).metrics
    slope = gradient(model)
    model = Full()
    trainer, told = steps(model, **config)
    trainer.reference()
    model.room, model.in_backward = 40, in_backward
    found = trainer.step(random_groups(1), step=0, steps=1).metrics
    assert model.failed == 1
    assert len(told) == 1
    assert "forward passes now take 32 tokens instead of 64; set train.micro_tokens = 32" in told[0]
    assert "Tried to allocate" not in told[0]
    assert distance(gradient(model), slope) < 1e-10
    for name in ("loss", "grad_norm", "entropy", "tokens_trained", "ratio_mean"):
        assert found[name] == pytest.approx(expected[name], rel=1e-9)
    trainer.step(random_groups(2), step=1, steps=2)
    assert (model.failed, len(told)) == (1, 1)  # later steps begin with what fits


def test_demonstrations_too():
    model = Full()
    model.room, model.in_backward = 40, True
    trainer, told = steps(model)
    demos = [t for group in random_groups(1) for t in group.trajectories]
    found = trainer.supervised(demos, lr=0.0)
    whole = Trainer(Model64(), TrainConfig(**STILL)).supervised(demos, lr=0.0)
    assert len(told) == 1
    assert found["loss"] == pytest.approx(whole["loss"])
    assert found["grad_norm"] == pytest.approx(whole["grad_norm"])


def test_a_second_time_is_an_error_that_leaves_the_weights():
    model = Full()
    model.room = 5
    trainer, told = steps(model, lr=0.1)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(TurnwiseError, match=r"passes of 32 tokens, already half of train.micro_tokens") as caught:
        trainer.step(random_groups(1), step=0, steps=1)
    assert "limits.context" in str(caught.value)
    assert len(told) == 1
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_other_errors_pass_through():
    trainer, told = steps(Full())

    def fail(*args):
        raise RuntimeError("a bug")

    trainer.model.model.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="a bug"):
        trainer.step(random_groups(1), step=0, steps=1)
    assert told == []


def test_what_a_pass_keeps_is_carried_on_from_short_ones():
    model = Model64(vocabulary=50, width=16, layers=2, context=512)
    forward = Trainer(model, TrainConfig()).forward
    sizes = [activation_bytes(forward, count, count, torch.device("cpu")) for count in (48, 128, 256)]
    # Its attention keeps its weights: two heads, two layers, 8 bytes, and the softmax's input or output.
    assert sizes[2] - sizes[1] > 2 * 2 * 8 * (256**2 - 128**2)
    measured = [_measured(forward, count) for count in (48, 128, 256)]
    assert sizes == pytest.approx(measured, rel=0.02)


def _measured(forward, count):
    from turnwise.training.trainer.memory import _saved_bytes

    return _saved_bytes(forward, count, torch.device("cpu"))


def test_the_parts_of_an_estimate():
    model = Model64()
    size = sum(p.nbytes for p in model.parameters())
    found = estimate(Trainer(model, TrainConfig(kl=0.1)), longest=100)
    largest = max(p.nbytes for p in model.parameters())
    parts = (found.weights, found.gradients, found.optimizer, found.reference, found.engine)
    assert parts == (size, size + largest, 2 * size, 2 * size, size)
    assert found.activations > 0
    assert found.logits == 4 * 4 * 4096 * 50
    half = Model64().to(torch.bfloat16)
    for parameter in list(half.parameters())[1:]:
        parameter.requires_grad_(False)
    first = next(half.parameters()).numel()
    forward = Trainer(half, TrainConfig()).forward
    assert forward is not None
    found = estimate(Trainer(half, TrainConfig()), longest=100, engine=False)
    assert (found.weights, found.gradients, found.optimizer) == (size // 4, 4 * first, 16 * first)
    assert (found.reference, found.engine) == (0, 0)


def test_what_is_told_before_a_run():
    found = MemoryEstimate(GIB, GIB, 2 * GIB, GIB, GIB, activations=3 * GIB, logits=GIB, tokens=4096)
    assert found.total == 10 * GIB
    assert check_memory(found, 20 * GIB) == (
        "memory: about 10.0 GiB of 20.0 GiB at the peak of a step (weights 1.0 GiB, gradients 1.0 GiB, optimizer 2.0 GiB, "
        "reference 1.0 GiB, engine 1.0 GiB, activations 3.0 GiB, logits 1.0 GiB; passes of 4096 tokens, text alone)"
    )
    assert check_memory(found, None).startswith("memory: about 10.0 GiB at the peak")
    assert check_memory(found, 9 * GIB).endswith("which may not fit: train.micro_tokens = 2048 would")
    with pytest.raises(ConfigError, match=r"optimizer alone need 6.0 GiB.*train.kl = 0"):
        check_memory(found, 5 * GIB)
    assert available_bytes(torch.device("cpu")) > 10**8
