"""Faults at every await of 256 concurrent episodes, and what became of each.

In four kinds of world: async code, sync code in threads, sync code in processes
(`isolation = "process"`), and async code whose rewards are computed in processes
(`reward_isolation = "process"`, called scorer). Faults: it raises, hangs for ever, returns garbage,
returns after its deadline, dies by a signal (in processes alone). Held to: every episode ends as
trained or as a record that names its fault, and they add up; the ids of the others equal those of a
run without faults; all end by their deadline plus grace; every environment is closed (or its
process ended); nothing is left but the threads of sync calls that never return.

    python benchmarks/faults.py            # half a minute; last line JSON
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import turnwright as tw
from turnwright.engines import Generation
from turnwright.rollouts import Rollout, make_episode_specs
from turnwright.rollouts.rollout_settings import RolloutSettings

AWAITS = ("reset", "step", "reward", "generate", "close")
FAULTS = ("raises", "hangs", "garbage", "late", "dies")
DEADLINE_S = {"async": 1.5, "thread": 1.5, "process": 12.0, "scorer": 3.0}
"""256 processes at once take turns at the cores; their start alone has a deadline of its own."""
GRACE_S = 5.0
EXPECTED = {
    "raises": "ConnectionError",
    "hangs": "TimeoutError",
    "late": "TimeoutError",
    "dies": "ProcessDied",
}
GARBAGE = {
    "reset": "TypeError",
    "step": "EnvError",
    "reward": "RewardError",
    "generate": "BackendContractError",
    "close": "",
}
RELEASE = threading.Event()
"""Lets go of what hangs in threads, when all has been counted."""


class Broken:
    """What both kinds of world do wrong, by the task's id: `await.fault.number`."""

    opened = 0
    closed = 0

    def begin(self, task: tw.Task) -> None:
        type(self).opened += 1
        self.at, self.fault = task.id.split(".")[:2]
        self.late = task.info["late"]
        self.left = 4

    def wrong(self, at: str) -> str:
        if at != self.at or (at == "step" and self.left != 2):
            return ""
        if self.fault == "raises":
            raise ConnectionError("reset by peer")
        if self.fault == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        return self.fault

    def answer(self, fault: str) -> Any:
        self.left -= 1
        return (
            5
            if fault == "garbage"
            else tw.Step(f"{self.left} left", reward=0.25, terminated=self.left == 0)
        )

    def shut(self) -> None:
        type(self).closed += 1


def block(fault: str, late: float) -> None:
    """Hang, or come back too late."""
    if fault == "hangs":
        RELEASE.wait()
    if fault == "late":
        time.sleep(late)


class Sync(Broken, tw.Env):
    """Blocks."""

    def reset(self, task, *, seed=None):
        self.begin(task)
        block(fault := self.wrong("reset"), self.late)
        return 5 if fault == "garbage" else "Go."

    def step(self, action):
        block(fault := self.wrong("step"), self.late)
        return self.answer(fault)

    def reward(self, trajectory):
        block(fault := self.wrong("reward"), self.late)
        return "much" if fault == "garbage" else 1.0

    def close(self):
        self.shut()
        block(fault := self.wrong("close"), self.late)
        return 5 if fault == "garbage" else None


async def wait(fault: str, late: float) -> None:
    """Hang, or come back too late."""
    if fault in ("hangs", "late"):
        await asyncio.sleep(3600 if fault == "hangs" else late)


class Async(Broken, tw.Env):
    """Awaits."""

    async def reset(self, task, *, seed=None):
        self.begin(task)
        await wait(fault := self.wrong("reset"), self.late)
        return 5 if fault == "garbage" else "Go."

    async def step(self, action):
        await wait(fault := self.wrong("step"), self.late)
        return self.answer(fault)

    async def reward(self, trajectory):
        await wait(fault := self.wrong("reward"), self.late)
        return "much" if fault == "garbage" else 1.0

    async def close(self):
        self.shut()
        await wait(fault := self.wrong("close"), self.late)
        return 5 if fault == "garbage" else None


