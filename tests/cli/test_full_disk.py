"""A file that the system lets grow no further, wherever a command writes: one line, and
nothing that looks complete."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
from kit.runs import train

from turnwright.cli.main import main

RECIPE = """
[[env]]
use = "hop"
[limits]
turns = 2
turn_tokens = 4
[rollout]
groups = 1
group_size = 2
[train]
steps = 1
[eval]
tasks = 2
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a recipe and the run that it made."""
    folder = tmp_path_factory.mktemp("full")
    (folder / "recipe.toml").write_text(RECIPE)
    train(folder / "recipe.toml", folder / "run")
    return folder


def limited(words: list[str], limit: int) -> tuple[int, list[str]]:
    """Run a command in a forked process whose files may have `limit` bytes; return its status and
    what it said of errors."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            os.close(reader)
            os.dup2(writer, 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            # pytest replaced sys.stderr, whose file would be limited too.
            import sys

            sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
            sys.stdout = os.fdopen(os.dup(1), "w")
            sys.dont_write_bytecode = (
                True  # Python would leave modules cut off, which no later process can import
            )
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            status = main(words)
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said.splitlines()


TRAIN = ["train", "recipe.toml", "--out", "new", "--display", "none"]


@pytest.mark.parametrize(
    ("words", "limit"),
    [
        (TRAIN, 100),  # config.json
        (TRAIN, 8_000),  # the tokenizer of the tiny model
        (TRAIN, 60_000),  # its weights
        pytest.param(["export", "run", "rows.jsonl"], 500, marks=pytest.mark.beside("view")),
        pytest.param(
            ["view", "run", "--html", "run.html"], 5_000, marks=pytest.mark.beside("view")
        ),
        (["pack", "run", "--out", "packed", "--kind", "int4", "--size", "16"], 20_000),
        (
            [
                "rollout",
                "recipe.toml",
                "--model.path",
                "run/model",
                "--save",
                "rows.jsonl",
                "--display",
                "none",
            ],
            500,
        ),
        (["init", "my_env"], 100),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else str(value),
)
def test_it_is_one_line(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], limit: int
) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "run").symlink_to(trained / "run")
    monkeypatch.chdir(tmp_path)
    status, said = limited(words, limit)
    assert status in (1, 2), said
    assert not any("Traceback" in line for line in said), said
    errors = [line for line in said if line.startswith("turnwright: error: ")]
    assert errors == said[-1:]
    assert any(reason in errors[0] for reason in ("may not grow so large", "File too large"))
