"""Algorithms with a critic: generalized advantages by hand, losses and gradients against float64
references, what the critic learns, and exact resume."""

import copy
import math
import re

import pytest
import torch
from kit.double_precision import Model64
from kit.gradients import disturbed
from kit.sight import Gallery, episode
from kit.training import (
    STILL,
    E,
    M,
    P,
    chain,
    distance,
    example_texts,
    fingerprint,
    fork_last_reply,
    gradient,
    random_groups,
    with_logprobs,
    with_turns,
)

from turnwright.config import LoraConfig, ModelConfig, TrainConfig
from turnwright.config.names import CRITIC_ADVANTAGES
from turnwright.config.schema import CriticConfig
from turnwright.errors import ConfigError, ModelError, UsageError
from turnwright.records.episode_metrics import METRIC_GROUPS
from turnwright.training import Trainer, add_lora
from turnwright.training.advantages import CreditSettings, advantages
from turnwright.training.gae import GaeSettings, set_gae
from turnwright.training.group_member import GroupMember, discounted_returns
from turnwright.training.loss_weights import TokenWeights
from turnwright.training.model import models
from turnwright.training.trainer.critic import ReturnScale, explained_variance
from turnwright.types import Group, RowReward, Task

ALGORITHMS = ("ppo", "turn_ppo", "bilevel_ppo")


# Generalized advantages by hand.


def member(replies, rewards, *, discount=1.0, weights=None, penalties=None):
    pieces = [(P, [1, 2])]
    for reply in replies:
        pieces += [(M, reply), (E, [7])]
    made = with_turns(chain(pieces, reward=math.fsum(rewards)), (), rewards)
    return GroupMember(
        trajectory=made,
        weights=weights,
        units=[list(turn.spans) for turn in made.turns],
        rewards=list(rewards),
        returns=discounted_returns(rewards, discount),
        penalties=penalties,
        discount=discount,
    )


def test_by_token_by_hand():
    made = member([[3, 4], [5]], [1.0, 2.0])
    values = {1: [0.5, 1.5], 3: [3.0]}
    set_gae(made, "gae", values, GaeSettings(token_discount=0.5, token_lambda=0.8))
    last = 2.0 - 3.0
    second = (1.0 + 0.5 * 3.0 - 1.5) + 0.4 * last
    first = (0.5 * 1.5 - 0.5) + 0.4 * second
    assert made.token_values == {1: pytest.approx([first, second]), 3: pytest.approx([last])}
    assert made.targets == {1: pytest.approx([first + 0.5, second + 1.5]), 3: pytest.approx([2.0])}


def test_by_token_with_penalties_by_hand():
    made = member([[3, 4]], [1.0], penalties={1: [0.25, 0.5]})
    set_gae(made, "gae", {1: [0.0, 0.0]}, GaeSettings())
    assert made.token_values == {1: pytest.approx([1.0 - 0.75, 1.0 - 0.5])}


def test_by_turn_by_hand():
    made = member([[3, 4], [5]], [1.0, 2.0], discount=0.5)
    values = {1: [0.5, 99.0], 3: [3.0]}
    set_gae(made, "gae_turn", values, GaeSettings(gae_lambda=0.8))
    last = 2.0 - 3.0
    first = (1.0 + 0.5 * 3.0 - 0.5) + 0.5 * 0.8 * last
    assert made.token_values == {1: pytest.approx([first] * 2), 3: pytest.approx([last])}
    targets = [value for row in made.targets.values() for value in row]
    assert targets == pytest.approx([first + 0.5, math.nan, 2.0], nan_ok=True)


def test_by_both_by_hand():
    made = member([[3, 4, 6], [5]], [1.0, 2.0], discount=0.5)
    values = {1: [0.5, 1.0, 2.0], 3: [3.0]}
    set_gae(
        made, "gae_bilevel", values, GaeSettings(gae_lambda=0.8, token_discount=0.9, token_lambda=1)
    )
    turn = (1.0 + 0.5 * 3.0 - 2.0) + 0.4 * (2.0 - 3.0)
    second = (0.9 * 2.0 - 1.0) + 0.9 * turn
    first = (0.9 * 1.0 - 0.5) + 0.9 * second
    assert made.token_values[1] == pytest.approx([first, second, turn])
    assert made.targets[1] == pytest.approx([first + 0.5, second + 1.0, turn + 2.0])


