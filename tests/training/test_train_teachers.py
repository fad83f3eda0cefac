"""Teachers: their signal against a computation by hand, the ids that they score, and the
account of the others."""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.double_precision import Model64
from kit.strategies import groups
from kit.teachers import of_trainer
from kit.training import STILL, E, M, P, branched, chain, distance, gradient, random_groups

from turnwright.config import TeacherConfig, TrainConfig
from turnwright.errors import ConfigError, UsageError
from turnwright.renderers import byte_renderer
from turnwright.training import Trainer
from turnwright.training.forward import forward as heads
from turnwright.training.forward.forward import ForwardPass
from turnwright.training.teachers.local import LocalTeacher, SelfTeacher
from turnwright.training.teachers.teacher import Hint, Teachers
from turnwright.types import Group, Message, Task

VOCABULARY = 50


def other_model(seed=1, vocabulary=VOCABULARY):
    """Another model of the same vocabulary, its logits spread so that most signals are large."""
    model = Model64(vocabulary)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.4
            )
    return model.requires_grad_(False)


def taught(teacher, *, reward_weight=0.0, hint=None, **config):
    """What makes one teacher of a policy."""
    given = TeacherConfig(**({"self": True} if teacher is None else {"path": "x"}), **config)

    def make(policy):
        if teacher is None:
            return Teachers(
                [SelfTeacher(given, "t", policy, hint, policy.forward, "rows")], reward_weight
            )
        return Teachers(
            [LocalTeacher(given, "t", policy, hint, ForwardPass(teacher), "auto")], reward_weight
        )

    return make


def learn(model, made, make, law=(), **settings):
    """One step that leaves the weights as they are: its metrics, and the gradient
    that it left on them."""
    given = TrainConfig(**{**STILL, "reward_weight": 0.0, **settings})
    trainer = Trainer(model, given, teachers=make, **of_trainer(law))
    trainer.reference()
    return trainer.step(made, step=0, steps=10).metrics, gradient(model)


def singles(seed=0, count=6):
    """Groups of one episode, without any difference of rewards."""
    return random_groups(seed, groups=count, size=1, vocabulary=VOCABULARY)


def by_hand(model, teacher, made, signal, law=None, prefix=(), weight=1.0):
    """The gradient of the mean over sampled ids of `signal(log p, log q, id)`, with
    distributions over the vocabulary."""
    law = {"temperature": 1.0, "banned_ids": (), **(law or {})}
    model.zero_grad()
    total, count = 0.0, 0

    def rows(one, ids, drop):
        logits = one(
            input_ids=torch.tensor([ids]), position_ids=torch.arange(len(ids))[None]
        ).logits[0, drop:]
        return logits / law["temperature"]

    for trajectory in (t for group in made for t in group.trajectories):
        for sample in trajectory.samples():
            policy = rows(model, sample.ids, 0)
            with torch.no_grad():
                target = rows(teacher, [*prefix, *sample.ids], len(prefix))
            excluded = torch.zeros_like(policy, dtype=torch.bool)
            excluded[:, list(law["banned_ids"])] = True
            if top_k := law.get("top_k"):
                kept = policy.detach().masked_fill(excluded, -torch.inf).topk(top_k, -1).indices
                excluded = torch.ones_like(excluded).scatter(1, kept, False)
                for place in range(1, len(sample.ids)):
                    excluded[place - 1, sample.ids[place]] = False
            logp, logq = (
                one.masked_fill(excluded, -1e30).log_softmax(-1) for one in (policy, target)
            )
            for place, wanted in enumerate(sample.weights):
                if wanted and place:
                    total = total + weight * signal(
                        logp[place - 1], logq[place - 1], sample.ids[place]
                    )
                    count += 1
    (total / count).backward()
    return gradient(model)


def advantage(bound):
    def signal(logp, logq, token):
        return -logp[token] * (logq[token] - logp[token]).detach().clamp(-bound, bound)

    return signal


def reverse(logp, logq, token):
    return (logp.exp() * (logp - logq)).sum()


def forward(logp, logq, token):
    return (logq.exp() * (logq - logp)).sum()


def js(logp, logq, token):
    p, q = logp.exp(), logq.exp()
    middle = ((p + q) / 2).clamp(min=1e-300).log()
    return 0.5 * (p * (logp - middle)).sum() + 0.5 * (q * (logq - middle)).sum()


