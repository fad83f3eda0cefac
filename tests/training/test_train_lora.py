"""LoRA: what is trained, what leaves for an engine, and what is saved, held against peft itself."""

from __future__ import annotations

import asyncio
import json
import weakref

import pytest
import torch
from kit.training import distance, fingerprint, gradient, random_groups, with_logprobs

from turnwright.config import LoraConfig, TrainConfig
from turnwright.engines.local import LocalEngine
from turnwright.engines.local import fingerprint as of_weights
from turnwright.errors import ConfigError, ModelError, TurnwrightError
from turnwright.training import Checkpoints, Trainer, add_lora
from turnwright.training.low_rank import merge_weight
from turnwright.training.model import models
from turnwright.training.model.lora import adapter_of, linear_layers, load_adapter
from turnwright.training.model.weight_export import cast
from turnwright.training.trainer.micro_batches import (
    ADAPTER_MICRO_TOKENS,
    LARGE_MICRO_TOKENS,
    MICRO_TOKENS,
)

peft = pytest.importorskip("peft")
LORA = LoraConfig(rank=4)
CONFIG = TrainConfig(lr=1e-2, max_mismatch=1e9)
IDS = torch.arange(12)[None] % 40


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def trained(model, config=CONFIG, lora=LORA, steps=2):
    add_lora(model, lora, seed=1)
    trainer = Trainer(model, config)
    if config.kl:
        trainer.reference()
    for step in range(steps):
        trainer.step(random_groups(step), step=step, steps=10)
    return trainer


def test_it_begins_as_the_model_was_and_only_adapters_are_trained(tiny_dir, tiny_model):
    base = {name: p.clone() for name, p in tiny_model.named_parameters()}
    before = logits(tiny_model)
    add_lora(tiny_model, LORA)
    assert torch.equal(logits(tiny_model), before)
    trainer = Trainer(tiny_model, CONFIG)
    trainer.step(random_groups(0), step=0, steps=10)
    assert not torch.equal(logits(tiny_model), before)
    for name, p in tiny_model.named_parameters():
        plain = name.replace(".base_layer", "")
        assert p.requires_grad == (plain not in base)
        assert plain not in base or torch.equal(p, base[plain])
    assert {name.split(".lora_")[0] for name in trainer.optimizer.names} == set(
        linear_layers(models.load(tiny_dir)[0], ("all",))
    )


def test_what_leaves_is_what_peft_would_merge(tiny_dir, tiny_model):
    trainer = trained(tiny_model)
    sent = dict(trainer.weights())
    theirs = models.load(tiny_dir)[0]
    assert list(sent) == [n for n in theirs.state_dict() if n != "lm_head.weight"]  # tied
    adapter = {name: p for name, p in tiny_model.state_dict().items() if "lora_" in name}
    wrapped = peft.get_peft_model(
        theirs, peft.LoraConfig(r=4, lora_alpha=8, target_modules=linear_layers(theirs, ("all",)))
    )
    wrapped.load_state_dict({f"base_model.model.{n}": p for n, p in adapter.items()}, strict=False)
    merged = wrapped.merge_and_unload().state_dict()
    assert any(not torch.equal(sent[n], models.load(tiny_dir)[0].state_dict()[n]) for n in sent)
    for name, tensor in sent.items():
        assert torch.allclose(tensor, merged[name], atol=1e-6), name
    trainer.transforms.append(cast(torch.bfloat16))
    assert {t.dtype for _, t in trainer.weights()} == {torch.bfloat16}


def test_a_merged_weight_is_gone_before_the_next_is_merged(tiny_model, monkeypatch):
    adapter = add_lora(tiny_model, LORA)
    merged = []
    alive = []

    def merge(*matrices):
        alive.append(sum(reference() is not None for reference in merged))
        weight = merge_weight(*matrices)
        merged.append(weakref.ref(weight))
        return weight

    monkeypatch.setattr("turnwright.training.model.lora.merge_weight", merge)
    with torch.no_grad():
        for _, tensor in adapter.merge(iter(tiny_model.named_parameters())):
            del tensor
    assert len(alive) == len(adapter.layers) > 1
    assert not any(alive)