@pytest.mark.parametrize("kind", CRITIC_ADVANTAGES)
def test_a_turn_without_loss_leaves_its_reward_to_the_one_before(kind):
    """A turn of weight 0 chose nothing: it is a part of the environment."""
    weights = TokenWeights({3: [0.0]}, "weighed")
    made = member([[3], [4], [5]], [0.0, 1.0, 2.0], discount=0.5, weights=weights)
    set_gae(made, kind, {1: [0.5], 3: [7.0], 5: [3.0]}, GaeSettings())
    step = 1.0 if kind == "gae" else 0.5  # tokens are not discounted here
    assert made.token_values[5] == pytest.approx([2.0 - 3.0])
    if kind == "gae":
        assert made.token_values[1] == pytest.approx([1.0 + 3.0 - 0.5 + (2.0 - 3.0)])
    else:
        assert made.token_values[1] == pytest.approx(
            [step * 1.0 + step**2 * 3.0 - 0.5 + step**2 * (2.0 - 3.0)]
        )
    assert made.token_values[3] == [0.0]
    assert math.isnan(made.targets[3][0])


@pytest.mark.parametrize("kind", CRITIC_ADVANTAGES)
def test_rows_of_their_own_have_nothing_to_do_with_each_other(kind):
    made = member([[3, 4], [5]], [1.0, 2.0], discount=0.0)
    made.trajectory.row_rewards = [RowReward(1.0, (0,)), RowReward(2.0, (1,))]
    set_gae(made, kind, {1: [0.5, 0.5], 3: [0.25]}, GaeSettings())
    assert made.token_values == {1: pytest.approx([0.5, 0.5]), 3: pytest.approx([1.75])}


@pytest.mark.parametrize("kind", CRITIC_ADVANTAGES)
def test_with_lambda_one_and_no_discount_it_is_the_return_less_the_value(kind):
    made = member([[3, 4], [5], [6, 8, 9]], [1.0, 0.0, 2.0])
    values = {1: [0.1, 0.2], 3: [0.3], 5: [0.4, 0.5, 0.6]}
    set_gae(made, kind, values, GaeSettings())
    for span, returned in ((1, 3.0), (3, 2.0), (5, 2.0)):
        for offset, value in enumerate(values[span]):
            asked = values[span][0] if kind == "gae_turn" else value
            assert made.token_values[span][offset] == pytest.approx(returned - asked)


def test_only_a_trainer_has_values():
    made = [Group(Task("t", id="t"), [member([[3]], [1.0]).trajectory])]
    with pytest.raises(UsageError, match=r"call Trainer\.step_credits"):
        advantages(made, CreditSettings("gae", credit="turn"))


# A step against float64 references.


def example(seed=41, **options):
    """Groups with turns and rewards of them; a cut reply, and an episode on two branches."""
    made = random_groups(seed, groups=3, size=3, turns=4, **options)
    for g in made:
        for t in g.trajectories:
            turns = sum(span.sampled for span in t.spans)
            rewards = [0.5 * ((n + t.key.sample) % 3) for n in range(turns)]
            t.reward = math.fsum(rewards) + 0.25
            with_turns(t, (), rewards)
    span = made[0].trajectories[0].spans[1]
    span.untrained, span.untrained_from = "rewound", len(span.ids) - 1
    fork_last_reply(made[2].trajectories[1])
    return made


def all_outputs(model, ids):
    """Log-probabilities and hidden states at each position of a row."""
    positions = torch.arange(len(ids))[None]
    hidden = model.model(torch.tensor([ids]), positions).last_hidden_state[0]
    return torch.log_softmax(model.lm_head(hidden), -1), hidden


def slow_value(critic, hidden):
    """The head by hand, in points of reward."""
    centered = hidden - hidden.mean()
    scaled = centered / torch.sqrt((centered**2).mean() + 1e-5)
    inner = critic.head.inner.weight @ scaled + critic.head.inner.bias
    value = critic.head.last.weight[0] @ (inner * torch.sigmoid(inner)) + critic.head.last.bias[0]
    return value * critic.scale.deviation + critic.scale.mean


