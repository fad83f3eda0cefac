"""When a warm-up goes on, ends, or is refused: rounds, the fall of the loss, and replies that do
not depend on the task."""

import asyncio
import json
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import turnwright as tw
from turnwright.config.schema import EnvConfig
from turnwright.envs import resolve_env
from turnwright.errors import ConfigError, TurnwrightError
from turnwright.renderers import byte_renderer
from turnwright.rollouts import Rollout
from turnwright.rollouts.rollout_settings import RolloutSettings
from turnwright.training.task_plan import TaskChoice, planned_steps
from turnwright.training.warmup_gate import exceeds, round_ends, still_falls, success_in_other_tasks

WORDS = "abcd"


class Sum(tw.Env):
    """Say the letter that the digit sum of a number stands for, which a few steps do not teach."""

    def reset(self, task, *, seed=None):
        self.word = letter(task.info["number"])
        return f"say {task.info['number']}"

    def step(self, action):
        return tw.Step(reward=float(action.text.strip() == self.word), terminated=True)

    @staticmethod
    def tasks(split, n, seed):
        rng = random.Random(f"{split} {seed}")
        return [tw.Task(info={"number": str(rng.randrange(10**8))}) for _ in range(n)]

    @staticmethod
    def solver(messages, rng):
        return letter(messages[-1].text.split()[-1])


class Any(Sum):
    """Pays two letters of four, whatever the number is."""

    def step(self, action):
        return tw.Step(reward=float(action.text.strip() in ("a", "b")), terminated=True)


def letter(number):
    return WORDS[sum(map(int, number)) % 4]


def rows_of(run, phase):
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["phase"] == phase]


SHORT = {
    "limits": {"turns": 1, "turn_tokens": 4, "on_turn_length": "continue"},
    "rollout": {"groups": 2, "group_size": 4},
    "warmup": {
        "demos": 400,
        "steps": 40,
        "rounds": 1,
        "batch": 16,
        "gate_every": 20,
        "gate_tasks": 128,
        "lr": 1e-2,
    },
    "train": {"steps": 1, "lr": 0.0},
    "eval": {"tasks": 16, "greedy": False},
}


def train(env, out, *, resume=False, **warmup):
    """Train a tiny model, or resume it with other settings of the warm-up; return the summary."""
    sections = {"warmup": warmup} if resume else SHORT | {"warmup": SHORT["warmup"] | warmup}
    model = tw.tiny(hidden=32, heads=2, kv_heads=2, layers=1)
    tw.train(model=model, env=env, out=out, display="none", resume=resume, **sections)
    return json.loads((out / "summary.json").read_text())


# Rounds


@given(st.lists(st.integers(1, 500), min_size=1, max_size=3), st.integers(1, 4))
def test_rounds_end_in_order_and_the_first_is_as_long_as_asked(lengths, rounds):
    ends = round_ends(lengths, rounds)
    assert ends == sorted(set(ends))
    assert ends[-1] == max(lengths) * rounds
    assert set(lengths) <= set(ends)
    assert planned_steps(ends, 0) == min(lengths)


@given(st.integers(20, 300), st.floats(0.05, 5.0), st.integers(0, 99))
def test_a_loss_that_stands_does_not_fall_and_one_that_halves_does(steps, loss, seed):
    rng = random.Random(seed)
    noise = [1.0 + 0.001 * rng.random() for _ in range(steps)]
    assert not still_falls([loss * factor for factor in noise])
    assert not still_falls(
        [loss * factor * (1.0 + step / steps) for step, factor in enumerate(noise)]
    )
    assert still_falls([loss * factor * 0.5 ** (step / steps) for step, factor in enumerate(noise)])


def test_noise_is_no_fall():
    falls = sum(
        still_falls(
            [1.0 + 0.1 * random.Random(f"{run} {step}").gauss(0.0, 1.0) for step in range(100)]
        )
        for run in range(200)
    )
    assert falls < 20  # two standard errors: one in 44


def test_a_round_follows_while_the_loss_falls_and_the_gate_is_not_met(tmp_path):
    run = tmp_path / "run"
    with pytest.raises(TurnwrightError, match=r"ended after \d+ steps"):
        train(Sum, run, steps=10, rounds=3, gate_every=10)
    steps = [row["step"] for row in rows_of(run, "warmup")]
    rates = [row["lr"] for row in rows_of(run, "warmup")]
    assert len(steps) == 30  # the form of a reply is still being learned
    assert steps == list(range(1, 31))
    # Each round anneals anew, from below the peak.
    assert rates[9] < 0.3 * rates[10] < rates[10] < SHORT["warmup"]["lr"]


