"""Invariants 6 and 9: what breaks is a record that names it, has no reward, and
takes no sibling with it."""

from __future__ import annotations

import asyncio
import random
import threading
import time

import pytest
from kit.rollouts import AsyncTalk, Sampler, Talk, check_record, facts, tasks

import turnwright as tw
from turnwright.engines import Generation
from turnwright.rollouts import Rollout, make_episode_specs
from turnwright.rollouts.rollout_settings import RolloutSettings

# What breaks, and the record of it: stop reason, type of the error, phase.
WORLD = {
    "make_raises": ("env_error", "OSError", "reset"),
    "make_wrong": ("env_error", "EnvError", "reset"),
    "make_exits": ("env_error", "RuntimeError", "reset"),
    "reset_raises": ("env_error", "KeyError", "reset"),
    "reset_hangs": ("timeout", "TimeoutError", "reset"),
    "reset_says_nonsense": ("env_error", "TypeError", "reset"),
    "step_raises": ("env_error", "ZeroDivisionError", "step"),
    "step_hangs": ("timeout", "TimeoutError", "step"),
    "step_exits": ("env_error", "RuntimeError", "step"),
    "step_cancels": ("env_error", "RuntimeError", "step"),
    "step_stops_iteration": ("env_error", "RuntimeError", "step"),
    "step_swallows": ("timeout", "TimeoutError", "step"),
    "step_gives_nothing": ("env_error", "EnvError", "step"),
    "step_says_nonsense": ("env_error", "TypeError", "step"),
    "step_info_nonsense": ("env_error", "EnvError", "step"),
    "step_tool_breaks": ("tool_error", "ToolFailure", "step"),
    "step_pays_nan": ("reward_error", "RewardError", "step"),
    "step_pays_inf": ("reward_error", "RewardError", "step"),
    "step_pays_huge": ("reward_error", "RewardError", "step"),
    "reward_raises": ("reward_error", "LookupError", "reward"),
    "reward_hangs": ("timeout", "TimeoutError", "reward"),
    "reward_nan": ("reward_error", "RewardError", "reward"),
    "reward_text": ("reward_error", "RewardError", "reward"),
}
ENGINE = {
    "engine_raises": ("engine_error", "EngineError", "generate"),
    "engine_raises_oddly": ("engine_error", "EngineError", "generate"),
    "engine_hangs": ("timeout", "TimeoutError", "generate"),
    "engine_cancels": ("engine_error", "EngineError", "generate"),
    "engine_no_logprobs": ("engine_error", "BackendContractError", "generate"),
    "engine_none_logprob": ("engine_error", "BackendContractError", "generate"),
    "engine_few_logprobs": ("engine_error", "BackendContractError", "generate"),
    "engine_many_logprobs": ("engine_error", "BackendContractError", "generate"),
    "engine_nan": ("engine_error", "BackendContractError", "generate"),
    "engine_inf": ("engine_error", "BackendContractError", "generate"),
    "engine_empty": ("engine_error", "BackendContractError", "generate"),
    "engine_too_many": ("engine_error", "BackendContractError", "generate"),
    "engine_none_id": ("engine_error", "BackendContractError", "generate"),
    "engine_negative_id": ("engine_error", "BackendContractError", "generate"),
    "engine_unknown_id": ("engine_error", "EngineError", "generate"),
    "engine_stop_without_end": ("engine_error", "BackendContractError", "generate"),
    "engine_length_behind_end": ("engine_error", "BackendContractError", "generate"),
    "engine_odd_finish": ("engine_error", "BackendContractError", "generate"),
    "engine_no_version": ("engine_error", "BackendContractError", "generate"),
    "engine_stale": ("engine_error", "BackendContractError", "generate"),
    "engine_aborts_for_ever": ("engine_error", "EngineError", "generate"),
    "engine_gives_nothing": ("engine_error", "EngineError", "generate"),
}
CLOSING = {
    "close_raises": ("done", "PermissionError", "close"),
    "close_hangs": ("done", "TimeoutError", "close"),
}
FAULTS = WORLD | ENGINE | CLOSING
HANGS = [name for name in FAULTS if name.endswith(("hangs", "swallows"))]


