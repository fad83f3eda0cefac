"""Memory that runs out: passes are halved once, and said; and what is told of it before a run."""

import asyncio
import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.double_precision import Model64
from kit.training import STILL, distance, gradient, random_groups

from turnwright.config import LoraConfig, TrainConfig
from turnwright.config.schema import CriticConfig
from turnwright.engines import Request
from turnwright.engines.local import LocalEngine
from turnwright.errors import ConfigError, TurnwrightError
from turnwright.training import Trainer, add_lora
from turnwright.training.model import models
from turnwright.training.trainer.allocations import Allocations, carry_on, trace_pass
from turnwright.training.trainer.memory import (
    GIB,
    LENGTHS,
    MemoryEstimate,
    _features,
    available_bytes,
    check_memory,
    estimate,
    short_passes,
)


class Full(Model64):
    """Has memory for so many tokens in a pass; what it raises is what CUDA does."""

    room = 10**9
    in_backward = False

    def __init__(self, **options):
        super().__init__(**options)
        self.model.register_forward_hook(self.measure, with_kwargs=True)
        self.failed = 0

    def measure(self, module, args, kwargs, output):
        if (
            kwargs["input_ids"] if kwargs else args[0]
        ).numel() <= self.room or not torch.is_grad_enabled():
            return  # what keeps no activations has room

        def fail(grad):
            self.failed += 1
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 4.64 GiB. GPU 0 has ..."
            )

        if not self.in_backward:
            fail(None)
        elif output.last_hidden_state.requires_grad:
            output.last_hidden_state.register_hook(fail)


def steps(model, **config):
    told = []
    return Trainer(
        model, TrainConfig(**STILL | {"micro_tokens": 64} | config), on_note=told.append
    ), told


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize(
    "config",
    [{}, {"epochs": 2, "minibatches": 2, "correction": "tis"}, {"kl": 0.1, "algorithm": "gspo"}],
)
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
    with pytest.raises(
        TurnwrightError, match=r"passes of 32 tokens, already half of train.micro_tokens"
    ) as caught:
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


class Rows:
    """A pass of a small function, whose blocks are known: x (8 n bytes), x @
    x.T (8 n^2) and a sum."""

    def __init__(self):
        self.weight = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)

    def trace(self, count):
        return trace_pass(lambda: self.forward(count), [self.weight])

    def forward(self, count):
        x = torch.ones(count, 1, dtype=torch.float64) @ self.weight
        return (x @ x.T).exp().sum()


def test_blocks_of_a_pass_are_seen_as_they_come_and_go():
    found = Rows().trace(10)
    live = found.live_bytes()
    # The product and its exponential, which exp keeps for the backward pass.
    squares = 2 * 8 * 10**2
    assert squares <= max(live[: found.forward_events]) <= squares + 3 * 8 * 10
    assert 8 * 10**2 <= found.saved < squares
    assert live[-1] == 0
    assert found.peak >= found.saved


def test_gradients_are_dropped():
    rows = Rows()
    rows.trace(10)
    assert rows.weight.grad is None
    assert not rows.weight._post_accumulate_grad_hooks