def slow_advantages(kind, values, rewards, discount, trace):
    """Advantages of the tokens of turns, from the definition as a sum of discounted errors;
    `values` are by turn and token."""
    if kind == "ppo":
        flat = [value for row in values for value in row]
        ends = [sum(len(row) for row in values[: k + 1]) - 1 for k in range(len(values))]
        paid = [0.0] * len(flat)
        for end, reward in zip(ends, rewards, strict=True):
            paid[end] += reward
        errors = [
            paid[n] + (flat[n + 1] if n + 1 < len(flat) else 0.0) - value
            for n, value in enumerate(flat)
        ]
        sums = iter([sum(errors[n:]) for n in range(len(errors))])
        return [[next(sums) for _ in row] for row in values]

    asked = [row[0] if kind == "turn_ppo" else row[-1] for row in values]
    errors = [
        reward + (discount * asked[k + 1] if k + 1 < len(asked) else 0.0) - asked[k]
        for k, reward in enumerate(rewards)
    ]
    found = []
    for k, row in enumerate(values):
        turn = sum((discount * trace) ** n * error for n, error in enumerate(errors[k:]))
        if kind == "turn_ppo":
            found.append([turn] * len(row))
        else:  # discount and lambda of tokens are 1, so what is between cancels
            found.append([turn + row[-1] - value for value in row])
    return found


def slow_step(model, critic, body, made, kind):
    """The loss with its gradient, token by token; ratios are to the engine's logprobs."""
    rows, every = [], []
    for g in made:
        for t in g.trajectories:
            turn_of = {index: k for k, turn in enumerate(t.turns) for index in turn.spans}
            now, old, values = ([[] for _ in t.turns] for _ in range(3))
            for row in t.samples():
                logp, hidden = all_outputs(model, row.ids)
                if body is not None:
                    _, hidden = all_outputs(body, row.ids)
                for place, weight in enumerate(row.weights):
                    if weight and place:
                        k = turn_of[row.slots[place][0]]
                        now[k].append(logp[place - 1, row.ids[place]])
                        old[k].append(row.logprobs[place])
                        values[k].append(float(slow_value(critic, hidden[place - 1]).detach()))
            rewards = [turn.reward for turn in t.turns]
            rewards[-1] += t.reward - sum(rewards)
            discount, trace = (0.99, 0.9) if kind != "ppo" else (1.0, 1.0)
            found = slow_advantages(kind, values, rewards, discount, trace)
            every += [value for row in found for value in row]
            rows.append((now, old, found))

    mean = math.fsum(every) / len(every)
    std = math.sqrt(math.fsum((v - mean) ** 2 for v in every) / len(every)) + 1e-4
    total = 0.0
    for now, old, found in rows:
        for turn_now, turn_old, turn_found in zip(now, old, found, strict=True):
            change = torch.stack(turn_now) - torch.tensor(turn_old, dtype=torch.float64)
            ratio = torch.exp(change)
            if kind == "turn_ppo":
                own = torch.stack(turn_now)
                ratio = torch.exp(change.sum()).detach() * torch.exp(own - own.detach())
            advantage = torch.tensor([(v - mean) / std for v in turn_found], dtype=torch.float64)
            bounded = ratio.clamp(0.8, 1.2) * advantage
            total = total - torch.minimum(ratio * advantage, bounded).sum()
    return total / len(every)


def stirred(trainer, seed=0):
    """Give the critic values that are not all equal."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trainer.critic.head.last.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.3 * drawn)
    trainer.critic.scale = ReturnScale(1.0, 0.7, 1.3)


def near(model, made):
    """The groups with logprobs near the model's, so that not every ratio is clipped."""
    for g in made:
        for t in g.trajectories:
            for row in t.samples():
                logp, _ = all_outputs(model, row.ids)
                for place, (span, offset) in enumerate(row.slots):
                    if t.spans[span].sampled:
                        t.spans[span].logprobs[offset] = float(logp[place - 1, row.ids[place]])
    return made


@pytest.mark.parametrize("body", ["own", "policy"])
@pytest.mark.parametrize("kind", ALGORITHMS)
def test_loss_and_gradient_against_the_formula(kind, body):
    model = Model64()
    made = near(model, example())
    assert any(len(list(t.samples())) > 1 for g in made for t in g.trajectories)
    config = TrainConfig(
        **STILL, algorithm=kind, old_logprobs="engine", critic=CriticConfig(body=body, width=12)
    )
    trainer = Trainer(model, config)
    stirred(trainer)
    disturbed(model, 0.02, 1)
    own = Model64() if body == "own" else None
    expected = slow_step(model, trainer.critic, own, made, kind)
    expected.backward()
    base = gradient(model)

    model.zero_grad()
    found = trainer.step(made, step=0, steps=10).metrics
    assert found["loss"] == pytest.approx(expected.item(), rel=1e-9, abs=1e-12)
    assert distance(gradient(model), base) < 1e-9
    assert found["clip_fraction"] > 0
    assert found["tokens_trained"] + found["tokens_rewound"] == found["tokens_sampled"]


