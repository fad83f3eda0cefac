"""Failures that pass do not stay: an outage of the world, and kills of what belongs to a run, leave
it as if undisturbed."""

from __future__ import annotations

import json
import os
import random
import threading
from collections import Counter
from pathlib import Path

import kill_resume as bench
import pytest

from turnwright.cli.main import main

WORLD = '''\
import os
from pathlib import Path
import turnwright as tw

HERE = Path(__file__).parent

class World(tw.Env):
    """Guess; it is out of reach while a file exists, which the first reset of some step may make."""

    def reset(self, task, *, seed=None):
        self.task = task
        if task.id == os.environ.get("OUTAGE_AT") and not (HERE / "was").exists():
            (HERE / "was").touch()
            (HERE / "down").touch()
        self.reach()
        return f"Say {task.answer}."

    def reach(self):
        if (HERE / "down").exists():
            raise ConnectionError("no route to the world")

    def step(self, action):
        self.reach()
        return tw.Step("so", reward=len(action.raw) % 3 / 2, terminated=len(action.raw) % 2 == 0)

    @staticmethod
    def tasks(split, n, seed):
        return [tw.Task(f"{split} {i}", id=f"{split}{i}", answer=str(i)) for i in range(min(n, 8))]
'''  # noqa: E501
RECIPE = """\
[model]
hidden = 32
layers = 1
[[env]]
use = "world.py:World"
retries.wait_s = 0.0
[limits]
turns = 3
turn_tokens = 5
on_turn_length = "continue"
[rollout]
groups = 2
group_size = 3
[warmup]
demos = 0
[train]
steps = 3
[eval]
tasks = 2
[checkpoint]
every = 2
"""


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "world.py").write_text(WORLD)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    monkeypatch.delenv("OUTAGE_AT", raising=False)
    return tmp_path


def train(*words: object) -> int:
    return main(["train", *map(str, words), "--display", "none"])


@pytest.mark.parametrize("at", ["train4", "eval0"])
def test_a_run_that_an_outage_stopped_goes_on_as_if_there_had_been_none(
    at: str, world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peace, war = world / "peace", world / "war"
    assert train(world / "recipe.toml", "--out", peace) == 0
    monkeypatch.setenv("OUTAGE_AT", at)
    assert train(world / "recipe.toml", "--out", war) == 1
    said = capsys.readouterr().err
    assert "ConnectionError" in said
    assert train("--resume", war) == 1  # it is still down
    (world / "down").unlink()
    assert train("--resume", war) == 0, f"the run cannot go on: {capsys.readouterr().err}"
    assert "--resume" in said
    assert bench.trained(war) == bench.trained(peace)
    assert bench.weights(war) == bench.weights(peace)
    summary = json.loads((war / "summary.json").read_text())
    closed = [event for event in bench.events(war) if event["e"] == "closed"]
    keys = Counter(tuple(event["k"]) for event in closed)
    assert summary["failed_plays"] == sum(keys.values()) - len(keys) > 0  # each of them is counted
    rows = [json.loads(line) for line in (war / "metrics.jsonl").read_text().splitlines()]
    assert sum(row.get("failed_plays", 0) for row in rows) == summary["failed_plays"]


def test_a_failure_that_a_step_went_on_without_counts_for_good(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Invariant 10: a run that is killed behind such a step trains on the same
    episodes as one that was not."""
    (world / "world.py").write_text(WORLD.replace("self.reach()\n        return f", "self.fail()\n        return f").replace(  # noqa: E501
        "    def reach(self)", '''    def fail(self):
        with (HERE / "resets").open("a") as file:
            file.write(".")
        if self.task.id == "train1" and os.environ.get("FAILS") == "1":
            raise ConnectionError("no route to the world")

    def reach(self)'''
    ))  # fmt: skip
    monkeypatch.setenv("FAILS", "1")
    recipe = RECIPE.replace("[rollout]", "[rollout]\nmax_failed = 0.6") + "\n"
    (world / "recipe.toml").write_text(recipe)
    out, copy = world / "run", world / "copy"
    assert train(world / "recipe.toml", "--out", out) == 0, capsys.readouterr().err
    # The directory as a kill right behind the first step leaves it.
    copy.mkdir()
    lines = (out / "journal.jsonl").read_bytes().splitlines(keepends=True)
    end = next(n for n, line in enumerate(lines) if b'"e":"trained"' in line)
    (copy / "journal.jsonl").write_bytes(b"".join(lines[: end + 1]))
    (copy / "config.json").write_bytes((out / "config.json").read_bytes())
    accepted = [json.loads(line) for line in lines[: end + 1] if b'"e":"accepted"' in line]
    assert [len(event["failed"]) for event in accepted] == [3]
    monkeypatch.setenv("FAILS", "0")  # it would go well now
    assert train("--resume", copy) == 0, capsys.readouterr().err
    first = [spans for key, spans in sorted(bench.trained(copy).items()) if key[0] == 0]
    assert first == [spans for key, spans in sorted(bench.trained(out).items()) if key[0] == 0]
    assert bench.weights(copy) == bench.weights(out)


SMALL = bench.TREE.replace("steps = 12", "steps = 3").replace(
    "tasks = 4\nevery = 6", "tasks = 2\ngreedy = false"
)


def test_kills_of_what_is_below_a_run_and_an_outage_leave_it_as_undisturbed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A slice of `benchmarks/kill_resume.py --tree`; kills of the run itself
    are in test_kill_resume.py."""
    (tmp_path / "world.py").write_text(bench.WORLD)
    (tmp_path / "recipe.toml").write_text(SMALL)
    peace, war = tmp_path / "peace", tmp_path / "war"
    assert train(tmp_path / "recipe.toml", "--out", peace) == 0
    rng, todo, done, over = (
        random.Random(0),
        ["outage", "environment", "forks environments"],
        [],
        threading.Event(),
    )

    def disturb() -> None:
        while todo and not over.wait(rng.uniform(0.02, 0.3)):
            if bench.size(war) and (
                what := bench.disturb(os.getpid(), todo[-1], tmp_path / "down", rng)
            ):
                done.append(todo.pop())
                assert what

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        status, times = train(tmp_path / "recipe.toml", "--out", war), 0
        while status == 1 and times < 8:
            status, times = train("--resume", war), times + 1
    finally:
        over.set()
        thread.join()
    assert status == 0, capsys.readouterr().err
    assert done, "nothing was disturbed"
    assert bench.trained(war) == bench.trained(peace)
    assert bench.weights(war) == bench.weights(peace)
