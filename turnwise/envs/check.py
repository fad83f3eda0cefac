"""Whether an environment is fit to train with, found out without a model."""

from __future__ import annotations

import json
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from turnwise.envs.base import Env
from turnwise.envs.isolation.process_env import open_resources
from turnwise.envs.scripted_play import ScriptedEpisode, ScriptedRunner, Speak, call_method, play_scripted, run
from turnwise.envs.spec import EnvSpec
from turnwise.envs.tasks import check_disjoint, content_key
from turnwise.envs.tool_env import ToolEnv
from turnwise.errors import EnvError, UsageError
from turnwise.types import Task

T = TypeVar("T")

MISTAKES = (
    "",
    "?",
    "x" * 10_000,
    '<tool_call>{"name": "',
    '<tool_call>{"name": "nothing", "arguments": {}}</tool_call>',
    "\ud800",
)
"""Replies of a model that knows nothing yet: each must be answered, never raise."""

_EPISODES = 4
"""Episodes after which what they left behind is counted."""

_TASKS = 200
"""Tasks per split that are compared with each other."""


@dataclass(frozen=True, slots=True)
class EnvFinding:
    """One thing that a check found."""

    severity: Literal["ok", "note", "warning", "error"]
    message: str
    remedy: str = ""

    @property
    def ok(self) -> bool | None:
        """True for what is well, False for an error, None for a remark."""
        return {"ok": True, "error": False}.get(self.severity)

    @property
    def text(self) -> str:
        """The finding as one line."""
        head = "warning: " if self.severity == "warning" else ""
        return f"{head}{self.message}" + (f" {self.remedy}" if self.remedy else "")


def check_env(world: EnvSpec, *, n: int = 16, seed: int = 0) -> list[EnvFinding]:
    """Play an environment by hand and say what is wrong with it; never raises for a fault of the environment.

    Args:
        n: tasks per split to play.
    """
    return run(_check(world, n, seed))


async def _check(world: EnvSpec, n: int, seed: int) -> list[EnvFinding]:
    findings: list[EnvFinding] = []
    tasks = _check_tasks(world, n, seed, findings)
    if world.factory is None:
        findings.append(
            EnvFinding(
                "note", f"{world.name} is a play function; only its tasks are checked.", "Play it with a ScriptedEngine."
            )
        )
        return findings
    if not tasks:
        return findings
    contents = [content_key(task) for task in tasks]
    checks: Sequence[Callable[..., Awaitable[list[EnvFinding]]]] = (_check_factory, _check_opening, _check_mistakes)
    for check in checks:
        findings += await check(world, tasks)
    if not any(finding.severity == "error" for finding in findings):  # else what follows would only repeat it
        findings += await _check_lives(world, tasks)
        findings += await _check_isolation(world, tasks, seed)
        findings += await _check_gold(world, tasks, seed)
    if contents != [content_key(task) for task in tasks]:
        findings.append(
            EnvFinding("error", "Playing changes the task, which all episodes of its group share.", "Copy what you change.")
        )
    return list(dict.fromkeys(findings))


def _check_tasks(world: EnvSpec, n: int, seed: int, findings: list[EnvFinding]) -> list[Task]:
    sides: dict[str, list[Task]] = {}
    for split in ("train", "eval"):
        try:
            sides[split] = world.tasks(split, _TASKS, seed)
        except UsageError as error:
            findings.append(EnvFinding("error", f"The {split} tasks cannot be had: {error}."))
        except Exception as error:
            findings.append(EnvFinding("error", f"tasks({split!r}, {_TASKS}, {seed}) raised {_said(error)}."))
    if len(sides) < 2:
        return sides.get("train", [])[:n]
    repeated = _repeated(sides["train"]) or _repeated(sides["eval"])
    if repeated is not None:
        findings.append(EnvFinding("error", f"The task id {repeated} is given twice in a split.", "Yield each task once."))
    try:
        check_disjoint(sides["train"], sides["eval"])
    except UsageError as error:
        findings.append(EnvFinding("error", f"Training and held-out tasks overlap: {error}."))
    else:
        if sides["eval"]:
            counts = f"{len(sides['train'])} training and {len(sides['eval'])} held-out tasks"
            findings.append(EnvFinding("ok", f"{counts} have nothing in common."))
        else:
            findings.append(
                EnvFinding("warning", "There are no held-out tasks.", "Give at least 5 tasks, or eval tasks of their own.")
            )
    return sides["train"][:n] + sides["eval"][:n]


def _repeated(tasks: Sequence[Task]) -> str | None:
    seen: set[str] = set()
    return next((task.id for task in tasks if task.id in seen or seen.add(task.id)), None)  # type: ignore[func-returns-value]