def test_an_engine_samples_from_the_adapted_model(tiny_dir, tiny_model):
    from turnwright.engines import Request

    trainer = trained(tiny_model)
    engine = LocalEngine(models.load(tiny_dir)[0])

    async def main():
        sent = list(trainer.weights())
        assert await engine.update(sent, 1) == of_weights(sent)
        reply = await engine.generate(Request(IDS[0].tolist(), 8, frozenset(), seed=3, session="s"))
        await engine.close()
        return reply

    reply = asyncio.run(main())
    ids = torch.tensor([IDS[0].tolist() + reply.ids])
    with torch.no_grad():
        logp = torch.log_softmax(tiny_model(input_ids=ids).logits[0], -1)
    ours = [float(logp[11 + n, i]) for n, i in enumerate(reply.ids)]
    assert max(abs(a - b) for a, b in zip(ours, reply.logprobs, strict=True)) < 1e-4


def test_a_checkpoint_is_in_pefts_layout_and_small(tmp_path, tiny_dir, tiny_model):
    trainer = trained(tiny_model)
    expected = logits(tiny_model)
    path = Checkpoints(tmp_path / "checkpoints", tiny_dir).save("step-1", trainer, {"step": 1})
    assert not (path / "model.safetensors").exists()
    wrapped = peft.PeftModel.from_pretrained(models.load(tiny_dir)[0], path)
    assert torch.allclose(logits(wrapped), expected, atol=1e-6)
    assert json.loads((path / "adapter_config.json").read_text())["r"] == 4
    # As a model of its own, which is how `turnwright eval --checkpoint` and `--model.path` take it.
    plain, _ = models.load(path)
    assert adapter_of(plain) is None
    assert torch.allclose(logits(plain), expected, atol=1e-5)
    assert all(p.requires_grad for p in plain.parameters())
    # transformers takes such a directory too.
    from transformers import AutoModelForCausalLM

    assert torch.allclose(logits(AutoModelForCausalLM.from_pretrained(path)), expected, atol=1e-6)


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_resume_goes_on_bit_for_bit(tmp_path, tiny_dir, tiny_model, kl):
    config = TrainConfig(lr=1e-2, max_mismatch=1e9, kl=kl)
    whole = trained(tiny_model, config)
    path = Checkpoints(tmp_path / "checkpoints", tiny_dir).save("a", whole, {})
    assert not (path / "reference.safetensors").exists()  # switched off is the reference
    again = models.load(tiny_dir)[0]
    load_adapter(again, path)
    resumed = Trainer(again, config)
    resumed.load(path)
    for step in (2, 3):
        for t in (whole, resumed):
            t.step(random_groups(step), step=step, steps=10)
    assert fingerprint(whole.model) == fingerprint(resumed.model)


def test_dropout_is_resumed_bit_for_bit(tmp_path, tiny_dir, tiny_model):
    """The process shares torch's generator with the code of environments, so neither may move
    what the other draws."""
    rows = random_groups(0)[0].trajectories
    add_lora(tiny_model, LoraConfig(rank=4, dropout=0.5), seed=1)
    whole = Trainer(tiny_model, CONFIG, seed=3)
    whole.supervised(rows, lr=1e-2)
    path = Checkpoints(tmp_path / "checkpoints", tiny_dir).save("a", whole, {})

    def resumed(seed):
        again = models.load(tiny_dir)[0]
        load_adapter(again, path)
        trainer = Trainer(again, CONFIG, seed=seed)
        trainer.load(path)
        return trainer

    def losses(trainer):
        found = []
        for elsewhere in (1, 2):
            torch.rand(elsewhere)
            before = torch.get_rng_state()
            found.append(trainer.supervised(rows, lr=1e-2)["loss"])
            assert torch.equal(torch.get_rng_state(), before)
        return found

    expected = losses(whole)
    assert losses(resumed(3)) == expected
    assert losses(resumed(4)) != expected


# Reference policy.