@pytest.mark.parametrize("body", ["own", "policy"])
@pytest.mark.parametrize("kind", ALGORITHMS)
def test_neither_layout_nor_order_change_what_is_learned(kind, body):
    def learned(made, **more):
        model = Model64()
        trainer = Trainer(
            model, TrainConfig(**STILL, algorithm=kind, critic=CriticConfig(body=body), **more)
        )
        stirred(trainer)
        figures = trainer.step(made, step=0, steps=10).metrics
        critic = torch.cat([p.detach().flatten() for p in trainer.critic.head.parameters()])
        return gradient(model), critic, figures

    base, critic, figures = learned(example())
    turned = [Group(g.task, g.trajectories[::-1]) for g in example()[::-1]]
    again, same, _ = learned(turned)
    assert torch.equal(again, base)
    assert torch.equal(same, critic)
    for micro_tokens in (1, 60):
        other, other_critic, other_figures = learned(example(), micro_tokens=micro_tokens)
        assert distance(other, base) < 1e-8
        assert distance(other_critic, critic) < 1e-8
        assert other_figures["critic.loss"] == pytest.approx(figures["critic.loss"], rel=1e-8)


def test_the_loss_of_the_critic_by_hand():
    model = Model64()
    trainer = Trainer(model, TrainConfig(**STILL, algorithm="turn_ppo"))
    stirred(trainer)
    made = example()
    trainer.critic.scale.add(0.4, 0.9)
    asked = trainer._scored(made).asked
    credits = trainer.step_credits(made).credits
    figures = trainer.critic.learn(asked, credits)

    scale = trainer.critic.scale
    errors = []
    for credit in credits:
        values = asked.batch.by_trajectory(asked.values_n, math.nan)(credit.trajectory)
        for span, targets in credit.for_critic.targets.items():
            for offset, target in enumerate(targets):
                if math.isfinite(target):
                    errors.append((values[span][offset] - target) / scale.deviation)
    turns = sum(len(t.turns) for g in made for t in g.trajectories)
    assert len(errors) == turns  # it is asked once a turn
    assert figures["critic.loss"] == pytest.approx(
        0.5 * math.fsum(error**2 for error in errors) / turns, rel=1e-9
    )
    assert figures["critic.loss_after"] < figures["critic.loss"]


# What it learns.


@pytest.mark.parametrize("body", ["own", "policy"])
def test_a_critic_learns_what_follows_from_what_was_said(tiny_model, body):
    """The reward is told by the first id of the prompt: a critic that has learned it explains the
    variance of returns, of every turn."""
    made = random_groups(5, groups=8, size=4, turns=3)
    for number, g in enumerate(made):
        for t in g.trajectories:
            t.spans[0].ids = [number % 2 + 3, *list(t.spans[0].ids)[1:]]
            t.reward = float(number % 2)
            with_turns(t)
    with_logprobs(tiny_model, made)
    config = TrainConfig(
        **{**STILL, "lr": 1e-3},
        algorithm="turn_ppo",
        critic=CriticConfig(body=body, updates=20, warmup_steps=6),
    )
    trainer = Trainer(tiny_model, config)
    before = fingerprint(tiny_model)
    shares = []
    for step in range(6):
        figures = trainer.step(made, step=step, steps=10).metrics
        shares.append(figures["critic.explained_variance"])
        assert figures["optimizer_steps"] == 0
        assert figures["mismatch_max"] < 1e-3  # the engine is compared all the same
    assert fingerprint(tiny_model) == before
    assert shares[0] == pytest.approx(0.0, abs=1e-6)
    assert shares[-1] > (0.8 if body == "own" else 0.6)
    assert figures["critic.explained_variance.turn_2"] > 0.3
    assert trainer.step(made, step=6, steps=10).metrics["optimizer_steps"] == 1
    assert fingerprint(tiny_model) != before


def test_explained_variance_by_hand():
    returns = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert explained_variance(returns + 5.0, returns) == pytest.approx(1.0)
    assert explained_variance(torch.zeros(4), returns) == pytest.approx(0.0)
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)
    assert explained_variance(torch.zeros(4), torch.ones(4)) is None
    assert explained_variance(torch.zeros(1), torch.ones(1)) is None