class Faults:
    """The faults of both kinds of world; counts what was opened and closed."""

    opened = 0
    closed = 0
    turns = 4

    def fault(self, phase):
        return self.what.removeprefix(f"{phase}_") if self.what.startswith(f"{phase}_") else ""

    def begin(self, task):
        self.what = task.info.get("fault", "")
        type(self).opened += 1
        return {"raises": KeyError("gone"), "says_nonsense": 5}.get(self.fault("reset"))

    def answer(self):
        fault = self.fault("step")
        if self.left > 2:
            return None
        if fault in ("raises", "exits", "cancels", "stops_iteration", "tool_breaks"):
            raise {
                "raises": ZeroDivisionError("division by zero"),
                "exits": SystemExit(2),
                "cancels": asyncio.CancelledError(),
                "stops_iteration": StopIteration(),
                "tool_breaks": tw.ToolFailure("the search index is down"),
            }[fault]
        return {
            "gives_nothing": (),
            "says_nonsense": tw.Step(object()),
            "info_nonsense": tw.Step("x", info="abc"),
            "pays_nan": tw.Step("x", reward=float("nan")),
            "pays_inf": tw.Step("x", reward=float("inf")),
            "pays_huge": tw.Step("x", reward=10**400),
        }.get(fault)

    def pay(self):
        fault = self.fault("reward")
        if fault == "raises":
            raise LookupError("no judge")
        return {"nan": float("nan"), "text": "excellent"}.get(fault, 0.25)

    def shut(self):
        type(self).closed += 1
        if self.fault("close") == "raises":
            raise PermissionError("busy")


class Sync(Faults, Talk):
    """Blocks; a hanging call comes back long after its deadline."""

    def reset(self, task, *, seed=None):
        given = self.begin(task)
        if isinstance(given, Exception):
            raise given
        if self.fault("reset") == "hangs":
            RELEASE.wait(20)
        return given or Talk.reset(self, task, seed=seed)

    def step(self, action):
        broken = self.answer()
        if self.left <= 2 and self.fault("step") in ("hangs", "swallows"):
            RELEASE.wait(20)
        return Talk.step(self, action) if broken is None else broken

    def reward(self, trajectory):
        if self.fault("reward") == "hangs":
            RELEASE.wait(20)
        return self.pay()

    def close(self):
        self.shut()
        if self.fault("close") == "hangs":
            RELEASE.wait(20)


class Async(Faults, AsyncTalk):
    """The same on the event loop."""

    async def reset(self, task, *, seed=None):
        given = self.begin(task)
        if isinstance(given, Exception):
            raise given
        if self.fault("reset") == "hangs":
            await asyncio.sleep(60)
        return given or Talk.reset(self, task, seed=seed)

    async def step(self, action):
        broken = self.answer()
        if self.left <= 2 and self.fault("step") == "hangs":
            await asyncio.sleep(60)
        if self.left <= 2 and self.fault("step") == "swallows":
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                await asyncio.sleep(0)
            raise TimeoutError("of my own")
        return Talk.step(self, action) if broken is None else broken

    async def reward(self, trajectory):
        if self.fault("reward") == "hangs":
            await asyncio.sleep(60)
        return self.pay()

    async def close(self):
        self.shut()
        if self.fault("close") == "hangs":
            await asyncio.sleep(60)


RELEASE = threading.Event()


@pytest.fixture(autouse=True)
def _release():
    """Lets go of threads that hang, and holds each test to leaving none."""
    RELEASE.clear()
    before = set(threading.enumerate())
    yield
    RELEASE.set()
    end = time.monotonic() + 20
    while left := [
        t for t in threading.enumerate() if t not in before and t.name.startswith("turnwright-env")
    ]:
        assert time.monotonic() < end, f"threads are left: {left}"
        time.sleep(0.005)


