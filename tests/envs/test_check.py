"""`check_env` finds what is planted, and nothing where nothing is."""

import asyncio
import math
import random
import subprocess
import sys

import pytest

import turnwright as tw
from turnwright.envs import Env, Step, as_env_spec, resolve_env, tool_env
from turnwright.envs.check import check_env
from turnwright.errors import InvalidAction
from turnwright.types import Task


class Count(Env):
    """Say the next number, three times. A sound environment for the faults to be planted in."""

    max_turns = 4

    def reset(self, task, *, seed=None):
        self.at = self.start = task.info["start"]
        return f"count on from {self.at}"

    def step(self, action):
        if action.text.strip() != str(self.at + 1):
            return Step("no")
        self.at += 1
        return Step(str(self.at), float(self.at == self.start + 3), self.at == self.start + 3)

    @staticmethod
    def tasks(split, n, seed):
        return [Task(info={"start": 2 * i + (split == "eval")}) for i in range(n)]

    @staticmethod
    def solver(messages, rng):
        return str(int(messages[-1].text.split()[-1]) + 1)


def faults(env, **kwargs):
    findings = check_env(as_env_spec(env, **kwargs), n=4)
    return [finding for finding in findings if finding.severity in ("error", "warning")]


@pytest.mark.parametrize("name", ["hop", "hop_json"])
def test_the_built_in_worlds_are_sound(name):
    findings = check_env(resolve_env(name))
    assert {finding.severity for finding in findings} == {"ok"}
    assert all(finding.ok for finding in findings)


def test_a_sound_environment_has_no_faults():
    assert faults(Count) == []


def plant(**members):
    return type("Planted", (Count,), members)


def step_of(result):
    return lambda self, action: result() if callable(result) else result


class SharedList(Count):
    heard: list = []  # noqa: RUF012

    def step(self, action):
        self.heard.append(action.text)
        return super().step(action)


class SharedState(Count):
    def reset(self, task, *, seed=None):
        type(self).here = task.info["start"]
        return f"count on from {type(self).here}"

    def step(self, action):
        if action.text.strip() != str(type(self).here + 1):
            return Step("no")
        type(self).here += 1
        return Step(str(type(self).here), 1.0, type(self).here % 10 == 3)


class ChangesTask(Count):
    def step(self, action):
        return super().step(action)

    def reset(self, task, *, seed=None):
        opening = super().reset(task)
        task.info["seen"] = True
        return opening


def raises(error):
    def method(self, *args, **kwargs):
        raise error

    return method


async def never_ends(self, action):
    await asyncio.sleep(0)
    return Step("no")


def strict(self, action):
    if not action.text.strip().isdigit():
        raise InvalidAction("say a whole number")
    return Count.step(self, action)


mute = staticmethod(lambda messages, rng: "?")

PLANTED = [
    (plant(step=step_of(None)), "error", "Step returned None; return tw.Step(...)"),
    (plant(step=step_of(("a", 1.0, True, False))), "error", "return tw.Step(...) or a Gymnasium 5-tuple"),  # noqa: E501
    (plant(step=step_of(Step("a", math.nan))), "error", "A step's reward is nan"),
    (plant(step=step_of(Step("a", math.inf, True))), "error", "A step's reward is inf"),
    (plant(step=step_of(Step("a", "1.0x"))), "error", "A step's reward is '1.0x', not a number"),
    (plant(step=step_of(Step(3.5))), "error", "Step returned what is no message"),
    (plant(step=step_of(Step("a", info=3))), "error", "Step returned the info 3"),
    (plant(step=lambda self, action: Step(str(int(action.text)))), "error", "step raised ValueError"),  # noqa: E501
    (plant(step=step_of(Step("a", 1.0, True))), "warning", "has the reward 1.0"),
    (plant(step=never_ends, solver=mute), "error", "The solver has the reward 0.0 on task"),
    (plant(reward=lambda self, trajectory: math.nan), "error", "The reward is nan"),
    (plant(reward=lambda self, trajectory: None), "error", "The solver has the reward None"),
    (plant(reward=raises(ZeroDivisionError("division by zero"))), "error", "reward raised ZeroDivisionError: division by zero"),  # noqa: E501
    (plant(reset=raises(KeyError("start"))), "error", "reset raised KeyError: 'start'"),
    (plant(reset=lambda self, task, seed=None: None), "error", "Reset returned nothing and the task has no messages"),  # noqa: E501
    (plant(reset=lambda self, task, seed=None: 7), "error", "Reset returned what is no message"),
    (plant(close=raises(OSError("gone"))), "warning", "close raised OSError: gone (test_check.py:98)"),  # noqa: E501
    (plant(solver=staticmethod(lambda messages, rng: "no")), "error", "The solver has the reward 0.0"),  # noqa: E501
    (plant(reward=lambda self, trajectory: -float(int(trajectory.task.id, 16) % 4 == 0)), "warning",
     "The solver has the reward 1 on"),
    (plant(solver=staticmethod(raises(IndexError("list index out of range")))), "error", "The solver raised IndexError"),  # noqa: E501
    (plant(tools=[{"name": "f"}]), "error", 'is not {"type": "function"'),
    (plant(tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]), "error",  # noqa: E501
     "not of type object"),
    (plant(tools=[{"type": "function", "function": {"name": "f"}}] * 2), "error", "two tools are called 'f'"),  # noqa: E501
    (plant(tools=[{"type": "function", "function": {"name": "f", "default": {1}}}]), "error", "it is not JSON"),  # noqa: E501
    (plant(tasks=staticmethod(lambda split, n, seed: [Task(info={"start": i}) for i in range(n)])), "error", "overlap"),  # noqa: E501
    (plant(tasks=staticmethod(lambda split, n, seed: [])), "error", "Cannot load the train tasks"),
    (plant(tasks=staticmethod(lambda split, n, seed: 1 / 0)), "error", "raised ZeroDivisionError"),
    (plant(tasks=None), "error", "Cannot load the train tasks: Planted has no train tasks"),
    (plant(tasks=staticmethod(lambda: [Task(info={"start": 1})])), "warning", "There are no held-out tasks"),  # noqa: E501
    (plant(solver=None, tasks=staticmethod(lambda: [Task("x", str(i), info={"start": i}) for i in range(9)])), "warning",  # noqa: E501
     "The gold answer as the only reply has the reward 0.0"),
    (SharedList, "error", "Playing changes the class attribute heard"),
    (SharedState, "error", "Two concurrent episodes differ from each alone"),
    (ChangesTask, "error", "Playing changes the task"),
    (plant(step=lambda self, action: Step(str(random.random())), solver=mute), "warning",
     "give different results when played again"),
]  # fmt: skip


