"""Check an environment without a model, before training with it.

`check_env` plays its tasks with scripted players; `_check` has the checks in order, each a function
that returns findings. What a recipe's settings need is checked in `training/self_checks.py`.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from turnwright.config import Limits
from turnwright.envs.env import ChecksRow, Env
from turnwright.envs.isolation.forking import open_resources
from turnwright.envs.likely_names import likely_name
from turnwright.envs.scripted_play import (
    CallHangs,
    ScriptedEpisode,
    ScriptedRunner,
    Speak,
    call_within,
    run,
)
from turnwright.envs.spec import EnvSpec
from turnwright.envs.tasks import check_disjoint, content_key
from turnwright.envs.tool_env import NO_REWARD, ToolEnv, ToolEnvFactory
from turnwright.envs.user_code import user_location
from turnwright.errors import ConfigError, EnvError, UsageError
from turnwright.types import Task

T = TypeVar("T")

MISTAKES = (
    "",
    "?",
    "x" * 10_000,
    '<tool_call>{"name": "',
    '<tool_call>{"name": "nothing", "arguments": {}}</tool_call>',
    "\ud800",
)
"""Replies of an untrained model; an environment must respond to each without raising."""

_LEAK_EPISODES = 4
"""Episodes played before leaked resources are counted."""

_TASKS = 200
"""Tasks per split compared with each other."""

_MANY = 4000
"""Training tasks that a run of the recipe of `turnwright init` asks for."""

MANY_HANG = (
    "A run asks for a task for each group of each step and for each demonstration. Where there "
    "are fewer different ones, return fewer: a loop that waits for more never ends."
)

CALL_S = Limits().env_s
"""Seconds that a call of the environment may take."""


@dataclass(frozen=True, slots=True)
class EnvFinding:
    """Result of one check."""

    severity: Literal["ok", "note", "warning", "error"]
    message: str
    remedy: str = ""

    @property
    def ok(self) -> bool | None:
        """True for a passed check, False for an error, None for a note or warning."""
        return {"ok": True, "error": False}.get(self.severity)

    @property
    def text(self) -> str:
        """The finding as one line."""
        text = f"warning: {self.message}" if self.severity == "warning" else self.message
        return f"{text} {self.remedy}" if self.remedy else text


_ok = partial(EnvFinding, "ok")
_note = partial(EnvFinding, "note")
_warning = partial(EnvFinding, "warning")
_error = partial(EnvFinding, "error")


def check_env(spec: EnvSpec, *, n: int = 16, seed: int = 0, made: int = _TASKS) -> list[EnvFinding]:
    """Play `n` of `made` tasks per split with scripted players and report faults; never raises for
    one of the environment.

    Example::

        >>> from turnwright.envs.resolve import resolve_env
        >>> for finding in check_env(resolve_env("calculator"), n=4, made=20):
        ...     print(finding.text)
        20 training and 20 held-out tasks have nothing in common.
        1 tool schema is valid: calculator.
        6 invalid replies are handled, none rewarded.
        Two concurrent episodes do not affect each other.
        The solver has the reward 1 on 8 tasks, in 2.0 turns on average.
    """
    findings: list[EnvFinding] = []
    try:
        run(_check(spec, n, seed, made, findings))
    except CallHangs as error:  # the next checks would wait for the same
        findings.append(_finding_of(error))
    return list(dict.fromkeys(findings))


def check_first_row(spec: EnvSpec) -> None:
    """Read the first training task, and make its environment where that alone shows whether it can
    be used.

    Raises:
        TaskError: for a row that is no task.
        ConfigError: for an environment that cannot be made.
    """
    first_tasks = spec.tasks("train", 1)
    if not isinstance(spec.factory, ChecksRow):
        return
    for task in first_tasks:
        try:
            spec.factory.check_row(task)
        except EnvError as error:
            raise ConfigError(f"{spec.name}, task {task.id}: {error}") from error
        except Exception as error:
            raise ConfigError(
                f"{spec.name}, task {task.id}: raised {_describe_error(error)}"
            ) from error


async def _check(spec: EnvSpec, n: int, seed: int, made: int, findings: list[EnvFinding]) -> None:
    """Append the findings of all checks; raise `CallHangs` where a call of the environment does."""
    tasks = await _check_tasks(spec, n, seed, made, findings)
    if spec.factory is None:
        message = f"{spec.name} is a play function; only its tasks are checked."
        findings.append(_note(message, "Play it with a ScriptedEngine."))
        return
    if not tasks:
        return

    if isinstance(spec.factory, ToolEnvFactory) and spec.factory.needs_rewards_of_calls:
        findings.append(_warning(f"It is {NO_REWARD}."))
    contents = [content_key(task) for task in tasks]
    findings += await _check_factory(spec)
    findings += await _check_opening(spec, tasks)
    findings += await _check_mistakes(spec, tasks)

    # After an error, the other checks would repeat it.
    if not any(finding.severity == "error" for finding in findings):
        findings += await _check_release(spec, tasks)
        findings += await _check_isolation(spec, tasks, seed)
        findings += await _check_gold(spec, tasks, seed)

    if contents != [content_key(task) for task in tasks]:
        message = "Playing changes the task, which all episodes of its group share."
        findings.append(_error(message, "Copy what you change."))


async def _check_tasks(
    spec: EnvSpec, n: int, seed: int, made: int, findings: list[EnvFinding]
) -> list[Task]:
    """Check that both splits can be read and have nothing in common; return the first tasks of
    each."""
    tasks: dict[str, list[Task]] = {}
    for split in ("train", "eval"):
        size = made
        try:
            tasks[split] = await call_within(CALL_S, spec.tasks, split, size, seed)
            if split == "train":  # as many as a run asks for
                size = max(made, _MANY)
                await call_within(CALL_S, spec.tasks, split, size, seed)
        except CallHangs:
            message = f"tasks({split!r}, {size}, {seed}) did not return within {CALL_S:g} s."
            findings.append(_error(message, MANY_HANG))
            return []
        except UsageError as error:
            findings.append(_error(f"Cannot load the {split} tasks: {error}."))
        except Exception as error:
            message = f"tasks({split!r}, {size}, {seed}) raised {_describe_error(error)}."
            findings.append(_error(message))
    if len(tasks) < 2:
        return tasks.get("train", [])[:n]

    train = tasks["train"]
    held_out = tasks["eval"]
    repeated_id = _repeated_id(train)
    if not repeated_id:
        repeated_id = _repeated_id(held_out)
    if repeated_id is not None:
        message = f"The task id {repeated_id} is given twice in a split."
        findings.append(_error(message, "Yield each task once."))

    try:
        check_disjoint(train, held_out)
    except UsageError as error:
        findings.append(_error(f"Training and held-out tasks overlap: {error}."))
    else:
        if held_out:
            counts = f"{len(train)} training and {len(held_out)} held-out tasks"
            findings.append(_ok(f"{counts} have nothing in common."))
        else:
            remedy = "Give at least 5 tasks, or eval tasks of their own."
            findings.append(_warning("There are no held-out tasks.", remedy))
    return train[:n] + held_out[:n]


def _repeated_id(tasks: Sequence[Task]) -> str | None:
    """Return the first id that a second task has too; None where each has its own."""
    seen: set[str] = set()
    for task in tasks:
        if task.id in seen:
            return task.id
        seen.add(task.id)
    return None


async def _check_factory(spec: EnvSpec) -> list[EnvFinding]:
    """Check that the factory makes new environments, which can be closed without a reset."""
    first = _make(spec)
    second = _make(spec)
    if first is second:
        message = "The factory gives the same environment twice."
        return [_error(message, "Make a new one per call: an episode must own its state.")]

    for env in (first, second):
        try:
            await call_within(CALL_S, env.close)
        except CallHangs:
            raise
        except Exception as error:
            message = (
                f"close raised {_describe_error(error)} on an environment that was never reset."
            )
            remedy = "It is always called, also after a failed reset: close what is open."
            return [_warning(message, remedy)]
    return []


async def _check_opening(spec: EnvSpec, tasks: Sequence[Task]) -> list[EnvFinding]:
    """Check the opening messages and the tools of the first task."""
    task = tasks[0]
    runner = ScriptedRunner(_make(spec), task, _silent, random.Random(0), call_s=CALL_S)
    opened = await _attempt(runner.open(), f"task {task.id}")
    closed = await _attempt(runner.close(), f"task {task.id}")
    if isinstance(opened, EnvFinding):
        return [opened]
    findings = []
    if isinstance(closed, EnvFinding):
        findings.append(closed)

    tools = runner.played.tools
    names = [_name(tool) for tool in tools]
    problems = [problem for tool in tools for problem in _schema_problems(tool)]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            problems.append(f"two tools are called {name!r}")
    for problem in problems:
        message = f"A tool schema is wrong: {problem}."
        findings.append(_error(message, "See OpenAI's function calling."))
    if names and not problems:
        are_valid = "schemas are" if len(names) > 1 else "schema is"
        findings.append(_ok(f"{len(names)} tool {are_valid} valid: {', '.join(names)}."))
    return findings


async def _check_release(spec: EnvSpec, tasks: Sequence[Task]) -> list[EnvFinding]:
    """Check that stateful tools are released and that episodes leak no resources."""
    env = _make(spec)
    instances = env.instances if isinstance(env, ToolEnv) else []
    task = tasks[0]
    runner = ScriptedRunner(env, task, _silent, random.Random(0), call_s=CALL_S)
    opened = await _attempt(runner.open(), f"task {task.id}")
    names = [instance.name for instance in instances]
    for _ in range(2):  # closing again must not release again
        closed = await _attempt(runner.close(), f"task {task.id}")
        if isinstance(closed, EnvFinding):
            return [closed]
    if isinstance(opened, EnvFinding):
        return [opened]

    # Resources that are opened once exist by now; what each episode opens must be closed.
    resources_before = open_resources()
    for number in range(_LEAK_EPISODES):
        task = tasks[number % len(tasks)]
        played = await _play(spec, task, partial(_always, "?"), "the reply '?'", turns=1)
        if isinstance(played, EnvFinding):
            return [played]
    leaks = []
    for name, count in open_resources().items():
        leaked = count - resources_before.get(name, count)
        if leaked >= _LEAK_EPISODES:
            leaks.append(f"{leaked} {name}")

    if leaks:
        message = f"{_LEAK_EPISODES} episodes leak {' and '.join(leaks)}."
        return [_warning(message, "Release them in close, or in a tool's release.")]
    if names:
        return [_ok(f"Stateful tools are created and released: {', '.join(names)}.")]
    return []


def _name(tool: Any) -> str:
    """Return the name that a tool's schema gives it; `?` without one."""
    body = tool.get("function") if isinstance(tool, Mapping) else None
    return str(body.get("name")) if isinstance(body, Mapping) else "?"