async def _check_factory(world: EnvSpec, tasks: Sequence[Task]) -> list[EnvFinding]:
    assert world.factory is not None
    first, second = world.factory(), world.factory()
    if first is second:
        return [
            EnvFinding(
                "error",
                "The factory gives the same environment twice.",
                "Make a new one per call: an episode must own its state.",
            )
        ]
    for env in (first, second):
        try:
            await call_method(env.close)
        except Exception as error:
            said = f"close raised {_said(error)} on an environment that was never reset."
            return [EnvFinding("warning", said, "It is called whatever happened, also when reset failed: close what is open.")]
    return []


async def _check_opening(world: EnvSpec, tasks: Sequence[Task]) -> list[EnvFinding]:
    """The opening messages and the tools of the first task."""
    env = _make(world)
    hand = ScriptedRunner(env, tasks[0], lambda messages, rng: "", random.Random(0))
    opened = await _attempt(hand.open(), f"task {tasks[0].id}")
    closed = await _attempt(hand.close(), f"task {tasks[0].id}")
    if isinstance(opened, EnvFinding):
        return [opened]
    findings = [closed] if isinstance(closed, EnvFinding) else []
    problems = [problem for tool in hand.played.tools for problem in _schema_problems(tool)]
    names = [_name(tool) for tool in hand.played.tools]
    problems += [f"two tools are called {name!r}" for name in dict.fromkeys(names) if names.count(name) > 1]
    findings += [
        EnvFinding("error", f"A tool schema is wrong: {problem}.", "See OpenAI's function calling.") for problem in problems
    ]
    if names and not problems:
        findings.append(
            EnvFinding("ok", f"{len(names)} tool schema{'s are' if len(names) > 1 else ' is'} valid: {', '.join(names)}.")
        )
    return findings


async def _check_lives(world: EnvSpec, tasks: Sequence[Task]) -> list[EnvFinding]:
    """Tools that live for an episode are released, and episodes leave nothing behind."""
    env = _make(world)
    lives = env.lives if isinstance(env, ToolEnv) else []
    hand = ScriptedRunner(env, tasks[0], lambda messages, rng: "", random.Random(0))
    opened = await _attempt(hand.open(), f"task {tasks[0].id}")
    names = [life.name for life in lives]
    for _ in range(2):  # closing again must not release again
        closed = await _attempt(hand.close(), f"task {tasks[0].id}")
        if isinstance(closed, EnvFinding):
            return [closed]
    if isinstance(opened, EnvFinding):
        return [opened]
    before = open_resources()  # by now everything that is made once is there
    for number in range(_EPISODES):
        played = await _play(world, tasks[number % len(tasks)], lambda messages, rng: "?", "the reply '?'", turns=1)
        if isinstance(played, EnvFinding):
            return [played]
    grown = {key: after - before.get(key, after) for key, after in open_resources().items()}
    left = [f"{count} {key}" for key, count in grown.items() if count >= _EPISODES]
    if left:
        said = f"{_EPISODES} episodes leave {' and '.join(left)} behind."
        return [EnvFinding("warning", said, "Let go of them in close, or in a tool's release.")]
    return [EnvFinding("ok", f"Tools that live are created and released: {', '.join(names)}.")] if names else []


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
    if not isinstance(properties, Mapping) or not all(isinstance(schema, Mapping) for schema in properties.values()):
        yield f"the properties of {name!r} are not schemas"
        return
    for key in parameters.get("required", ()):
        if key not in properties:
            yield f"{name!r} requires {key!r}, which is no property"


async def _check_mistakes(world: EnvSpec, tasks: Sequence[Task]) -> list[EnvFinding]:
    """What a model says that knows nothing must be answered."""
    findings: dict[str, EnvFinding] = {}
    for number, reply in enumerate(MISTAKES):
        task = tasks[number % len(tasks)]
        shown = repr(reply if len(reply) < 40 else reply[:20] + "...")
        played = await _play(world, task, lambda messages, rng, reply=reply: reply, f"the reply {shown}", turns=3)  # type: ignore[misc]
        if isinstance(played, EnvFinding):
            findings.setdefault(played.message.partition(" on ")[0], played)
        elif (played.trajectory.reward or 0.0) >= 1.0 and reply != str(task.answer):
            reward = played.trajectory.reward
            findings[reply] = EnvFinding(
                "warning", f"The reply {shown} has the reward {reward}.", "Is the reward too easily had?"
            )
    return list(findings.values()) or [EnvFinding("ok", f"{len(MISTAKES)} senseless replies are answered, none rewarded.")]