class Broken(Sampler):
    """An engine that breaks for the sessions of tasks that say so, in their second call."""

    async def generate(self, request):
        fault = FAULT_OF.get(request.session.split("/")[2], "")
        if not fault.startswith("engine_") or request.call < 1:
            return await super().generate(request)
        fault = fault.removeprefix("engine_")
        if fault == "raises":
            raise tw.EngineError("out of memory")
        if fault == "raises_oddly":
            raise ConnectionError("refused")
        if fault == "hangs":
            await asyncio.sleep(60)
        if fault == "cancels":
            raise asyncio.CancelledError
        end = min(request.stop_ids)
        rows = {
            "no_logprobs": ([65, end], None, "stop", 0),
            "none_logprob": ([65, end], [-1.0, None], "stop", 0),
            "few_logprobs": ([65, end], [-1.0], "stop", 0),
            "many_logprobs": ([65, end], [-1.0] * 3, "stop", 0),
            "nan": ([65, end], [-1.0, float("nan")], "stop", 0),
            "inf": ([65, end], [float("-inf"), -1.0], "stop", 0),
            "empty": ([], [], "stop", 0),
            "too_many": (
                [65] * (request.max_tokens + 1),
                [-1.0] * (request.max_tokens + 1),
                "length",
                0,
            ),
            "none_id": ([None, end], [-1.0, -1.0], "stop", 0),
            "negative_id": ([-1, end], [-1.0, -1.0], "stop", 0),
            "unknown_id": ([10**6, end], [-1.0, -1.0], "stop", 0),
            "stop_without_end": ([65, 66], [-1.0, -1.0], "stop", 0),
            "length_behind_end": ([65, end], [-1.0, -1.0], "length", 0),
            "odd_finish": ([65, end], [-1.0, -1.0], "eos", 0),
            "no_version": ([65, end], [-1.0, -1.0], "stop", None),
            "stale": ([65, end], [-1.0, -1.0], "stop", -1),
            "aborts_for_ever": ([], [], "abort", 0),
        }
        return Generation(*rows[fault]) if fault in rows else None


FAULT_OF: dict[str, str] = {}


def faulty(names):
    """One task per name, with that fault ("" for none)."""
    rows = [tw.Task(f"Task {i}", id=f"{i}", info={"fault": name}) for i, name in enumerate(names)]
    FAULT_OF.clear()
    FAULT_OF.update({task.id: task.info["fault"] for task in rows})
    return rows


def factory(world):
    """Makes worlds of a class that counts from 0."""
    kind = type("Counted", (world,), {"opened": 0, "closed": 0})
    queue: list[str] = []

    def make():
        fault = queue.pop(0) if queue else ""
        if fault == "make_raises":
            raise OSError("no display")
        if fault == "make_exits":
            raise SystemExit(1)
        return object() if fault == "make_wrong" else kind()

    make.kind, make.queue = kind, queue
    return make


def expect(trajectory, fault):
    stop, error, phase = FAULTS[fault]
    found = trajectory.error
    assert found is not None, f"{fault} left no error"
    assert (trajectory.stop, found.type, found.phase) == (stop, error, phase), (fault, found)
    assert found.traceback
    if fault not in CLOSING:
        assert trajectory.reward is None, f"{fault} was given a reward"


@pytest.mark.parametrize("world", [Sync, Async])
def test_everything_that_hangs_is_a_record_that_names_it_and_has_no_reward(world):
    """All at once, with a deadline that the one that does not hang meets on a machine that stands
    still for a second, too."""
    make = factory(world)
    engine = Broken()
    limits = tw.Limits(env_s=2.0, reward_s=2.0, generate_s=2.0)
    *broken, fine = tw.rollout(make, faulty([*HANGS, ""]), engine, limits=limits)
    for trajectory, fault in zip(broken, HANGS, strict=True):
        expect(trajectory, fault)
    assert (fine.stop, fine.error) == ("done", None)
    assert fine.reward is not None
    for trajectory in (*broken, fine):
        check_record(trajectory, engine.calls)
    assert make.kind.closed == make.kind.opened


@pytest.mark.parametrize("world", [Sync, Async])
@pytest.mark.parametrize("fault", [name for name in FAULTS if name not in HANGS])
def test_every_fault_is_a_record_that_names_it_and_has_no_reward(fault, world):
    make = factory(world)
    make.queue.append(fault)
    engine = Broken()
    rows = faulty([fault, ""])
    broken, fine = tw.rollout(make, rows, engine, concurrency=1)
    expect(broken, fault)
    assert (fine.stop, fine.error) == ("done", None)
    assert fine.reward is not None
    for trajectory in (broken, fine):
        check_record(trajectory, engine.calls)
    assert make.kind.closed == make.kind.opened


