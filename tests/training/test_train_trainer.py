"""The trainer's steps: ratio, mismatch, determinism, precision, phases, and that it learns."""

import math

import pytest
import torch
from kit.double_precision import Model64
from kit.forks import run_ranks
from kit.training import ANY, M, P, chain, fingerprint, gradient, random_groups, with_logprobs

from turnwright.config import TrainConfig
from turnwright.engines import Sampling
from turnwright.errors import (
    ConfigError,
    ModelError,
    RewardError,
    SyncError,
    TurnwrightError,
    UsageError,
)
from turnwright.training import Ranks, Trainer
from turnwright.training.model import models
from turnwright.training.model.weight_export import cast
from turnwright.training.trainer.optimizer import Optimizer, schedule
from turnwright.types import Group, Task

# Ratio and mismatch.


@pytest.mark.parametrize("minibatches", [1, 3])
def test_ratio_is_exactly_one_before_the_first_update(tiny_model, minibatches):
    made = random_groups(0)
    settings = {"lr": 0.0, "schedule": "constant", "minibatches": minibatches}
    figures = (
        Trainer(tiny_model, TrainConfig(**settings, **ANY)).step(made, step=0, steps=1).metrics
    )
    assert figures["ratio_mean"] == 1.0
    assert figures["clip_fraction"] == 0.0
    assert figures["optimizer_steps"] == minibatches


def test_ratio_leaves_one_with_the_second_update(tiny_model):
    figures = (
        Trainer(tiny_model, TrainConfig(lr=1e-2, epochs=3, **ANY))
        .step(random_groups(0), step=0, steps=1)
        .metrics
    )
    assert figures["ratio_mean"] != 1.0
    assert figures["optimizer_steps"] == 3


@pytest.mark.parametrize(
    ("temperature", "banned"), [(1.0, ()), (0.6, ()), (1.0, (3, 7)), (1.7, (3, 7))]
)
def test_a_right_engine_has_no_mismatch(tiny_model, temperature, banned):
    made = random_groups(1)
    for g in made:
        for t in g.trajectories:
            for span in t.spans:
                span.ids = [i + 8 if i in banned else i for i in span.ids]
    with_logprobs(tiny_model, made, temperature, banned)
    trainer = Trainer(
        tiny_model, TrainConfig(), sampling=Sampling(temperature=temperature), banned_ids=banned
    )
    figures = trainer.step(made, step=0, steps=10).metrics
    assert figures["mismatch_max"] < 1e-4
    assert figures["mismatch_kl"] == pytest.approx(0, abs=1e-8)
    assert figures["importance_ess"] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("wrong", ["weights", "temperature", "banned"])
@pytest.mark.parametrize("minibatches", [1, 3])
def test_a_wrong_engine_stops_the_step_with_a_diagnosis(tiny_model, wrong, minibatches):
    made = with_logprobs(tiny_model, random_groups(2))
    sampling = Sampling(temperature=0.9 if wrong == "temperature" else 1.0)
    banned = {60, 61} if wrong == "banned" else set()
    trainer = Trainer(
        tiny_model, TrainConfig(minibatches=minibatches), sampling=sampling, banned_ids=banned
    )
    if wrong == "weights":
        with torch.no_grad():
            tiny_model.lm_head.weight += 0.01 * torch.randn_like(tiny_model.lm_head.weight)
    before = fingerprint(tiny_model)
    with pytest.raises(SyncError, match="engine and trainer disagree") as caught:
        trainer.step(made, step=0, steps=10)
    assert "\n" not in str(caught.value)
    assert "newest weights" in str(caught.value)
    assert fingerprint(tiny_model) == before


def test_mismatch_may_be_let_pass(tiny_model):
    assert (
        Trainer(tiny_model, TrainConfig(max_mismatch=1e9))
        .step(random_groups(), step=0, steps=1)
        .metrics["mismatch_max"]
        > 0.1
    )


@pytest.mark.parametrize(
    ("dtype", "checked"),
    [(torch.float32, [0, 1, 20, 21]), (torch.bfloat16, [0, 1, 2, 19, 20, 21, 22])],
)
def test_updates_are_checked_in_the_engine_where_the_mismatch_could_hide_them(
    tiny_dir, dtype, checked
):
    trainer, found = (
        Trainer(models.load(tiny_dir, dtype=dtype)[0], TrainConfig(max_mismatch_kl=1e9)),
        [],
    )
    for step in (0, 1, 2, 19, 20, 21, 22):
        made = (
            random_groups(0)
            if dtype == torch.bfloat16
            else with_logprobs(trainer.model, random_groups(0))
        )
        trainer.step(made, step=step, steps=23)
        found += [step] if trainer.take_probe() else []
    assert found == checked


