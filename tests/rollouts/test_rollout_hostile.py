"""One episode's exception never ends the rollout, whatever kind of exception it is; a real
cancellation and Ctrl-C still do."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest
from kit.rollouts import Sampler, Talk, tasks

import turnwright as tw
from turnwright import errors
from turnwright.rollouts import make_episode_specs


class Own(BaseException):
    """No `Exception`."""


class Mute(Exception):
    def __str__(self):
        raise ValueError("no words")

    __repr__ = __str__


class Fatal(Exception):
    def __str__(self):
        raise Own("no words at all")

    __repr__ = __str__


class Disguised(Exception):
    @property
    def __class__(self):
        raise ZeroDivisionError

    @property
    def over(self):
        raise ZeroDivisionError


class Late(TimeoutError):
    __str__ = Mute.__str__


class Bare:
    """No object of ours, and no text either."""

    def __repr__(self):
        raise Own

    __str__ = __format__ = __float__ = __repr__


def cancel():
    asyncio.current_task().cancel()


def throw(error):
    raise error


FAULTS = {
    "mute": lambda: throw(Mute()),
    "fatal": lambda: throw(Fatal()),
    "disguised": lambda: throw(Disguised()),
    "late": lambda: throw(Late()),
    "base": lambda: throw(Own("stop it all")),
    "group": lambda: throw(BaseExceptionGroup("many", [Own()])),
    "generator": lambda: throw(GeneratorExit()),
    "exit": lambda: throw(SystemExit(Bare())),
    "trace": lambda: throw(errors.TraceError("runs/x: cannot be written")),
    "limit": lambda: throw(errors.LimitReached("no such reason", "enough")),
    "engine": lambda: throw(errors.EngineError("mine")),
    "bugs": lambda: throw(errors.RepeatedUserError("mine")),
    "cancelled": lambda: throw(asyncio.CancelledError()),
    "cancels": cancel,
}
PLACES = (
    "make",
    "reset",
    "step",
    "info",
    "reward",
    "close",
    "tool",
    "tools",
    "function",
    "parts",
    "siblings",
    "play",
)
SYNC = {"cancels"}  # what a thread has no task for


async def act(task, place):
    if task.info.get("place") == place:
        FAULTS[task.info["fault"]]()
        await asyncio.sleep(0)


class Hostile(Talk):
    """Breaks in async code."""

    turns = 2
    hold = staticmethod(act)

    async def reset(self, task, *, seed=None):
        self.task = task
        await self.hold(task, "reset")
        return Talk.reset(self, task, seed=seed)

    async def step(self, action):
        await self.hold(self.task, "step")
        step = Talk.step(self, action)
        return (
            step._replace(info={"bare": Bare(), Bare: [Bare()]})
            if self.task.info.get("place") == "info"
            else step
        )

    async def reward(self, trajectory):
        await self.hold(self.task, "reward")
        return 0.5

    async def close(self):
        await self.hold(self.task, "close")


class Blocking(Talk):
    """The same in threads."""

    turns = 2

    def reset(self, task, *, seed=None):
        self.task = task
        self.act("reset")
        return Talk.reset(self, task, seed=seed)

    def act(self, place):
        if self.task.info.get("place") == place:
            FAULTS[self.task.info["fault"]]()

    def step(self, action):
        self.act("step")
        return Talk.step(self, action)

    def reward(self, trajectory):
        self.act("reward")
        return 0.5

    def close(self):
        self.act("close")


def broken(place, faults=FAULTS):
    rows = [
        tw.Task(f"{place} {name}", id=f"{place}/{name}", info={"place": place, "fault": name})
        for name in faults
    ]
    return [*rows, *(tw.Task("fine", id=f"fine{i}") for i in range(2))]


def survive(env, rows, engine=None, **options):
    """The trajectories by task; a rollout that ends with an exception is what must not be."""
    ended = played = None
    try:
        played = tw.rollout(env, rows, engine or Sampler(), **options)
    except BaseException as error:
        ended = type(error).__name__
    assert ended is None, f"the exception of one episode ended the rollout: {ended}"
    return {trajectory.task.id: trajectory for trajectory in played}


def held(found, place):
    """Each broken episode names its failure, and the others are as if it were alone."""
    for name, trajectory in found.items():
        if name.startswith("fine"):
            assert (trajectory.stop, trajectory.error) == ("done", None), name
            assert trajectory.reward is not None
            continue
        assert trajectory.error is not None, f"{name} left no error"
        assert type(trajectory.error.message) is str
        if place != "close":
            assert trajectory.reward is None, name


@pytest.mark.parametrize("place", ["reset", "step", "reward", "close"])
def test_what_async_environments_raise_ends_their_episode_alone(place):
    held(survive(Hostile, broken(place), concurrency=4), place)


@pytest.mark.parametrize("place", ["reset", "step", "reward", "close"])
def test_what_blocking_environments_raise_ends_their_episode_alone(place):
    held(survive(Blocking, broken(place, FAULTS.keys() - SYNC), concurrency=4), place)


def test_what_making_an_environment_raises_ends_its_episode_alone():
    rows = broken("make")
    todo = iter(rows)

    class Made(Hostile):
        def __init__(self):
            FAULTS.get(next(todo).info.get("fault"), lambda: None)()

    held(survive(Made, rows, concurrency=1), "make")


def test_values_without_words_end_their_episode_alone(tmp_path):
    """In what is written down they stand by their class."""
    rows = [tw.Task("go", id="bare", info={"place": "info"}), *tasks(2)]
    found = survive(Hostile, rows, out=tmp_path / "run")
    assert {one.stop for one in found.values()} == {"done"}
    assert b"Bare" in (tmp_path / "run" / "journal.jsonl").read_bytes()

    class Pays(Hostile):
        async def reward(self, trajectory):
            return Bare() if trajectory.task.id == "bare" else 1.0

    found = survive(Pays, rows)
    assert found["bare"].error is not None
    assert [found[f"t{i}"].reward is not None for i in range(2)] == [True, True]


CALL = '<tool_call>\n{"name": "breaks", "arguments": {"fault": "%s"}}\n</tool_call>'


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("kind", ["async", "sync"])
def test_what_tools_raise_is_told_to_the_model_or_ends_their_episode_alone(kind, calls):
    def breaks(fault: str) -> str:
        """Break."""
        FAULTS[fault]()
        return "ok"

    async def breaks_too(fault: str) -> str:
        """Break."""
        FAULTS[fault]()
        await asyncio.sleep(0)
        return "ok"

    def say(messages, rng):
        told = messages[0].text
        return "So." if messages[-1].role == "tool" or told == "fine" else CALL % told * calls

    env = tw.tool_env([breaks if kind == "sync" else tw.tool(name="breaks")(breaks_too)])
    faults = [name for name in FAULTS if kind == "async" or name not in SYNC]
    rows = [*(tw.Task(name, id=name) for name in faults), tw.Task("fine", id="fine")]
    found = survive(env, rows, tw.ScriptedEngine(say))
    assert found["fine"].stop == "done"
    assert found["mute"].error is None  # a tool's exception is the model's to read
    assert "Mute" in found["mute"].messages[2].text
    for name in ("base", "generator", "cancels"):
        if name in faults:
            tool_said = (
                [m.text for m in found[name].messages if m.role == "tool"]
                if found[name].turns
                else []
            )
            assert found[name].error is not None or "Error" in tool_said[0], name


@pytest.mark.parametrize("shape", ["one", "parts", "group"])
def test_what_reward_functions_raise_ends_their_episode_alone(shape):
    async def pays(trajectory):
        await act(trajectory.task, "pay")
        return 1.0

    async def compares(trajectories):
        await act(trajectories[0].task, "pay")
        return [1.0] * len(trajectories)

    reward = {
        "one": pays,
        "parts": tw.rewards(a=pays, b=lambda t: 1.0),
        "group": tw.rewards(a=tw.RewardPart(compares, of="group")),
    }
    found = survive(
        tw.tool_env([], reward=reward[shape]),
        broken("pay"),
        tw.ScriptedEngine(["42"]),
        concurrency=3,
    )
    held(found, "pay")


def test_what_play_functions_raise_ends_their_episode_alone():
    async def play(task, model):
        await act(task, "play")
        await model.generate("Go on.")
        return 1.0

    held(survive(play, broken("play"), concurrency=4), "play")


def test_a_timeout_of_ones_own_around_generate_is_still_ones_own():
    """A play function may cancel its own calls: that cancellation is not taken for the
    rollout's, nor swallowed."""

    class Slow(Sampler):
        async def generate(self, request):
            await asyncio.sleep(30)

    async def play(task, model):
        try:
            async with asyncio.timeout(0.01):
                await model.generate("Go on.")
        except TimeoutError:
            return 0.25

    (found,) = tw.rollout(play, tasks(1), Slow())
    assert (found.stop, found.reward) == ("done", 0.25)


