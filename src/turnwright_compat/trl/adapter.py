"""TRL: what `GRPOTrainer` takes as `environment_factory`, `tools` and
`reward_funcs`, played by our loop."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from turnwright import plugins
from turnwright.envs.foreign import ForeignObject, Framework
from turnwright.envs.gym import seeded_tasks
from turnwright.envs.resolve import load_named
from turnwright.envs.tools.results import ResultLimit
from turnwright.envs.tools.stateful import parse_tools
from turnwright.envs.tools.tool import Tool, Tools
from turnwright.envs.tools.tool_schema import ToolSchemaError
from turnwright.errors import ConfigError, suggest_or_list
from turnwright_compat.common import accepted
from turnwright_compat.trl.environments import (
    LIFETIME,
    EnvironmentClass,
    RewardFunction,
    TrlEnv,
    TrlFactory,
    TrlOptions,
    make_tool,
)
from turnwright_compat.trl.script import find_script, trainer_arguments

__all__ = ["FRAMEWORK", "TrlEnv", "TrlFactory"]

ARGUMENTS = (
    "environment_factory",
    "tools",
    "reward_funcs",
    "reward_weights",
    "max_tool_calling_iterations",
    "conversational",
    "system",
)


class TrainerArguments:
    """What `use = "trl:GRPOTrainer"` names: arguments of the trainer in `[env.args]`."""


TRAINER = TrainerArguments()


def adapt(found: ForeignObject) -> TrlFactory | None:
    """Make a factory of an environment class, of a dict of them by name, or of
    the trainer's arguments."""
    target, args = found.target, dict(found.args)
    script = find_script(target, found.where, found.base)
    if script is not None:
        return _of_script(found, script, args)
    if _is_environment(target) or (
        isinstance(target, Mapping) and target and all(map(_is_environment, target.values()))
    ):
        if "environment_factory" in args:
            raise ConfigError(
                f"{found.where}: environment_factory is given twice; use names it already"
            )
        args["environment_factory"] = target
    elif not isinstance(target, TrainerArguments):
        return None
    for key in args:
        if key not in ARGUMENTS:
            raise ConfigError(
                f"{found.where} has no argument {key!r}; {suggest_or_list(key, ARGUMENTS)}"
            )
    return _factory(found, args)


def _of_script(found: ForeignObject, script: Path, args: dict[str, Any]) -> TrlFactory:
    """Make a factory of what a training script gives its trainer; `[env.args]` come before it."""
    argv = args.pop("argv", ())
    if isinstance(argv, str) or not isinstance(argv, (list, tuple)):
        raise ConfigError(
            f"{found.where}: argv = {argv!r}; write the arguments of the command line as a list"
        )
    given = trainer_arguments(script, argv, found.where)
    if given.get("rollout_func") is not None:
        raise ConfigError(
            f"{found.where}: the script has a rollout_func, which plays all prompts of a step; our "
            "loop replaces it"
        )

    settings = given.get("args")
    for key in ("reward_weights", "max_tool_calling_iterations"):
        given.setdefault(key, getattr(settings, key, None))
    for key in ARGUMENTS:
        if key not in args and given.get(key) is not None:
            args[key] = given[key]
    for key in args:
        if key not in ARGUMENTS:
            raise ConfigError(
                f"{found.where} has no argument {key!r}; "
                f"{suggest_or_list(key, (*ARGUMENTS, 'argv'))}"
            )

    factory = _factory(found, args)
    rows = given.get("train_dataset")
    return (
        factory
        if rows is None
        else replace(factory, tasks=lambda: [_row(dict(row)) for row in rows])
    )