def test_another_scale_of_returns_changes_no_value():
    trainer = Trainer(Model64(), TrainConfig(**STILL, algorithm="ppo"))
    stirred(trainer)
    batch = trainer._scored(example()).asked.batch
    before = trainer.critic.values(batch).values_n
    trainer.critic._rescale(30.0, 1000.0)
    after = trainer.critic.values(batch).values_n
    assert float((after - before).abs().max()) < 1e-12
    assert float(before.std()) > 0.05


def test_clipped_values_by_hand():
    trainer = Trainer(
        Model64(), TrainConfig(**STILL, algorithm="ppo", critic=CriticConfig(clip=0.2))
    )
    values = torch.tensor([1.0, 1.0, 0.1, 5.0], dtype=torch.float64, requires_grad=True)
    before = torch.zeros(4, dtype=torch.float64)
    targets = torch.tensor([1.0, 0.5, 0.2, math.nan], dtype=torch.float64)
    loss = trainer.critic._loss(values, targets, before)
    # 1: clipped to 0.2, error 0.8. 2: own error 0.5, clipped 0.3. 3: within the range.
    assert loss.item() == pytest.approx(0.5 * (0.8**2 + 0.5**2 + 0.1**2) / 3)
    loss.backward()
    assert values.grad.tolist() == pytest.approx([0.0, 0.5 / 3, -0.1 / 3, 0.0])


def test_its_metrics_are_documented():
    trainer = Trainer(Model64(), TrainConfig(**STILL, algorithm="ppo"))
    names = trainer.step(example(), step=0, steps=10).metrics
    of_critic = {
        re.sub(r"turn_\d+$", "turn_<turn>", name) for name in names if name.startswith("critic.")
    }
    documented = {metric.name for metrics in METRIC_GROUPS.values() for metric in metrics}
    assert of_critic == {name for name in documented if name.startswith("critic.")}


def test_one_episode_of_a_task_is_enough():
    made = [Group(g.task, g.trajectories[:1]) for g in example()]
    figures = (
        Trainer(Model64(), TrainConfig(**STILL, algorithm="ppo"))
        .step(made, step=0, steps=10)
        .metrics
    )
    assert figures["trajectories_trained"] == 3
    assert figures["grad_norm"] > 0


def test_credits_that_are_looked_at_teach_nothing():
    trainer = Trainer(Model64(), TrainConfig(**STILL, algorithm="ppo"))
    before = fingerprint(trainer.critic.head), fingerprint(trainer.critic.body)
    trainer.step_credits(example())
    assert (fingerprint(trainer.critic.head), fingerprint(trainer.critic.body)) == before
    assert trainer.critic.updates == 0


@pytest.fixture(scope="module")
def gallery(tmp_path_factory):
    sizes = ModelConfig(hidden=32, heads=4, vision=True, image_side=64)
    folder = tmp_path_factory.mktemp("sees") / "model"
    return Gallery(models.create_tiny_model(sizes, example_texts(), folder))


@pytest.mark.parametrize("body", ["own", "policy"])
@pytest.mark.parametrize("vision", ["trained", "frozen"])
def test_it_sees_and_shared_pictures_change_nothing(gallery, body, vision):
    rows = []
    for sample in range(4):
        pictures = [gallery.image(sample % 2), gallery.image(7), None]
        made = with_turns(episode(gallery, pictures, sample=sample))
        made.reward = float(sample % 2)
        rows.append(made)

    def learned(batching):
        model = copy.deepcopy(gallery.module)
        config = TrainConfig(
            **STILL,
            algorithm="turn_ppo",
            batching=batching,
            vision=vision,
            critic=CriticConfig(body=body, lr=3e-3, head_lr=3e-3, updates=12),
        )
        trainer = Trainer(model, config, banned_ids=gallery.banned, pixels=gallery.pixels)
        losses = []
        for step in range(4):
            figures = trainer.step([Group(Task("t", id="t"), rows)], step=step, steps=10).metrics
            losses.append(figures["critic.loss"])
        values = trainer.critic.values(trainer._scored([Group(Task("t"), rows)]).asked.batch)
        by_id = values.batch.by_trajectory(values.values_n, 0.0)
        return losses, torch.tensor([by_id(row)[row.turns[0].spans[0]][0] for row in rows])

    losses, values = learned("rows")
    assert losses[-1] < 0.7 * losses[0]
    assert float((values[1] - values[0]).abs()) > 0.1  # what it shows decides the reward
    tree_losses, tree_values = learned("tree")
    assert tree_losses[0] == pytest.approx(losses[0], abs=1e-6)
    assert float((tree_values - values).abs().max()) < 1e-3  # Adam enlarges rounding


