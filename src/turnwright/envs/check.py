"""Check an environment without a model, before training with it."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
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

_LEAK_EPISODES = 4  # episodes played before leaked resources are counted

_TASKS = 200  # tasks per split compared with each other


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
        head = "warning: " if self.severity == "warning" else ""
        return f"{head}{self.message}" + (f" {self.remedy}" if self.remedy else "")


_ok, _note, _warning, _error = (
    partial(EnvFinding, severity) for severity in ("ok", "note", "warning", "error")
)


CALL_S = Limits().env_s
"""Seconds that a call of the environment may take."""


def check_env(spec: EnvSpec, *, n: int = 16, seed: int = 0, made: int = _TASKS) -> list[EnvFinding]:
    """Play `n` of `made` tasks per split with scripted players and report faults; never raises for
    one of the environment."""
    findings: list[EnvFinding] = []
    try:
        run(_check(spec, n, seed, made, findings))
    except CallHangs as error:  # the next checks would wait for the same
        findings.append(_from_env(error))
    return list(dict.fromkeys(findings))


def check_first_row(spec: EnvSpec) -> None:
    """Read the first training task, and make its environment where that alone
    shows whether it can be used.

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
    tasks = await _check_tasks(spec, n, seed, made, findings)
    if spec.factory is None:
        findings.append(
            _note(
                f"{spec.name} is a play function; only its tasks are checked.",
                "Play it with a ScriptedEngine.",
            )
        )
        return
    if not tasks:
        return
    if isinstance(spec.factory, ToolEnvFactory) and spec.factory.needs_rewards_of_calls:
        findings.append(_warning(f"It is {NO_REWARD}."))
    contents = [content_key(task) for task in tasks]
    checks: Sequence[Callable[..., Awaitable[list[EnvFinding]]]] = (
        _check_factory,
        _check_opening,
        _check_mistakes,
    )
    for check in checks:
        findings += await check(spec, tasks)
    if not any(finding.severity == "error" for finding in findings):
        # The next checks would repeat the error.
        findings += await _check_release(spec, tasks)
        findings += await _check_isolation(spec, tasks, seed)
        findings += await _check_gold(spec, tasks, seed)
    if contents != [content_key(task) for task in tasks]:
        findings.append(
            _error(
                "Playing changes the task, which all episodes of its group share.",
                "Copy what you change.",
            )
        )


async def _check_tasks(
    spec: EnvSpec, n: int, seed: int, made: int, findings: list[EnvFinding]
) -> list[Task]:
    sides: dict[str, list[Task]] = {}
    for split in ("train", "eval"):
        asked = made
        try:
            sides[split] = await call_within(CALL_S, spec.tasks, split, asked, seed)
            if split == "train":
                asked = max(made, _MANY)
                await call_within(CALL_S, spec.tasks, split, asked, seed)
        except CallHangs:
            hangs = f"tasks({split!r}, {asked}, {seed}) did not return within {CALL_S:g} s."
            findings.append(_error(hangs, MANY_HANG))
            return []
        except UsageError as error:
            findings.append(_error(f"Cannot load the {split} tasks: {error}."))
        except Exception as error:
            findings.append(
                _error(f"tasks({split!r}, {asked}, {seed}) raised {_describe_error(error)}.")
            )
    if len(sides) < 2:
        return sides.get("train", [])[:n]
    repeated = _repeated(sides["train"]) or _repeated(sides["eval"])
    if repeated is not None:
        findings.append(
            _error(f"The task id {repeated} is given twice in a split.", "Yield each task once.")
        )
    try:
        check_disjoint(sides["train"], sides["eval"])
    except UsageError as error:
        findings.append(_error(f"Training and held-out tasks overlap: {error}."))
    else:
        counts = f"{len(sides['train'])} training and {len(sides['eval'])} held-out tasks"
        none = _warning(
            "There are no held-out tasks.", "Give at least 5 tasks, or eval tasks of their own."
        )
        findings.append(_ok(f"{counts} have nothing in common.") if sides["eval"] else none)
    return sides["train"][:n] + sides["eval"][:n]