def _schema_problems(tool: Any) -> Iterator[str]:
    """Yield what is wrong with a tool's schema."""
    try:
        json.dumps(tool)
    except (TypeError, ValueError) as error:
        yield f"it is not JSON ({error})"
        return
    body = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(body, Mapping) or tool.get("type") != "function":
        yield f'{tool!r:.60} is not {{"type": "function", "function": {{...}}}}'
        return
    name = body.get("name")
    if not isinstance(name, str) or not name:
        yield "its function has no name"
        return

    parameters = body.get("parameters", {"type": "object", "properties": {}})
    if not isinstance(parameters, Mapping) or parameters.get("type") != "object":
        yield f"the parameters of {name!r} are not of type object"
        return
    properties = parameters.get("properties", {})
    has_schemas = isinstance(properties, Mapping) and all(
        isinstance(schema, Mapping) for schema in properties.values()
    )
    if not has_schemas:
        yield f"the properties of {name!r} are not schemas"
        return
    for key in parameters.get("required", ()):
        if key not in properties:
            yield f"{name!r} requires {key!r}, which is no property"


def _always(reply: str, messages: object, rng: object) -> str:
    """Reply the same, whatever was asked."""
    return reply


_silent: Speak = partial(_always, "")


async def _check_mistakes(spec: EnvSpec, tasks: Sequence[Task]) -> list[EnvFinding]:
    """Check that replies of an untrained model are handled and not rewarded."""
    findings: dict[str, EnvFinding] = {}
    replies_by_fault = Counter[str]()
    for number, reply in enumerate(MISTAKES):
        task = tasks[number % len(tasks)]
        shown = repr(reply if len(reply) < 40 else reply[:20] + "...")
        played = await _play(spec, task, partial(_always, reply), f"the reply {shown}", turns=3)
        if isinstance(played, EnvFinding):
            fault = _fault(played.message)
            findings.setdefault(fault, played)
            replies_by_fault[fault] += 1
            continue
        reward = played.trajectory.reward
        if reward is not None and reward >= 1.0 and reply != str(task.answer):
            message = f"The reply {shown} has the reward {reward}."
            findings[reply] = _warning(message, "Check whether the reward is too easy to obtain.")

    for fault, count in replies_by_fault.items():
        if count > 1:
            finding = findings[fault]
            message = f"{finding.message} So do {count - 1} other replies."
            findings[fault] = replace(finding, message=message)
    if findings:
        return list(findings.values())
    return [_ok(f"{len(MISTAKES)} invalid replies are handled, none rewarded.")]


