"""The log of a run: what it tells, how large it grows, and that nothing about it fails a run."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
from kit.runs import SMALL

from turnwright.cli import options
from turnwright.cli.main import main
from turnwright.display import run_log
from turnwright.display.run_log import LOG_LEVELS, LoggingListener, logged
from turnwright.errors import UsageError
from turnwright.records import NullListener, RunDir
from turnwright.records.run_dir import FAILURE_FILE, LOG_FILE

BROKEN = """\
import turnwright as tw

class Broken(tw.Env):
    def reset(self, task, *, seed=None):
        raise LookupError("the table of answers is gone")

    def step(self, action):
        return tw.Step(reward=1.0, terminated=True)

    @classmethod
    def tasks(cls, split, n, seed=0):
        return [tw.Task(f"{split} {number}") for number in range(n)]
"""
BROKEN_RECIPE = """\
[model]
hidden = 32
layers = 1
[[env]]
use = "broken.py:Broken"
[limits]
turns = 1
turn_tokens = 4
[rollout]
groups = 2
group_size = 2
max_failed = 1.0
[train]
steps = 2
[eval]
tasks = 2
[checkpoint]
every = 1
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "recipe.toml").write_text(SMALL)
    out = folder / "out"
    assert main(["train", str(folder / "recipe.toml"), "--out", str(out), "--quiet"]) == 0
    return out


def messages(run: Path) -> list[str]:
    """The lines of a log without their times."""
    return [line[24:] for line in (run / LOG_FILE).read_text().splitlines()]


def test_the_log_has_the_start_the_steps_the_evaluations_the_checkpoints_and_the_end(
    trained: Path,
) -> None:
    lines = messages(trained)
    assert lines[0] == f"INFO    started in {trained}"
    assert lines[-1] == "INFO    finished"
    for beginning in ("evaluate before: 1 of", "train: 1 of 2 steps", "train: 2 of 2 steps"):
        assert [line for line in lines if line.startswith(f"INFO    {beginning}")]
    assert "INFO    writing a checkpoint" in lines
    assert not any("warm-up: 1 of 2 steps" in line for line in lines)  # below the level
    assert not (trained / FAILURE_FILE).exists()


def test_a_resumed_run_goes_on_in_the_same_log_and_is_no_failure_any_more(trained: Path) -> None:
    before = messages(trained)
    (trained / FAILURE_FILE).write_text("{}")
    assert main(["train", "--resume", str(trained), "--train.steps", "3", "--quiet"]) == 0
    after = messages(trained)
    assert after[: len(before)] == before
    assert after[len(before)] == f"INFO    resumed in {trained}"
    assert any(line.startswith("INFO    train: 3 of 3 steps") for line in after)
    assert not (trained / FAILURE_FILE).exists()


def test_failed_episodes_and_a_failed_run_are_logged_with_their_tracebacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text(BROKEN)
    Path("recipe.toml").write_text(BROKEN_RECIPE)
    assert main(["train", "recipe.toml", "--out", "run", "--quiet"]) == 1

    text = Path("run", LOG_FILE).read_text()
    assert "LookupError: the table of answers is gone" in text
    assert 'broken.py", line 5, in reset' in text
    assert " ERROR   failed" in text
    failure = json.loads(Path("run", FAILURE_FILE).read_text())
    assert failure["type"] == "RepeatedUserError"
    assert "the table of answers is gone" in failure["message"]


def test_a_run_that_was_refused_leaves_neither_log_nor_failure(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "recipe.toml").write_text(SMALL.replace("hidden = 32", 'path = "missing"'))
    assert main(["train", str(tmp_path / "recipe.toml"), "--out", str(out), "--quiet"]) == 2
    assert not out.exists()