def test_a_banned_id_in_the_data_is_refused(tiny_model):
    made = random_groups(3)
    target = made[0].trajectories[0].spans[1].ids[0]
    with pytest.raises(
        TurnwrightError, match="gives no probability to an id that was sampled in task 't"
    ):
        Trainer(tiny_model, TrainConfig(**ANY), banned_ids={target}).step(made, step=0, steps=1)


def test_missing_logprobs(tiny_model):
    made = with_logprobs(tiny_model, random_groups(4))
    made[0].trajectories[0].spans[1].logprobs = [None] * len(made[0].trajectories[0].spans[1].ids)
    Trainer(tiny_model, TrainConfig(lr=0.0)).step(made, step=0, steps=1)  # the trainer's own serve
    with pytest.raises(
        ConfigError, match=r"needs a logprob for every sampled id; \d+ of \d+ have none"
    ):
        Trainer(tiny_model, TrainConfig(old_logprobs="engine")).step(made, step=0, steps=1)


# What a step reports and refuses.


def test_accounting_in_the_metrics(tiny_model):
    made = random_groups(5)
    made[0].trajectories[0].reward = None
    for t in made[1].trajectories:
        t.reward = 1.0
    made[2].trajectories[1].spans[1].untrained = "rewound"
    figures = Trainer(tiny_model, TrainConfig(**ANY)).step(made, step=0, steps=1).metrics
    parts = {name: value for name, value in figures.items() if name.startswith("tokens_")}
    per_second, sampled = parts.pop("tokens_per_s"), parts.pop("tokens_sampled")
    assert set(parts) == {
        "tokens_trained",
        "tokens_no_reward",
        "tokens_no_signal",
        "tokens_rewound",
    }
    assert (
        sum(parts.values())
        == sampled
        == sum(t.sampled_tokens for g in made for t in g.trajectories)
    )
    assert per_second > 0
    assert all(isinstance(value, float) and math.isfinite(value) for value in figures.values())


def test_nothing_to_train_on_changes_nothing(tiny_model):
    made = random_groups(6, rewards=(1.0,))
    before = fingerprint(tiny_model)
    figures = Trainer(tiny_model, TrainConfig(**ANY)).step(made, step=0, steps=1).metrics
    assert fingerprint(tiny_model) == before
    assert figures["optimizer_steps"] == figures["tokens_trained"] == figures["loss"] == 0.0
    assert (
        Trainer(tiny_model, TrainConfig()).step([], step=0, steps=1).metrics["tokens_sampled"]
        == 0.0
    )


def test_bad_rewards_and_settings(tiny_model):
    made = random_groups(7)
    made[0].trajectories[0].reward = math.nan
    with pytest.raises(RewardError):
        Trainer(tiny_model, TrainConfig(**ANY)).step(made, step=0, steps=1)
    with pytest.raises(ConfigError, match="temperature"):
        Trainer(tiny_model, TrainConfig(), sampling=Sampling(temperature=0.0))
    with pytest.raises(TurnwrightError, match="reference"):
        Trainer(tiny_model, TrainConfig(kl=0.1, **ANY)).step(random_groups(7), step=0, steps=1)


def test_a_gradient_that_is_not_finite_leaves_the_weights():
    model = Model64()
    model.lm_head.weight.data[0] = 1e200
    before = fingerprint(model)
    made = random_groups(8)
    with pytest.raises(TurnwrightError, match=r"lower the learning rate|no probability"):
        Trainer(model, TrainConfig(**ANY)).step(made, step=3, steps=9)
    assert fingerprint(model) == before


@pytest.mark.parametrize("eps", [1e-8, 1.0, 9.0])
def test_eps_is_added_to_the_denominator_of_an_update(eps):
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = Optimizer(model, TrainConfig(weight_decay=0.0, eps=eps), Ranks())
    before = model.weight.item()
    model.weight.grad = torch.tensor([[3.0]])
    optimizer.step(0.1)
    assert before - model.weight.item() == pytest.approx(0.1 * 3 / (3 + eps), rel=1e-4)


