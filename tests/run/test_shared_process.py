"""Code of environments in the process of a run: what it changes there is set
back, or is one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import kill_resume as bench
import pytest
from kit.runs import train

from turnwright.cli.main import main
from turnwright.training.run import TrainingRun

WORLD = """\
import asyncio
import os
import threading
from pathlib import Path
import turnwright as tw

HERE = Path(__file__).parent

async def raises(error):
    raise error

class World(tw.Env):
    async def reset(self, task, *, seed=None):
        self.task = task
        return f"Say {task.answer}."

    async def step(self, action):
        if (HERE / "begun").exists():
            await self.act()
        return tw.Step("so", reward=len(action.raw) % 3 / 2, terminated=len(action.raw) % 2 == 0)

    async def act(self):
        ACT

    @staticmethod
    def demonstrator(messages, rng):
        return "a" * rng.randint(1, 4)

    @staticmethod
    def tasks(split, n, seed):
        return [tw.Task(f"{split} {i}", id=f"{split}{i}", answer=str(i)) for i in range(min(n, 8))]
"""
RECIPE = """\
[model]
hidden = 32
layers = 1
[[env]]
use = "world.py:World"
[limits]
turns = 3
turn_tokens = 5
on_turn_length = "continue"
[rollout]
groups = 2
group_size = 3
[warmup]
demos = 12
steps = 2
batch = 4
gate_success = 0.0
gate_every = 2
gate_tasks = 2
[train]
steps = 2
[eval]
tasks = 2
samples = 1
"""
ONCE = "if not (HERE / 'done').exists(): (HERE / 'done').touch(); "
HARMLESS = {
    "dtype": "import torch; torch.set_default_dtype(torch.float64)",
    "device": "import torch; torch.set_default_device('meta')",
    "threads": "import torch; torch.set_num_threads(2)",
    "chdir": "(HERE / 'elsewhere').mkdir(exist_ok=True); os.chdir(HERE / 'elsewhere')",
}
FATAL = {
    "interrupt in a task": ONCE + "await asyncio.create_task(raises(KeyboardInterrupt()))",
    "exit in a task": ONCE + "await asyncio.create_task(raises(SystemExit(3)))",
}


def write(folder: Path, act: str) -> None:
    (folder / "world.py").write_text(WORLD.replace("ACT", act))
    (folder / "recipe.toml").write_text(RECIPE)


@pytest.fixture
def begins(monkeypatch, tmp_path):
    """Environments act only once a run has begun: what happens during its
    set-up is an error of its own."""
    play = TrainingRun.play

    async def told(self):
        (tmp_path / "begun").touch()
        return await play(self)

    monkeypatch.setattr(TrainingRun, "play", told)


@pytest.fixture(scope="module")
def peace(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("peace")
    write(folder, "pass")
    train(folder / "recipe.toml", folder / "run")
    return folder / "run"


def files(run: Path) -> set[str]:
    return {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}


@pytest.mark.parametrize("what", HARMLESS)
def test_a_change_of_the_process_changes_no_run(what, peace, begins, tmp_path, monkeypatch):
    write(tmp_path, HARMLESS[what])
    monkeypatch.chdir(tmp_path)
    train("recipe.toml", "runs/here")

    assert Path.cwd() == tmp_path
    run = tmp_path / "runs" / "here"
    assert files(run) == files(peace)
    assert bench.trained(run) == bench.trained(peace)
    assert bench.weights(run) == bench.weights(peace)


def test_a_change_of_torch_s_settings_is_named_once(begins, tmp_path, capsys):
    write(tmp_path, HARMLESS["dtype"])
    assert (
        main(
            [
                "train",
                str(tmp_path / "recipe.toml"),
                "--out",
                str(tmp_path / "run"),
                "--display",
                "plain",
            ]
        )
        == 0
    )
    printed = capsys.readouterr()
    said = printed.out + printed.err
    assert said.count("code of environment World set torch's default dtype to torch.float64") == 1


def test_an_interrupt_that_code_raises_is_of_its_episode(begins, tmp_path):
    write(tmp_path, ONCE + "raise KeyboardInterrupt")
    train(tmp_path / "recipe.toml", tmp_path / "run")
    failed = [
        json.loads(line)["error"] for line in (tmp_path / "run" / "trajectories.jsonl").open()
    ]
    assert (
        sum(error is not None and "KeyboardInterrupt" in error["message"] for error in failed) <= 1
    )


@pytest.mark.parametrize("what", FATAL)
def test_what_ends_the_event_loop_is_a_line_that_names_the_environment(
    what, begins, tmp_path, capsys
):
    write(tmp_path, FATAL[what])
    run = tmp_path / "run"
    assert (
        main(["train", str(tmp_path / "recipe.toml"), "--out", str(run), "--display", "none"]) == 1
    )
    said = capsys.readouterr().err
    assert "code of environment World raised" in said
    assert f"turnwright train --resume {run}" in said
    assert main(["train", "--resume", str(run), "--display", "none"]) == 0


def process(folder: Path) -> subprocess.CompletedProcess[str]:
    """Train in a process of its own, whose files may be closed."""
    command = [
        sys.executable,
        "-m",
        "turnwright",
        "train",
        str(folder / "recipe.toml"),
        "--out",
        str(folder / "run"),
    ]
    return subprocess.run(
        [*command, "--display", "none"],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src")},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_closed_files_are_a_line_that_names_the_environment(tmp_path):
    write(tmp_path, "os.closerange(3, 256)")
    (tmp_path / "begun").touch()
    (tmp_path / "world.py").write_text(
        (tmp_path / "world.py")
        .read_text()
        .replace('(HERE / "begun")', "(HERE / 'run' / 'metrics.jsonl')")
    )
    done = process(tmp_path)
    assert done.returncode == 1
    assert "code of environment World closed files of this process" in done.stderr


def test_a_thread_that_code_left_does_not_keep_the_command_from_ending(tmp_path):
    write(tmp_path, "threading.Thread(target=threading.Event().wait, name='left behind').start()")
    (tmp_path / "begun").touch()
    done = process(tmp_path)
    assert done.returncode == 0
    assert (tmp_path / "run" / "summary.json").exists()
    assert "left behind" in done.stderr