MANY_HANG = (
    "A run asks for a task for each group of each step and for each demonstration. Where there "
    "are fewer different ones, return fewer: a loop that waits for more never ends."
)
_MANY = 4000  # training tasks that a run of the recipe of `init` asks for


def _repeated(tasks: Sequence[Task]) -> str | None:
    seen: set[str] = set()
    return next((task.id for task in tasks if task.id in seen or seen.add(task.id)), None)  # type: ignore[func-returns-value]


async def _check_factory(spec: EnvSpec, tasks: Sequence[Task]) -> list[EnvFinding]:
    assert spec.factory is not None
    first, second = spec.factory(), spec.factory()
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
            return [
                _warning(
                    message, "It is always called, also after a failed reset: close what is open."
                )
            ]
    return []


async def _check_opening(spec: EnvSpec, tasks: Sequence[Task]) -> list[EnvFinding]:
    """Check the opening messages and the tools of the first task."""
    env = _make(spec)
    runner = ScriptedRunner(
        env, tasks[0], lambda messages, rng: "", random.Random(0), call_s=CALL_S
    )
    opened = await _attempt(runner.open(), f"task {tasks[0].id}")
    closed = await _attempt(runner.close(), f"task {tasks[0].id}")
    if isinstance(opened, EnvFinding):
        return [opened]
    findings = [closed] if isinstance(closed, EnvFinding) else []
    problems = [problem for tool in runner.played.tools for problem in _schema_problems(tool)]
    names = [_name(tool) for tool in runner.played.tools]
    problems += [
        f"two tools are called {name!r}" for name in dict.fromkeys(names) if names.count(name) > 1
    ]
    findings += [
        _error(f"A tool schema is wrong: {problem}.", "See OpenAI's function calling.")
        for problem in problems
    ]
    if names and not problems:
        findings.append(
            _ok(
                f"{len(names)} tool schema{'s are' if len(names) > 1 else ' is'} valid: "
                f"{', '.join(names)}."
            )
        )
    return findings


async def _check_release(spec: EnvSpec, tasks: Sequence[Task]) -> list[EnvFinding]:
    """Check that stateful tools are released and that episodes leak no resources."""
    env = _make(spec)
    instances = env.instances if isinstance(env, ToolEnv) else []
    runner = ScriptedRunner(
        env, tasks[0], lambda messages, rng: "", random.Random(0), call_s=CALL_S
    )
    opened = await _attempt(runner.open(), f"task {tasks[0].id}")
    names = [instance.name for instance in instances]
    for _ in range(2):  # closing again must not release again
        closed = await _attempt(runner.close(), f"task {tasks[0].id}")
        if isinstance(closed, EnvFinding):
            return [closed]
    if isinstance(opened, EnvFinding):
        return [opened]
    before = open_resources()  # one-time resources exist by now
    for number in range(_LEAK_EPISODES):
        played = await _play(
            spec, tasks[number % len(tasks)], lambda messages, rng: "?", "the reply '?'", turns=1
        )
        if isinstance(played, EnvFinding):
            return [played]
    grown = {key: after - before.get(key, after) for key, after in open_resources().items()}
    left = [f"{count} {key}" for key, count in grown.items() if count >= _LEAK_EPISODES]
    if left:
        message = f"{_LEAK_EPISODES} episodes leak {' and '.join(left)}."
        return [_warning(message, "Release them in close, or in a tool's release.")]
    return [_ok(f"Stateful tools are created and released: {', '.join(names)}.")] if names else []


def _name(tool: Any) -> str:
    body = tool.get("function") if isinstance(tool, Mapping) else None
    return str(body.get("name")) if isinstance(body, Mapping) else "?"


def _schema_problems(tool: Any) -> Iterator[str]:
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
    if not isinstance(properties, Mapping) or not all(
        isinstance(schema, Mapping) for schema in properties.values()
    ):
        yield f"the properties of {name!r} are not schemas"
        return
    for key in parameters.get("required", ()):
        if key not in properties:
            yield f"{name!r} requires {key!r}, which is no property"


def _always(reply: str, messages: object, rng: object) -> str:
    """Reply the same, whatever was asked."""
    return reply