DIVERGENCES = {"reverse": reverse, "forward": forward, "js": js}
LAWS = [
    {},
    {"temperature": 0.7},
    {"banned_ids": frozenset(range(44, 50))},
    {"temperature": 1.3, "top_k": 5, "banned_ids": frozenset({49})},
]


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("name", ["advantage", *DIVERGENCES])
def test_the_gradient_is_that_of_the_formula(name, law):
    model, teacher = Model64(VOCABULARY), other_model()
    made = random_groups(0, groups=6, size=1, vocabulary=44)
    config = (
        {"signal": "advantage", "bound": 4.0}
        if name == "advantage"
        else {"signal": "loss", "divergence": name}
    )
    figures, found = learn(model, made, taught(teacher, weight=1.7, **config), law)
    signal = advantage(4.0) if name == "advantage" else DIVERGENCES[name]
    assert distance(found, by_hand(model, teacher, made, signal, law, weight=1.7)) < 1e-9
    assert figures["tokens_trained"] == figures["tokens_sampled"]
    assert figures["teacher.t.answered"] == 1.0
    if name == "advantage":
        assert 0.1 < figures["teacher.t.bounded"] < 0.9


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("top", [1, 4, VOCABULARY, VOCABULARY + 9])
def test_other_ids_than_the_top_ones_are_one_outcome(name, top):
    model, teacher, made = Model64(VOCABULARY), other_model(), singles(1)

    def coarse(logp, logq, token):
        if top >= VOCABULARY:
            return DIVERGENCES[name](logp, logq, token)
        best = logq.topk(top).indices
        others = torch.ones_like(logq, dtype=torch.bool)
        others[best] = False
        pairs = (
            torch.cat([one[best], one[others].logsumexp(0, keepdim=True)]) for one in (logp, logq)
        )
        return DIVERGENCES[name](*pairs, token)

    found = learn(model, made, taught(teacher, signal="loss", divergence=name, top=top))[1]
    assert distance(found, by_hand(model, teacher, made, coarse)) < 1e-8


@pytest.mark.parametrize("config", [{}, {"signal": "loss"}, {"signal": "loss", "top": 3}], ids=str)
def test_chunks_of_the_head_and_passes_change_nothing(config, monkeypatch):
    model, teacher, made = Model64(VOCABULARY), other_model(), singles(2)
    expected = learn(model, made, taught(teacher, **config))[1]
    monkeypatch.setitem(heads.CHUNK_NUMBERS, "cpu", 3 * VOCABULARY)
    found = learn(model, made, taught(teacher, **config), micro_tokens=20)[1]
    assert distance(found, expected) < 1e-10


@pytest.mark.parametrize("config", [{}, {"signal": "loss"}], ids=str)
def test_branches_are_scored_on_the_ids_that_the_policy_received(config):
    model, teacher, made = Model64(VOCABULARY), other_model(), singles(3)
    cut = [Group(group.task, [branched(t) for t in group.trajectories]) for group in made]
    figures, found = learn(model, cut, taught(teacher, **config))
    assert distance(found, learn(model, made, taught(teacher, **config))[1]) < 1e-10
    assert figures["tokens_trained"] == figures["tokens_sampled"]


@pytest.mark.parametrize("config", [{}, {"signal": "loss"}, {"signal": "loss", "top": 4}], ids=str)
def test_a_real_model_in_trees_and_rows(tiny_dir, config):
    from turnwright.training.model import models

    teacher = models.load(tiny_dir)[0].requires_grad_(False)
    with torch.no_grad():
        for name, parameter in teacher.named_parameters():
            if "norm" not in name:
                parameter += 0.05 * torch.randn_like(parameter)
    made = random_groups(4)
    found = [
        learn(models.load(tiny_dir)[0], made, taught(teacher, **config), batching=batching)[1]
        for batching in ("tree", "rows")
    ]
    assert float(found[0].norm()) > 0
    assert distance(*found) < 5e-5


def test_later_updates_of_a_step_keep_the_teachers_answers():
    model, made = Model64(VOCABULARY), singles(5)
    seen = []

    class Watched(LocalTeacher):
        def score(self, batch):
            seen.append(batch.size)
            return super().score(batch)

    def make(policy):
        return Teachers(
            [
                Watched(
                    TeacherConfig(path="x"), "t", policy, None, ForwardPass(other_model()), "rows"
                )
            ],
            0.0,
        )

    settings = {**STILL, "lr": 1e-3, "reward_weight": 0.0, "epochs": 3, "minibatches": 2}
    figures = (
        Trainer(model, TrainConfig(**settings), teachers=make).step(made, step=0, steps=10).metrics
    )
    assert figures["optimizer_steps"] == 6
    assert len(seen) == 2


def test_a_step_lowers_the_divergence_from_the_teacher():
    model, made = Model64(VOCABULARY), singles(6, count=20)
    trainer = Trainer(
        model,
        TrainConfig(**{**STILL, "lr": 3e-3, "reward_weight": 0.0}),
        teachers=taught(other_model(), signal="loss", divergence="forward"),
    )
    losses = [trainer.step(made, step=step, steps=10).metrics["loss"] for step in range(8)]
    assert losses[-1] < 0.9 * losses[0]