@pytest.mark.parametrize(("fault", "tells"), [
    ("engine_few_logprobs", "1 logprobs for 2 ids"), ("engine_no_logprobs", "no logprobs"), ("engine_nan", "finite"),  # noqa: E501
    ("engine_none_logprob", "missing"), ("engine_empty", "no ids"), ("engine_too_many", "were requested"),  # noqa: E501
    ("engine_odd_finish", "'eos'"), ("engine_stale", "older than 0"), ("engine_stop_without_end", "no stop id"),  # noqa: E501
    ("engine_raises_oddly", "ConnectionError: refused"),
])  # fmt: skip
def test_an_engine_that_breaks_its_contract_is_told_what_is_wrong(fault, tells):
    (broken,) = tw.rollout(factory(Async), faulty([fault]), Broken())
    assert tells in broken.error.message


@pytest.mark.parametrize("seed", [0, 1])
def test_of_256_episodes_with_random_faults_each_names_its_own_and_the_others_are_untouched(seed):
    rng = random.Random(seed)
    names = [rng.choice([*FAULTS, *[""] * len(FAULTS)]) for _ in range(256)]
    names = ["" if name.startswith("make") else name for name in names]
    rows = faulty(names)
    limits = tw.Limits(env_s=3, reward_s=3, generate_s=3)
    worlds = {task.id: (Sync, Async)[rng.randrange(2)] for task in rows}

    async def run(tasks_given, engine):
        made = {"Sync": factory(Sync), "Async": factory(Async)}
        todo = [
            episode for task in tasks_given
            for episode in make_episode_specs(made[worlds[task.id].__name__], [task], phase="rollout", step=0)  # noqa: E501
        ]  # fmt: skip
        rollout = Rollout(
            engine, tw.byte_renderer(), RolloutSettings(limits=limits, concurrency=256)
        )
        before = asyncio.all_tasks()
        played = await rollout.play(todo)
        assert asyncio.all_tasks() == before, "tasks are left"
        assert not rollout.pending()
        assert all(make.kind.opened == make.kind.closed for make in made.values())
        return rollout, dict(zip([task.id for task in tasks_given], played, strict=True))

    engine = Broken(delay=1e-3)
    rollout, played = asyncio.run(run(rows, engine))
    for task in rows:
        check_record(played[task.id], engine.calls)
        if task.info["fault"]:
            expect(played[task.id], task.info["fault"])
    hung = [
        task
        for task in rows
        if task.info["fault"] in HANGS and task.info["fault"] != "engine_hangs"
    ]
    assert rollout.abandoned == sum(worlds[task.id] is Sync for task in hung)
    fine = [task for task in rows if not task.info["fault"]]
    _, alone = asyncio.run(run(fine, Sampler()))
    for task in fine:
        assert facts(played[task.id]) == facts(alone[task.id])
    assert sorted(engine.released) == sorted({f"rollout/0/{task.id}/0/0" for task in rows})


@pytest.mark.parametrize("world", [Sync, Async])
def test_a_step_without_a_reward_leaves_the_episode_without_one(world):
    class Unpaid(world):
        def reward(self, trajectory):
            return 1.0

    def unpaid(self, action):
        return tw.Step("x", reward=None, terminated=True)

    async def later(self, action):
        return unpaid(self, action)

    Unpaid.step = unpaid if world is Sync else later
    (trajectory,) = tw.rollout(Unpaid, faulty([""]), Sampler())
    assert (trajectory.stop, trajectory.reward, trajectory.error) == ("done", None, None)


def test_a_world_that_cannot_say_its_reward_gives_none():
    class Silent(Async):
        async def reward(self, trajectory):
            return None

    (trajectory,) = tw.rollout(Silent, faulty([""]), Sampler())
    assert (trajectory.stop, trajectory.reward, trajectory.error) == ("done", None, None)


def test_an_episode_that_uses_up_its_time_is_cut_off_by_the_clock():
    (trajectory,) = tw.rollout(
        factory(Async), faulty(["step_hangs"]), Sampler(), limits=tw.Limits(wall_clock_s=0.1)
    )
    assert (trajectory.stop, trajectory.reward, trajectory.error.phase) == (
        "wall_clock",
        None,
        "step",
    )