async def _check_mistakes(spec: EnvSpec, tasks: Sequence[Task]) -> list[EnvFinding]:
    """Check that replies of an untrained model are handled and not rewarded."""
    findings: dict[str, EnvFinding] = {}
    times = Counter[str]()
    for number, reply in enumerate(MISTAKES):
        task = tasks[number % len(tasks)]
        text = repr(reply if len(reply) < 40 else reply[:20] + "...")
        played = await _play(spec, task, partial(_always, reply), f"the reply {text}", turns=3)
        if isinstance(played, EnvFinding):
            fault = _fault(played.message)
            findings.setdefault(fault, played)
            times[fault] += 1
        elif (played.trajectory.reward or 0.0) >= 1.0 and reply != str(task.answer):
            message = f"The reply {text} has the reward {played.trajectory.reward}."
            findings[reply] = _warning(message, "Check whether the reward is too easy to obtain.")
    for fault, count in times.items():
        if count > 1:
            found = findings[fault]
            findings[fault] = replace(
                found, message=f"{found.message} So do {count - 1} other replies."
            )
    return list(findings.values()) or [
        _ok(f"{len(MISTAKES)} invalid replies are handled, none rewarded.")
    ]


def _fault(message: str) -> str:
    """Return what messages about one fault have in common: an exception and its place, whatever its
    text quotes of a reply."""
    raised = re.search(r"raised (\w+).* \(([^()]+:\d+)\) on ", message, re.DOTALL)
    return f"{raised[1]} at {raised[2]}" if raised else re.split(r"[ (]on ", message)[0]


async def _check_isolation(spec: EnvSpec, tasks: Sequence[Task], seed: int) -> list[EnvFinding]:
    """Check that concurrent episodes equal sequential ones, and that playing changes
    neither task nor class."""
    first, second = tasks[0], tasks[1 % len(tasks)]
    player = spec.solver or spec.demonstrator or (lambda messages, rng: "?")
    before = _class_state(_make(spec))
    alone: list[list[Any]] = []
    for task in (first, second, first, second):
        played = await _play(spec, task, player, f"task {task.id}", seed=seed, turns=_turns(spec))
        if isinstance(played, EnvFinding):
            return [played]
        alone.append(_history(played))
    findings: list[EnvFinding] = []
    if alone[:2] != alone[2:]:
        message = "The same task, seed and replies give different results when played again."
        findings.append(
            _warning(
                message,
                "Draw from random.Random(seed) with reset's seed; keep no state between episodes.",
            )
        )
    elif await _interleaved(spec, (first, second), player, seed) != alone[:2]:
        message = "Two concurrent episodes differ from each alone: they share state."
        findings.append(
            _error(message, "Keep state on self, set in reset; not on the class or the module.")
        )
    if changed := [
        key for key, state in _class_state(_make(spec)).items() if before.get(key) != state
    ]:
        message = (
            f"Playing changes the class attribute {', '.join(changed)}, which all episodes share."
        )
        findings.append(_error(message, "Set it on self in reset."))
    return findings or [_ok("Two concurrent episodes do not affect each other.")]


def _class_state(env: Env) -> dict[str, str]:
    """Return the repr of each class attribute of an environment that is not a function."""
    state: dict[str, str] = {}
    for owner in type(env).__mro__[:-1]:
        if owner.__module__ != Env.__module__:
            for key, value in vars(owner).items():
                plain = not callable(value) and not isinstance(
                    value, (staticmethod, classmethod, property)
                )
                if plain and not key.startswith(("__", "_abc_")):
                    state.setdefault(key, repr(value))
    return state


async def _interleaved(
    spec: EnvSpec, tasks: Sequence[Task], player: Speak, seed: int
) -> list[list[Any]] | None:
    runners = [
        ScriptedRunner(
            _make(spec),
            task,
            player,
            random.Random(seed),
            turns=_turns(spec),
            seed=seed,
            call_s=CALL_S,
        )
        for task in tasks
    ]
    try:
        for runner in runners:
            await runner.open()
        going = list(runners)
        while going:
            going = [runner for runner in going if await runner.turn()]
        return [_history(await runner.finish()) for runner in runners]
    except Exception:  # it succeeded when played alone
        return None
    finally:
        for runner in runners:
            await runner.close()