def test_the_level_decides_what_is_written_and_off_writes_nothing(tmp_path: Path) -> None:
    for level in LOG_LEVELS:
        run = tmp_path / level
        run.mkdir()
        with logged(run, level):
            for name in ("debug", "info", "warning", "error"):
                getattr(run_log.log, name)("at %s", name)
    written = {
        level: len(messages(tmp_path / level)) if (tmp_path / level / LOG_FILE).exists() else 0
        for level in LOG_LEVELS
    }
    assert written == {"debug": 4, "info": 3, "warning": 2, "error": 1, "off": 0}
    assert options.LOG_LEVELS == LOG_LEVELS, "the command has them without importing a display"
    with pytest.raises(UsageError, match="write debug, info"), logged(tmp_path, "loud"):  # type: ignore[arg-type]
        pass


def test_a_log_does_not_grow_without_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_log, "MAX_BYTES", 2000)
    with logged(tmp_path, "info"):
        for number in range(400):
            run_log.log.info("line %d", number)
    sizes = {file.name: file.stat().st_size for file in tmp_path.iterdir()}
    assert sorted(sizes) == ["log.txt", "log.txt.1", "log.txt.2"]
    assert max(sizes.values()) <= 2000
    assert messages(tmp_path)[-1] == "INFO    line 399"


def test_a_log_that_cannot_be_written_fails_nothing(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("mine\n")
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / LOG_FILE).symlink_to(tmp_path / "secret")
    piped = tmp_path / "piped"
    piped.mkdir()
    os.mkfifo(piped / LOG_FILE)
    for run in (linked, piped, tmp_path / "missing"):
        with logged(run, "info"):
            run_log.log.info("unheard")
    assert (tmp_path / "secret").read_text() == "mine\n"


def test_what_models_say_cannot_control_the_terminal_that_shows_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pytest's own record of the log cannot be sent to another process, for half a surrogate pair.
    monkeypatch.setattr(logging.getLogger("turnwright"), "propagate", False)
    with logged(tmp_path, "info"):
        LoggingListener(NullListener()).note("said \x1b[2J\u202e and \ud800")
    assert messages(tmp_path) == ["INFO    said ⟨ESC⟩[2J⟨U+202E⟩ and ⟨U+D800⟩"]


def test_warnings_of_modules_still_reach_the_terminal_and_events_only_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # pytest's own handlers would count as the user's.
    monkeypatch.setattr(logging.getLogger("turnwright"), "propagate", False)
    with logged(tmp_path, "info"):
        run_log.log.warning("an event")
        logging.getLogger("turnwright.engines").warning("a server is gone")
    assert capsys.readouterr().err == "a server is gone\n"
    assert [line.split()[-1] for line in messages(tmp_path)] == ["event", "gone"]
    assert logging.getLogger("turnwright").handlers == []


def test_the_log_changes_nothing_of_what_a_program_shows_itself(tmp_path: Path) -> None:
    package = logging.getLogger("turnwright")
    engines = logging.getLogger("turnwright.engines")
    shown: list[str] = []

    class Shown(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            shown.append(record.getMessage())

    def say() -> list[str]:
        shown.clear()
        run_log.log.info("an event")
        run_log.log.warning("a warning")
        engines.debug("a detail")
        package.info("of the package")
        return [*shown]

    root = logging.getLogger()
    handler = Shown()
    root.addHandler(handler)
    try:
        for root_level, engines_level, expected in (
            (logging.WARNING, logging.NOTSET, ["a warning"]),
            (logging.WARNING, logging.DEBUG, ["a warning", "a detail"]),
            (logging.INFO, logging.NOTSET, ["an event", "a warning", "of the package"]),
        ):
            root.setLevel(root_level)
            engines.setLevel(engines_level)
            assert say() == expected
            with logged(tmp_path, "debug"):
                assert say() == expected
            assert say() == expected
    finally:
        root.removeHandler(handler)
        root.setLevel(logging.WARNING)
        engines.setLevel(logging.NOTSET)
    assert len(messages(tmp_path)) == 12
    assert (package.handlers, package.level, package.propagate) == ([], logging.NOTSET, True)


def test_a_run_dir_is_no_failure_while_another_process_writes_it(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(SMALL)
    with RunDir(tmp_path / "out"):
        words = ["train", str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "out"), "--quiet"]
        assert main(words) == 2
    assert not (tmp_path / "out" / FAILURE_FILE).exists()
