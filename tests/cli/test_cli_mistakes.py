"""Mistakes of the first hour: each ends in the line that docs/mistakes.md prints for it, never in a
traceback or in silence."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import pytest
from kit.mistakes import GOOD, MISTAKES, SMALL

import turnwright as tw
from turnwright.cli.main import main
from turnwright.config import load
from turnwright.envs import check, tasks
from turnwright.envs.likely_names import STEP, likely_name
from turnwright.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "mistakes.md"
ROW = re.compile(r"^\| (.+?) \| ``(.+)`` \|$", re.MULTILINE)


def no_network(*args, **kwargs):
    raise OSError("no network")


def last_line(text: str, folder: Path) -> str:
    """Return the line that names the fault, without the directory of the test."""
    lines = [
        line
        for line in text.splitlines()
        if line.startswith(("turnwright: error:", "FAIL", "diagnosis"))
    ]
    return lines[0].replace(f"{folder}/", "").replace(str(folder), ".") if lines else ""


def mistake_line(folder: Path, name: str, monkeypatch, capsys) -> str:
    """Make a mistake in a directory and return what it prints."""
    files, command = MISTAKES[name]
    for path, text in ({"echo.py": GOOD, "recipe.toml": SMALL} | files).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.setattr("huggingface_hub.snapshot_download", no_network)
    assert main(command.split()) in (1, 2)
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    return last_line(captured.err + captured.out, folder)


@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_prints_its_line(tmp_path, monkeypatch, capsys, name):
    assert (
        mistake_line(tmp_path, name, monkeypatch, capsys)
        == dict(ROW.findall(PAGE.read_text()))[name]
    )


def test_the_page_has_every_mistake():
    assert list(dict(ROW.findall(PAGE.read_text()))) == list(MISTAKES)
    assert len(MISTAKES) >= 30


def test_a_model_of_the_hub_is_fetched(tmp_path, monkeypatch):
    fetched = []

    def snapshot_download(name, *, revision, allow_patterns):
        fetched.append((name, revision))
        (tmp_path / "config.json").write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    resolved = load(
        None, ["--env.use", "hop", "--model.path", "Qwen/Qwen3-0.6B", "--model.revision", "none"]
    )
    assert resolved.config.model.path == str(tmp_path)
    assert fetched == [("Qwen/Qwen3-0.6B", None)]
    (tmp_path / "Qwen").mkdir()  # a path that begins with a directory is none of the hub
    with pytest.raises(ConfigError, match="no such directory"):
        load(None, ["--env.use", "hop", "--model.path", "Qwen/Qwen3-0.6B"])
    assert len(fetched) == 1


def test_a_task_function_that_takes_long_is_reported(monkeypatch, caplog):
    tasks.load_tasks(lambda n, split: [tw.Task("quick")], n=3)
    assert not caplog.records
    monkeypatch.setattr(tasks, "SLOW_S", 0.01)

    def endless(n):
        end = time.monotonic() + 60
        while not caplog.records and time.monotonic() < end:
            time.sleep(0.01)
        return ["one"]

    tasks.load_tasks(lambda n, split: [tw.Task(text) for text in endless(n)], n=3)
    assert "bound its attempts" in caplog.text


def test_a_trajectory_is_one_line_and_shows_its_conversation(capsys):
    (trajectory,) = tw.rollout(
        Talk, [tw.Task("hello")], engine=tw.ScriptedEngine(["one\x1b[2J", "two"])
    )
    assert (
        repr(trajectory)
        == f"<Trajectory task={trajectory.task.id} reward=None turns=2 tokens=12 stop=env_error "
        f"{trajectory.error!r}>"
    )
    assert repr(trajectory.error).startswith("<Failure ValueError in step: no more (")
    assert len(repr(trajectory.error)) < 300
    trajectory.show(limit=3)
    out = capsys.readouterr().out
    assert "user | hel [2 characters more]" in out
    assert "assistant | one [4 characters more]" in out
    assert "ValueError in step: no more" in out
    assert "\x1b" not in out


class Talk(tw.Env):
    """Fails at the second reply."""

    def reset(self, task, *, seed=None):
        self.turn = 0

    def step(self, action):
        self.turn += 1
        if self.turn == 2:
            raise ValueError("no more")
        return tw.Step("go on")


def test_a_recipe_is_checked_by_its_name(tmp_path, capsys):
    (tmp_path / "recipe.toml").write_text('[[env]]\nuse = "hop"\n')
    assert main(["check", str(tmp_path / "recipe.toml")]) == 0
    assert "environment hop" in capsys.readouterr().out


def test_a_step_that_hangs_is_named(monkeypatch):
    class Hangs(tw.Env):
        def reset(self, task, *, seed=None):
            return "Go."

        def step(self, action):
            released.wait()
            return tw.Step(reward=1.0, terminated=True)

        @staticmethod
        def tasks(split, n, seed):
            return [tw.Task(f"{split} {number}") for number in range(8)]

    released = threading.Event()
    monkeypatch.setattr(check, "CALL_S", 0.2)
    try:
        findings = check.check_env(tw.as_env_spec(Hangs))
    finally:
        released.set()
    errors = [finding.message for finding in findings if finding.severity == "error"]
    assert len(errors) == 1  # what hangs once is not called again
    assert errors[0].startswith("Step did not return within 0.2 s (limits.env_s in training)")


def test_tasks_that_never_end_where_a_run_asks_for_more_are_named(monkeypatch):
    class Few(Talk):
        """Has 300 different tasks: enough for the other checks, not for a run."""

        @staticmethod
        def tasks(split, n, seed):
            found = set()
            while len(found) < n and not released.is_set():
                found.add(f"{split} {len(found) % 300}")
                released.wait(0.0)
            return [tw.Task(text) for text in found]

    released = threading.Event()
    monkeypatch.setattr(check, "CALL_S", 1.0)
    try:
        findings = check.check_env(tw.as_env_spec(Few))
    finally:
        released.set()
    (finding,) = [finding for finding in findings if finding.severity == "error"]
    assert finding.message == "tasks('train', 4000, 0) did not return within 1 s."
    assert "return fewer" in finding.remedy


def test_an_environments_own_timeout_is_no_call_that_hangs():
    class Late(tw.Env):
        def reset(self, task, *, seed=None):
            return "Go."

        def step(self, action):
            raise TimeoutError("the database is away")

        @staticmethod
        def tasks(split, n, seed):
            return [tw.Task(f"{split} {number}") for number in range(8)]

    findings = check.check_env(tw.as_env_spec(Late))
    (error,) = [finding.message for finding in findings if finding.severity == "error"]
    assert error.startswith("step raised TimeoutError: the database is away")


def test_one_fault_is_told_once_whatever_it_quotes(tmp_path, monkeypatch, capsys):
    (tmp_path / "echo.py").write_text(
        GOOD.replace("float(action.text == self.word)", "float(action.text)")
    )
    monkeypatch.chdir(tmp_path)
    assert main(["check", "echo.py:Echo"]) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
    assert len(failed) == 1
    assert "So do 5 other replies." in failed[0]


@pytest.mark.beside("view")
def test_help_and_version_are_commands_too(capsys):
    assert main(["version"]) == main(["help"]) == main(["help", "view"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("turnwright ")
    assert [line for line in lines if line.startswith("usage:")][1].startswith(
        "usage: turnwright view"
    )


@pytest.mark.parametrize(("given", "tells"), [
    ({"trian": {"steps": 1}}, "did you mean 'train'"),
    ({"steps": 1}, "write warmup={'steps': ...} or train={'steps': ...}"),
    ({"xyzzy": 1}, "sections are policy, "),
])  # fmt: skip
def test_settings_of_train_are_named(tmp_path, given, tells):
    with pytest.raises(ConfigError, match=re.escape(tells)):
        tw.train("hop", out=tmp_path / "run", **given)


@pytest.mark.parametrize(("code", "tells"), [
    (lambda: tw.Step(finished=True), "write terminated=True"),
    (lambda: tw.Step(rewrad=1.0), "did you mean 'reward'?"),
    (lambda: tw.Task("x", word="y"), "write Task(..., info={'word': ...})"),
    (lambda: tw.Task("x", info={"word": "y"}).word, "write task.info['word']"),
    (lambda: tw.Task("x").awnser, "did you mean 'answer'?"),
    (lambda: tw.Message("user", "x").split(), "message.text.split"),
    (lambda: tw.Message("user", "x").contents, "did you mean 'content'?"),
    (lambda: "x".no_such, ""),
    (lambda: int(None), ""),
])  # fmt: skip
def test_likely_names(code, tells):
    with pytest.raises((AttributeError, TypeError)) as caught:
        code()
    assert tells in likely_name(caught.value)
    assert bool(likely_name(caught.value)) == bool(tells)


def test_likely_names_know_the_fields_of_a_step():
    assert tw.Step._fields == STEP