# Beside rewards.


@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_beside_rewards_both_gradients_add_up(weight):
    model, teacher, made = (
        Model64(VOCABULARY),
        other_model(),
        random_groups(7, vocabulary=VOCABULARY),
    )
    make = taught(teacher, reward_weight=weight)
    figures, both = learn(model, made, make, reward_weight=weight)
    rewards = learn(model, made, None, reward_weight=1.0)[1]
    alone = learn(model, made, taught(teacher))[1]
    assert distance(both, weight * rewards + alone) < 1e-9
    assert figures["trajectories_trained"] == 16


def test_groups_without_variance_train_by_the_teacher():
    model, teacher = Model64(VOCABULARY), other_model()
    made = random_groups(8, vocabulary=VOCABULARY, rewards=(1.0,))
    figures, found = learn(model, made, taught(teacher, reward_weight=1.0), reward_weight=1.0)
    assert distance(found, learn(model, made, taught(teacher))[1]) < 1e-12
    assert figures["tokens_trained"] == figures["tokens_sampled"]


def test_a_trajectory_without_a_reward_trains_by_the_teacher_and_a_failed_one_by_nothing():
    made = random_groups(9, groups=1, vocabulary=VOCABULARY)
    first, second, *_ = made[0].trajectories
    first.reward = None
    second.stop = type(second.stop).ENV_ERROR
    figures = learn(Model64(VOCABULARY), made, taught(other_model()))[0]
    assert figures["tokens_failed"] == second.sampled_tokens
    assert figures["tokens_trained"] == figures["tokens_sampled"] - second.sampled_tokens


# Filters and the account.


def environments(seed=10):
    made = random_groups(seed, vocabulary=VOCABULARY)
    for number, group in enumerate(made):
        group.task = replace(group.task, env="ab"[number % 2])
        for trajectory in group.trajectories:
            trajectory.task = group.task
            for index, span in enumerate(trajectory.spans):
                if span.sampled and index % 4 == 1:
                    span.agent = "asker"
    return made


def sampled(made, fits):
    return sum(
        len(s.ids)
        for g in made
        for t in g.trajectories
        for s in t.spans
        if s.sampled and fits(t, s)
    )


@pytest.mark.parametrize(
    ("config", "fits"),
    [
        ({"environments": ("a",)}, lambda t, s: t.task.env == "a"),
        ({"agents": ("asker",)}, lambda t, s: s.agent == "asker"),
        (
            {"agents": ("asker",), "environments": ("b",)},
            lambda t, s: s.agent == "asker" and t.task.env == "b",
        ),
    ],
    ids=["environment", "agent", "both"],
)
@pytest.mark.parametrize("signal", ["advantage", "loss"])
def test_ids_that_no_teacher_scores_are_no_teacher(config, fits, signal):
    made = environments()
    figures = learn(Model64(VOCABULARY), made, taught(other_model(), signal=signal, **config))[0]
    assert figures["tokens_trained"] == sampled(made, fits)
    assert figures["tokens_no_teacher"] == sampled(made, lambda t, s: not fits(t, s))
    assert figures["teacher.t.answered"] == 1.0


def test_beside_rewards_ids_without_an_answer_train_by_rewards():
    made = environments()
    config = {"agents": ("asker",)}
    model, teacher = Model64(VOCABULARY), other_model()
    figures, both = learn(
        model, made, taught(teacher, reward_weight=1.0, **config), reward_weight=1.0
    )
    assert figures["tokens_trained"] == figures["tokens_sampled"]
    share = sampled(made, lambda t, s: s.agent == "asker") / figures["tokens_sampled"]
    assert figures["teacher.t.answered"] == pytest.approx(share)
    rewards = learn(model, made, None, reward_weight=1.0)[1]
    # Its mean is over the ids that it answered for.
    alone = share * learn(model, made, taught(teacher, **config))[1]
    assert distance(both, rewards + alone) < 1e-9


@settings(max_examples=40, deadline=None)
@given(
    made=groups(vocabulary=VOCABULARY),
    weight=st.sampled_from([0.0, 1.0]),
    agents=st.sampled_from([(), ("main",), ("planner",)]),
)
def test_the_account_holds(made, weight, agents):
    """Invariant 1: every sampled id is trained or has a reason."""
    make = taught(other_model(), reward_weight=weight, agents=agents)
    figures = learn(Model64(VOCABULARY), made, make, reward_weight=weight)[0]
    parts = {name: value for name, value in figures.items() if name.startswith("tokens_")}
    total, _ = parts.pop("tokens_sampled"), parts.pop("tokens_per_s")
    assert (
        sum(parts.values()) == total == sum(t.sampled_tokens for g in made for t in g.trajectories)
    )


