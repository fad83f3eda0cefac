"""Each remedy of docs/first_task.md does what it promises when it is followed to the letter."""

import json
import re
import shlex
from pathlib import Path

import pytest

from turnwright.cli.main import main

PAGE = Path(__file__).parents[2] / "docs" / "first_task.md"
TABLE = PAGE.read_text().partition("## Mend")[2].partition("```")[0]
ROWS = dict(re.findall(r"^\| (.+?) \| (.+?) \|$", TABLE, re.MULTILINE)[1:])
ROWS.pop("---", None)

ADVICE = {
    "what is learned does not carry over": "other tasks, which only the user can write",
    "no better than one reply": "another demonstrator, which only the user can write",
}
"""Remedies without a setting."""

ENV = '''
import random

import numpy as np

import turnwright as tw


class Quiz(tw.Env):
    """Say the letter of a number, which a few steps do not teach."""

    def reset(self, task, *, seed=None):
        self.word = "abcd"[sum(map(int, task.info["number"])) % 4]
        return f"say {task.info['number']}"

    def step(self, action):
        return tw.Step(reward=float(action.text.strip() == self.word), terminated=True)

    @staticmethod
    def tasks(split, n, seed):
        rng = random.Random(f"{split} {seed}")
        return [tw.Task(info={"number": str(rng.randrange(10**8))}) for _ in range(n)]

    @staticmethod
    def solver(messages, rng):
        return "abcd"[sum(map(int, messages[-1].text.split()[-1])) % 4]


class Pictures(Quiz):
    """Shows a picture beside the number."""

    def reset(self, task, *, seed=None):
        number = super().reset(task, seed=seed)
        return [tw.Image(np.zeros((32, 32, 3), np.uint8), alt="a picture"), number]

    @staticmethod
    def solver(messages, rng):
        return Quiz.solver(messages, rng)


class Wordy(Quiz):
    """Its demonstrations are longer than a reply may be."""

    @staticmethod
    def solver(messages, rng):
        return "a long way to say " + Quiz.solver(messages, rng)
'''