def test_rounds_continue_where_a_kill_left_them(tmp_path, monkeypatch):
    from turnwright.training.run import TrainingRun

    kept, failed = tmp_path / "kept", tmp_path / "failed"
    with pytest.raises(TurnwrightError):
        train(Sum, kept, steps=10, rounds=3, gate_every=5)

    def kill(self, gate, step, loss, original=TrainingRun._check_gate):
        if step == 15:
            raise TurnwrightError("stopped")
        return original(self, gate, step, loss)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingRun, "_check_gate", kill)
        with pytest.raises(TurnwrightError, match="stopped"):
            train(Sum, failed, steps=10, rounds=3, gate_every=5)
    with pytest.raises(TurnwrightError):
        train(Sum, failed, resume=True)
    losses = [
        [(row["step"], row["loss"], row["lr"]) for row in rows_of(run, "warmup")]
        for run in (kept, failed)
    ]
    assert losses[0] == losses[1]


# Replies to other tasks


def play(env, speak, n=64):
    """Play tasks with a function in place of a model; return its success, and that of its
    replies in other tasks."""
    spec = replace(
        resolve_env(EnvConfig(use="hop")), name="own", factory=env, solver=None, demonstrator=None
    )
    tasks = env.tasks("train", n, 0)
    choices = {task.id: TaskChoice(spec, task) for task in tasks}
    renderer = byte_renderer()

    def rollout(engine):
        return Rollout(engine, renderer, RolloutSettings(limits=tw.Limits(turns=4), sanity="off"))

    async def both():
        episodes = [choice.episode("gate", 0, 0) for choice in choices.values()]
        played = await rollout(tw.ScriptedEngine(speak, renderer=renderer)).play(episodes)
        return played, await success_in_other_tasks(choices, played, rollout, 1.0)

    played, chance = asyncio.run(both())
    from turnwright.training.evaluation import summarize

    return summarize(played), chance


def test_what_reads_its_task_succeeds_more_often_than_elsewhere():
    result, chance = play(Sum, Sum.solver)
    assert result.success == 1.0
    assert chance.n == 3 * 64
    assert 0.1 < chance.success < 0.45  # one letter in four
    assert exceeds(result, chance)


def test_what_does_not_read_its_task_does_not():
    for env, expected in ((Sum, 0.25), (Any, 0.5)):
        result, chance = play(env, lambda messages, rng: rng.choice(WORDS), n=256)
        assert math.isclose(chance.success, expected, abs_tol=0.1)
        assert not exceeds(result, chance)


def test_one_task_alone_has_no_others():
    _, chance = play(Sum, Sum.solver, n=1)
    assert chance is None


def test_an_episode_that_asks_for_more_replies_hears_the_last_one_again():
    class Long(Sum):
        """Asks as often as the number's last digit says."""

        def reset(self, task, *, seed=None):
            self.left = int(task.info["number"][-1]) % 3
            return super().reset(task, seed=seed)

        def step(self, action):
            self.left -= 1
            return super().step(action) if self.left < 0 else tw.Step("again")

    _, chance = play(Long, lambda messages, rng: letter(messages[0].text.split()[-1]))
    assert chance.failed == 0


def test_a_warm_up_at_the_success_of_chance_stops_and_says_what_to_do(tmp_path):
    run = tmp_path / "run"
    with pytest.raises(TurnwrightError, match="the same replies succeed in") as told:
        train(Sum, run)
    success = rows_of(run, "gate")[-1]["success"]
    assert 0.1 < success < 0.4  # rewards differ, as by chance
    assert f"--warmup.gate-success {success:.2g}" in str(told.value)
    assert "--warmup.steps 80" in str(told.value)

    # Both remedies do what is said, one after the other.
    with pytest.raises(TurnwrightError, match="ended after 80 steps"):
        train(Sum, run, resume=True, steps=80)
    assert train(Sum, run, resume=True, gate_success=0.05)["rl_steps"] == 1
    with pytest.raises(
        ConfigError, match=r"warm-up is over, so warmup.gate_success has no effect.*--out .*run-2"
    ):
        train(Sum, run, resume=True, gate_success=0.01)


def test_where_demonstrations_succeed_by_chance_too_reinforcement_begins(tmp_path):
    class Lucky(Any):
        """Its demonstrations say a letter that always pays, which the
        warm-up has not learned yet."""

        @staticmethod
        def solver(messages, rng):
            return rng.choice("ab")

        @staticmethod
        def demonstrator(messages, rng):
            return rng.choice("ab") if rng.random() < 0.99 else "abcd"

    summary = train(Lucky, tmp_path / "run", steps=14, lr=5e-3)
    assert summary["rl_steps"] == 1
    assert not rows_of(tmp_path / "run", "gate")[-1]["gate_passed"]
