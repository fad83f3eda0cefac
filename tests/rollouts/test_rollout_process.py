"""Environments in processes of their own: the same trajectories, and nothing left of what
hangs, dies or breaks."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import types
from pathlib import Path

import pytest
from kit.processes import children
from kit.rollouts import AsyncTalk, Sampler, Talk, check_record, facts, tasks

import turnwright as tw
from turnwright.envs.isolation import env_server, fork_server

APART = tw.EnvRules(isolation="process")


def folders():
    return set(Path(tempfile.gettempdir()).glob("turnwright-env-*"))


@pytest.fixture(autouse=True)
def _nothing_is_left():
    gc.collect()
    before = children(), folders(), set(os.listdir("/proc/self/fd")), set(threading.enumerate())
    yield
    gc.collect()
    end = time.monotonic() + 20
    while threads := [t for t in threading.enumerate() if t not in before[3]]:
        assert time.monotonic() < end, threads
        time.sleep(0.005)
    assert children() <= before[0], "a process is left"
    assert folders() <= before[1], "a temporary directory is left"
    assert set(os.listdir("/proc/self/fd")) <= before[2], "a descriptor is left"


class Mute(Exception):
    def __str__(self):
        raise ValueError("no words")

    __repr__ = __str__


class Faulty(Talk):
    """Breaks in the ways that only a process of its own survives."""

    turns = 3

    def reset(self, task, *, seed=None):
        self.fault = task.info.get("fault", "")
        self.folder = tempfile.mkdtemp()
        if self.fault == "reset_hangs":
            signal.pause()
        return Talk.reset(self, task, seed=seed)

    def step(self, action):
        if self.left > 2:
            return Talk.step(self, action)
        self.die()
        if self.fault == "raises":
            raise KeyError("mine")
        if self.fault == "mute":
            raise Mute
        if self.fault == "tool":
            raise tw.ToolFailure("down")
        if self.fault == "garbage":
            return 5
        if self.fault == "code":
            self.fault = ""
            return tw.Step("x", info={"hm": Faulty, "n": 1})
        if self.fault == "invalid":
            self.fault = ""
            raise tw.InvalidAction("not so")
        return Talk.step(self, action)

    def die(self):
        if self.fault == "spins":
            while True:
                pass
        if self.fault == "deaf":  # to everything but a kill
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            subprocess.Popen(["sleep", "300"])
            while True:
                time.sleep(60)
        if self.fault == "dies":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "leaves":
            os._exit(3)
        if self.fault == "exits":
            sys.exit(3)

    def reward(self, trajectory):
        if self.fault == "reward_hangs":
            signal.pause()
        if self.fault == "reward_nan":
            return float("nan")
        return 0.25 + 0 * len(trajectory.turns)


class AsyncFaulty(Faulty):
    """The same with async methods."""

    async def reset(self, task, *, seed=None):
        return Faulty.reset(self, task, seed=seed)

    async def step(self, action):
        await asyncio.sleep(0)
        return Faulty.step(self, action)


OUTCOMES = {
    "reset_hangs": ("timeout", "TimeoutError", "timeout", "reset"),
    "spins": ("timeout", "TimeoutError", "timeout", "step"),
    "deaf": ("timeout", "TimeoutError", "timeout", "step"),
    "dies": ("env_error", "ProcessDied", "environment", "step"),
    "killed": ("env_error", "ProcessDied", "environment", "step"),
    "leaves": ("env_error", "ProcessDied", "environment", "step"),
    "exits": ("env_error", "RuntimeError", "environment", "step"),
    "raises": ("env_error", "KeyError", "user_bug", "step"),
    "mute": ("env_error", "Mute", "environment", "step"),
    "tool": ("tool_error", "ToolFailure", "tool", "step"),
    "garbage": ("env_error", "EnvError", "user_bug", "step"),
    "reward_hangs": ("timeout", "TimeoutError", "timeout", "reward"),
    "reward_nan": ("reward_error", "RewardError", "reward", "reward"),
}


@pytest.mark.parametrize("world", [Faulty, AsyncFaulty])
def test_what_goes_well_is_the_same_as_without_a_process(world):
    alone = tw.rollout(Faulty, tasks(6), Sampler())
    apart = tw.rollout(world, tasks(6), Sampler(), rules=APART)
    assert [facts(t) for t in apart] == [facts(t) for t in alone]


@pytest.mark.parametrize("world", [Faulty, AsyncFaulty])
def test_every_fault_is_a_record_and_the_others_are_untouched(world):
    names = [*OUTCOMES, "code", "invalid", "", ""]
    rows = [
        tw.Task(f"Task {name}", id=f"{i}", info={"fault": name}) for i, name in enumerate(names)
    ]
    engine = Sampler()
    before, limits = children(), tw.Limits(env_s=3.0, reward_s=3.0)
    played = dict(
        zip(names, tw.rollout(world, rows, engine, rules=APART, limits=limits), strict=True)
    )
    # What hangs here hangs forever.
    assert children() <= before, "something outlasted its deadline and its grace"
    for name, (stop, error, kind, phase) in OUTCOMES.items():
        found = played[name]
        check_record(found, engine.calls)
        assert found.error is not None, name
        assert (found.stop, found.error.type, found.error.kind, found.error.phase) == (
            stop,
            error,
            kind,
            phase,
        ), name
        assert found.reward is None
    assert "signal 11 (SIGSEGV)" in played["dies"].error.message
    assert "signal 9 (SIGKILL)" in played["killed"].error.message
    assert "status 3" in played["leaves"].error.message
    assert 'raise KeyError("mine")' in played["raises"].error.traceback
    assert "test_rollout_process.py:" in played["raises"].error.place
    for name in ("code", "invalid", ""):
        assert (played[name].stop, played[name].error) == ("done", None)
    assert played["code"].turns[1].info["n"] == 1
    assert "Faulty" in played["code"].turns[1].info["hm"]
    assert played["invalid"].metrics["invalid_actions"] == 1


class Flaky(Talk):
    """Dies once, by a mark that outlives its process."""

    turns = 4

    def reset(self, task, *, seed=None):
        self.mark = Path(task.info["mark"])
        return Talk.reset(self, task, seed=seed)

    def step(self, action):
        if self.left == 2 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return Talk.step(self, action)


class Saves(Flaky):
    def snapshot(self):
        return self.left, self.rng

    def restore(self, state):
        self.left, self.rng = state


@pytest.mark.parametrize(("world", "how"), [(Flaky, "replayed"), (Saves, "restored")])
def test_an_environment_whose_process_died_is_brought_back(world, how, tmp_path):
    rows = [tw.Task("go", info={"mark": str(tmp_path / "mark")})]
    rules = tw.EnvRules(isolation="process", retries=tw.RetryRules(turn=1, wait_s=0.0))
    (got,) = tw.rollout(world, rows, Sampler(), rules=rules)
    (expected,) = tw.rollout(world, rows, Sampler())
    assert facts(got) == facts(expected)
    (failure,) = got.failures
    assert (failure.type, failure.recovery, got.turns[2].retries) == ("ProcessDied", how, 1)


def test_a_factory_that_no_other_process_can_find_is_said_at_once():
    class Inner(AsyncTalk):
        pass

    with pytest.raises(tw.UsageError, match=r"Inner cannot be found .* at the top level of a file"):
        tw.rollout(Inner, tasks(1), Sampler(), rules=APART)


SCRIPT = """
    import sys, time
    from pathlib import Path
    import turnwright as tw

    class Slow(tw.Env):
        def reset(self, task, *, seed=None):
            self.id = task.id
            (Path(sys.argv[1]) / f"open{task.id}").touch()  # it may be ended from here on
            return "Go."

        def step(self, action):
            time.sleep(0.01 if self.id == "t0" else 300)
            return tw.Step("on", terminated=False)

        def close(self):
            (Path(sys.argv[1]) / f"closed{self.id}").touch()

    if __name__ == "__main__":
        tasks = [tw.Task("go", id=f"t{i}") for i in range(4)]
        rules = tw.EnvRules(isolation=sys.argv[2])
        limits = tw.Limits(turns=10**6, episode_tokens=None, context=None)
        tw.rollout(Slow, tasks, tw.ScriptedEngine(lambda messages, rng: "x"), rules=rules, limits=limits)
