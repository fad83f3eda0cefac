"""SIGTERM and SIGHUP end a command as Ctrl-C does, also where a script started
it in the background."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from turnwright.cli.main import main
from turnwright.cli.options import stopped_by_signals

NUMBERS = [signal.SIGTERM, signal.SIGHUP]
KINDS = {"ignored": signal.SIG_IGN, "default": signal.default_int_handler}

IN_ORDER = """
import asyncio, signal
from turnwright.cli.options import stopped_by_signals
from turnwright.shutdown import run_loop

async def session(over):
    await over.wait()
    await asyncio.sleep(0)
    print("session written", flush=True)

async def work():
    over = asyncio.Event()
    open_session = asyncio.create_task(session(over))
    try:
        print("up", flush=True)
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        over.set()
        await open_session
        print("closed in order", flush=True)
        {last}

signal.signal(signal.SIGINT, {interrupts})
with stopped_by_signals():
    run_loop(work())
    print("returned", flush=True)
print("ended", flush=True)
"""


@pytest.fixture(autouse=True)
def hangups_end() -> Iterator[None]:
    """The tests run under `nohup` too, which ignores SIGHUP in all that it starts."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def last_words(code: str, number: int) -> tuple[list[str], int]:
    """Run code until it prints `up`, send the signal, and return the lines that
    follow and the status."""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(number)
        said, _ = process.communicate(timeout=60)
    return said.splitlines(), process.returncode


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("interrupts", ["signal.SIG_IGN", "signal.default_int_handler"])
def test_what_is_open_is_written_before_the_event_loop_ends(number: int, interrupts: str) -> None:
    said, status = last_words(IN_ORDER.format(interrupts=interrupts, last="return"), number)
    assert said == ["session written", "closed in order", "returned", "ended"]
    assert status == 0


def test_a_cancelled_body_is_interrupted_and_does_not_return() -> None:
    said, status = last_words(
        IN_ORDER.format(interrupts="signal.SIG_IGN", last="raise"), signal.SIGTERM
    )
    assert said == ["session written", "closed in order", "ended"]
    assert status == 0


def test_a_second_signal_does_not_wait() -> None:
    code = IN_ORDER.format(interrupts="signal.SIG_IGN", last="return").replace(
        "await open_session",
        "print('waits', flush=True); signal.raise_signal(signal.SIGTERM); await open_session",
    )
    said, _ = last_words(code, signal.SIGTERM)
    assert said == ["waits", "ended"]


FORKED = """
import os, signal, time
from turnwright.cli.options import stopped_by_signals

with stopped_by_signals():
    ready, started = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(started, b"x")
        while True:
            time.sleep(60)
    os.read(ready, 1)
    os.kill(child, signal.SIGTERM)
    cause = os.WTERMSIG(os.waitpid(child, 0)[1])
    print("up", flush=True)
    signal.pause()
print(cause, "ended", flush=True)
"""


def test_a_child_that_user_code_forked_dies_of_the_signal() -> None:
    said, _ = last_words(FORKED, signal.SIGTERM)
    assert said == [f"{int(signal.SIGTERM)} ended"]


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopped_by_signals():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.fixture(params=KINDS)
def interrupts(request: pytest.FixtureRequest) -> Iterator[None]:
    """SIGINT as a terminal leaves it, and as a script leaves it for what runs in the background."""
    before = signal.signal(signal.SIGINT, KINDS[request.param])
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", NUMBERS)
def test_the_status_is_that_of_the_signal_and_the_handlers_are_put_back(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    interrupts: None,
    number: int,
) -> None:
    monkeypatch.setattr(
        "turnwright.runs.run_training", lambda *_, **__: signal.raise_signal(number)
    )
    (tmp_path / "hop.toml").write_text('[[env]]\nuse = "hop"\n')
    before = [signal.getsignal(one) for one in NUMBERS]
    assert main(["train", str(tmp_path / "hop.toml"), "--display", "none"]) == 128 + number
    assert capsys.readouterr().err.startswith(
        "turnwright: error: interrupted; journaled episodes are kept; resume with"
    )
    assert [signal.getsignal(one) for one in NUMBERS] == before


ENDING_ENV = """
import os, signal
import turnwright as tw

class Ends(tw.Env):
    def reset(self, task, *, seed=None):
        if task.id == os.environ.get("ENDS_AT"):
            os.kill(os.getpid(), signal.SIGTERM)
        return "Say something."

    def step(self, action):
        return tw.Step("", reward=float(len(action.text) % 3), terminated=True)

    @staticmethod
    def tasks(split, n, seed):
        return [tw.Task(f"{split} {i}", id=f"{split}-{i}") for i in range(n)]
"""
RECIPE = """
[[env]]
use = "ends.py:Ends"
[limits]
turns = 1
turn_tokens = 4
[rollout]
groups = 1
group_size = 2
[train]
steps = 2
[eval]
tasks = 2
"""


def test_sigterm_of_a_run_prints_the_command_that_resumes_it(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    interrupts: None,
) -> None:
    (tmp_path / "ends.py").write_text(ENDING_ENV)
    (tmp_path / "run.toml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ENDS_AT", "train-1")
    assert main(["train", "run.toml", "--out", "run", "--display", "none"]) == 143
    assert capsys.readouterr().err.splitlines()[-1] == (
        "turnwright: error: interrupted; resume with: turnwright train --resume run"
    )
    monkeypatch.delenv("ENDS_AT")
    assert main(["train", "--resume", "run", "--display", "none"]) == 0


@pytest.mark.beside("view")
def test_a_view_in_the_background_ends_in_order(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    words = [sys.executable, "-m", "turnwright", "view", str(tmp_path)]
    ignore = (
        "import os, signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        f"os.execv({sys.executable!r}, {words!r})"
    )
    with subprocess.Popen(
        [sys.executable, "-c", ignore], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("serving on ")
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0