def _history(played: ScriptedEpisode) -> list[Any]:
    turns = [(turn.messages, turn.reply, turn.reward) for turn in played.trajectory.turns]
    return [turns, played.trajectory.reward, played.trajectory.stop, played.trajectory.final]


async def _check_gold(spec: EnvSpec, tasks: Sequence[Task], seed: int) -> list[EnvFinding]:
    """Check that the solver, or else the gold answer as the only reply, earns the reward 1."""
    if spec.solver is None and all(task.answer is None for task in tasks):
        return [
            _note(
                "It is unknown whether success is possible.",
                "Give the class a solver(messages, rng) -> str.",
            )
        ]
    who = "The solver" if spec.solver is not None else "The gold answer as the only reply"
    total, missed = 0, list[str]()
    for number, task in enumerate(tasks):
        answer = str(task.answer)
        player = spec.solver or (lambda messages, rng, answer=answer: answer)  # type: ignore[misc]
        played = await _play(
            spec, task, player, f"task {task.id}", seed=seed + number, turns=_turns(spec)
        )
        if isinstance(played, EnvFinding):
            return [played]
        reward, stop = played.trajectory.reward, played.trajectory.stop
        if reward is None or reward < 1.0 - 1e-9:
            message = (
                f"{who} has the reward {reward} on task {task.id} after {len(played.replies)} "
                f"turns ({stop}), not 1."
            )
            if spec.solver is None:
                return [
                    _warning(
                        message,
                        "If more than the answer is needed, give a solver(messages, rng) -> str.",
                    )
                ]
            missed.append(message)
        total += len(played.replies)
    if 2 * len(missed) > len(tasks):
        return [_error(missed[0], "Correct the reward or the solver; a reward of 1 is success.")]
    if missed:
        message = (
            f"{who} has the reward 1 on {len(tasks) - len(missed)} of {len(tasks)} tasks. "
            f"{missed[0]}"
        )
        return [
            _warning(
                message,
                "If chance decides that, training can reach no more; else correct one of the two.",
            )
        ]
    return [
        _ok(
            f"{who} has the reward 1 on {len(tasks)} tasks, in {total / len(tasks):.1f} turns on "
            "average."
        )
    ]


async def _play(
    spec: EnvSpec, task: Task, player: Speak, on: str, *, seed: int = 0, turns: int = 8
) -> ScriptedEpisode | EnvFinding:
    runner = ScriptedRunner(
        _make(spec), task, player, random.Random(seed), turns=turns, seed=seed, call_s=CALL_S
    )
    return await _attempt(runner.play(), on)


async def _attempt(work: Awaitable[T], on: str) -> T | EnvFinding:
    """Return the result, or a finding about the exception."""
    try:
        return await work
    except EnvError as error:
        error.add_note(f"on {on}")
        if isinstance(error, CallHangs):
            raise
        return _from_env(error)
    except Exception as error:
        phase = next(iter(getattr(error, "__notes__", [])), "step")
        if phase == "player":
            return _error(
                f"The solver raised {_describe_error(error)} on {on}.",
                "It receives only the model's messages.",
            )
        remedy = (
            "A mistake of the model is an observation: return it, or raise tw.InvalidAction."
            if phase == "step"
            else ""
        )
        return _error(f"{phase} raised {_describe_error(error)} on {on}.", remedy)


def _from_env(error: EnvError) -> EnvFinding:
    """Return the finding about an error, on what its note names."""
    on = next(
        (f" ({note})" for note in getattr(error, "__notes__", []) if note.startswith("on ")), ""
    )
    return _error(f"{str(error)[:1].upper()}{str(error)[1:]}{on}.")


def _describe_error(error: BaseException) -> str:
    lines, place = str(error).splitlines(), user_location(error)
    text = f"{type(error).__name__}: {lines[0][:120]}" if lines else type(error).__name__
    text += likely_name(error)
    return f"{text} ({Path(place).name})" if place else text


def _make(spec: EnvSpec) -> Env:
    assert spec.factory is not None
    return spec.factory()


def _turns(spec: EnvSpec) -> int:
    return spec.max_turns or 16