# Its state.


@pytest.mark.parametrize("body", ["own", "policy"])
def test_saved_and_loaded_it_goes_on_with_equal_bits(tiny_model, tmp_path, body):
    config = TrainConfig(
        **{**STILL, "lr": 1e-3}, algorithm="turn_ppo", critic=CriticConfig(body=body)
    )
    start = {name: p.detach().clone() for name, p in tiny_model.named_parameters()}

    def back(to):
        with torch.no_grad():
            for name, parameter in tiny_model.named_parameters():
                parameter.copy_(to[name])

    steps = [example(seed) for seed in (1, 2, 3)]
    trainer = Trainer(tiny_model, config)
    for step in (0, 1):
        trainer.step(steps[step], step=step, steps=10)
    trainer.save(tmp_path)
    middle = {name: p.detach().clone() for name, p in tiny_model.named_parameters()}
    expected = trainer.step(steps[2], step=2, steps=10).metrics
    ended = fingerprint(tiny_model), fingerprint(trainer.critic.head)

    back(start)
    resumed = Trainer(tiny_model, config)
    back(middle)
    resumed.load(tmp_path)
    assert resumed.critic.updates == 8
    found = resumed.step(steps[2], step=2, steps=10).metrics
    assert (fingerprint(tiny_model), fingerprint(resumed.critic.head)) == ended
    for name in ("loss", "grad_norm", "critic.loss", "critic.explained_variance"):
        assert found[name] == expected[name]


def test_another_critic_is_refused(tiny_model, tmp_path):
    config = {**STILL, "algorithm": "turn_ppo"}
    Trainer(tiny_model, TrainConfig(**config, critic=CriticConfig(width=8))).save(tmp_path)
    other = Trainer(tiny_model, TrainConfig(**config, critic=CriticConfig(width=9)))
    with pytest.raises(ModelError, match=r"the critic of the checkpoint is another"):
        other.load(tmp_path)


def test_a_new_phase_begins_with_the_policy_as_it_is(tiny_model):
    trainer = Trainer(tiny_model, TrainConfig(**STILL, algorithm="ppo"))
    with torch.no_grad():
        for parameter in tiny_model.parameters():
            parameter.mul_(1.1)
    trainer.reset_optimizer()
    assert fingerprint(trainer.critic.body) == fingerprint(tiny_model)
    with torch.no_grad():  # a copy: what is done to one is not done to the other
        next(iter(trainer.critic.body.parameters())).add_(1.0)
    assert fingerprint(trainer.critic.body) != fingerprint(tiny_model)


def test_an_adapters_base_is_there_once(tiny_model):
    add_lora(tiny_model, LoraConfig(rank=2), seed=0)
    trainer = Trainer(tiny_model, TrainConfig(**{**STILL, "lr": 1e-3}, algorithm="ppo"))
    frozen = [p for p in tiny_model.parameters() if not p.requires_grad]
    own = {id(p) for p in trainer.critic.body.parameters()}
    assert frozen
    assert all(id(p) in own for p in frozen)
    trained = [p for p in tiny_model.parameters() if p.requires_grad]
    assert not any(id(p) in own for p in trained)
    before = [p.detach().clone() for p in trained]
    trainer.critic.learn(trainer._scored(example()).asked, trainer.step_credits(example()).credits)
    assert all(torch.equal(p, old) for p, old in zip(trained, before, strict=True))


# What a recipe says.


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"algorithm": "ppo", "credit": "trajectory"}, "which is by turn; leave it out"),
        ({"algorithm": "ppo", "discount": 0.9}, "set token_discount"),
        ({"algorithm": "turn_ppo", "refill": 2}, "compares with what its critic expects"),
    ],
)
def test_contradictions_are_refused(keys, said):
    with pytest.raises(ConfigError, match=said):
        Trainer(Model64(), TrainConfig(**keys))


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_a_model_without_a_body_has_values_of_its_logits(kind):
    trainer = Trainer(Model64(whole=True), TrainConfig(**STILL, algorithm=kind))
    assert trainer.critic.head.width == 50
    figures = trainer.step(example(), step=0, steps=10).metrics
    assert figures["critic.loss_after"] < figures["critic.loss"]