@pytest.mark.parametrize(("env", "severity", "said"), PLANTED, ids=[said for _, _, said in PLANTED])
def test_a_planted_fault_is_found(env, severity, said):
    found = faults(env)
    assert [
        finding for finding in found if finding.severity == severity and said in finding.message
    ], found
    assert all("\n" not in finding.text for finding in found)
    assert all(finding.ok is (False if finding.severity == "error" else None) for finding in found)


def test_a_mistake_that_is_told_by_an_exception_is_no_fault():
    assert faults(plant(step=strict)) == []


def test_a_factory_that_gives_one_environment_again_and_again():
    only = Count()
    assert "the same environment twice" in faults(lambda: only)[0].message


def test_tools_with_a_gold_answer():
    def shout(word: str) -> str:
        """Shout."""
        return word.upper()

    tasks = [Task(f"Shout {word}", word.upper()) for word in "abcdefghij"]
    sound = tool_env(
        [shout], reward=lambda trajectory: float(trajectory.final_text == trajectory.task.answer)
    )
    assert [finding.severity for finding in check_env(as_env_spec(sound, tasks=tasks))] == [
        "ok"
    ] * 5
    wrong = tool_env([shout], reward=lambda trajectory: float("nan"))
    assert "The reward is nan" in faults(wrong, tasks=tasks)[0].message


def test_a_play_function_is_noted():
    async def play(task, model):
        return 1.0

    findings = check_env(as_env_spec(play, tasks=[Task(str(i)) for i in range(10)]))
    assert [finding.severity for finding in findings] == ["ok", "note"]


def test_a_synchronous_environment_may_run_a_loop_of_its_own():
    def step(self, action):
        return asyncio.run(asyncio.sleep(0, Count.step(self, action)))

    assert faults(plant(step=step)) == []


class Held(tw.StatefulTool):
    """Holds a process and a file; `lets_go` says whether it gives them back."""

    lets_go = True

    def create(self):
        self.process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        KEPT.append(self.process)

    def execute(self, x: int) -> int:
        """Double.

        Args:
            x: a number.
        """
        return 2 * x

    def release(self):
        if self.lets_go:
            self.process.communicate()


class Keeps(Held):
    lets_go = False


class Fails(Held):
    def release(self):
        super().release()
        raise OSError("it is stuck")


KEPT = []


@pytest.mark.parametrize(
    ("kind", "severity", "said"),
    [
        (Held, "ok", "Stateful tools are created and released: held."),
        (Keeps, "warning", "4 episodes leak 4 processes and 4 open files. Release them in close"),
        (Fails, "error", "close raised ToolFailure: fails: release raised OSError: it is stuck"),
    ],
)
def test_tools_that_live_are_held_to_letting_go(kind, severity, said):
    tasks = [tw.Task(f"Task {n}", id=f"t{n}") for n in range(10)]
    env = tw.tool_env(
        [kind],
        reward=lambda t: 0.0,
        tasks=lambda split, n, seed: tasks[:5] if split == "train" else tasks[5:],
    )
    try:
        findings = check_env(as_env_spec(env))
    finally:
        while KEPT:
            process = KEPT.pop()
            process.kill()
            process.communicate()
    assert [f.text for f in findings if f.severity == severity and said in f.text], [
        f.text for f in findings
    ]
