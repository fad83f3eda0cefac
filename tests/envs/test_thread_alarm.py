"""User code that bounds a call by SIGALRM, as tools and rewards of other systems do, in the
threads that run it here."""

import asyncio
import subprocess
import sys
import textwrap

import pytest

import turnwright as tw
from turnwright.config.schema import EnvConfig
from turnwright.envs import thread_alarm
from turnwright.envs.resolve import resolve_env
from turnwright.envs.threads import AbandonableThreads

TOOL = """
import signal
import time
from contextlib import contextmanager
{imports}

import turnwright as tw


class Late(Exception):
    pass


@contextmanager
def bounded(seconds):
    def handler(signum, frame):
        raise Late("too late")

    {set}
    try:
        yield
    finally:
        {unset}


def work(seconds: float) -> str:
    '''Work.

    Args:
        seconds: How long.
    '''
    try:
        with bounded(0.2):
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                time.sleep(0.01)
    except Late:
        return "late"
    return "done"


def make():
    return tw.tool_env([work], reward=lambda trajectory: 1.0)()
"""
WAYS = {
    "setitimer": (
        "",
        "signal.signal(signal.SIGALRM, handler); signal.setitimer(signal.ITIMER_REAL, seconds)",
        "signal.setitimer(signal.ITIMER_REAL, 0)",
    ),
    "names": (
        "from signal import ITIMER_REAL, SIGALRM, setitimer, signal as on",
        "on(SIGALRM, handler); setitimer(ITIMER_REAL, seconds)",
        "setitimer(ITIMER_REAL, 0)",
    ),
    "restored": (
        "",
        "before = signal.signal(signal.SIGALRM, handler); signal.setitimer(signal.ITIMER_REAL, "
        "seconds)",
        "signal.setitimer(signal.ITIMER_REAL, 0); signal.signal(signal.SIGALRM, before)",
    ),
}


SETS_ALARM = {
    "stops": "signal.setitimer(signal.ITIMER_REAL, 0)",
    "rings again": "signal.setitimer(signal.ITIMER_REAL, 60)",
}


def call(**arguments):
    import json

    return f"<tool_call>\n{json.dumps({'name': 'work', 'arguments': arguments})}\n</tool_call>"


def answers(folder, source, *replies):
    (folder / "tool.py").write_text(textwrap.dedent(source))
    spec = resolve_env(EnvConfig(use="tool.py:make"), base=folder)
    limits = tw.Limits(turns=6, turn_tokens=500)
    (found,) = tw.rollout(
        spec.factory, [tw.Task("Go.")], tw.ScriptedEngine([*replies, "end"]), limits=limits
    )
    assert found.error is None, found.error
    return [message.text for message in found.messages if message.role == "tool"]


@pytest.mark.parametrize("way", WAYS)
def test_an_alarm_of_a_tool_ends_it_and_no_later_call(way, tmp_path):
    imports, on, off = WAYS[way]
    source = TOOL.format(imports=imports, set=on, unset=off)
    assert answers(
        tmp_path,
        source,
        call(seconds=30),
        call(seconds=0.05),
        call(seconds=0.4),
        call(seconds=0.01),
    ) == [
        "late",
        "done",
        "late",
        "done",
    ]


@pytest.mark.parametrize("way", SETS_ALARM)
def test_a_handler_may_set_the_alarm(way, tmp_path):
    imports, on, off = WAYS["setitimer"]
    source = TOOL.format(imports=imports, set=on, unset=off)
    source = source.replace(
        "        raise Late(", f"        {SETS_ALARM[way]}\n        raise Late("
    )
    assert answers(tmp_path, source, call(seconds=30), call(seconds=0.05)) == ["late", "done"]


def test_an_alarm_that_rings_when_its_call_has_ended_loses_no_result(monkeypatch):
    """The exception meets the thread between the call and the end of its alarm."""
    late = iter([RuntimeError("late"), RuntimeError("late"), None])
    clear = thread_alarm.clear

    def ringing():
        if (error := next(late, None)) is not None:
            raise error
        clear()

    monkeypatch.setattr(thread_alarm, "clear", ringing)

    async def work():
        threads = AbandonableThreads()
        try:
            return await asyncio.wait_for(threads.call(lambda: "done"), 10)
        finally:
            threads.close()

    assert asyncio.run(work()) == "done"


AGAIN = """

def again(seconds: float) -> str:
    '''Again.

    Args:
        seconds: How long.
    '''
    time.sleep(seconds)
    return 'slept'
"""


def test_an_alarm_that_is_left_on_reaches_no_other_call(tmp_path):
    imports, on, _ = WAYS["setitimer"]
    source = (
        TOOL.format(imports=imports, set=on, unset="pass").replace("[work]", "[work, again]")
        + AGAIN
    )
    again = call(seconds=0.5).replace('"work"', '"again"')
    assert answers(tmp_path, source, call(seconds=0.01), again, call(seconds=0.01)) == [
        "done",
        "slept",
        "done",
    ]


def test_alarm_counts_in_seconds_and_returns_what_was_left(tmp_path):
    source = """
    import signal

    import turnwright as tw

    def work() -> str:
        '''Work.'''
        signal.signal(signal.SIGALRM, lambda signum, frame: None)
        first = signal.alarm(5)
        left = signal.alarm(0)
        return f"{first} {left} {signal.alarm(0)} {callable(signal.getsignal(signal.SIGALRM))}"

    def make():
        return tw.tool_env([work], reward=lambda trajectory: 1.0)()
    """
    assert answers(tmp_path, source, call()) == ["0 5 0 True"]


def test_other_signals_are_the_process_own(tmp_path):
    source = """
    import signal

    import turnwright as tw

    def work() -> str:
        '''Work.'''
        try:
            signal.signal(signal.SIGTERM, lambda signum, frame: None)
        except ValueError as error:
            return str(error)
        return "set"

    def make():
        return tw.tool_env([work], reward=lambda trajectory: 1.0)()
    """
    (answer,) = answers(tmp_path, source, call())
    assert "main thread" in answer


def test_many_alarms_at_once_each_end_their_own_call(tmp_path):
    imports, on, off = WAYS["setitimer"]
    (tmp_path / "tool.py").write_text(TOOL.format(imports=imports, set=on, unset=off))
    spec = resolve_env(EnvConfig(use="tool.py:make"), base=tmp_path)

    def speak(messages, rng):
        if messages[-1].role == "tool":
            return "end"
        return call(seconds=30 if int(messages[0].text) % 2 else 0.01)

    tasks = [tw.Task(str(number)) for number in range(16)]
    found = tw.rollout(
        spec.factory, tasks, tw.ScriptedEngine(speak), limits=tw.Limits(turns=3, turn_tokens=500)
    )
    for one in found:
        said = [message.text for message in one.messages if message.role == "tool"]
        assert said == (["late"] if int(one.task.messages[0].text) % 2 else ["done"])


PROFILED = """
import signal, sys, threading
from turnwright.envs import thread_alarm

def in_a_thread():
    thread_alarm.SignalOfUserCode().alarm(5)
    thread_alarm.clear_late()

thread = threading.Thread(target=in_a_thread)
thread.start()
thread.join()
calls = []
sys.setprofile(lambda frame, event, argument: calls.append(event))
len("a call")
(lambda: None)()
sys.setprofile(None)
print(len(calls) > 2)
"""


def test_an_alarm_leaves_no_request_that_all_threads_are_asked_for():
    """CPython 3.11 asks for an exception that was taken back for ever, and a profiled
    thread then makes no step."""
    command = [sys.executable, "-c", PROFILED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "True\n"