def test_schedule():
    assert [schedule("linear", step, 4) for step in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert [schedule("constant", step, 4) for step in (0, 3)] == [1.0, 1.0]
    assert schedule("cosine", 2, 4) == pytest.approx(0.5)
    assert schedule("cosine", 4, 4) == pytest.approx(0.0)


# Weights and precision.


def test_weights_are_copies_under_hugging_face_names(tiny_model, tiny_dir):
    from safetensors.torch import load_file

    trainer = Trainer(tiny_model, TrainConfig(**ANY))
    given = dict(trainer.weights())
    assert set(given) == set(load_file(tiny_dir / "model.safetensors"))
    kept = {name: tensor.clone() for name, tensor in given.items()}
    trainer.step(random_groups(9), step=0, steps=1)
    assert all(torch.equal(given[name], kept[name]) for name in given)
    after = dict(trainer.weights())
    assert not any(torch.equal(given[name], after[name]) for name in given if given[name].dim() > 1)


def test_transforms_stand_between(tiny_model):
    trainer = Trainer(tiny_model, TrainConfig())
    trainer.transforms.append(cast(torch.bfloat16))
    trainer.transforms.append(lambda weights: ((f"x.{name}", tensor) for name, tensor in weights))
    assert all(
        name.startswith("x.") and tensor.dtype is torch.bfloat16
        for name, tensor in trainer.weights()
    )
    assert next(tiny_model.parameters()).dtype is torch.float32


def test_bfloat16_trains_on_masters(tiny_dir):
    """Updates far below what bfloat16 resolves must add up."""
    model = models.load(tiny_dir, dtype=torch.bfloat16)[0]
    config = TrainConfig(lr=2e-5, schedule="constant", weight_decay=0.0, **ANY)
    trainer = Trainer(model, config)
    weight = model.model.layers[0].mlp.up_proj.weight
    before = weight.detach().float().clone()
    for step in range(40):
        figures = trainer.step(random_groups(0), step=step, steps=40).metrics
    moved = (weight.detach().float() - before).abs()
    assert figures["loss"] < 0
    assert (
        moved.mean() > 1e-4
    )  # 40 updates of about 2e-5; each alone is less than half a bit of most weights
    assert model.dtype is torch.bfloat16


def test_the_reference_is_a_copy_and_holds_the_policy_back(tiny_model):
    made = random_groups(11)
    trainer = Trainer(tiny_model, TrainConfig(kl=0.5, lr=3e-3, schedule="constant", **ANY))
    trainer.reference()
    first = trainer.step(made, step=0, steps=1).metrics
    assert first["kl"] == pytest.approx(0.0, abs=1e-9)
    for _ in range(3):
        later = trainer.step(made, step=0, steps=1).metrics
    assert later["kl"] > 1e-6


def test_supervised_takes_the_token_mean_of_sampled_ids():
    rows = [chain([(P, [1, 2]), (M, [3, 4, 5])]), chain([(P, [6]), (M, [7])], sample=1)]
    model = Model64()
    expected = []
    for row in rows:
        ids = row.path(1)
        logits = model(torch.tensor([ids]), torch.arange(len(ids))[None]).logits[0].detach()
        logp = torch.log_softmax(logits, -1)
        expected += [
            -float(logp[place - 1, ids[place]])
            for place in range(row.spans[1].start, row.spans[1].end)
        ]
    # Temperature belongs to sampling; demonstrations are learned as they are.
    trainer = Trainer(model, TrainConfig(), sampling=Sampling(temperature=0.5))
    figures = trainer.supervised(rows, lr=0.0)
    assert figures["loss"] == pytest.approx(sum(expected) / 4, rel=1e-12)
    assert figures["tokens_trained"] == 4
    base = gradient(model)
    Trainer(model, TrainConfig(micro_tokens=1)).supervised(rows[::-1], lr=0.0)
    assert (gradient(model) - base).norm() < 1e-12 * base.norm()
    with pytest.raises(TurnwrightError, match=r"no.* has an id to train"):
        trainer.supervised([chain([(P, [1, 2])])], lr=0.0)


def test_phases_forget_the_optimizer(tiny_model, tiny_dir):
    made = random_groups(12)
    config = TrainConfig(**ANY)
    trainer = Trainer(tiny_model, config)
    trainer.supervised(made[0].trajectories, lr=0.0)
    trainer.reset_optimizer()
    trainer.step(made, step=0, steps=1)
    other = models.load(tiny_dir)[0]
    Trainer(other, config).step(made, step=0, steps=1)
    assert fingerprint(tiny_model) == fingerprint(other)


# Bits and learning.


def little_run(directory):
    """The fingerprint after a supervised step and three of reinforcement."""
    model = models.load(directory)[0]
    trainer = Trainer(model, TrainConfig(minibatches=2, **ANY), seed=5)
    trainer.supervised(random_groups(1)[0].trajectories, lr=1e-3)
    for step in range(3):
        trainer.step(random_groups(step), step=step, steps=9)
    return fingerprint(model)


def write_fingerprint(directory, out):
    out.write_text(little_run(directory))


def test_the_same_input_gives_the_same_bits_in_a_fresh_process(tiny_dir, tmp_path):
    run_ranks(write_fingerprint, 1, tiny_dir, tmp_path / "other")
    assert (tmp_path / "other").read_text() == little_run(tiny_dir)


def sample(model, prompt, rows, length, end, generator):
    """Replies sampled at temperature 1 with their logprobs, each up to `end` or `length`."""
    ids = torch.tensor([prompt] * rows)
    logprobs = []
    for _ in range(length):
        with torch.no_grad():
            logp = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[:, -1], -1)
        chosen = torch.multinomial(logp.exp(), 1, generator=generator)
        logprobs.append(logp.gather(1, chosen)[:, 0].tolist())
        ids = torch.cat([ids, chosen], 1)
    for row, reply in enumerate(ids[:, len(prompt) :].tolist()):
        stop = reply.index(end) + 1 if end in reply else length
        yield reply[:stop], [column[row] for column in logprobs[:stop]]


