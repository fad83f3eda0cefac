"""The trainer's logprobs on models of several families, against each row alone
through the stock model."""

import importlib

import pytest
import torch
from kit.training import branched, random_groups

from turnwright.config import TrainConfig
from turnwright.training import LossDenominator, Trainer, make_batch
from turnwright.training.advantages import advantages
from turnwright.types import Group

SMALL = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
HEADS = {"num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 128}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

FAMILIES = {
    "llama": ("Llama", SMALL | HEADS, "plain"),
    "qwen2": ("Qwen2", SMALL | {"num_key_value_heads": 1, "use_sliding_window": False}, "plain"),
    "qwen3": ("Qwen3", SMALL | HEADS | {"tie_word_embeddings": True}, "plain"),
    "qwen3_moe": ("Qwen3Moe", SMALL | HEADS | MOE, "plain"),
    # Soft-capped logits, and a window shorter than the rows.
    "gemma2": (
        "Gemma2",
        SMALL | HEADS | {"final_logit_softcapping": 2.0, "sliding_window": 8},
        "cap",
    ),
    # Scaled logits.
    "granite": ("Granite", SMALL | {"num_key_value_heads": 1, "logits_scaling": 4.0}, "over"),
    "cohere": ("Cohere", SMALL | {"num_key_value_heads": 1, "logit_scale": 0.25}, "times"),
    # Learned positions, and a body that is not called `model`.
    "gpt2": (
        "GPT2",
        {"vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128},
        "plain",
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_of_families(family):
    name, sizes, shape = FAMILIES[family]
    configs = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    models = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    torch.manual_seed(0)
    model = getattr(models, f"{name}LMHeadModel" if family == "gpt2" else f"{name}ForCausalLM")(
        getattr(configs, f"{name}Config")(**sizes, initializer_range=0.2)
    ).eval()
    trainer = Trainer(model, TrainConfig(max_mismatch=1e9))
    assert trainer.forward.head is not None
    assert trainer.forward.head.shape.kind == shape
    made = random_groups(0, groups=3, size=3)
    made[1] = Group(made[1].task, [branched(t) for t in made[1].trajectories])
    credits = advantages(made).credits
    batch = make_batch(credits, LossDenominator.of(credits, "token"), micro_tokens=300)
    assert len(batch.micros) > 1
    found = trainer._score(batch)
    expected = []
    for t in batch.trajectories:
        for sample in t.samples():
            with torch.no_grad():
                logp = torch.log_softmax(model(input_ids=torch.tensor([sample.ids])).logits[0], -1)
            expected += [
                float(logp[p - 1, sample.ids[p]])
                for p, weight in enumerate(sample.weights)
                if weight
            ]
    assert (found - torch.tensor(expected, dtype=torch.float64)).abs().max() < 1e-4
    figures = trainer.step(made, step=0, steps=1).metrics
    assert figures["ratio_mean"] == 1.0
    assert figures["grad_norm"] > 0
