"""A named pipe, a socket, a directory or JSON nested without end in place of a file:
one line that names it."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from kit.runs import train

from turnwright.cli.main import main
from turnwright.files import open_file, read_json

ENV = """
import turnwright as tw

class Short(tw.Env):
    def reset(self, task, *, seed=None):
        return "Say something."

    def step(self, action):
        return tw.Step("", reward=float(len(action.text) % 3), terminated=True)

    @staticmethod
    def tasks(split, n, seed):
        return [tw.Task(f"{split} {i}", id=f"{split}-{i}") for i in range(n)]
"""
RECIPE = """
[[env]]
use = "short.py:Short"
[limits]
turns = 1
turn_tokens = 4
[rollout]
groups = 1
group_size = 2
[train]
steps = 1
[eval]
tasks = 2
"""
DATA = '\n[model]\npath = "run/model"\n[[env]]\nuse = "geometry"\ntasks = "rows.jsonl"\n'


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a recipe and the run that it made."""
    folder = tmp_path_factory.mktemp("odd")
    (folder / "short.py").write_text(ENV)
    (folder / "recipe.toml").write_text(RECIPE)
    before = Path.cwd()
    os.chdir(folder)
    try:
        train("recipe.toml", "run")
    finally:
        os.chdir(before)
    return folder


def pipe(path: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    made = socket.socket(socket.AF_UNIX)
    made.bind(path.name)  # a name of its own length, and not the directory's
    made.close()


def nested(path: Path) -> None:
    path.write_text("[" * 100_000 + "]" * 100_000 + "\n")


def directory(path: Path) -> None:
    path.mkdir()


@pytest.fixture
def place(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run, in the working directory."""
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    monkeypatch.chdir(copy)
    return copy


KINDS = [pipe, unix_socket, directory, nested]
TRAIN = "train", "recipe.toml", "--display", "none", "--out", "new"
WITH_MODEL = *TRAIN, "--model.path", "run/model"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("recipe.toml", TRAIN),
        ("run/model/config.json", WITH_MODEL),
        ("run/model/tokenizer.json", WITH_MODEL),
        ("run/model/tokenizer_config.json", WITH_MODEL),
        ("run/model/generation_config.json", WITH_MODEL),
        ("run/model/model.safetensors", WITH_MODEL),
        ("run/config.json", ("train", "--resume", "run", "--display", "none")),
        ("run/config.json", ("eval", "--run", "run", "--display", "none")),
        pytest.param(
            "run/config.json", ("track", "run", "--to", "trackio"), marks=pytest.mark.beside("view")
        ),
        (
            "run/journal.jsonl",
            ("train", "--resume", "run", "--train.steps", "2", "--display", "none"),
        ),
        (
            "run/metrics.jsonl",
            ("train", "--resume", "run", "--train.steps", "2", "--display", "none"),
        ),
        (
            "run/trajectories.jsonl",
            ("train", "--resume", "run", "--train.steps", "2", "--display", "none"),
        ),
        pytest.param("recipe.toml", ("convert", "recipe.toml"), marks=pytest.mark.beside("compat")),
    ],
    ids=lambda value: "-".join(value[:1] if isinstance(value, tuple) else [Path(value).name]),
)
def test_it_is_refused_in_one_line_that_names_it(
    capsys: pytest.CaptureFixture[str],
    place: Path,
    file: str,
    words: tuple[str, ...],
    kind: Callable[[Path], None],
) -> None:
    path = place / file
    os.chdir(path.parent)
    path.unlink()
    kind(Path(path.name))
    os.chdir(place)
    capsys.readouterr()
    assert main(words) in (1, 2)
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if line.startswith("turnwright: error: ")] == said[-1:]
    assert Path(file).name in said[-1] or "run/model" in said[-1]
    assert not any("Traceback" in line for line in said)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ["config.json", "metrics.jsonl", "summary.json", "trajectories.jsonl"]
)
@pytest.mark.beside("view")
def test_a_report_leaves_it_out(place: Path, name: str, kind: Callable[[Path], None]) -> None:
    """A viewer shows what it can read of a run."""
    os.chdir(place / "run")
    Path(name).unlink()
    kind(Path(name))
    os.chdir(place)
    assert main(["view", "run", "--report"]) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_tasks(
    capsys: pytest.CaptureFixture[str], place: Path, kind: Callable[[Path], None]
) -> None:
    (place / "data.toml").write_text(DATA)
    kind(Path("rows.jsonl"))
    assert main(["rollout", "data.toml", "--display", "none"]) == 2
    assert "rows.jsonl" in capsys.readouterr().err.splitlines()[-1]


def test_what_a_shell_substitutes_is_read() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"[1]")
    os.close(writer)
    assert read_json(Path(f"/dev/fd/{reader}")) == [1]
    os.close(reader)


def test_a_directory_is_one(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        open_file(tmp_path)
