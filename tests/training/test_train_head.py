"""Logprobs and gradients a chunk of targets at a time: what they are, and that the
whole logits never exist."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.training import distance, gradient, random_groups
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from turnwright.config import TrainConfig
from turnwright.engines import Sampling
from turnwright.training import LogitDistribution, Trainer
from turnwright.training.forward import forward as heads
from turnwright.training.forward.forward import LogitTransform, OutputHead, target_stats

WIDTH, VOCABULARY, COUNT = 8, 23, 17


class Hooked(nn.Linear):
    """A head that is more than its weights: it must be called."""


class Largest(TorchDispatchMode):
    """Keeps the number of elements of the largest tensor that any operation
    makes, backward included."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return made


def example(seed, module, *, bias=False, dtype=torch.float32):
    torch.manual_seed(seed)
    linear = module(WIDTH, VOCABULARY, bias=bias).to(dtype)
    hidden_md = torch.randn(COUNT, WIDTH).to(dtype).requires_grad_()
    return linear, hidden_md, torch.randint(VOCABULARY, (COUNT,)), torch.randn(COUNT)


def answer(linear, hidden_md, targets_m, slope_m, shape, law, most):
    found = target_stats(
        hidden_md, OutputHead(linear, shape), targets_m, law, entropy=True, max_logits=most
    )
    given = [hidden_md, *linear.parameters()]
    grads = torch.autograd.grad((found.logprobs_m * slope_m).sum(), given)
    return [found.logprobs_m.detach(), found.entropy_m, *grads]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 999),
    rows=st.integers(1, COUNT - 1),
    kind=st.sampled_from(["plain", "cap", "times", "over"]),
    module=st.sampled_from([nn.Linear, Hooked]),
    bias=st.booleans(),
    temperature=st.sampled_from([1.0, 0.7, 2.0]),
    ban=st.booleans(),
    cut=st.sampled_from([(1.0, 0), (0.7, 0), (1.0, 3), (0.9, 8)]),
)
def test_chunks_change_nothing(seed, rows, kind, module, bias, temperature, ban, cut):
    linear, hidden_md, targets_m, slope_m = example(seed, module, bias=bias)
    banned = frozenset(range(VOCABULARY)) - set(targets_m.tolist()) - {0} if ban else frozenset()
    law = LogitDistribution(temperature, banned, *cut)
    shape = LogitTransform(kind, 1.0 if kind == "plain" else 2.5)
    whole = answer(linear, hidden_md, targets_m, slope_m, shape, law, COUNT * VOCABULARY)
    parts = answer(linear, hidden_md, targets_m, slope_m, shape, law, rows * VOCABULARY)
    for one, other in zip(parts, whole, strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max() <= 1e-6 * max(1.0, float(other.abs().max()))


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("kind", ["plain", "cap", "times", "over"])
def test_the_gradient_is_that_of_differences(kind, entropy):
    linear, hidden_md, targets_m, _ = example(5, nn.Linear, bias=True, dtype=torch.float64)
    head, law = (
        OutputHead(linear, LogitTransform(kind, 1.5)),
        LogitDistribution(0.8, {1, 2} - set(targets_m.tolist())),
    )

    def logp(hidden, weight, bias):
        linear.weight.data, linear.bias.data = weight, bias
        found = heads._Chunks.apply(
            hidden, weight, bias, head, targets_m, law, None, entropy, entropy, 4
        )
        return found if entropy else found[0]

    given = (
        hidden_md,
        linear.weight.detach().clone().requires_grad_(),
        linear.bias.detach().clone().requires_grad_(),
    )
    assert torch.autograd.gradcheck(logp, given)


@pytest.mark.parametrize("module", [nn.Linear, Hooked])
def test_the_whole_logits_never_exist(module):
    linear, hidden_md, targets_m, slope_m = example(0, module)
    for rows in (3, COUNT):
        with Largest() as seen:
            answer(
                linear,
                hidden_md,
                targets_m,
                slope_m,
                LogitTransform(),
                LogitDistribution(0.5, {3}),
                rows * VOCABULARY,
            )
        # The head's weights and their gradient are as large as 8 rows of logits here.
        assert seen.numbers == max(rows, WIDTH) * VOCABULARY


def test_a_head_without_gradient_and_hidden_states_without_one():
    linear, hidden_md, targets_m, slope_m = example(1, nn.Linear)
    linear.requires_grad_(False)
    most = 4 * VOCABULARY
    found = target_stats(
        hidden_md,
        OutputHead(linear),
        targets_m,
        LogitDistribution(),
        entropy=False,
        max_logits=most,
    )
    assert found.entropy_m.numel() == 0
    (found.logprobs_m * slope_m).sum().backward()
    assert hidden_md.grad.abs().sum() > 0
    assert linear.weight.grad is None
    linear.requires_grad_(True)
    found = target_stats(
        hidden_md.detach(),
        OutputHead(linear),
        targets_m,
        LogitDistribution(),
        entropy=False,
        max_logits=most,
    )
    (found.logprobs_m * slope_m).sum().backward()
    assert linear.weight.grad.abs().sum() > 0


def test_bfloat16_sums_over_chunks_are_not_rounded():
    linear, hidden_md, targets_m, slope_m = example(2, nn.Linear, dtype=torch.bfloat16)
    exact = answer(
        nn.Linear(WIDTH, VOCABULARY, bias=False).to(torch.float64),
        *given64(linear, hidden_md, targets_m, slope_m),
        LogitTransform(),
        LogitDistribution(),
        9999,
    )
    whole = answer(
        linear, hidden_md, targets_m, slope_m, LogitTransform(), LogitDistribution(), 9999
    )
    parts = answer(
        linear, hidden_md, targets_m, slope_m, LogitTransform(), LogitDistribution(), VOCABULARY
    )
    errors = [
        [distance(a.double(), b) for a, b in zip(found, exact, strict=True)]
        for found in (parts, whole)
    ]
    assert all(part <= 1.5 * one + 1e-12 for part, one in zip(*errors, strict=True)), errors


def given64(linear, hidden_md, targets_m, slope_m):
    return hidden_md.detach().double().requires_grad_(), targets_m, slope_m.double()


def models():
    from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    sizes = {
        "vocab_size": 60,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    more = {
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
    }
    yield "tied", Qwen3ForCausalLM, Qwen3Config(**sizes, **more, tie_word_embeddings=True)
    yield "capped", Gemma2ForCausalLM, Gemma2Config(**sizes, **more, final_logit_softcapping=2.0)


@pytest.mark.parametrize(("name", "kind", "config"), list(models()), ids=["tied", "capped"])
def test_a_training_step_in_chunks(name, kind, config, monkeypatch):
    groups = random_groups(0)
    given = TrainConfig(
        max_mismatch=1e9, lr=0.0, weight_decay=0.0, correction="tis", max_grad_norm=1e9
    )
    grads, figures = [], []
    for most in (1 << 25, 60 * 5):
        monkeypatch.setitem(heads.CHUNK_NUMBERS, "cpu", most)
        torch.manual_seed(0)
        trainer = Trainer(
            kind(config), given, sampling=Sampling(temperature=0.9), banned_ids={51, 52}
        )
        assert trainer.forward.head is not None
        figures.append(trainer.step(groups, step=0, steps=1).metrics)
        grads.append(gradient(trainer.model))
    assert distance(grads[1], grads[0]) < 1e-6
    for key in ("loss", "entropy", "ratio_mean", "mismatch_mean"):
        assert figures[1][key] == pytest.approx(figures[0][key], rel=1e-5, abs=1e-6), key