# Hints.


def hint_file(folder, body):
    path = folder / "hints.py"
    path.write_text(body)
    return Hint(f"{path}:hint", byte_renderer())


def test_the_teacher_reads_the_hint_and_then_the_same_ids(tmp_path):
    hint = hint_file(
        tmp_path, "def hint(trajectory):\n    return f'the task is {trajectory.task.id}'\n"
    )
    model, teacher = Model64(300), other_model(vocabulary=300)
    made = random_groups(11, groups=4, size=1, vocabulary=300)
    seen = []

    class Watched(LocalTeacher):
        def rows(self, batch):
            found = super().rows(batch)
            seen.extend(zip(batch.rows, found[0], strict=True))
            return found

    def make(policy):
        return Teachers(
            [Watched(TeacherConfig(path="x"), "t", policy, hint, ForwardPass(teacher), "rows")], 0.0
        )

    figures, found = learn(model, made, make)
    assert figures["tokens_trained"] == figures["tokens_sampled"]
    for row, read in seen:
        task = made[row.trajectory].trajectories[0].task.id
        prefix = read.ids[: len(read.ids) - len(row.ids)]
        assert (
            byte_renderer()
            .decode(prefix)
            .startswith(f"<|im_start|>user\nthe task is {task}<|im_end|>")
        )
        assert "assistant" not in byte_renderer().decode(prefix)
        assert read.ids[len(prefix) :] == row.ids
        assert read.targets == row.targets
    one = hint_file(tmp_path, "def hint(trajectory):\n    return 'short'\n")
    ids = byte_renderer().preamble([Message("user", "short")]).ids
    found = learn(model, made, taught(teacher, hint=one))[1]
    assert distance(found, by_hand(model, teacher, made, advantage(5.0), prefix=ids)) < 1e-9


@pytest.mark.parametrize("config", [{}, {"signal": "loss"}, {"signal": "loss", "top": 3}], ids=str)
def test_the_policy_with_a_hint_is_its_own_teacher(tmp_path, config):
    hint = hint_file(tmp_path, "def hint(trajectory):\n    return 'a hint'\n")
    ids = byte_renderer().preamble([Message("user", "a hint")]).ids
    model = Model64(300)
    made = random_groups(12, groups=4, size=1, vocabulary=300)
    teacher = copy.deepcopy(model)
    found = learn(model, made, taught(None, hint=hint, **config))[1]
    if "top" not in config:
        signal = advantage(5.0) if not config else reverse
        assert distance(found, by_hand(model, teacher, made, signal, prefix=ids)) < 1e-9
    assert float(found.norm()) > 0
    still = learn(model, made, taught(None, hint=hint, **config), epochs=2, lr=1e-2)[0]
    assert still["optimizer_steps"] == 2


def test_no_hint_for_a_trajectory_is_no_answer_of_the_policy_itself(tmp_path):
    hint = hint_file(
        tmp_path,
        "def hint(trajectory):\n    return None if trajectory.task.id == 't0' else 'a hint'\n",
    )
    made = random_groups(13, groups=4, size=1, vocabulary=300)
    figures = learn(Model64(300), made, taught(None, hint=hint))[0]
    assert figures["tokens_no_teacher"] == made[0].trajectories[0].sampled_tokens


def test_an_error_in_a_hint_names_the_episode_and_the_line(tmp_path):
    hint = hint_file(tmp_path, "def hint(trajectory):\n    return trajectory.nothing\n")
    with pytest.raises(
        UsageError, match=r"teacher.hint = .*, task 't0', sample 0: AttributeError: .*hints.py:2"
    ):
        learn(Model64(300), random_groups(14, vocabulary=300), taught(None, hint=hint))
    with pytest.raises(ConfigError, match="must take one argument, the trajectory"):
        hint_file(tmp_path, "def hint():\n    return 'x'\n")


def test_ids_beyond_the_teachers_context_are_no_teacher():
    made = [
        Group(Task("t", id="t"), [chain([(P, [1, 2]), (M, [3, 4]), (E, [5] * 6), (M, [6, 7, 8])])])
    ]

    class Short(LocalTeacher):
        @property
        def context(self):
            return 11

    def make(policy):
        return Teachers(
            [Short(TeacherConfig(path="x"), "t", policy, None, ForwardPass(other_model()), "rows")],
            0.0,
        )

    figures = learn(Model64(VOCABULARY), made, make)[0]
    assert (figures["tokens_trained"], figures["tokens_no_teacher"]) == (4.0, 1.0)
