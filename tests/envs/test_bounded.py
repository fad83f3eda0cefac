"""Calls on untrusted text are bounded in processor time and memory, from any thread."""

import math
import operator
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from turnwright.child_processes import python_path
from turnwright.envs.isolation.bounded import MAX_DEATHS, BoundExceeded, call_bounded
from turnwright.errors import ProcessDied


def test_a_call_returns_what_the_function_returns():
    assert call_bounded(math.gcd, 12, 18) == 6


def test_an_error_of_the_function_has_its_type_and_message():
    with pytest.raises(RuntimeError, match=r"ZeroDivisionError: "):
        call_bounded(operator.truediv, 1, 0)


@pytest.mark.parametrize(
    ("function", "args"),
    [(math.factorial, (10**9,)), (operator.mul, ("x", 10**11)), (math.comb, (10**9, 10**8))],
)
def test_what_exceeds_its_bounds_is_an_error_and_the_next_call_works(function, args):
    with pytest.raises(BoundExceeded):
        call_bounded(function, *args)
    assert call_bounded(math.gcd, 12, 18) == 6


def test_threads_share_the_helpers():
    found = {}

    def ask(number):
        found[number] = [call_bounded(operator.add, number, one) for one in range(20)]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [number + one for one in range(20)] for number in range(8)}


def dies_from_outside(times, count_file):
    """Be killed so often by a signal that no call brings upon itself."""
    with open(count_file, "a") as file:
        file.write(".")
    if os.path.getsize(count_file) <= times:
        os.kill(os.getpid(), signal.SIGKILL)
    return "answer"


def test_a_helper_that_is_killed_from_outside_changes_no_verdict(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    monkeypatch.setattr(dies_from_outside, "__module__", "test_bounded")
    assert call_bounded(dies_from_outside, MAX_DEATHS - 1, str(tmp_path / "few")) == "answer"
    with pytest.raises(ProcessDied, match=r"SIGKILL\), 3 times"):
        call_bounded(dies_from_outside, MAX_DEATHS, str(tmp_path / "many"))


def test_a_crash_is_the_call_s_own():
    with pytest.raises(BoundExceeded, match="ended its process"):
        call_bounded(os.abort)


def test_the_user_s_program_is_not_run_again_and_nothing_is_printed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from turnwright.envs.isolation.bounded import call_bounded\n"
        "import builtins, math, os\n"
        "with open('runs', 'a') as file:\n"
        "    file.write('.')\n"
        "call_bounded(builtins.print, 'a library says this')\n"
        "print(call_bounded(math.gcd, 12, 18))\n"
    )
    ran = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (tmp_path / "runs").read_text() == "."
    assert (ran.stdout, ran.stderr) == ("6\n", "")


def test_a_forked_process_has_calls_of_its_own():
    assert call_bounded(math.gcd, 12, 18) == 6
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        os.write(write_end, str(call_bounded(math.gcd, 14, 21)).encode())
        os._exit(0)
    assert os.read(read_end, 100) == b"7"
    assert call_bounded(math.gcd, 12, 18) == 6