RECIPE = """
out = "runs/quiz"
model = { hidden = 32, layers = 1 }

[[env]]
use = "quiz.py:Quiz"

[limits]
turns = 1
turn_tokens = 4
on_turn_length = "continue"

[rollout]
groups = 2
group_size = 4

[warmup]
demos = 400
steps = 40
rounds = 1
batch = 16
gate_every = 20
lr = 1e-2

[train]
steps = 1
lr = 1e-4

[eval]
tasks = 16
greedy = false
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("quiz.py").write_text(ENV)
    Path("recipe.toml").write_text(RECIPE)


def printed(capsys):
    told = capsys.readouterr()
    return told.out + told.err


def stopped(capsys, *words):
    """Train until the warm-up stops; return the words of the message."""
    status = main(["train", "recipe.toml", "--display", "plain", *words])
    text = printed(capsys)
    assert status != 0, text
    return text


def commands(text):
    """Return the resuming commands that a message prints, as lists of words."""
    found = re.findall(r"--resume \S+ --warmup\.[a-z-]+ [\d.]+", text)
    return [shlex.split(command) for command in found]


def test_every_remedy_is_tried_or_is_advice():
    assert len(ROWS) == 9
    assert set(ROWS) == {*ADVICE, *TRIED}


def test_a_warm_up_that_ended_goes_on_by_the_command_that_is_printed(capsys):
    text = stopped(capsys, "--warmup.lr", "1e-5", "--warmup.steps", "5", "--warmup.gate-every", "5")
    assert "the warm-up ended after 5 steps" in text
    (more, *_) = commands(text)
    assert "--warmup.steps" in more
    assert main(["train", *more]) != 0
    assert "the warm-up ended after 10 steps" in printed(capsys)


def test_what_does_not_read_its_task_goes_on_by_either_command(capsys):
    text = stopped(capsys)
    assert "the same replies succeed in" in text
    longer, lower = commands(text)
    assert main(["train", *longer]) != 0
    assert "ended after 80 steps" in printed(capsys)
    (_, lower) = commands(text)
    assert main(["train", *lower[:-1], "0.05"]) == 0
    assert "reinforcement" in printed(capsys)


def test_a_model_with_more_layers_is_built():
    assert "`--model.layers 3`" in ROWS["the same replies succeed in other tasks"]
    short = ["--warmup.gate-success", "0", "--warmup.steps", "2", "--warmup.gate-every", "2"]
    assert main(["train", "recipe.toml", *short, "--model.layers", "3"]) == 0
    config = json.loads(Path("runs/quiz/model/config.json").read_text())
    assert config["num_hidden_layers"] == 3


def test_a_run_with_more_rounds_is_another_run(capsys):
    text = stopped(
        capsys,
        "--out",
        "runs/again",
        "--warmup.rounds",
        "6",
        "--warmup.steps",
        "10",
        "--warmup.gate-every",
        "10",
    )
    steps = int(re.search(r"ended after (\d+) steps", text)[1])
    assert steps > 10
    assert Path("runs/again/metrics.jsonl").exists()


def test_a_raised_limit_no_longer_cuts_demonstrations(capsys):
    wordy = ["--env.use", "quiz.py:Wordy", "--limits.on-turn-length", "stop"]
    assert "are cut at limits.turn_tokens = 4; raise it" in stopped(capsys, *wordy)
    text = stopped(capsys, *wordy, "--limits.turn-tokens", "40", "--out", "runs/longer")
    assert "are cut at" not in text


def test_a_model_with_vision_sees(capsys):
    seen = ["--env.use", "quiz.py:Pictures", "--warmup.steps", "2", "--warmup.gate-success", "0"]
    quick = ["--warmup.gate-every", "2", "--warmup.demos", "16", "--warmup.gate-tasks", "8"]
    assert main(["train", "recipe.toml", "--display", "plain", *seen, *quick]) == 0
    assert "it reads their alt texts; set model.vision = true" in printed(capsys)
    words = shlex.split(ROWS["the model has no vision"].strip("`"))
    assert (
        main(
            [
                "train",
                "recipe.toml",
                "--display",
                "plain",
                *seen,
                *quick,
                "--out",
                "runs/sees",
                *words,
            ]
        )
        == 0
    )
    assert "alt texts" not in printed(capsys)


def test_half_the_learning_rate_and_more_steps(capsys):
    begin = [
        "--warmup.gate-success",
        "0",
        "--warmup.steps",
        "2",
        "--warmup.gate-every",
        "2",
        "--warmup.demos",
        "16",
    ]
    assert main(["train", "recipe.toml", *begin, "--train.lr", "5e-5"]) == 0
    rows = [json.loads(line) for line in Path("runs/quiz/metrics.jsonl").read_text().splitlines()]
    assert next(row["lr"] for row in rows if row["phase"] == "train") == 5e-5
    assert main(["train", "--resume", "runs/quiz", "--train.steps", "3"]) == 0
    assert json.loads(Path("runs/quiz/summary.json").read_text())["rl_steps"] == 3


TRIED = {
    "the warm-up ended without meeting its gate": (
        test_a_warm_up_that_ended_goes_on_by_the_command_that_is_printed,
    ),
    "the same replies succeed in other tasks": (
        test_what_does_not_read_its_task_goes_on_by_either_command,
        test_a_model_with_more_layers_is_built,
    ),
    "the warm-up ended below its goal, training goes on": (
        test_a_run_with_more_rounds_is_another_run,
    ),
    "the demonstrations are cut at a limit": (test_a_raised_limit_no_longer_cuts_demonstrations,),
    "the model has no vision": (test_a_model_with_vision_sees,),
    "reinforcement made it worse": (test_half_the_learning_rate_and_more_steps,),
    "success still rises at the end": (test_half_the_learning_rate_and_more_steps,),
}
"""The tests that follow a remedy."""