async def _check_isolation(world: EnvSpec, tasks: Sequence[Task], seed: int) -> list[EnvFinding]:
    """Two episodes at once must go like each alone, and leave task and class as they were."""
    first, second = tasks[0], tasks[1 % len(tasks)]
    player = world.solver or world.demonstrator or (lambda messages, rng: "?")
    before = _class_state(_make(world))
    alone: list[list[Any]] = []
    for task in (first, second, first, second):
        played = await _play(world, task, player, f"task {task.id}", seed=seed, turns=_turns(world))
        if isinstance(played, EnvFinding):
            return [played]
        alone.append(_history(played))
    findings: list[EnvFinding] = []
    if alone[:2] != alone[2:]:
        said = "The same task with the same seed and the same replies goes differently a second time."
        findings.append(
            EnvFinding("warning", said, "Draw from random.Random(seed) with reset's seed; keep no state between episodes.")
        )
    elif await _interleaved(world, (first, second), player, seed) != alone[:2]:
        said = "Two episodes at once go differently from each alone: they share state."
        findings.append(EnvFinding("error", said, "Keep state on self, set in reset; not on the class or the module."))
    if changed := [key for key, state in _class_state(_make(world)).items() if before.get(key) != state]:
        said = f"Playing changes the class attribute {', '.join(changed)}, which all episodes share."
        findings.append(EnvFinding("error", said, "Set it on self in reset."))
    return findings or [EnvFinding("ok", "Two episodes at once do not see each other.")]


def _class_state(env: Env) -> dict[str, str]:
    """What the classes of an environment hold, without functions, in a form that shows changes."""
    state: dict[str, str] = {}
    for owner in type(env).__mro__[:-1]:
        if owner.__module__ != Env.__module__:
            for key, value in vars(owner).items():
                plain = not callable(value) and not isinstance(value, (staticmethod, classmethod, property))
                if plain and not key.startswith(("__", "_abc_")):
                    state.setdefault(key, repr(value))
    return state


async def _interleaved(world: EnvSpec, tasks: Sequence[Task], player: Speak, seed: int) -> list[list[Any]] | None:
    hands = [ScriptedRunner(_make(world), task, player, random.Random(seed), turns=_turns(world), seed=seed) for task in tasks]
    try:
        for hand in hands:
            await hand.open()
        going = list(hands)
        while going:
            going = [hand for hand in going if await hand.turn()]
        return [_history(await hand.finish()) for hand in hands]
    except Exception:  # alone it went well
        return None
    finally:
        for hand in hands:
            await hand.close()


def _history(played: ScriptedEpisode) -> list[Any]:
    turns = [(turn.messages, turn.reply, turn.reward) for turn in played.trajectory.turns]
    return [turns, played.trajectory.reward, played.trajectory.stop, played.trajectory.final]


async def _check_gold(world: EnvSpec, tasks: Sequence[Task], seed: int) -> list[EnvFinding]:
    """The solver, or else the gold answer as the only reply, must have the reward 1."""
    if world.solver is None and all(task.answer is None for task in tasks):
        return [
            EnvFinding("note", "Whether success is possible is not known.", "Give the class a solver(messages, rng) -> str.")
        ]
    who = "The solver" if world.solver is not None else "The gold answer as the only reply"
    total = 0
    for number, task in enumerate(tasks):
        answer = str(task.answer)
        player = world.solver or (lambda messages, rng, answer=answer: answer)  # type: ignore[misc]
        played = await _play(world, task, player, f"task {task.id}", seed=seed + number, turns=_turns(world))
        if isinstance(played, EnvFinding):
            return [played]
        reward, stop = played.trajectory.reward, played.trajectory.stop
        if reward is None or reward < 1.0 - 1e-9:
            said = f"{who} has the reward {reward} on task {task.id} after {len(played.replies)} turns ({stop}), not 1."
            if world.solver is None:
                return [EnvFinding("warning", said, "If more than the answer is needed, give a solver(messages, rng) -> str.")]
            return [EnvFinding("error", said, "Correct the reward or the solver; a reward of 1 is success.")]
        total += len(played.replies)
    return [EnvFinding("ok", f"{who} has the reward 1 on {len(tasks)} tasks, in {total / len(tasks):.1f} turns on average.")]


async def _play(
    world: EnvSpec, task: Task, player: Speak, on: str, *, seed: int = 0, turns: int = 8
) -> ScriptedEpisode | EnvFinding:
    return await _attempt(play_scripted(_make(world), task, player, random.Random(seed), turns=turns, seed=seed), on)


async def _attempt(work: Awaitable[T], on: str) -> T | EnvFinding:
    """The result, or a finding of what was raised and where."""
    try:
        return await work
    except EnvError as error:
        return EnvFinding("error", f"{str(error)[:1].upper()}{str(error)[1:]} (on {on}).")
    except Exception as error:
        phase = next(iter(getattr(error, "__notes__", [])), "step")
        if phase == "player":
            return EnvFinding(
                "error", f"The solver raised {_said(error)} on {on}.", "It sees only messages, as the model does."
            )
        remedy = "A mistake of the model is an observation: return it, or raise tw.InvalidAction." if phase == "step" else ""
        return EnvFinding("error", f"{phase} raised {_said(error)} on {on}.", remedy)


def _said(error: BaseException) -> str:
    words = str(error).splitlines()
    return f"{type(error).__name__}: {words[0][:120]}" if words else type(error).__name__


def _make(world: EnvSpec) -> Env:
    assert world.factory is not None
    return world.factory()


def _turns(world: EnvSpec) -> int:
    return world.max_turns or 16