@given(
    sizes=st.lists(st.tuples(*[st.integers(0, 10**6)] * 3), min_size=1, max_size=6),
    order=st.randoms(use_true_random=False),
    tokens=st.integers(1, 10**5),
    rows=st.integers(1, 8),
)
def test_blocks_are_carried_on_one_by_one(sizes, order, tokens, rows):
    events = list(range(len(sizes)))
    for number in range(len(sizes)):
        events.insert(order.randint(events.index(number) + 1, len(events)), -1 - number)

    def passed(count, length):
        return Allocations(
            [float(a + b * count + c * count * length) for a, b, c in sizes], events, 1
        )

    lengths, length = (16, 32, 64), max(1, tokens // rows)
    expected = passed(tokens, length)
    found = carry_on([passed(n, n) for n in lengths], lengths, tokens, length)
    assert found.peak == pytest.approx(expected.peak, rel=1e-6, abs=1)
    assert found.saved == pytest.approx(expected.saved, rel=1e-6, abs=1)


def test_passes_of_other_blocks_are_carried_on_as_a_whole():
    short = [Allocations([n * 10.0, n * 5.0], [0, 1, -2, -1], 1) for n in (16, 32)]
    short.append(Allocations([640.0, 200.0, 120.0], [0, 1, 2, -2, -3, -1], 1))
    found = carry_on(short, (16, 32, 64), 1000, 100)
    assert (found.saved, found.peak) == pytest.approx((10_000, 15_000))


@pytest.mark.parametrize("config", [{}, {"gradient_checkpointing": True}])
@pytest.mark.parametrize("lora", [False, True])
def test_a_long_pass_takes_what_short_ones_say(tiny_dir, config, lora):
    model = models.load(tiny_dir)[0]
    if lora:
        add_lora(model, LoraConfig(rank=4), seed=1)
    trainer = Trainer(model, TrainConfig(**config))
    known = [*model.parameters(), *model.buffers()]
    long = trace_pass(lambda: _features(trainer, 300), known)
    found = carry_on(short_passes(trainer), LENGTHS, 300, 300)
    assert found.peak == pytest.approx(long.peak, rel=0.02)
    assert found.saved == pytest.approx(long.saved, rel=0.02)
    assert all(p.grad is None for p in model.parameters())


def test_attention_that_keeps_its_weights_is_carried_on_by_squares():
    model = Model64(vocabulary=50, width=16, layers=2, context=512)
    short = short_passes(Trainer(model, TrainConfig()))
    saved = [carry_on(short, LENGTHS, count, count).saved for count in (128, 256)]
    # Two heads, two layers, 8 bytes, and the softmax's input or output.
    assert saved[1] - saved[0] > 2 * 2 * 8 * (256**2 - 128**2)
    # In rows of half the length it keeps half.
    assert carry_on(short, LENGTHS, 256, 128).saved < 0.7 * saved[1]


def test_the_parts_of_an_estimate(tiny_dir):
    model = Model64()
    size = sum(p.nbytes for p in model.parameters())
    found = estimate(Trainer(model, TrainConfig(kl=0.1)), longest=100)
    assert (found.weights, found.gradients, found.optimizer, found.reference) == (
        size,
        size,
        2 * size,
        size,
    )
    assert (found.engine, found.update, found.longest) == (0, size, 100)
    assert found.activations > 0
    assert found.process > 10**8

    half = Model64().to(torch.bfloat16)
    for parameter in list(half.parameters())[1:]:
        parameter.requires_grad_(False)
    first = next(half.parameters()).numel()
    found = estimate(Trainer(half, TrainConfig()), longest=100)
    assert (found.weights, found.gradients, found.optimizer, found.reference) == (
        size // 4,
        2 * first,
        16 * first,
        0,
    )

    model = models.load(tiny_dir)[0]
    trainer, engine = Trainer(model, TrainConfig()), LocalEngine(model, context=512)
    few = estimate(trainer, longest=100, engine=engine, sequences=4, concurrency=4)
    many = estimate(trainer, longest=500, engine=engine, sequences=40, concurrency=200)
    assert few.weights == few.engine < many.engine  # an engine begins with a cache for so few
    assert (few.tokens, many.tokens) == (400, trainer.micro_batch_limit.tokens)


@pytest.mark.parametrize("body", ["own", "policy"])
def test_a_critics_own_body_is_counted(tiny_model, body):
    config = TrainConfig(algorithm="ppo", critic=CriticConfig(body=body))
    found = estimate(Trainer(tiny_model, config), longest=100)
    size = sum(4 * p.numel() for p in tiny_model.parameters())
    assert found.critic == (3 * size if body == "own" else 0)


def test_the_cache_grows_as_estimated(tiny_dir):
    engine = LocalEngine(models.load(tiny_dir)[0], context=512)
    expected = engine.cache_bytes_of(12, 400)
    assert engine.cache_bytes < expected

    async def play():
        ids = list(range(5, 15))
        requests = [Request(ids, 390, frozenset(), seed=n, session=f"s{n}") for n in range(12)]
        await asyncio.gather(*(engine.generate(request) for request in requests))
        found = engine.cache_bytes
        await engine.close()
        return found

    assert asyncio.run(play()) == expected


def estimated(**parts):
    names = [one.name for one in dataclasses.fields(MemoryEstimate)]
    return MemoryEstimate(**{name: parts.get(name, 0) for name in names if name != "takes_images"})


def test_what_is_told_before_a_run():
    fixed = {
        "process": GIB,
        "weights": GIB,
        "gradients": GIB,
        "optimizer": 2 * GIB,
        "reference": GIB,
    }
    found = estimated(
        **fixed, activations=3 * GIB, logits=GIB, update=GIB, tokens=4096, longest=500
    )
    assert found.total == 10 * GIB
    assert check_memory(found, 20 * GIB) == (
        "memory: about 10.0 GiB of 20.0 GiB at the peak of a step (process 1.0 GiB, weights 1.0 "
        "GiB, gradients 1.0 GiB, optimizer 2.0 GiB, reference 1.0 GiB, activations 3.0 GiB, "
        "logits 1.0 GiB; passes of 4096 tokens)"
    )
    assert check_memory(found, None).startswith("memory: about 10.0 GiB at the peak")
    assert check_memory(dataclasses.replace(found, takes_images=True), None).endswith(
        "4096 tokens, images not counted)"
    )
    assert check_memory(found, 9 * GIB).endswith(
        "which may not fit: train.micro_tokens = 2048 would"
    )
    with pytest.raises(ConfigError, match=r"optimizer alone need 6.0 GiB.*train.kl = 0"):
        check_memory(found, 5 * GIB)
    assert available_bytes(torch.device("cpu")) > 10**8


def test_a_range_is_told_where_the_length_of_rows_is_open():
    least = estimated(weights=2 * GIB, update=GIB, tokens=512, longest=64)
    most = estimated(weights=2 * GIB, engine=3 * GIB, update=2 * GIB, tokens=4096, longest=2048)
    assert check_memory(most, 20 * GIB, least) == (
        "memory: 3.0 GiB to 7.0 GiB of 20.0 GiB at the peak of a step for rows of 64 to 2048 ids "
        "(weights 2.0 GiB, engine 3.0 GiB, update 2.0 GiB; passes of 4096 tokens)"
    )
    # No refusal: short rows may fit.
    assert "which may not fit" in check_memory(most, 4 * GIB, least)
    with pytest.raises(ConfigError, match=r"alone need 2\.0 GiB"):
        check_memory(most, GIB, least)