def _row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of a trainer's dataset whose images are in its prompt, before the first message
    of the user as in TRL."""
    images = row.pop("images", None) or ([row.pop("image")] if row.get("image") is not None else [])
    prompt = row.get("prompt")
    if not images or not isinstance(prompt, (list, tuple)):
        return row | ({"images": images} if images else {})

    messages = [dict(message) for message in prompt]
    parts = [
        part
        for message in messages
        if isinstance(message["content"], list)
        for part in message["content"]
    ]
    if not any(part.get("type") == "image" for part in parts):
        user = next((message for message in messages if message.get("role") == "user"), None)
        if user is not None:
            text = (
                [{"type": "text", "text": user["content"]}]
                if isinstance(user["content"], str)
                else list(user["content"])
            )
            user["content"] = [*({"type": "image"} for _ in images), *text]
    return row | {"prompt": messages, "images": images}


def _is_environment(target: Any) -> bool:
    """Whether a class has the shape of TRL's environments: `reset`, and tools or
    `get_reward`, but no `step`."""
    if not inspect.isclass(target) or target.__module__.partition(".")[0] in (
        "turnwright",
        *plugins.PACKAGES,
    ):
        return False
    names = {
        name
        for name, _ in inspect.getmembers(target, inspect.isfunction)
        if not name.startswith("_")
    }
    return "reset" in names and "step" not in names and len(names) > 1


def _factory(found: ForeignObject, args: Mapping[str, Any]) -> TrlFactory:
    where = found.where
    tools = [_tool(one, where) for one in _loaded(found, "tools", args.get("tools"))]
    environments = _environments(found, args.get("environment_factory"), tools)
    rewards = _rewards(found, args)
    if not environments and not tools and not rewards:
        raise ConfigError(
            f"{where} has nothing to play; give environment_factory, tools or reward_funcs under "
            "[env.args]"
        )
    if not rewards and not any(one.has_reward for one in environments.values()):
        raise ConfigError(
            f"{where} has no reward; give reward_funcs under [env.args], or define get_reward in "
            "the environment"
        )
    most = args.get("max_tool_calling_iterations")
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 0):
        raise ConfigError(
            f"{where}: max_tool_calling_iterations = {most!r}; it is an integer of at least 0, or "
            "left out"
        )
    conversational = args.get("conversational", True)
    if not isinstance(conversational, bool):
        raise ConfigError(
            f"{where}: conversational = {conversational!r}; write true, or false for rewards that "
            "read text"
        )
    options = TrlOptions(found.faithful, tuple(tools), environments, rewards, conversational)
    kit = parse_tools(tools, None, ResultLimit())
    turns = None if most is None else most + 1
    tasks = (
        None
        if any(one.needs_row for one in environments.values()) or not environments
        else seeded_tasks
    )
    return TrlFactory(args.get("system"), turns, tasks, None, None, None, None, kit, options)


def _loaded(found: ForeignObject, key: str, value: Any) -> list[Any]:
    """Load what a list of names names: `file.py:name` or `module:name`."""
    items = [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
    return [_load(found, key, one) for one in items]


def _load(found: ForeignObject, key: str, named: Any) -> Any:
    if isinstance(named, str) and ":" not in named:
        raise ConfigError(
            f'{found.where}: {key} = "{named}"; write file.py:name or package.module:name (a model '
            "is no reward here)"
        )
    return load_named(named, found, key)


def _tool(function: Any, where: str) -> Tool:
    if not callable(function) or inspect.isclass(function):
        raise ConfigError(
            f"{where}: tools has {function!r:.80}; a tool is a function with hints and a docstring"
        )
    try:
        return make_tool(function)
    except ToolSchemaError as error:
        raise ConfigError(f"{where}: {error}") from error


def _environments(
    found: ForeignObject, given: Any, tools: list[Tool]
) -> dict[str | None, EnvironmentClass]:
    """Return the environments by the value of the row's column `environment`;
    None for the only one."""
    if given is None:
        return {}
    named = dict(given) if isinstance(given, Mapping) else {None: given}
    made = {}
    for name, one in named.items():
        factory = _load(found, "environment_factory", one)
        where = found.where if name is None else f"{found.where}: environment_factory[{name!r}]"
        made[name] = _environment(factory, tools, where)
    return made


def _environment(factory: Callable[[], Any], tools: list[Tool], where: str) -> EnvironmentClass:
    """Make one environment, as TRL does, to read its methods."""
    if not callable(factory):
        raise ConfigError(
            f"{where} is {type(factory).__name__}; an environment is a class, or a function that "
            "makes one"
        )
    try:
        instance = factory()
    except Exception as error:
        raise ConfigError(
            f"{where} cannot be made: {type(error).__name__}: {error}; TRL calls "
            "environment_factory without arguments"
        ) from error
    members = dict(inspect.getmembers(type(instance), inspect.isfunction))
    name = type(instance).__name__
    if "reset" not in members:
        raise ConfigError(
            f"{where}: {name} has no reset; an environment of TRL has reset(self, **row) -> None "
            "or text"
        )
    methods = [key for key in members if key not in LIFETIME and not key.startswith("_")]
    try:
        templates = {
            key: replace(make_tool(getattr(instance, key)), source=f"{name}.{key}")
            for key in methods
        }
        Tools([*tools, *templates.values()])
    except ToolSchemaError as error:
        raise ConfigError(f"{where}: {error}") from error
    parameters = [
        one for key, one in inspect.signature(members["reset"]).parameters.items() if key != "self"
    ]
    for one in parameters:
        if one.kind is one.POSITIONAL_ONLY:
            raise ConfigError(
                f"{where}: {name}.reset takes {one.name!r} by position; columns of the row are "
                "passed by name"
            )
    needs_row = any(
        one.default is one.empty and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
        for one in parameters
    )
    if "get_reward" in members and (wrong := _needs(members["get_reward"])):
        raise ConfigError(
            f"{where}: {name}.get_reward needs {wrong}; it is called without arguments"
        )
    # TRL reads the methods of an instance that it uses, so this one is the first of the pool.
    return EnvironmentClass(
        factory, name, templates, "get_reward" in members, needs_row, [instance]
    )


def _needs(method: Callable[..., Any]) -> str:
    """Return the parameters without a default, but `self`."""
    parameters = list(inspect.signature(method).parameters.values())[1:]
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return ", ".join(
        one.name for one in parameters if one.default is one.empty and one.kind not in kinds
    )


def _rewards(found: ForeignObject, args: Mapping[str, Any]) -> tuple[RewardFunction, ...]:
    functions = _loaded(found, "reward_funcs", args.get("reward_funcs"))
    weights = args.get("reward_weights")
    if weights is None:
        weights = [1.0] * len(functions)
    if not isinstance(weights, (list, tuple)) or len(weights) != len(functions):
        raise ConfigError(
            f"{found.where}: {len(functions)} reward_funcs and reward_weights = {weights!r}; give "
            "one number for each"
        )
    made = []
    for function, weight in zip(functions, weights, strict=True):
        name = getattr(function, "__name__", type(function).__name__)
        if not callable(function) or inspect.isclass(function):
            raise ConfigError(
                f"{found.where}: reward_funcs has {function!r:.80}; a reward is a function of "
                "completions"
            )
        if not accepted(
            function, dict.fromkeys(("prompts", "completions", "completion_ids", "environments"))
        ):
            raise ConfigError(
                f"{found.where}: {name} takes "
                f"{', '.join(inspect.signature(function).parameters) or 'nothing'}; a reward takes "
                "completions, prompts and columns of the row by name, or **kwargs, and returns a "
                "list"
            )
        made.append(RewardFunction(function, name, float(weight)))
    return tuple(made)


def find(name: str) -> Any:
    """Return the target of `trl:name`; None for an unknown one."""
    return TRAINER if name == "GRPOTrainer" else None


FRAMEWORK = Framework("trl", adapt, find, lambda: ("GRPOTrainer",))
