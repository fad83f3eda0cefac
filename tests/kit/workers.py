"""Runs and workers in processes of their own, which join over real sockets and are killed by -9."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kit.forks import Forked

ENVIRONMENT = '''\
"""Three turns with rewards of any reply; every step takes a moment, so that a kill meets turns."""

import os
import time

import turnwright as tw


class World(tw.Env):
    max_turns = 4

    def __init__(self, pause: float = 0.0, effects: str = "", hold: str = "") -> None:
        self.pause, self.effects, self.hold, self.at = pause, effects, hold, 0

    def tasks(self, split, n, seed):
        return [tw.Task(f"say {split} {i}", id=f"{split}-{i}", info={"digits": (i, i + 1)}) for i in range(n or 8)]

    def reset(self, task, *, seed=None):
        self.task, self.seed = task, seed
        assert isinstance(task.info["digits"], tuple)
        return task.messages

    def step(self, action):
        time.sleep(self.pause)
        while self.hold and os.path.exists(self.hold):
            time.sleep(0.05)
        self.at += 1
        if self.effects:
            with open(self.effects, "a") as file:
                file.write(f"{time.time()} {os.getpid()} {self.task.id}/{self.seed}/{self.at}\\n")
        reward = sum(map(ord, action.text)) % 7 / 7  # every group has different rewards
        return tw.Step(f"turn {self.at}", reward=reward, terminated=self.at >= 3)

    def snapshot(self):
        return {"at": self.at}

    def restore(self, state):
        self.at = state["at"]
'''  # noqa: E501

RECIPE = """\
[model]
hidden = 32
layers = 1
[[env]]
use = "world.py:World"
[env.args]
pause = {pause}
[limits]
turns = 4
turn_tokens = 8
on_turn_length = "continue"
[rollout]
groups = 3
group_size = 2
[train]
steps = {steps}
[eval]
tasks = 4
greedy = false
[checkpoint]
every = 1
"""


def write_recipe(folder: Path, *, pause: float = 0.0, steps: int = 2, more: str = "") -> Path:
    """Write the environment and a recipe of it; return the recipe's path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "world.py").write_text(ENVIRONMENT)
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.format(pause=pause, steps=steps) + more)
    return recipe


def start(*words: Any, log: Path, **variables: str) -> Forked:
    """Start a command, with output to a file."""
    command = [sys.executable, "-m", "turnwright.cli.main", *map(str, words)]
    with log.open("ab") as file:
        return Forked(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
            stdout=file,
            stderr=file,
        )


def kill(process: Forked) -> None:
    """Kill a process by -9."""
    process.kill()
    process.wait()


def finished(process: Forked, log: Path) -> None:
    """Wait for a process to succeed."""
    assert process.wait(120) == 0, log.read_text()


def free_port() -> int:
    """Return a port that nothing listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(holds: Callable[[], Any], seconds: float = 60.0, why: Callable[[], str] = str) -> Any:
    """Wait until something holds, and return it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := holds():
            return found
        time.sleep(0.02)
    raise AssertionError(f"it did not come to hold in {seconds:g} s: {why()}")


def events(run: Path, *kinds: str) -> list[dict[str, Any]]:
    """Return the complete events of a journal, of some kinds if any are given."""
    path = run / "journal.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [event for event in map(json.loads, lines) if not kinds or event["e"] in kinds]


def final_weights(run: Path) -> bytes:
    """Return the weights of the last checkpoint."""
    return max((run / "checkpoints").glob("step-*")).joinpath("model.safetensors").read_bytes()


@contextmanager
def processes() -> Iterator[list[Forked]]:
    """Kill the processes in the list at the end."""
    started: list[Forked] = []
    try:
        yield started
    finally:
        for process in started:
            kill(process)