def _fault(message: str) -> str:
    """Return what messages about one fault have in common: an exception and its place, whatever its
    text quotes of a reply."""
    raised = re.search(r"raised (\w+).* \(([^()]+:\d+)\) on ", message, re.DOTALL)
    if raised:
        return f"{raised[1]} at {raised[2]}"
    return re.split(r"[ (]on ", message)[0]


async def _check_isolation(spec: EnvSpec, tasks: Sequence[Task], seed: int) -> list[EnvFinding]:
    """Check that concurrent episodes equal sequential ones, and that playing changes neither task
    nor class."""
    first = tasks[0]
    second = tasks[1 % len(tasks)]
    player = spec.solver or spec.demonstrator or partial(_always, "?")
    state_before = _class_state(_make(spec))
    alone: list[list[Any]] = []
    for task in (first, second, first, second):
        played = await _play(
            spec, task, player, f"task {task.id}", seed=seed, turns=_max_turns(spec)
        )
        if isinstance(played, EnvFinding):
            return [played]
        alone.append(_history(played))

    findings: list[EnvFinding] = []
    if alone[:2] != alone[2:]:
        message = "The same task, seed and replies give different results when played again."
        remedy = "Draw from random.Random(seed) with reset's seed; keep no state between episodes."
        findings.append(_warning(message, remedy))
    elif await _interleaved(spec, (first, second), player, seed) != alone[:2]:
        message = "Two concurrent episodes differ from each alone: they share state."
        remedy = "Keep state on self, set in reset; not on the class or the module."
        findings.append(_error(message, remedy))

    state_after = _class_state(_make(spec))
    changed = [name for name, value in state_after.items() if state_before.get(name) != value]
    if changed:
        message = (
            f"Playing changes the class attribute {', '.join(changed)}, which all episodes share."
        )
        findings.append(_error(message, "Set it on self in reset."))
    return findings or [_ok("Two concurrent episodes do not affect each other.")]


