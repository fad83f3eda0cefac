"""Keys of `[train]` that other systems have too: warm-up, entropy bonus, dual clip, passes,
own functions, and more."""

import json
from types import SimpleNamespace

import pytest
import torch
from kit.double_precision import Model64
from kit.training import STILL, M, P, chain, credit_settings, gradient, played, random_groups

import turnwright as tw
from turnwright.config import RolloutConfig, RunConfig, TrainConfig
from turnwright.engines import Sampling
from turnwright.errors import ConfigError, UsageError
from turnwright.rollouts.standalone import run_sync
from turnwright.training import Trainer
from turnwright.training.advantages import advantages, without_signal
from turnwright.training.loss import TokenBatch, clipped
from turnwright.training.task_plan import with_steps_of_epochs
from turnwright.training.trainer.optimizer import schedule
from turnwright.types import Group, StopReason, Task


def test_the_learning_rate_rises_then_falls():
    assert [schedule("linear", step, 6, 2) for step in range(6)] == pytest.approx(
        [1 / 3, 2 / 3, 1.0, 0.75, 0.5, 0.25]
    )
    assert [schedule("constant", step, 4, 1) for step in range(3)] == [0.5, 1.0, 1.0]
    given = {**STILL, "lr": 1e-2, "schedule": "linear", "lr_warmup_steps": 3}
    trainer = Trainer(Model64(), TrainConfig(**given))
    rates = [trainer.step(random_groups(3), step=step, steps=4).metrics["lr"] for step in range(4)]
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01])


@pytest.mark.parametrize(
    ("ratio", "advantage", "cap", "expected", "slope"),
    [
        (5.0, -1.0, None, 5.0, True),
        (5.0, -1.0, 3.0, 3.0, False),
        (2.0, -1.0, 3.0, 2.0, True),
        (5.0, 1.0, 3.0, -1.28, False),
    ],
)
def test_the_cap_bounds_the_loss_of_a_negative_advantage(ratio, advantage, cap, expected, slope):
    logp = torch.tensor([ratio]).log().requires_grad_()
    zero = torch.zeros(1)
    found = clipped(TokenBatch(logp, zero, torch.tensor([advantage]), zero, zero, 0.2, 0.28, cap))
    assert float(found.loss.detach()) == pytest.approx(expected)
    (given,) = torch.autograd.grad(found.loss.sum(), logp)
    assert bool(given.any()) is slope
    assert bool(found.clipped) is not slope


def test_the_cap_reaches_the_loss_of_a_step():
    made = [random_groups(1, rewards=(0.0, 1.0))]
    losses = []
    for cap in (None, 1.01):
        trainer = Trainer(
            Model64(), TrainConfig(**{**STILL, "lr": 0.05, "epochs": 3}, clip_cap=cap)
        )
        losses.append(trainer.step(made[0], step=0, steps=1).metrics["clip_fraction"])
    assert losses[1] > losses[0]


def entropies(trainer, batch):
    """The entropy of the sampled distribution at every target, from the model's logits."""
    parts = []
    for micro in batch.micros:
        logp = trainer.forward.full_logprobs(micro, None, trainer.distribution)
        parts.append((-(logp.exp() * logp).sum(-1), micro.tokens_m))
    return parts


@pytest.mark.parametrize("micro", [8, 10**6])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_gradient_of_the_bonus_is_that_of_the_mean_entropy(micro, temperature):
    made, slopes = random_groups(3, vocabulary=49), []
    for weight in (0.0, 0.3):
        config = TrainConfig(**STILL, entropy=weight, micro_tokens=micro)
        trainer = Trainer(
            Model64(), config, sampling=Sampling(temperature=temperature), banned_ids={49}
        )
        _, (_, batches) = trainer.step(made, step=0, steps=1)
        slopes.append(gradient(trainer.model))
    trainer.optimizer.zero_grad()
    (batch,) = batches
    bonus = sum((values * batch.weights_n[at]).sum() for values, at in entropies(trainer, batch))
    (-0.3 * bonus).backward()
    expected = gradient(trainer.model)
    assert expected.norm() > 1e-3
    assert (slopes[1] - slopes[0] - expected).norm() <= 1e-9 * expected.norm() + 1e-12


