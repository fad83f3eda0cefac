"""Rewards in processes of their own: used again, killed whole at their deadline, and
nothing of them is left."""

from __future__ import annotations

import asyncio
import collections
import gc
import importlib
import os
import pickle
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from kit.processes import children
from kit.rollouts import AsyncTalk, Sampler, Talk, facts, tasks

import turnwright as tw
from turnwright.envs.isolation import fork_server
from turnwright.envs.isolation.fork_server import ForkServer
from turnwright.envs.isolation.process_pool import ProcessPool

ENGINE = ["an answer"]
APART = tw.EnvRules(reward_isolation="process")


@pytest.fixture(autouse=True)
def _nothing_is_left():
    gc.collect()
    folders = set(Path(tempfile.gettempdir()).glob("turnwright-env-*"))
    before = children(), set(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert children() <= before[0], "a process is left"
    assert set(os.listdir("/proc/self/fd")) <= before[1], "a descriptor is left"
    assert set(Path(tempfile.gettempdir()).glob("turnwright-env-*")) <= folders, (
        "a temporary directory is left"
    )


def fault(trajectory):
    return trajectory.task.info.get("fault", "")


def process(trajectory):
    """Which process it runs in."""
    return float(os.getpid())


def heavy(trajectory):
    """Computes; for ever, where the task says so."""
    at = fault(trajectory)
    if at == "daemon":  # in a session of its own, deaf to everything but a kill
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
        subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        signal.pause()
    while at == "spins":
        pass
    if at == "dies":
        os.abort()
    if at == "raises":
        raise ConnectionError("no route")
    if at == "bug":
        return {}["mine"]
    if at == "exits":
        sys.exit(3)
    return {"nan": float("nan"), "garbage": "much", "none": None}.get(at, 0.5)


async def waits(trajectory, task):
    await asyncio.sleep(3600 if fault(trajectory) == "spins" else 0)
    return float(task.answer)


def each_turn(trajectory, turn):
    return turn + 1


def ranks(trajectories):
    return tuple(range(len(trajectories)))


OUTCOMES = {
    "spins": (
        "timeout",
        "TimeoutError",
        "timeout",
        "the reward 'heavy' did not answer by its deadline",
    ),
    "daemon": (
        "timeout",
        "TimeoutError",
        "timeout",
        "the reward 'heavy' did not answer by its deadline",
    ),
    "dies": (
        "reward_error",
        "ProcessDied",
        "reward",
        "the process of the reward 'heavy' died by signal 6 (SIGABRT)",
    ),
    "raises": ("reward_error", "ConnectionError", "reward", "no route"),
    "bug": ("reward_error", "KeyError", "user_bug", "'mine'"),
    "exits": ("reward_error", "RuntimeError", "reward", "raised SystemExit(3)"),
    "nan": ("reward_error", "RewardError", "reward", "is nan"),
    "garbage": ("reward_error", "RewardError", "reward", "is 'much', not a number"),
}


@pytest.mark.parametrize("how", ["part", "rules"])
def test_every_fault_of_a_scorer_is_a_record_that_names_it_and_the_others_are_untouched(how):
    names = [*OUTCOMES, "none", *[""] * 4]
    rows = [tw.Task("go", id=f"{n}", info={"fault": name}) for n, name in enumerate(names)]
    reward = tw.rewards(heavy=heavy, isolation="process") if how == "part" else heavy
    rules = APART if how == "rules" else None
    limits = tw.Limits(reward_s=1.5)
    env = tw.tool_env([], reward=reward)
    played = tw.rollout(env, rows, tw.ScriptedEngine(ENGINE), limits=limits, rules=rules)
    for name, trajectory in zip(names, played, strict=True):
        if name not in OUTCOMES:
            assert (trajectory.reward, trajectory.error) == (
                None if name == "none" else 0.5,
                None,
            ), name
            continue
        error = trajectory.error
        assert error is not None, name
        assert (trajectory.stop, error.type, error.kind, error.phase) == (
            *OUTCOMES[name][:3],
            "reward",
        ), name
        assert OUTCOMES[name][3] in error.message
        assert trajectory.reward is None
        if name == "bug":
            assert "test_rollout_scorers.py:" in error.place
            assert "in the reward 'heavy'" in error.traceback


def test_a_process_with_more_open_files_than_select_takes_has_them_too():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip(f"this system grants {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        (played,) = tw.rollout(
            tw.tool_env([], reward=process), tasks(1), tw.ScriptedEngine(ENGINE), rules=APART
        )
    finally:
        for one in held:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert played.error is None
    assert played.reward not in (None, os.getpid())


def test_processes_are_used_again_and_are_not_ours(monkeypatch):
    # More workers start where rewards hang.
    monkeypatch.setattr(
        importlib.import_module("turnwright.envs.isolation.process_pool"), "_STALL_S", 600.0
    )
    env = tw.tool_env(
        [], reward=tw.rewards(process=tw.RewardPart(process, isolation="process"), here=process)
    )
    played = tw.rollout(env, tasks(24), tw.ScriptedEngine(ENGINE))
    own, apart = ({t.rewards[name] for t in played} for name in ("here", "process"))
    assert own == {os.getpid()}
    assert os.getpid() not in apart
    assert len(apart) <= (os.cpu_count() or 1)


def test_parts_of_every_kind_have_the_values_that_they_have_without_a_process():
    def env(**isolation):
        turn, rank = tw.RewardPart(each_turn, 0.1, of="turn"), tw.RewardPart(ranks, of="group")
        return tw.tool_env(
            [],
            reward=tw.rewards(heavy=(heavy, 2.0), waits=waits, turn=turn, rank=rank, **isolation),
        )

    rows = [tw.Task("go", answer="3"), tw.Task("come", answer="4")]
    alone = tw.rollout(env(), rows, tw.ScriptedEngine(ENGINE), samples=3)
    apart = tw.rollout(env(isolation="process"), rows, tw.ScriptedEngine(ENGINE), samples=3)
    assert [facts(t) for t in apart] == [facts(t) for t in alone]
    assert {t.reward for t in apart} == {
        1.1 + answer + rank for answer in (3, 4) for rank in range(3)
    }


class Marks(Talk):
    """An environment whose own reward computes for long."""

    turns = 2

    def reset(self, task, *, seed=None):
        self.task = task
        return Talk.reset(self, task, seed=seed)

    def reward(self, trajectory):
        self.process = os.getpid()
        while self.task.info.get("fault") == "spins":
            pass
        return float(os.getpid() != self.task.info["parent"])


def test_the_reward_of_an_environment_runs_in_a_process_where_it_can_be_sent_there():
    rows = [
        tw.Task("go", id=name, info={"fault": name, "parent": os.getpid()})
        for name in ("", "spins")
    ]
    fine, spins = tw.rollout(Marks, rows, Sampler(), limits=tw.Limits(reward_s=1.0), rules=APART)
    assert fine.reward == sum(turn.reward for turn in fine.turns) + 1.0
    assert spins.error.message == "the reward 'Marks.reward' did not answer by its deadline"
    assert spins.stop == "timeout"

    class Inner(Marks):
        pass

    (inner,) = tw.rollout(Inner, rows[:1], Sampler(), rules=APART)
    assert "'Inner.reward' cannot be sent to a separate process" in inner.error.message
    assert "at the top level of a file" in inner.error.message


def test_a_reward_that_hangs_in_a_thread_is_named_too():
    stop = []

    def stuck(trajectory):
        while not stop:
            time.sleep(0.01)
        return 1.0

    env = tw.tool_env([], reward=tw.rewards(fine=process, stuck=stuck))
    (trajectory,) = tw.rollout(
        env, tasks(1), tw.ScriptedEngine(ENGINE), limits=tw.Limits(reward_s=0.3)
    )
    stop.append(True)
    assert trajectory.error.message == "the reward 'stuck' did not answer by its deadline"


def test_a_function_that_no_process_can_find_is_said_when_it_is_given():
    with pytest.raises(
        tw.UsageError, match=r"the reward 'x'.*no other process can find .*top level of a file"
    ):
        tw.rewards(x=lambda trajectory: 1.0, isolation="process")
    with pytest.raises(
        tw.UsageError, match=r"isolation = 'magic'; write \"thread\" or \"process\""
    ):
        tw.rewards(x=tw.RewardPart(heavy, isolation="magic"))


def test_outside_of_a_rollout_and_inside_of_an_isolated_one_it_works_as_well():
    trajectory = tw.rollout(AsyncTalk, tasks(1), Sampler())[0]
    reward = tw.rewards(heavy=heavy, isolation="process")
    assert asyncio.run(reward(trajectory)).total == 0.5
    env = tw.tool_env([], reward=reward)
    (apart,) = tw.rollout(
        env, tasks(1), tw.ScriptedEngine(ENGINE), rules=tw.EnvRules(isolation="process")
    )
    assert apart.reward == 0.5


def test_what_hangs_does_not_hold_up_the_others_and_a_killed_process_is_replaced():
    async def main():
        scorers = ProcessPool(limit=1)
        spins = tw.rollout(AsyncTalk, [tw.Task("go", info={"fault": "spins"})], Sampler())[0]
        fine = tw.rollout(AsyncTalk, tasks(1), Sampler())[0]
        stuck = asyncio.create_task(scorers.call("heavy", heavy, spins))
        while not scorers.processes_started:
            await asyncio.sleep(0.01)
        assert await scorers.call("heavy", heavy, fine) == 0.5
        assert not stuck.done()
        stuck.cancel()
        await asyncio.gather(stuck, return_exceptions=True)
        first = await scorers.call("process", process, fine)
        assert await scorers.call("process", process, fine) == first
        births = scorers.processes_started
        await scorers.close()
        return births

    assert asyncio.run(main()) == 2


@tw.tool("plus")
def add(a: int, b: int = 1) -> str:
    """Add two numbers.

    Args:
        a: one.
        b: another.
    """
    return str(a + b)


class Counter(tw.StatefulTool):
    """Counts in its process."""

    def execute(self, step: int) -> str:
        """Count on.

        Args:
            step: by how much.
        """
        return f"{step} {os.getpid()}"


def test_tools_of_every_kind_go_to_a_process():
    assert pickle.loads(pickle.dumps(add)) == add
    assert pickle.loads(pickle.dumps(add)).name == "plus"
    call = '<tool_call>{"name": "plus", "arguments": {"a": 2}}</tool_call>'
    call += '<tool_call>{"name": "counter", "arguments": {"step": 3}}</tool_call>'
    env = tw.tool_env([add, Counter], reward=heavy)
    (trajectory,) = tw.rollout(
        env, tasks(1), tw.ScriptedEngine([call, "done"]), rules=tw.EnvRules(isolation="process")
    )
    assert trajectory.error is None
    plus, counter = (message.text for message in trajectory.messages if message.role == "tool")
    assert plus == "3"
    assert counter.split()[0] == "3"
    assert int(counter.split()[1]) != os.getpid()


class Daemonic(Talk):
    """Starts what outlives a process group, and is killed outright."""

    turns = 3

    def step(self, action):
        code = (
            "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, "
            "flush=True); time.sleep(300)"
        )
        server = subprocess.Popen(
            [sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE
        )
        server.stdout.readline()
        os.kill(os.getpid(), 9)


def test_what_a_killed_environment_started_in_a_session_of_its_own_goes_with_it():
    (trajectory,) = tw.rollout(
        Daemonic, tasks(1), Sampler(), rules=tw.EnvRules(isolation="process")
    )
    assert trajectory.error.type == "ProcessDied"  # and nothing is left, says the fixture


class Groups(AsyncTalk):
    """Hangs in tasks of a group, so that the stop may meet a task, the group or asyncio itself."""

    async def reset(self, task, *, seed=None):
        self.note("made")
        return await super().reset(task, seed=seed)

    async def step(self, action):
        asyncio.create_task(self.spin("beside"))  # noqa: RUF006  # nobody asks for its exception
        async with asyncio.TaskGroup() as group:
            for number in range(3):
                group.create_task(self.spin(f"grouped-{number}"))

    async def spin(self, name):
        self.note(f"{name}-begun")
        try:
            while True:
                await asyncio.sleep(0)
        finally:
            self.note(name)
            raise RuntimeError("a cleanup that fails")

    async def close(self):
        await asyncio.sleep(0.01)  # the loop runs on, with what the stop left on it
        self.note("closed")

    def note(self, name):
        Path(os.environ["NOTES"], f"{name}.{os.getpid()}").touch()


class Blocks(Groups):
    """Keeps the event loop from running."""

    async def step(self, action):
        time.sleep(60)


@pytest.fixture
def patient(monkeypatch, tmp_path):
    """Processes are given a minute to end, since other programs may keep the cores busy."""
    monkeypatch.setattr(fork_server, "EXIT_GRACE_S", 60.0)
    monkeypatch.setenv("NOTES", str(tmp_path))


@pytest.mark.usefixtures("patient")
def test_an_environment_that_is_stopped_while_it_blocks_its_loop_is_closed(monkeypatch, tmp_path):
    monkeypatch.setattr(fork_server, "EXIT_GRACE_S", 4.0)
    rows = tw.rollout(
        Blocks,
        tasks(2),
        Sampler(),
        limits=tw.Limits(env_s=0.5),
        rules=tw.EnvRules(isolation="process"),
    )
    assert {t.error.type for t in rows} == {"TimeoutError"}
    notes = collections.Counter(path.stem for path in tmp_path.iterdir())
    assert notes == {"made": notes["closed"], "closed": notes["made"]}


@pytest.mark.usefixtures("patient")
def test_an_environment_that_is_stopped_in_the_middle_of_a_call_is_closed_and_says_nothing(
    capfd, tmp_path
):
    limits = tw.Limits(env_s=0.5)
    rows = tw.rollout(
        Groups, tasks(12), Sampler(), limits=limits, rules=tw.EnvRules(isolation="process")
    )
    assert {t.error.type for t in rows} == {"TimeoutError"}
    err = capfd.readouterr().err
    assert "never retrieved" not in err
    assert "Exception in" not in err
    # The deadline may pass before a busy machine begins a call.
    notes = collections.Counter(path.stem for path in tmp_path.iterdir())
    assert notes["made"] == notes["closed"]
    for name in ("beside", "grouped-0", "grouped-1", "grouped-2"):
        assert notes[f"{name}-begun"] == notes[name] > 0


def test_the_start_of_a_process_is_not_part_of_what_a_reset_may_take(monkeypatch):
    birth = ForkServer.fork

    async def late(self):
        await asyncio.sleep(1.2)
        return await birth(self)

    monkeypatch.setattr(ForkServer, "fork", late)
    (trajectory,) = tw.rollout(
        AsyncTalk,
        tasks(1),
        Sampler(),
        limits=tw.Limits(env_s=1.0),
        rules=tw.EnvRules(isolation="process"),
    )
    assert trajectory.error is None
