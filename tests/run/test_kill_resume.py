"""A run killed at any instant and resumed equals one that was never stopped (invariant 10)."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from kit.runs import SMALL, benchmark, train

from turnwright.cli.main import main


def check(tmp_path: Path, kills: int, steps: int, *, fresh: bool = False) -> None:
    bench = benchmark(fresh=fresh)
    recipe = bench.RECIPE.replace("steps = 16", f"steps = {steps}")
    outcome = bench.compare(tmp_path, list(bench.instants(kills, 0.9, random.Random(0))), recipe)
    assert outcome.kills, "no kill landed"
    assert "writing a checkpoint" in outcome.kills
    assert outcome.ids_equal
    assert outcome.weights_equal
    assert outcome.metrics_equal
    assert outcome.again == 0


def test_three_kills(tmp_path: Path) -> None:
    check(tmp_path, 3, steps=5)


def test_kills_of_a_run_with_effects(tmp_path: Path) -> None:
    bench = benchmark()
    kills = ["mid-episode", 0.05, "mid-episode", 0.3]
    outcome = bench.compare(tmp_path, kills, bench.EFFECTS.replace("steps = 16", "steps = 4"))
    assert outcome.kills, "no kill landed"
    assert outcome.resumed, "nothing was left to go on with"
    assert outcome.good
    assert outcome.steps_repeated <= len(outcome.kills) * 24  # episodes that play at once


def test_a_killed_run_draws_the_tasks_of_one_that_was_not(tmp_path: Path) -> None:
    bench = benchmark()
    recipe = SMALL.replace('"hop"', '"hop"\nsampler = "window"\nkey = "start"').replace(
        "[train]\nsteps = 2", "[train]\nsteps = 5"
    )
    recipe = bench.with_schedule(f"{recipe}[checkpoint]\nevery = 2\n", "one_step_off")
    outcome = bench.compare(tmp_path, ["checkpoint", "mid-episode"], recipe)
    assert outcome.kills, "no kill landed"
    assert outcome.good


INSERTS = """\
import random
import turnwright as tw

class Inserts(tw.Env):
    def reset(self, task, *, seed=None):
        self.rng, self.left = random.Random(seed), 4

    def step(self, action):
        self.left -= 1
        kept = self.rng.randint(0, len(action.raw))
        tail = self.rng.choice(["trained", "untrained"])
        said = self.rng.choice(["On.", tw.InlineObservation("so "), tw.InlineObservation("no: ", keep_chars=kept, tail=tail)])
        return tw.Step(said, reward=self.paid(), terminated=self.left == 0)

    def paid(self):
        return float(self.left == 0 and self.rng.random() < 0.25)

    @staticmethod
    def tasks(split, n, seed):
        return [tw.Task(f"Say {split} {number}.") for number in range(n)]
"""  # noqa: E501


def test_kills_of_a_run_that_inserts_and_rewinds(tmp_path: Path) -> None:
    bench = benchmark()
    (tmp_path / "inserts.py").write_text(INSERTS)
    recipe = bench.RECIPE.replace('use = "hop"', f'use = "{tmp_path / "inserts.py"}:Inserts"')
    recipe = recipe[: recipe.index("[warmup]")] + recipe[recipe.index("[train]") :].replace(
        "steps = 16", "steps = 4"
    ).replace("tasks = 24", "tasks = 8")
    recipe = recipe.replace("turn_tokens = 8", 'turn_tokens = 8\non_turn_length = "continue"')
    recipe = recipe.replace("[rollout]", '[rollout]\nstop = ["e", "an"]').replace(
        "[train]", "[train]\nrefill = 2"
    )
    outcome = bench.compare(tmp_path, [*bench.instants(2, 0.9, random.Random(1))], recipe)
    assert outcome.kills
    assert outcome.ids_equal
    assert outcome.weights_equal
    assert outcome.metrics_equal
    rows = [
        json.loads(line)
        for path in tmp_path.rglob("metrics.jsonl")
        for line in path.read_text().splitlines()
    ]
    # And which tasks they were of was the same again.
    assert any(row.get("groups_refilled") for row in rows)


GIVES_UP = """\
import asyncio
import turnwright as tw