def _class_state(env: Env) -> dict[str, str]:
    """Return the repr of each class attribute of an environment that is not a function."""
    descriptors = (staticmethod, classmethod, property)
    state: dict[str, str] = {}
    for owner in type(env).__mro__[:-1]:
        if owner.__module__ == Env.__module__:
            continue
        for name, value in vars(owner).items():
            is_data = not callable(value) and not isinstance(value, descriptors)
            if is_data and not name.startswith(("__", "_abc_")):
                state.setdefault(name, repr(value))
    return state


async def _interleaved(
    spec: EnvSpec, tasks: Sequence[Task], player: Speak, seed: int
) -> list[list[Any]] | None:
    """Play tasks turn by turn at the same time, and return their histories; None where that
    raises."""
    runners = []
    for task in tasks:
        runner = ScriptedRunner(
            _make(spec),
            task,
            player,
            random.Random(seed),
            turns=_max_turns(spec),
            seed=seed,
            call_s=CALL_S,
        )
        runners.append(runner)
    try:
        for runner in runners:
            await runner.open()
        unfinished = list(runners)
        while unfinished:
            unfinished = [runner for runner in unfinished if await runner.turn()]
        return [_history(await runner.finish()) for runner in runners]
    except Exception:  # it succeeded when played alone
        return None
    finally:
        for runner in runners:
            await runner.close()