class Engine:
    """Answers by the request's seed; breaks in the second call where the task says so."""

    context = None
    version = 0

    async def generate(self, request: tw.Request) -> Generation:
        at, fault = request.session.split("/")[2].split(".")[:2]
        if at == "generate" and request.call == 1:
            if fault == "raises":
                raise ConnectionError("refused")
            if fault == "garbage":
                return Generation([65, 66], [-1.0], "length", 0)
            await asyncio.sleep(3600)
        await asyncio.sleep(0)
        ids = [97 + request.seed % 26, 97 + request.seed // 26 % 26, min(request.stop_ids)]
        return Generation(ids, [-0.5, -0.25, -0.125], "stop", 0)

    def release(self, session: str) -> None: ...

    async def close(self) -> None: ...


def tasks_of(mode: str, count: int) -> list[tw.Task]:
    """Every fault at every await in turn, and as many tasks without."""
    cases = [
        (at, fault) for at in AWAITS for fault in FAULTS
        if (fault != "dies" or (at != "generate" if mode == "process" else (mode, at) == ("scorer", "reward")))  # noqa: E501
        and (at, fault) != ("generate", "late")
    ]  # fmt: skip
    late = DEADLINE_S[mode] + 0.5
    names = [".".join(cases[i // 2 % len(cases)]) if i % 2 else "none.none" for i in range(count)]
    return [
        tw.Task("go", id=f"{name}.{number}", info={"late": late})
        for number, name in enumerate(names)
    ]


def ids_of(trajectory: tw.Trajectory) -> list[Any]:
    """All that was sampled and seen."""
    return [
        (span.origin, span.ids, span.logprobs, span.parent, span.start) for span in trajectory.spans
    ]


def state() -> dict[str, set[Any]]:
    """Processes below this one, descriptors, threads, temporary directories."""
    kids = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid():
                kids.add(entry.name)
        except OSError:
            continue
    folders = set(Path(tempfile.gettempdir()).glob("turnwright-env-*"))
    fds = set(os.listdir("/proc/self/fd"))
    return {
        "processes": kids,
        "descriptors": fds,
        "threads": set(threading.enumerate()),
        "directories": folders,
    }


def named(trajectory: tw.Trajectory, at: str, fault: str) -> bool:
    """Whether the record of an episode names the fault that was injected into it."""
    error = trajectory.error
    expected = GARBAGE[at] if fault == "garbage" else EXPECTED[fault]
    if (at, fault) == ("generate", "raises"):
        expected = "EngineError"
    if not expected or error is None:
        return not expected and error is None
    rewarded = (trajectory.reward is not None) == (at == "close")
    return rewarded and (error.type, error.phase) == (expected, at)


async def play(
    mode: str, tasks: Sequence[tw.Task]
) -> tuple[dict[str, tw.Trajectory], Rollout, float, type]:
    """Play tasks in a kind of world, all at once."""
    world = Async if mode in ("async", "scorer") else Sync
    world.opened = world.closed = 0
    seconds = DEADLINE_S[mode]
    limits = tw.Limits(env_s=seconds, reward_s=seconds, generate_s=seconds)
    rollout = Rollout(
        Engine(), tw.byte_renderer(), RolloutSettings(limits=limits, concurrency=len(tasks))
    )
    rules = tw.EnvRules(
        isolation="process" if mode == "process" else "thread",
        reward_isolation="process" if mode == "scorer" else "thread",
    )
    began = time.monotonic()
    played = await rollout.play(
        make_episode_specs(world, tasks, phase="faults", step=0, rules=rules)
    )
    taken = time.monotonic() - began
    return dict(zip([task.id for task in tasks], played, strict=True)), rollout, taken, world


def run(mode: str, count: int = 256) -> dict[str, Any]:
    """One kind of world; the figures, and a row for each await and fault."""
    before = state()
    tasks = tasks_of(mode, count)
    RELEASE.clear()
    played, rollout, seconds, world = asyncio.run(play(mode, tasks))
    opened, closed = world.opened, world.closed
    late = (
        sum(t.id.split(".")[1] == "late" and t.id.split(".")[0] != "generate" for t in tasks)
        if mode == "thread"
        else 0
    )
    end = time.monotonic() + 3.0  # those that come back late do so, and their threads end
    hung = (
        sum(t.id.split(".")[1] == "hangs" and t.id.split(".")[0] != "generate" for t in tasks)
        if mode == "thread"
        else 0
    )
    while len(state()["threads"] - before["threads"]) > hung and time.monotonic() < end:
        time.sleep(0.01)
    left = {name: len(found - before[name]) for name, found in state().items()}
    RELEASE.set()
    fine = [task for task in tasks if task.id.startswith("none.")]
    alone, *_ = asyncio.run(play(mode, fine))
    table: dict[str, Counter[str]] = {}
    for task in tasks:
        at, fault, _ = task.id.split(".")
        row = table.setdefault(f"{at} {fault}", Counter())
        trajectory = played[task.id]
        row["episodes"] += 1
        if at == "none":
            row["trained"] += trajectory.reward == 2.0 and trajectory.error is None
            row["ids equal"] += ids_of(trajectory) == ids_of(alone[task.id])
        else:
            row["trained"] += trajectory.reward is not None
            row["named"] += named(trajectory, at, fault)
    return {
        "mode": mode,
        "episodes": count,
        "seconds": round(seconds, 2),
        "bound_s": 2 * DEADLINE_S[mode] + GRACE_S,
        "opened": opened,
        "closed": closed,
        "abandoned": rollout.abandoned,
        "abandoned_expected": hung + late,
        "left": left,
        "threads_expected": hung,
        "table": {name: dict(row) for name, row in table.items()},
    }


def wrong(found: dict[str, Any]) -> list[str]:
    """What a run does not hold to."""
    mistakes = []
    for name, row in found["table"].items():
        good = row["episodes"] == (row.get("ids equal") if name == "none none" else row["named"])
        if not good or (name == "none none" and row["trained"] != row["episodes"]):
            mistakes.append(f"{found['mode']}: {name}: {row}")
    if sum(row["episodes"] for row in found["table"].values()) != found["episodes"]:
        mistakes.append("the counts do not add up")
    if found["seconds"] > found["bound_s"]:
        mistakes.append(f"{found['seconds']} s is over deadline and grace, {found['bound_s']} s")
    if found["opened"] != found["closed"] or found["abandoned"] != found["abandoned_expected"]:
        mistakes.append(
            f"{found['opened']} opened, {found['closed']} closed, {found['abandoned']} abandoned"
        )
    if (
        found["left"] | {"threads": 0} != dict.fromkeys(found["left"], 0)
        or found["left"]["threads"] != found["threads_expected"]
    ):
        mistakes.append(f"left behind: {found['left']}")
    return mistakes


def main() -> int:
    """Print the tables."""
    results = [run(mode) for mode in DEADLINE_S]
    for found in results:
        print(
            f"\n{found['mode']}: {found['episodes']} episodes at once in {found['seconds']} s "
            f"(bound {found['bound_s']} s)"
        )
        print(
            f"{'await':<10}{'fault':<10}{'episodes':>9}{'trained':>9}{'named':>7}{'ids equal':>11}"
        )
        for name, row in found["table"].items():
            cells = "".join(
                f"{row.get(key, '-'):>{width}}"
                for key, width in (("episodes", 9), ("trained", 9), ("named", 7))
            )
            print(
                f"{name.split()[0]:<10}{name.split()[1]:<10}{cells}{row.get('ids equal', '-'):>11}"
            )
        print(
            f"abandoned threads {found['abandoned']} (injected {found['abandoned_expected']}); "
            f"left: {found['left']}"
        )
    mistakes = [text for found in results for text in wrong(found)]
    print(
        *(mistakes or ["every fault is named, every environment closed, nothing else touched"]),
        sep="\n",
    )
    print(
        json.dumps(
            {found["mode"]: {k: v for k, v in found.items() if k != "table"} for found in results}
            | {"wrong": mistakes}
        )
    )
    return 1 if mistakes else 0


if __name__ == "__main__":
    sys.exit(main())
