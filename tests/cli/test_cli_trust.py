"""Runs of others: nothing that their settings name runs before the user has agreed."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from turnwright.cli.main import main
from turnwright.config import load
from turnwright.config.dump import to_json_dict
from turnwright.records import RunDir
from turnwright.records.own_runs import is_own_run, own_runs_file, remember_run

WORLD = """
from pathlib import Path
import turnwright as tw

Path(__file__).with_name("was_run").touch()

class World(tw.Env):
    tasks = [tw.Task("x")]
    eval_tasks = [tw.Task("y")]

    def reset(self, task, *, seed=None):
        return "go"

    def step(self, action):
        return tw.Step("on", reward=1.0, terminated=True)

class Tracker:
    def log(self, row, step):
        pass
"""


def make_run(run: Path, code: Path, *words: str) -> Path:
    """Write a run as `turnwright train` begins one, with an environment in `code`."""
    code.parent.mkdir(parents=True, exist_ok=True)
    code.write_text(WORLD)
    resolved = load(None, [f"--env.use={code}:World", f'--track.to=["{code}:Tracker"]', *words])
    with RunDir(run) as directory:
        directory.write_json("config.json", to_json_dict(resolved))
    (run / "recipe.toml").write_text(f'[[env]]\nuse = "{code}:World"\n')
    (run / "metrics.jsonl").touch()
    return run


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory of the user's own, for each test."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def foreign(tmp_path: Path, state: Path) -> Path:
    """A run that another user made: unpacked here, with its code beside its settings."""
    run = make_run(tmp_path / "theirs", tmp_path / "theirs" / "world.py")
    shutil.rmtree(state)
    return run


COMMANDS = {
    "eval --run RUN --dry-run": "env.0.use = RUN/world.py:World",
    "eval RUN/recipe.toml --dry-run": "env.0.use = RUN/world.py:World",
    "train --resume RUN --dry-run": "env.0.use = RUN/world.py:World",
    "replay RUN --loop --env recipe": "env.0.use = RUN/world.py:World",
    "track RUN": "track.to = RUN/world.py:Tracker",
    "check RUN/recipe.toml": "env.0.use = RUN/world.py:World",
    "check RUN/world.py:World": "RUN/world.py",
}
BESIDE = dict.fromkeys(("replay", "track"), pytest.mark.beside("view"))
"""Marks of commands of packages beside the core."""


@pytest.mark.parametrize(
    "command", [pytest.param(one, marks=BESIDE.get(one.partition(" ")[0], ())) for one in COMMANDS]
)
def test_without_a_terminal_the_code_of_anothers_run_needs_a_flag(
    command: str, foreign: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command.replace("RUN", str(foreign)).split()
    assert main(words) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    for part in (
        f"{foreign} was not started by you on this machine",
        COMMANDS[command].replace("RUN", str(foreign)),
        "add --trust",
    ):
        assert part in said
    assert not (foreign / "was_run").exists()


@pytest.mark.parametrize(
    "command", [command for command in COMMANDS if "--dry-run" in command or "check" in command]
)
def test_with_the_flag_it_runs(command: str, foreign: Path) -> None:
    main([*command.replace("RUN", str(foreign)).split(), "--trust"])
    assert (foreign / "was_run").exists()


def test_of_ones_own_run_nothing_is_asked(tmp_path: Path) -> None:
    run = make_run(tmp_path / "mine", tmp_path / "project" / "world.py")
    assert main(["eval", "--run", str(run), "--dry-run"]) == 0
    assert (tmp_path / "project" / "was_run").exists()
    moved = run.rename(tmp_path / "elsewhere")
    assert main(["eval", "--run", str(moved), "--dry-run"]) == 0


def test_edited_settings_and_code_in_the_run_are_asked_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "mine", tmp_path / "project" / "world.py")
    shutil.copytree(tmp_path / "project", tmp_path / "other")
    config = run / "config.json"
    config.write_text(config.read_text().replace("project/world.py", "other/world.py"))
    assert main(["eval", "--run", str(run), "--dry-run"]) == 2
    assert "was not started by you" in capsys.readouterr().err

    inside = make_run(tmp_path / "with_code", tmp_path / "with_code" / "world.py")
    assert main(["eval", "--run", str(inside), "--dry-run"]) == 2
    assert "has code in its directory" in capsys.readouterr().err
    assert not (inside / "was_run").exists()


def test_commands_and_modules_are_code_and_built_in_environments_are_not(
    tmp_path: Path, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {
        "hop": [],
        "program": ['--env.args.command=["rm", "-r"]'],
        "anywhere.world:World": [],
    }
    for number, (use, more) in enumerate(settings.items()):
        with RunDir(tmp_path / str(number)) as run:
            run.write_json("config.json", to_json_dict(load(None, [f"--env.use={use}", *more])))
    shutil.rmtree(state)
    assert main(["eval", "--run", str(tmp_path / "0"), "--dry-run"]) == 0
    for number, named in (
        (1, "env.0.args.command = rm; env.0.args.command = -r"),
        (2, "env.0.use = anywhere.world:World"),
    ):
        capsys.readouterr()
        assert main(["eval", "--run", str(tmp_path / str(number)), "--dry-run"]) == 2
        assert named in capsys.readouterr().err


def test_a_list_that_others_can_write_is_not_believed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "mine", tmp_path / "project" / "world.py")
    assert is_own_run(run)
    own_runs_file().chmod(0o666)
    assert not is_own_run(run)


def test_without_a_state_directory_runs_are_made_and_asked_about(
    tmp_path: Path, state: Path
) -> None:
    state.write_text("a file in its place")
    run = make_run(tmp_path / "mine", tmp_path / "project" / "world.py")
    assert not is_own_run(run)


def test_the_list_stays_small_and_keeps_what_is_new(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnwright.records.own_runs.MAX_BYTES", 1000)
    for number in range(60):
        remember_run(b"%d" % number)
        remember_run(b"%d" % number)  # once is enough
    assert own_runs_file().stat().st_size <= 1000 + 65
    (tmp_path / "config.json").write_bytes(b"59")
    assert is_own_run(tmp_path)


@pytest.mark.parametrize("answer", ["n", "", "y"])
def test_on_a_terminal_one_question_names_the_code(answer: str, foreign: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "turnwright", "eval", "--run", str(foreign), "--dry-run"]
    asking = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        env=os.environ | {"TERM": "dumb"},
    )
    os.close(theirs)
    said = b""
    while b"[y/N] " not in said:
        said += os.read(ours, 4096)
    os.write(ours, answer.encode() + b"\n")
    status = asking.wait(60)
    os.close(ours)
    assert f"env.0.use = {foreign}/world.py:World".encode() in said
    assert (status, (foreign / "was_run").exists()) == ((0, True) if answer == "y" else (2, False))