def test_a_rollout_that_is_cancelled_beside_hostile_code_ends_at_once():
    class Waits(Hostile):
        async def step(self, action):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                raise Own from None

    async def run():
        work = asyncio.ensure_future(tw.arollout(Waits, tasks(3), Sampler()))
        await asyncio.sleep(0.02)
        work.cancel()
        done, _ = await asyncio.wait([work], timeout=20)
        assert done, "a cancelled rollout goes on"
        assert work.cancelled()

    asyncio.run(run())


def test_ctrl_c_ends_a_rollout_also_while_episodes_break():
    rows = broken("step")

    class Last(Hostile):
        async def step(self, action):
            if self.task.id == "fine1":
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.sleep(60)
            return await super().step(action)

    assert threading.current_thread() is threading.main_thread()
    with pytest.raises(KeyboardInterrupt):
        tw.rollout(Last, rows, Sampler(), concurrency=4)


def test_what_environments_raise_while_prompts_are_measured_hides_their_prompt_alone():
    rows = broken("reset")

    async def sizes():
        rollout = tw.Rollout(Sampler(), tw.byte_renderer())
        work = asyncio.ensure_future(
            rollout.prompt_sizes(make_episode_specs(Hostile, rows, phase="x", step=0))
        )
        await asyncio.wait([work])
        return work

    work = asyncio.run(sizes())
    ended = (
        "a cancellation"
        if work.cancelled()
        else work.exception() and type(work.exception()).__name__
    )
    assert not ended, f"one environment ended it all: {ended}"
    assert [size is None for size in work.result()] == [task.id[:4] != "fine" for task in rows]


def test_a_journal_that_cannot_be_written_still_stops_the_rollout(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    async def play(task, model):
        monkeypatch.setattr(os, "write", full)
        await model.generate("a")

    with pytest.raises(errors.TraceError, match="No space left"):
        tw.rollout(play, tasks(2), Sampler(), out=tmp_path / "run")