def steps_with(tiny_dir, reference, lora=LORA, warm=False, kl=0.5):
    model = models.load(tiny_dir)[0]
    if lora:
        add_lora(model, lora, seed=1)
    trainer = Trainer(model, TrainConfig(lr=1e-2, max_mismatch=1e9, kl=kl, reference=reference))
    if warm:
        trainer.supervised(random_groups(5)[0].trajectories, lr=1e-2)
        trainer.reset_optimizer()
    trainer.reference()
    return trainer, [
        trainer.step(random_groups(s), step=s, steps=9).metrics["kl"] for s in range(3)
    ]


def test_switched_off_and_copied_are_one_policy_before_the_adapter_is_trained(tiny_dir):
    off, first = steps_with(tiny_dir, "adapter_off")
    copy, second = steps_with(tiny_dir, "copy")
    auto, third = steps_with(tiny_dir, "auto")
    assert first == second == third
    assert first[0] == 0.0 < first[2]
    assert fingerprint(off.model) == fingerprint(copy.model) == fingerprint(auto.model)
    assert off._reference.copied is None is auto._reference.copied
    assert copy._reference.copied


def test_after_a_warm_up_the_copy_is_the_policy_that_began(tiny_dir):
    _, off = steps_with(tiny_dir, "adapter_off", warm=True)
    auto, found = steps_with(tiny_dir, "auto", warm=True)
    assert auto._reference.copied
    assert found[0] == 0.0 < off[0]


def test_the_policy_is_itself_again_behind_its_reference(tiny_dir):
    for reference, lora in (("copy", None), ("copy", LORA), ("adapter_off", LORA)):
        trainer, _ = steps_with(tiny_dir, reference, lora=lora)
        before = fingerprint(trainer.model), logits(trainer.model)
        with trainer._reference.active():
            assert not torch.equal(logits(trainer.model), before[1])
        assert fingerprint(trainer.model) == before[0]
        assert torch.equal(logits(trainer.model), before[1])


def test_a_reference_that_is_not_there_is_refused(tiny_dir):
    with pytest.raises(ConfigError, match=r"train.reference = \"adapter_off\".*no LoRA adapter"):
        steps_with(tiny_dir, "adapter_off", lora=None)


# Settings.


def test_targets_are_linear_layers_by_name(tiny_model):
    assert linear_layers(tiny_model, ("q_proj",)) == [
        f"model.layers.{n}.self_attn.q_proj" for n in (0, 1)
    ]
    assert linear_layers(tiny_model, ("1.mlp.up_proj", "lm_head")) == [
        "model.layers.1.mlp.up_proj",
        "lm_head",
    ]
    every = linear_layers(tiny_model, ("all",))
    assert "lm_head" not in every
    assert len(every) == 14
    with pytest.raises(
        ConfigError, match=r"Qwen3ForCausalLM has no linear layer 'query'; it has .*q_proj"
    ):
        linear_layers(tiny_model, ("query",))
    with pytest.raises(ConfigError, match="embed_tokens"):
        linear_layers(tiny_model, ("embed_tokens",))


def test_dropout_is_of_the_warm_up_alone(tiny_model):
    add_lora(tiny_model, LoraConfig(rank=4, dropout=0.5), seed=1)
    trainer = Trainer(tiny_model, TrainConfig(lr=1e-2, max_mismatch=1e9))
    losses = {
        trainer.supervised(random_groups(0)[0].trajectories, lr=0.0)["loss"] for _ in range(2)
    }
    assert len(losses) == 1  # B is zero
    trainer.supervised(random_groups(0)[0].trajectories, lr=1e-2)
    losses = {
        trainer.supervised(random_groups(0)[0].trajectories, lr=0.0)["loss"] for _ in range(3)
    }
    assert len(losses) == 3
    assert trainer.step(random_groups(1), step=0, steps=2).metrics["ratio_mean"] == 1.0
    assert not any(module.training for module in tiny_model.modules())