def test_the_bonus_raises_the_entropy():
    made = random_groups(3)
    ends = []
    for weight in (0.0, 1.0):
        trainer = Trainer(Model64(), TrainConfig(**{**STILL, "lr": 0.01}, entropy=weight))
        ends.append(
            [trainer.step(made, step=step, steps=8).metrics["entropy"] for step in range(8)][-1]
        )
    assert ends[1] > ends[0]


@pytest.mark.parametrize(("every", "distances"), [(0, (0, 1, 1)), (1, (0, 0, 0)), (2, (0, 1, 0))])
def test_the_reference_is_renewed(tmp_path, every, distances):
    made, run = played(
        tmp_path / "run", steps=3, epochs=1, minibatches=1, reference_every=every, lr=1e-2
    )
    with run:
        run_sync(made.play())
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    found = [row["kl"] for row in rows if row["phase"] == "train"]
    assert [value > 1e-9 for value in found] == [bool(one) for one in distances]


def groups_of(rewards, stops=(), **more):
    stops = [*stops, *[StopReason.DONE] * (len(rewards) - len(stops))]
    rows = [
        chain([(P, [1, 2]), (M, [3, 4])], sample=i, reward=reward, **more)
        for i, reward in enumerate(rewards)
    ]
    for row, stop in zip(rows, stops, strict=True):
        row.stop = stop
    return [Group(rows[0].task, rows)]


def credits_of(config, groups):
    return advantages(groups, credit_settings(config))


@pytest.mark.parametrize(
    "stop", [StopReason.TURN_LENGTH, StopReason.EPISODE_TOKENS, StopReason.CONTEXT]
)
def test_cut_episodes_are_compared_but_not_trained(stop):
    made = groups_of([0.0, 0.0, 1.0], [stop])
    plain, filtered = (credits_of(TrainConfig(overlong_filter=on), made) for on in (False, True))
    assert [credit.reason for credit in filtered.credits] == ["overlong", None, None]
    assert [credit.advantage for credit in filtered.credits][1:] == [
        credit.advantage for credit in plain.credits
    ][1:]
    assert filtered.tokens == {"overlong": 2, "trained": 4}
    metrics = (
        Trainer(Model64(), TrainConfig(**STILL, overlong_filter=True))
        .step(made, step=0, steps=1)
        .metrics
    )
    assert (metrics["tokens_overlong"], metrics["tokens_trained"]) == (2, 4)


def test_episodes_that_end_for_another_reason_stay():
    made = groups_of([0.0, 1.0], [StopReason.MAX_TURNS])
    assert credits_of(TrainConfig(overlong_filter=True), made).tokens == {"trained": 4}


def write(tmp_path, body):
    path = tmp_path / "own.py"
    path.write_text(body)
    return f"{path}:own"


def test_an_advantage_of_ones_own(tmp_path):
    own = write(
        tmp_path,
        "def own(trajectories, returns):\n    best = max(returns)[0]\n    return [r[0] - best for "
        "r in returns]\n",
    )
    config = TrainConfig(advantage=own)
    assert [
        credit.advantage for credit in credits_of(config, groups_of([0.0, 0.5, 2.0])).credits
    ] == [-2.0, -1.5, 0.0]
    tied = credits_of(config, groups_of([1.0, 1.0]))
    assert {credit.reason for credit in tied.credits} == {"no_signal"}
    # A reward of its own reaches the function.
    shaped = TrainConfig(advantage=own, overlong_tokens=2, overlong_buffer=1.0)
    assert [credit.advantage for credit in credits_of(shaped, groups_of([0.0, 1.0])).credits] == [
        -1.0,
        0.0,
    ]
    trainer = Trainer(Model64(), TrainConfig(**STILL, advantage=own))
    assert trainer.step(groups_of([0.0, 1.0]), step=0, steps=1).metrics["tokens_trained"] == 4


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "def own(trajectories, returns):\n    return [0.0]",
            "returned 1 entries for 2 trajectories",
        ),
        (
            "def own(trajectories, returns):\n    return ['x', 0.0]",
            "entry 0: 'x' is neither a number nor numbers",
        ),
        (
            "def own(trajectories, returns):\n    return [[1.0, 2.0], 0.0]",
            "must be 1 finite numbers",
        ),
        (
            "def own(trajectories, returns):\n    return [float('nan'), 0.0]",
            "must be 1 finite numbers",
        ),
        ("def own(trajectories, returns):\n    raise KeyError('gold')", "raised KeyError: 'gold'"),
    ],
)
def test_a_wrong_advantage_is_named_with_its_task(tmp_path, body, said):
    with pytest.raises(UsageError, match="task 't'") as caught:
        credits_of(TrainConfig(advantage=write(tmp_path, body)), groups_of([0.0, 1.0]))
    assert said in str(caught.value)