@pytest.mark.parametrize("aggregation", ["token", "trajectory"])
def test_the_trainer_learns(tiny_model, aggregation):
    """The share of low ids in the replies is the reward; it rises from chance."""
    generator = torch.Generator().manual_seed(0)
    trainer = Trainer(
        tiny_model, TrainConfig(lr=1e-2, schedule="constant", aggregation=aggregation)
    )
    curve = []
    for step in range(20):
        made = []
        for task in range(4):
            rows = []
            for index, (ids, logprobs) in enumerate(
                sample(tiny_model, [40 + task, 41, 42], 8, 8, 9, generator)
            ):
                row = chain([(P, [40 + task, 41, 42]), (M, ids)], task=str(task), sample=index)
                row.spans[1].logprobs = logprobs
                row.reward = sum(i < 80 for i in ids) / len(ids)
                rows.append(row)
            made.append(Group(Task(str(task), id=str(task)), rows))
        curve.append(sum(t.reward for g in made for t in g.trajectories) / 32)
        figures = trainer.step(made, step=step, steps=20).metrics
        assert figures.get("mismatch_max", 0.0) < 1e-4
    assert curve[0] < 0.4
    assert curve[-1] > 0.8


def test_state_of_another_model_is_refused(tiny_model, tmp_path):
    trainer = Trainer(tiny_model, TrainConfig())
    trainer.supervised(random_groups(0)[0].trajectories, lr=1e-3)
    trainer.save(tmp_path)
    with pytest.raises(ModelError, match="of another model"):
        Trainer(Model64(), TrainConfig()).load(tmp_path)
    (tmp_path / "optimizer.safetensors").write_bytes(b"torn")
    with pytest.raises(
        ModelError, match=r"optimizer\.safetensors cannot be read .*resume from another checkpoint"
    ):
        trainer.load(tmp_path)


def test_trajectories_of_another_template_are_refused_before_anything_is_updated(tiny_model):
    groups = random_groups(0)
    trainer = Trainer(tiny_model, TrainConfig(**ANY), template="0" * 16)
    before = [parameter.clone() for parameter in tiny_model.parameters()]
    groups[-1].trajectories[-1].template = "1" * 16
    with pytest.raises(
        UsageError,
        match=r"of another chat template, tokenizer or settings \(hash 1{16}, here 0{16}\)",
    ):
        trainer.step(groups, step=0, steps=1)
    with pytest.raises(UsageError, match="another chat template"):
        trainer.supervised(groups[-1].trajectories, lr=1e-3)
    assert all(torch.equal(a, b) for a, b in zip(before, tiny_model.parameters(), strict=True))
