"""Damage to what a run goes on from is named: its journal, line by line, and its
checkpoints, file by file."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import kill_resume as bench
import pytest
from kit.runs import train

from turnwright.cli.main import main
from turnwright.errors import TraceError
from turnwright.records import RunDir, read_json_lines

RECIPE = """\
[model]
hidden = 32
layers = 1
[[env]]
use = "hop"
[limits]
turns = 2
turn_tokens = 4
[rollout]
groups = 2
group_size = 2
[train]
steps = 3
[eval]
tasks = 2
[checkpoint]
every = 1
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that ended; its copies are damaged and gone on with from a step before its end."""
    folder = tmp_path_factory.mktemp("damage")
    (folder / "recipe.toml").write_text(RECIPE)
    train(folder / "recipe.toml", folder / "run")
    return folder / "run"


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    return tmp_path / "run"


def resume(run: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capsys.readouterr()
    status = main(["train", "--resume", str(run), "--display", "none"])
    return status, capsys.readouterr().err


def gone(journal: Path) -> None:
    journal.unlink()


def halved(journal: Path) -> None:
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[: len(lines) // 2]))


def paid(journal: Path) -> None:
    text = journal.read_bytes()
    found = re.search(rb'"reward":0.0,"rewards"', text) or re.search(rb'"reward":\d', text)
    assert found is not None
    journal.write_bytes(
        text[: found.start()] + found.group().replace(b"0.0", b"9.0", 1) + text[found.end() :]
    )


def flipped(journal: Path) -> None:
    """One bit of a logprob, which leaves a number."""
    text = bytearray(journal.read_bytes())
    at = text.index(b'"logprobs":[-') + len(b'"logprobs":[-')
    text[at] ^= 1
    journal.write_bytes(text)


def shortened(journal: Path) -> None:
    """An episode that closed in the middle is left out."""
    lines = journal.read_bytes().splitlines(keepends=True)
    at = next(number for number, line in enumerate(lines) if b'"e":"closed"' in line)
    journal.write_bytes(b"".join([*lines[:at], *lines[at + 1 :]]))


@pytest.mark.parametrize("harm", [gone, halved, paid, flipped, shortened])
def test_a_journal_that_was_damaged_is_named(
    harm, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harm(run / "journal.jsonl")
    status, said = resume(run, capsys)
    assert status != 0, "the run went on from a journal that was damaged"
    assert "journal.jsonl" in said
    assert said.count("\n") == 1


def test_a_last_line_that_a_kill_cut_off_is_no_damage(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (run / "journal.jsonl").open("ab") as file:
        file.write(b'{"e":"turn","k":["train",2,"x')
    assert resume(run, capsys) == (0, "")


def test_lines_of_older_runs_are_not_checked(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"e":"old"}\n{"e":"older"}\n')
    for number in range(2):
        with RunDir(tmp_path) as run:
            run.journal.append({"e": "new", "n": number})
            run.journal.append({"e": "new", "n": number})
            found = list(run.events())
    assert found == [{"e": "old"}, {"e": "older"}, *({"e": "new", "n": n} for n in (0, 0, 1, 1))]
    text = path.read_bytes()
    path.write_bytes(text.replace(b"older", b"elder"))
    list(read_json_lines(path))  # nobody knows what it was
    for damaged in (
        text.replace(b'"n":0', b'"n":2', 1),
        text.replace(text.splitlines(keepends=True)[3], b""),
    ):
        path.write_bytes(damaged)
        told = ""
        try:
            list(read_json_lines(path))
        except TraceError as error:
            told = str(error)
        assert "checksum" in told, "an edited or missing line is read as if nothing were"


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "state.json", "tokenizer.json"]
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_offered(
    name: str, run: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = run / "checkpoints" / "step-00003"
    text = bytearray((newest / name).read_bytes())
    text[len(text) // 2] ^= 4
    (newest / name).write_bytes(text)
    status, said = resume(run, capsys)
    assert status != 0, f"the run went on from a checkpoint whose {name} was damaged"
    assert str(newest) in said
    assert name in said
    assert "step-00002 is intact" in said
    shutil.move(newest, run / "aside")
    assert resume(run, capsys)[0] == 0
    assert bench.weights(run) == bench.weights(whole)
    assert bench.trained(run) == bench.trained(whole)