@pytest.mark.parametrize("seconds", [0.5, 1.5])
def test_a_world_is_closed_also_when_its_time_is_long_over(seconds):
    class Blocks(Async):
        """Blocks the loop far beyond every deadline, as code that should have
        been synchronous does."""

        async def step(self, action):
            time.sleep(seconds)
            await asyncio.sleep(60)

        async def close(self):
            await asyncio.sleep(0.01)
            self.shut()

    make = factory(Blocks)
    (trajectory,) = tw.rollout(
        make, faulty([""]), Sampler(), limits=tw.Limits(wall_clock_s=0.3, env_s=1.0)
    )
    assert trajectory.stop == "wall_clock"
    assert make.kind.closed == 1


async def play_hangs(task, model):
    await model.generate("a")
    await asyncio.sleep(60)


async def play_raises(task, model):
    await model.generate("a")
    raise ValueError("mine")


async def play_cancels(task, model):
    raise asyncio.CancelledError


async def play_nan(task, model):
    await model.generate("a")
    return float("nan")


async def play_bad_budget(task, model):
    await model.generate("a", max_tokens=0)


async def play_nothing_said(task, model):
    await model.generate([])


@pytest.mark.parametrize(("play", "stop", "error"), [
    (play_hangs, "wall_clock", "TimeoutError"), (play_raises, "env_error", "ValueError"),
    (play_cancels, "env_error", "RuntimeError"), (play_nan, "reward_error", "RewardError"),
    (play_bad_budget, "env_error", "UsageError"), (play_nothing_said, "env_error", "TemplateError"),
])  # fmt: skip
def test_faults_of_play_functions_are_records(play, stop, error):
    engine = Sampler()
    rows = tw.rollout(play, tasks(2), engine, limits=tw.Limits(wall_clock_s=0.2), concurrency=1)
    for trajectory in rows:
        check_record(trajectory, engine.calls)
        assert (trajectory.stop, trajectory.error.type, trajectory.reward) == (stop, error, None)


def test_calls_that_a_play_function_leaves_behind_end_with_it():
    engine = Sampler(delay=0.01)
    left = []

    async def one_fails(task, model):
        async def fail():
            await asyncio.sleep(0)
            raise ValueError("mine")

        async def late():
            await asyncio.sleep(0.05)
            await model.generate("too late")

        left.append(asyncio.ensure_future(late()))
        await asyncio.gather(model.generate("a"), model.generate("b"), fail())

    async def run():
        rows = await tw.arollout(one_fails, tasks(3), engine)
        before = [facts(trajectory) for trajectory in rows]
        assert engine.running == 0
        assert {type(e) for e in await asyncio.gather(*left, return_exceptions=True)} == {
            tw.UsageError
        }
        assert [facts(trajectory) for trajectory in rows] == before
        return rows

    for trajectory in asyncio.run(run()):
        assert (trajectory.stop, trajectory.error.message) == ("env_error", "mine")
        check_record(trajectory, engine.calls)


def test_a_play_function_that_fails_does_not_wait_for_its_other_calls():
    class Never(Sampler):
        async def generate(self, request):
            await asyncio.sleep(60)
            return await super().generate(request)

    async def one_fails(task, model):
        async def fail():
            await asyncio.sleep(0)
            raise ValueError("mine")

        await asyncio.gather(model.generate("a"), fail())

    (trajectory,) = tw.rollout(one_fails, tasks(1), Never())
    assert (trajectory.stop, trajectory.turns) == ("env_error", [])


def test_stopping_a_rollout_closes_its_worlds_and_leaves_nothing_running():
    make = factory(Async)
    engine = Sampler(delay=0.02)

    async def run():
        work = asyncio.ensure_future(
            tw.arollout(make, faulty(["", "reset_hangs", "step_hangs"] * 4), engine)
        )
        while make.kind.opened < 12:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())
    assert make.kind.opened == make.kind.closed == 12
    assert len(engine.released) == 12


def test_an_engine_whose_release_fails_harms_nobody():
    class Clings(Sampler):
        def release(self, session):
            raise RuntimeError("lost")

    rows = tw.rollout(AsyncTalk, tasks(3), Clings())
    assert [(t.stop, t.error.phase) for t in rows] == [("done", "close")] * 3
    assert all(t.reward is not None for t in rows)