async def play(task, model):
    first = await model.generate(task.messages)
    await asyncio.sleep(0.01 * len(first.message.text))
    second = await model.generate(task.messages)
    if len(second.message.text) % 2:
        return tw.Scores(None, status="aborted")
    return float(len(first.message.text) % 2)

def tasks(split, n, seed):
    return [tw.Task(f"Say {split} {number}.") for number in range(n)]
"""


def test_what_a_function_gave_up_is_not_played_again(tmp_path: Path) -> None:
    bench = benchmark()
    (tmp_path / "gives_up.py").write_text(GIVES_UP)
    recipe = SMALL[: SMALL.index("[warmup]")] + SMALL[SMALL.index("[train]") :].replace(
        "steps = 2", "steps = 4"
    )
    recipe = recipe.replace(
        'use = "hop"', f'name = "say"\ntasks = "{tmp_path / "gives_up.py"}:tasks"'
    ).replace(
        "[rollout]", f'[rollout]\nfunction = "{tmp_path / "gives_up.py"}:play"\nmax_failed = 1.0'
    )
    recipe = recipe.replace("group_size = 2", "group_size = 8")
    outcome = bench.compare(
        tmp_path,
        ["mid-episode", "mid-episode", "mid-episode"],
        f"{recipe}[checkpoint]\nevery = 4\n",
    )
    assert outcome.kills, "no kill landed"
    stops = {
        event.get("stop") for event in bench.events(tmp_path / "war") if event["e"] == "closed"
    }
    assert "aborted" in stops
    assert outcome.good


SEES = """\
[model]
vision = true
hidden = 32
heads = 4
layers = 1
[[env]]
use = "radar"
args = { reach = 2 }
[limits]
turn_tokens = 4
[rollout]
groups = 2
group_size = 4
[warmup]
demos = 40
steps = 8
batch = 4
gate_success = 0.0
gate_every = 4
gate_tasks = 8
[train]
steps = 4
[eval]
tasks = 8
every = 2
[checkpoint]
every = 2
"""


@pytest.mark.slow
def test_kills_of_a_run_that_sees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And what it left is evaluated from its directory, images and all."""
    outcome = benchmark().compare(tmp_path, [*benchmark().instants(3, 0.9, random.Random(2))], SEES)
    assert outcome.kills
    assert outcome.ids_equal
    assert outcome.weights_equal
    assert outcome.metrics_equal
    assert main(["eval", "--run", str(tmp_path / "war"), "--samples", "2"]) == 0
    assert "success" in capsys.readouterr().out


@pytest.mark.slow
def test_ten_kills(tmp_path: Path) -> None:
    check(tmp_path, 10, steps=16, fresh=True)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def test_killed_before_it_began(
    tmp_path: Path, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The directory is there and empty: nothing to resume, and the first command works again."""
    out = tmp_path / "run"
    out.mkdir()
    for name in (".lock", "journal.jsonl", "metrics.jsonl", "trajectories.jsonl"):
        (out / name).touch()
    assert main(["train", "--resume", str(out)]) == 2
    said = capsys.readouterr().err
    assert "restart it with" in said
    assert said.count("\n") == 1
    (out / "model").mkdir()  # of another size, perhaps
    train(recipe, out)
    assert (out / "summary.json").exists()
    assert main(["train", str(recipe), "--out", str(out), "--display", "none"]) == 2
    assert "--resume" in capsys.readouterr().err


def test_killed_while_the_model_was_made(
    tmp_path: Path, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """config.json is there and the model half written: it is made anew."""
    out, other = tmp_path / "run", tmp_path / "other"
    train(recipe, other)
    (out / ".model.writing").mkdir(parents=True)
    (out / ".model.writing" / "config.json").write_text("{")
    (out / "config.json").write_text((other / "config.json").read_text())
    assert main(["train", "--resume", str(out), "--display", "none"]) == 0
    assert benchmark().weights(out) == benchmark().weights(other)
    assert not (out / ".model.writing").exists()
    # Resuming what has ended changes nothing.
    before = (out / "metrics.jsonl").read_bytes()
    assert main(["train", "--resume", str(out), "--display", "none"]) == 0
    assert (out / "metrics.jsonl").read_bytes() == before