"""  # noqa: E501


@pytest.mark.parametrize(
    ("isolation", "number"),
    [("process", signal.SIGINT), ("process", signal.SIGKILL), ("thread", signal.SIGINT)],
)
def test_interrupted_or_killed_a_rollout_leaves_no_environment_behind(isolation, number, tmp_path):
    file = tmp_path / "slow.py"
    file.write_text(textwrap.dedent(SCRIPT))
    before = children()
    process = subprocess.Popen([sys.executable, file, tmp_path, isolation], stderr=subprocess.PIPE)
    end = time.monotonic() + 60
    while len(list(tmp_path.glob("open*"))) < 4:
        assert time.monotonic() < end
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    process.send_signal(number)
    said = process.communicate(timeout=60)[1]
    end = time.monotonic() + 60
    if number == signal.SIGINT:
        assert b"KeyboardInterrupt" in said
    while children() - before or len(list(tmp_path.glob("closed*"))) < 4 or folders():
        assert time.monotonic() < end, "left behind"
        time.sleep(0.02)


def test_an_end_that_arrives_when_the_caller_is_gone_closes_the_environment(monkeypatch):
    closed, ours, theirs = [], *socket.socketpair()
    with ours, theirs:
        server = env_server.EnvServer(ours, Talk, 1.0)
        server._env = types.SimpleNamespace(close=lambda: closed.append(True))

        def late(number, handler):
            if handler is signal.SIG_IGN and not server._stopping:
                server._stop()

        monkeypatch.setattr(server, "_receive", lambda: None)
        monkeypatch.setattr(env_server.signal, "signal", late)
        server.serve()
        server._stream.close()
        server._runner.close()
    assert closed == [True]


class Talk4(Talk):
    turns = 4


class Orphan(Talk):
    """Kills the process that it was forked from, once, by a mark that outlives both."""

    turns = 4

    def reset(self, task, *, seed=None):
        self.mark = Path(task.info["mark"])
        return Talk.reset(self, task, seed=seed)

    def step(self, action):
        if self.left == 2 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)
        return Talk.step(self, action)


@pytest.mark.parametrize("retries", [1, 0])
def test_the_process_that_forks_environments_is_started_again(retries, tmp_path):
    rows = [
        tw.Task(f"Task {n}", id=f"t{n}", info={"mark": str(tmp_path / "mark")}) for n in range(3)
    ]
    rules = tw.EnvRules(isolation="process", retries=tw.RetryRules(turn=retries, wait_s=0.0))
    played = tw.rollout(Orphan, rows, Sampler(), rules=rules, environments=1)
    expected = [facts(one) for one in tw.rollout(Talk4, rows, Sampler())]
    failed = [one.error.type for one in played if one.error is not None]
    assert len(failed) == (0 if retries else 1), (
        f"with {retries} retries a turn, {failed} after one death"
    )
    assert [facts(one) for one in played][len(failed) :] == expected[len(failed) :]


class Mortal(Talk):
    """Kills the process that it was forked from each time."""

    def reset(self, task, *, seed=None):
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)


def test_a_process_that_dies_again_and_again_is_started_a_number_of_times(monkeypatch):
    monkeypatch.setattr(fork_server, "MAX_STARTS", 2)
    played = tw.rollout(Mortal, tasks(4), Sampler(), rules=APART, environments=1)
    assert {one.error.type for one in played} == {"ProcessDied"}
    assert "died 2 times" in played[-1].error.message


class Stray(Talk):
    """Answers each call twice, as a fork that comes back does; and one call before it was asked."""

    turns = 4

    def step(self, action):
        if self.left == 3 and os.fork() == 0:
            return tw.Step("from the copy", reward=100.0)
        time.sleep(0.05)
        return Talk.step(self, action)


def test_a_stray_answer_is_never_taken_for_the_next_call():
    played = tw.rollout(Stray, tasks(2), Sampler(), rules=APART)
    texts = [message.text for one in played for message in one.messages]
    assert "from the copy" not in texts, (
        "the answer of a fork was taken for that of the environment"
    )
    assert [facts(one) for one in played] == [
        facts(one) for one in tw.rollout(Talk4, tasks(2), Sampler())
    ]


class Twice(Talk):
    """Sends what it answered last once more, unasked."""

    turns = 4

    def step(self, action):
        step = Talk.step(self, action)
        if self.left == 2:
            child = next(one for one in gc.get_objects() if type(one).__name__ == "EnvServer")
            send, self.sent = child._send, None

            def doubled(*args):
                send(*args)
                if self.sent is None:
                    self.sent = True
                    send(*args)

            child._send = doubled
        return step


def test_an_answer_that_comes_twice_is_heard_once():
    played = tw.rollout(Twice, tasks(2), Sampler(), rules=APART)
    assert [facts(one) for one in played] == [
        facts(one) for one in tw.rollout(Talk4, tasks(2), Sampler())
    ], "a second copy of an answer was taken for the answer to the next call"