def _history(played: ScriptedEpisode) -> list[Any]:
    """Return what an episode did, to compare it with another."""
    trajectory = played.trajectory
    turns = [(turn.messages, turn.reply, turn.reward) for turn in trajectory.turns]
    return [turns, trajectory.reward, trajectory.stop, trajectory.final]


async def _check_gold(spec: EnvSpec, tasks: Sequence[Task], seed: int) -> list[EnvFinding]:
    """Check that the solver, or else the gold answer as the only reply, earns the reward 1."""
    if spec.solver is None and all(task.answer is None for task in tasks):
        remedy = "Give the class a solver(messages, rng) -> str."
        return [_note("It is unknown whether success is possible.", remedy)]

    who = "The solver" if spec.solver is not None else "The gold answer as the only reply"
    replies = 0
    missed: list[str] = []
    for number, task in enumerate(tasks):
        player = spec.solver or partial(_always, str(task.answer))
        played = await _play(
            spec, task, player, f"task {task.id}", seed=seed + number, turns=_max_turns(spec)
        )
        if isinstance(played, EnvFinding):
            return [played]
        replies += len(played.replies)

        reward = played.trajectory.reward
        if reward is None or reward < 1.0 - 1e-9:
            message = (
                f"{who} has the reward {reward} on task {task.id} after {len(played.replies)} "
                f"turns ({played.trajectory.stop}), not 1."
            )
            if spec.solver is None:
                remedy = "If more than the answer is needed, give a solver(messages, rng) -> str."
                return [_warning(message, remedy)]
            missed.append(message)

    if 2 * len(missed) > len(tasks):
        return [_error(missed[0], "Correct the reward or the solver; a reward of 1 is success.")]
    if missed:
        solved = len(tasks) - len(missed)
        message = f"{who} has the reward 1 on {solved} of {len(tasks)} tasks. {missed[0]}"
        remedy = "If chance decides that, training can reach no more; else correct one of the two."
        return [_warning(message, remedy)]
    turns = f"{replies / len(tasks):.1f} turns on average"
    return [_ok(f"{who} has the reward 1 on {len(tasks)} tasks, in {turns}.")]


async def _play(
    spec: EnvSpec, task: Task, player: Speak, on: str, *, seed: int = 0, turns: int = 8
) -> ScriptedEpisode | EnvFinding:
    """Play one episode; return it, or a finding about the exception that ended it."""
    runner = ScriptedRunner(
        _make(spec), task, player, random.Random(seed), turns=turns, seed=seed, call_s=CALL_S
    )
    return await _attempt(runner.play(), on)


async def _attempt(work: Awaitable[T], on: str) -> T | EnvFinding:
    """Return the result, or a finding about the exception; raise `CallHangs`."""
    try:
        return await work
    except EnvError as error:
        error.add_note(f"on {on}")
        if isinstance(error, CallHangs):
            raise
        return _finding_of(error)
    except Exception as error:
        phase = next(iter(getattr(error, "__notes__", [])), "step")
        if phase == "player":
            message = f"The solver raised {_describe_error(error)} on {on}."
            return _error(message, "It receives only the model's messages.")
        remedy = ""
        if phase == "step":
            remedy = (
                "A mistake of the model is an observation: return it, or raise tw.InvalidAction."
            )
        return _error(f"{phase} raised {_describe_error(error)} on {on}.", remedy)


def _finding_of(error: EnvError) -> EnvFinding:
    """Return the finding about an error, on what its note names."""
    message = str(error)
    message = message[:1].upper() + message[1:]
    for note in getattr(error, "__notes__", []):
        if note.startswith("on "):
            return _error(f"{message} ({note}).")
    return _error(f"{message}.")


def _describe_error(error: BaseException) -> str:
    """Describe an exception of user code in one line: what it raised, what was probably meant, and
    where."""
    text = type(error).__name__
    lines = str(error).splitlines()
    if lines:
        text += f": {lines[0][:120]}"
    text += likely_name(error)
    place = user_location(error)
    return f"{text} ({Path(place).name})" if place else text


def _make(spec: EnvSpec) -> Env:
    assert spec.factory is not None
    return spec.factory()


def _max_turns(spec: EnvSpec) -> int:
    return spec.max_turns or 16
