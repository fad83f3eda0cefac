"""Processes that this one starts lead sessions of their own, and are gone with
everything below them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from turnwright.child_processes import ChildProcess, exit_words, python_path

SLEEPER = (
    "import subprocess, sys, time; own = subprocess.Popen(['sleep', '600']); "
    "print(own.pid, flush=True); "
)


def started(code, **options):
    return ChildProcess(
        [sys.executable, "-c", code], env=os.environ, stdout=subprocess.PIPE, **options
    )


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until_gone(pid):
    end = time.monotonic() + 60
    while is_running(pid):
        assert time.monotonic() < end, f"process {pid} is left behind"
        time.sleep(0.01)


def test_a_session_ends_with_its_leader():
    child = started(SLEEPER)
    below = int(child.stdout.readline())
    assert child.wait(60)
    assert child.status == 0
    until_gone(below)
    child.kill()


@pytest.mark.parametrize(("ignores", "status"), [(False, -signal.SIGTERM), (True, -signal.SIGKILL)])
def test_it_is_asked_to_end_and_then_killed(ignores, status):
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " if ignores else ""
    child = started(f"{ignore}{SLEEPER}time.sleep(600)")
    below = int(child.stdout.readline())
    child.end(patience_s=0.2 if ignores else 60)
    assert child.status == status
    until_gone(below)


def test_waiting_has_an_end():
    child = started("import time; time.sleep(600)")
    assert not child.wait(0.01)
    child.kill()
    assert child.wait()


def test_another_s_program_ends_with_the_one_that_started_it():
    code = (
        "import os, sys, time; from turnwright.child_processes import ChildProcess; child = "
        "ChildProcess(['sleep', '600'], env=os.environ, ends_with_parent=True); print(child.pid, "
        "flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": python_path()},
        stdout=subprocess.PIPE,
    )
    below = int(parent.stdout.readline())
    end = time.monotonic() + 60
    while not Path(f"/proc/{below}/cmdline").read_bytes().startswith(b"sleep"):
        assert time.monotonic() < end, "it did not become the program"
        time.sleep(0.01)
    parent.kill()
    parent.communicate()
    until_gone(below)


def test_an_exit_is_told_in_words():
    assert exit_words(3) == "left with status 3"
    assert exit_words(-signal.SIGSEGV) == "died by signal 11 (SIGSEGV)"


def test_modules_are_found_from_any_directory(tmp_path):
    command = [sys.executable, "-P", "-c", "import turnwright; print(turnwright.__file__)"]
    child = ChildProcess(
        command,
        env=os.environ | {"PYTHONPATH": python_path()},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
    )
    import turnwright

    assert child.stdout.readline().decode().strip() == turnwright.__file__
    child.kill()