def test_gradients_are_those_of_the_merged_weights(tiny_dir, tiny_model):
    """d loss / d B = scale * (d loss / d W) A^T, in a model whose own weights are trained."""
    add_lora(tiny_model, LORA, seed=1)
    adapted, whole = Trainer(tiny_model, CONFIG), Trainer(models.load(tiny_dir)[0], CONFIG)
    for trainer in (adapted, whole):
        trainer.optimizer.max_grad_norm = 1e9
        trainer.step(random_groups(0), step=0, steps=10)
    for name, layer in adapted.adapter.layers.items():
        full = whole.model.get_submodule(name).weight.grad
        expected = adapted.adapter.scales[name] * full @ LoraA(layer, tiny_dir, name)
        assert distance(layer.lora_B["default"].weight.grad, expected) < 1e-4
    assert gradient(tiny_model).abs().sum() > 0


def LoraA(layer, tiny_dir, name):
    """A as it was before the update, transposed."""
    fresh = models.load(tiny_dir)[0]
    add_lora(fresh, LORA, seed=1)
    return fresh.get_submodule(name).lora_A["default"].weight.detach().T


def test_bfloat16_models_have_float32_adapters(tiny_dir):
    model = models.load(tiny_dir, dtype=torch.bfloat16)[0]
    trainer = trained(model)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert trainer.optimizer.masters is trainer.optimizer.params
    assert {t.dtype for _, t in trainer.weights()} == {torch.bfloat16}


def test_adapters_that_are_no_adapters_of_this_model(tmp_path, tiny_dir, tiny_model):
    trainer = trained(tiny_model)
    path = Checkpoints(tmp_path / "checkpoints", tiny_dir).save("a", trainer, {})
    text = (path / "adapter_config.json").read_text()
    (path / "adapter_config.json").write_text(text.replace('"r": 4', '"r": 2'))
    with pytest.raises(ModelError, match="belongs to another model"):
        models.load(path)
    (path / "adapter_config.json").write_text(
        text.replace(str(tiny_dir.resolve()), "gone/elsewhere")
    )
    with pytest.raises(ModelError, match="gone/elsewhere, which is no model directory here"):
        models.load(path)
    for named in (7, "a\0b", None):
        (path / "adapter_config.json").write_text(
            json.dumps(json.loads(text) | {"base_model_name_or_path": named})
        )
        with pytest.raises(
            ModelError, match="a model without a name, which is no model directory here"
        ):
            models.load(path)
    (path / "adapter_config.json").write_text(text)
    (path / "adapter_model.safetensors").write_bytes(b"no")
    with pytest.raises(ModelError, match="cannot be read"):
        models.load(path)


def test_other_kinds_of_adapters_are_refused(tiny_model):
    peft.inject_adapter_in_model(
        peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True), tiny_model
    )
    with pytest.raises(ConfigError, match="no plain LoRA"):
        Trainer(tiny_model, CONFIG)


def test_a_model_without_an_adapter_has_none_to_send(tiny_model):
    with pytest.raises(TurnwrightError, match="no LoRA adapter"):
        Trainer(tiny_model, CONFIG).adapter_weights()


def test_a_right_engine_has_no_mismatch(tiny_dir, tiny_model):
    trainer = trained(tiny_model)
    sampler = models.load(tiny_dir)[0]
    sampler.load_state_dict(dict(trainer.weights()), strict=False)
    sampler.tie_weights()
    figures = (
        Trainer(tiny_model, TrainConfig())
        .step(with_logprobs(sampler, random_groups(3)), step=0, steps=2)
        .metrics
    )
    assert figures["mismatch_max"] < 1e-4


def test_a_large_model_is_trained_in_small_passes_and_an_adapter_of_it_in_smaller_ones(
    tiny_dir, monkeypatch
):
    """By default, and on a CPU; a step of all weights has gradients beside any pass."""

    def limit(**settings):
        model, _ = models.load(tiny_dir)
        if settings.pop("lora", False):
            add_lora(model, LORA, seed=0)
        return Trainer(model, TrainConfig(**settings)).micro_batch_limit.tokens

    assert limit(lora=True) == limit() == MICRO_TOKENS
    monkeypatch.setattr("turnwright.training.trainer.micro_batches.LARGE_WEIGHTS", 1)
    assert limit(lora=True) == ADAPTER_MICRO_TOKENS
    assert limit() == LARGE_MICRO_TOKENS
    assert limit(lora=True, micro_tokens=2048) == 2048
