"""The death of an environment's process, in any phase and more than once, leaves a
run as if undisturbed."""

from __future__ import annotations

import json
from pathlib import Path

import kill_resume as bench
import pytest

from turnwright.cli.main import main
from turnwright.rollouts.play_again import MAX_DEATHS
from turnwright.training.run import TrainingRun

WORLD = '''\
import os
import signal
from pathlib import Path
import turnwright as tw

HERE = Path(__file__).parent

class World(tw.Env):
    """Guess; its process is killed as often as a file says, while the run is in the phase that another names."""

    def reset(self, task, *, seed=None):
        self.die_as_told()
        self.task = task
        return f"Say {task.answer}."

    def step(self, action):
        return tw.Step("so", reward=len(action.raw) % 3 / 2, terminated=len(action.raw) % 2 == 0)

    def die_as_told(self):
        left = HERE / "deaths"
        if left.exists() and (HERE / "phase").read_text() == (HERE / "dies in").read_text():
            for token in sorted(left.iterdir()):
                try:
                    token.unlink()
                except FileNotFoundError:
                    continue  # another process takes it, and dies of it
                os.kill(os.getpid(), signal.SIGKILL)

    @staticmethod
    def demonstrator(messages, rng):
        return "a" * rng.randint(1, 4)

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
isolation = "process"
retries.wait_s = 0.0
[limits]
turns = 3
turn_tokens = 5
on_turn_length = "continue"
[rollout]
groups = 2
group_size = 3
concurrency = 1
max_retries = 0
[warmup]
demos = 12
steps = 2
batch = 4
gate_success = 0.0
gate_every = 2
gate_tasks = 2
[train]
steps = 1
[eval]
tasks = 2
samples = 1
"""
PHASES = {
    "demonstrate": "_demonstrate",
    "gate": "_check_gate",
    "eval": "_evaluate",
    "train": "_train_step",
}


def train(
    folder: Path,
    out: str,
    monkeypatch: pytest.MonkeyPatch,
    phase: str = "",
    deaths: int = 0,
    recipe: str = RECIPE,
) -> int:
    """Train in `folder / out`; in a phase, the process of an environment dies so many times."""

    def told(name: str, method):
        async def tell(self, *args, **kwargs):
            (folder / "phase").write_text(name)
            return await method(self, *args, **kwargs)

        return tell

    with monkeypatch.context() as patch:
        for name, method in PHASES.items():
            patch.setattr(TrainingRun, method, told(name, getattr(TrainingRun, method)))
        (folder / "world.py").write_text(WORLD)
        (folder / "recipe.toml").write_text(recipe)
        (folder / "phase").write_text("set up")
        (folder / "dies in").write_text(phase)
        (folder / "deaths").mkdir(exist_ok=True)
        for number in range(deaths):
            (folder / "deaths" / str(number)).touch()
        return main(
            ["train", str(folder / "recipe.toml"), "--out", str(folder / out), "--display", "none"]
        )


@pytest.fixture(scope="module")
def peace(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("peace")
    with pytest.MonkeyPatch.context() as patch:
        assert train(folder, "run", patch) == 0
    return folder / "run"


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in rows(run) if row["phase"] == "warmup"]


def rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("phase", PHASES)
def test_deaths_in_a_phase_change_nothing(phase, peace, tmp_path, monkeypatch):
    """With `max_retries = 0`: the death of a process is no failure of the episode."""
    assert train(tmp_path, "run", monkeypatch, phase, deaths=3) == 0
    assert not list((tmp_path / "deaths").iterdir())

    war = tmp_path / "run"
    assert losses(war) == losses(peace)
    assert bench.trained(war) == bench.trained(peace)
    assert bench.weights(war) == bench.weights(peace)
    assert sum(row.get("failed_plays", 0) for row in rows(war)) == 3
    assert json.loads((war / "summary.json").read_text())["failed_plays"] == 3


def test_an_environment_that_dies_each_time_ends_the_run_with_a_line(tmp_path, monkeypatch, capsys):
    recipe = RECIPE.replace("demos = 12", "demos = 1")
    assert (
        train(tmp_path, "run", monkeypatch, "demonstrate", deaths=2 * MAX_DEATHS, recipe=recipe)
        == 1
    )
    # Played once, and MAX_DEATHS times again.
    assert len(list((tmp_path / "deaths").iterdir())) == MAX_DEATHS - 1
    said = capsys.readouterr().err
    assert "1 of 1 demonstrations failed, the first with ProcessDied" in said
    assert "Traceback" not in said