def test_own_functions_are_checked_before_anything_is_played(tmp_path):
    for key, body in (("advantage", "def own(one):\n    return 1"), ("group_filter", "own = 3")):
        config = TrainConfig(**{key: write(tmp_path, body)})
        with pytest.raises(
            ConfigError, match=f"train.{key} = .*(must take|is int, not a function)"
        ):
            credit_settings(config)


def test_a_filter_of_ones_own_decides_which_groups_are_replaced(tmp_path):
    body = "def own(trajectories):\n    return max(t.reward for t in trajectories) > 0.5\n"
    made = groups_of([0.1, 0.2])
    config = TrainConfig(group_filter=write(tmp_path, body), refill=2)
    settings = credit_settings(config)
    assert {credit.reason for credit in advantages(made, settings).credits} == {"filtered"}
    assert without_signal(made, settings) == [True]
    tied = groups_of([1.0, 1.0])  # the filter keeps it, so it stays, without a signal
    assert {credit.reason for credit in advantages(tied, settings).credits} == {"no_signal"}
    assert without_signal(tied, settings) == [False]
    wrong = TrainConfig(group_filter=write(tmp_path, "def own(trajectories):\n    return 'yes'"))
    with pytest.raises(UsageError, match="returned 'yes'; return True"):
        credits_of(wrong, made)


def test_passes_over_the_tasks_set_the_steps(tmp_path):
    class Once(tw.Env):
        tasks = staticmethod(lambda: [Task(f"Say {i}", id=str(i)) for i in range(12)])

        def reset(self, task, *, seed=None):
            return task.messages[0].text

        def step(self, action):
            return tw.Step(reward=float(len(action.text)), terminated=True)

    sections = {"rollout": {"groups": 4, "group_size": 2}, "eval": {"tasks": 2, "greedy": False}}
    sections["limits"] = {"turns": 1, "turn_tokens": 4, "on_turn_length": "continue"}
    out = tw.train(
        env=Once,
        display="none",
        out=str(tmp_path / "run"),
        model=tw.tiny(hidden=32, layers=1),
        train={"data_epochs": 1.5},
        **sections,
    )
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    steps = json.loads((tmp_path / "run" / "config.json").read_text())["config"]["train"]["steps"]
    assert out
    # 10 of 12 tasks are for training: 15 groups.
    assert steps == sum(row["phase"] == "train" for row in rows) == 4


def test_tasks_without_end_have_no_passes():
    spec = SimpleNamespace(
        name="hop", tasks=lambda split, n, seed: [Task("a", id=str(i)) for i in range(n)]
    )
    with pytest.raises(ConfigError, match="hop has no finite list of training tasks"):
        with_steps_of_epochs(RunConfig(train=TrainConfig(data_epochs=2.0)), [spec])
    finite = SimpleNamespace(
        name="a", tasks=lambda split, n, seed: [Task("a", id=str(i)) for i in range(10)]
    )
    config = RunConfig(train=TrainConfig(data_epochs=2.0), rollout=RolloutConfig(groups=8))
    assert with_steps_of_epochs(config, [finite, finite]).train.steps == 5
