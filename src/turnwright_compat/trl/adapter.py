"""TRL: what `GRPOTrainer` takes as `environment_factory`, `tools` and
`reward_funcs`, played by our loop.

`adapt` reads these from `[env.args]`, or from a training script (`script.py`). The episodes are in
`environments.py`, the calls of rewards in `rewards.py`. What user code imports of TRL is in
`stand_ins.py`; launch scripts are converted in `convert.py`.
"""

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
    target = found.target
    args = dict(found.args)
    script = find_script(target, found.where, found.base)
    if script is not None:
        return _of_script(found, script, args)

    are_environments = (
        isinstance(target, Mapping) and target and all(map(_is_environment, target.values()))
    )
    if _is_environment(target) or are_environments:
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
    of_trainer = trainer_arguments(script, argv, found.where)
    if of_trainer.get("rollout_func") is not None:
        raise ConfigError(
            f"{found.where}: the script has a rollout_func, which plays all prompts of a step; our "
            "loop replaces it"
        )

    config = of_trainer.get("args")
    for key in ("reward_weights", "max_tool_calling_iterations"):
        of_trainer.setdefault(key, getattr(config, key, None))
    for key in ARGUMENTS:
        if key not in args and of_trainer.get(key) is not None:
            args[key] = of_trainer[key]
    for key in args:
        if key not in ARGUMENTS:
            raise ConfigError(
                f"{found.where} has no argument {key!r}; "
                f"{suggest_or_list(key, (*ARGUMENTS, 'argv'))}"
            )

    factory = _factory(found, args)
    rows = of_trainer.get("train_dataset")
    if rows is None:
        return factory
    return replace(factory, tasks=lambda: [_row(dict(row)) for row in rows])


def _row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of a trainer's dataset whose images are in its prompt, before the first message
    of the user as in TRL."""
    images = row.pop("images", None)
    if not images:
        images = [row.pop("image")] if row.get("image") is not None else []
    if not images:
        return row
    prompt = row.get("prompt")
    if not isinstance(prompt, (list, tuple)):
        return row | {"images": images}

    messages = [dict(message) for message in prompt]
    parts: list[Any] = []
    for message in messages:
        if isinstance(message["content"], list):
            parts += message["content"]
    if not any(part.get("type") == "image" for part in parts):
        _put_images(messages, len(images))
    return row | {"prompt": messages, "images": images}


def _put_images(messages: list[dict[str, Any]], count: int) -> None:
    """Put places of images before the first message of the user."""
    for message in messages:
        if message.get("role") != "user":
            continue
        content = message["content"]
        text_parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        message["content"] = [*({"type": "image"} for _ in range(count)), *text_parts]
        return


def _is_environment(target: Any) -> bool:
    """Whether a class has the shape of TRL's environments: `reset`, and tools or
    `get_reward`, but no `step`."""
    if not inspect.isclass(target):
        return False
    package = target.__module__.partition(".")[0]
    if package in ("turnwright", *plugins.PACKAGES):
        return False

    functions = inspect.getmembers(target, inspect.isfunction)
    names = {name for name, _ in functions if not name.startswith("_")}
    return "reset" in names and "step" not in names and len(names) > 1


def _factory(found: ForeignObject, args: Mapping[str, Any]) -> TrlFactory:
    where = found.where
    tools = [_tool(function, where) for function in _loaded(found, "tools", args.get("tools"))]
    environments = _environments(found, args.get("environment_factory"), tools)
    rewards = _rewards(found, args)
    if not environments and not tools and not rewards:
        raise ConfigError(
            f"{where} has nothing to play; give environment_factory, tools or reward_funcs under "
            "[env.args]"
        )
    if not rewards and not any(environment.has_reward for environment in environments.values()):
        raise ConfigError(
            f"{where} has no reward; give reward_funcs under [env.args], or define get_reward in "
            "the environment"
        )

    iterations = args.get("max_tool_calling_iterations")
    if iterations is not None and (
        isinstance(iterations, bool) or not isinstance(iterations, int) or iterations < 0
    ):
        raise ConfigError(
            f"{where}: max_tool_calling_iterations = {iterations!r}; it is an integer of at least "
            "0, or left out"
        )
    conversational = args.get("conversational", True)
    if not isinstance(conversational, bool):
        raise ConfigError(
            f"{where}: conversational = {conversational!r}; write true, or false for rewards that "
            "read text"
        )

    # Environments that need no column of a row make their own tasks, each of a seed.
    needs_rows = any(environment.needs_row for environment in environments.values())
    return TrlFactory(
        system=args.get("system"),
        max_turns=None if iterations is None else iterations + 1,
        tasks=None if needs_rows or not environments else seeded_tasks,
        solver=None,
        demonstrator=None,
        single_turn_best=None,
        reward=None,
        kit=parse_tools(tools, None, ResultLimit()),
        options=TrlOptions(found.faithful, tuple(tools), environments, rewards, conversational),
    )


def _loaded(found: ForeignObject, key: str, value: Any) -> list[Any]:
    """Load what a list of names names: `file.py:name` or `module:name`."""
    if value is None:
        return []
    names = list(value) if isinstance(value, (list, tuple)) else [value]
    return [_load(found, key, name) for name in names]


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
    found: ForeignObject, value: Any, tools: list[Tool]
) -> dict[str | None, EnvironmentClass]:
    """Return the environments by the value of the row's column `environment`;
    None for the only one."""
    if value is None:
        return {}

    factories = dict(value) if isinstance(value, Mapping) else {None: value}
    environments = {}
    for name, named in factories.items():
        factory = _load(found, "environment_factory", named)
        where = found.where if name is None else f"{found.where}: environment_factory[{name!r}]"
        environments[name] = _environment(factory, tools, where)
    return environments


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
    tool_names = [key for key in members if key not in LIFETIME and not key.startswith("_")]
    try:
        templates = {
            key: replace(make_tool(getattr(instance, key)), source=f"{name}.{key}")
            for key in tool_names
        }
        Tools([*tools, *templates.values()])  # raises for two of one name
    except ToolSchemaError as error:
        raise ConfigError(f"{where}: {error}") from error

    needs_row = _reset_needs_row(members["reset"], name, where)
    has_reward = "get_reward" in members
    needed = _needs(members["get_reward"]) if has_reward else ""
    if needed:
        raise ConfigError(
            f"{where}: {name}.get_reward needs {needed}; it is called without arguments"
        )
    # TRL reads the methods of an instance that it uses, so this one is the first of the pool.
    return EnvironmentClass(factory, name, templates, has_reward, needs_row, [instance])


def _reset_needs_row(reset: Callable[..., Any], name: str, where: str) -> bool:
    """Whether `reset` has a parameter without a default, which is a column of the row."""
    signature = inspect.signature(reset)
    parameters = [parameter for key, parameter in signature.parameters.items() if key != "self"]
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigError(
                f"{where}: {name}.reset takes {parameter.name!r} by position; columns of the row "
                "are passed by name"
            )
    return any(_is_required(parameter) for parameter in parameters)


def _is_required(parameter: inspect.Parameter) -> bool:
    is_collector = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not is_collector


def _needs(method: Callable[..., Any]) -> str:
    """Return the parameters without a default, but `self`."""
    parameters = list(inspect.signature(method).parameters.values())[1:]
    return ", ".join(parameter.name for parameter in parameters if _is_required(parameter))


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

    passed_to_all = dict.fromkeys(("prompts", "completions", "completion_ids", "environments"))
    rewards = []
    for function, weight in zip(functions, weights, strict=True):
        name = getattr(function, "__name__", type(function).__name__)
        if not callable(function) or inspect.isclass(function):
            raise ConfigError(
                f"{found.where}: reward_funcs has {function!r:.80}; a reward is a function of "
                "completions"
            )
        if not accepted(function, passed_to_all):
            raise ConfigError(
                f"{found.where}: {name} takes "
                f"{', '.join(inspect.signature(function).parameters) or 'nothing'}; a reward takes "
                "completions, prompts and columns of the row by name, or **kwargs, and returns a "
                "list"
            )
        rewards.append(RewardFunction(function, name, float(weight)))
    return tuple(rewards)


def find(name: str) -> Any:
    """Return the target of `trl:name`; None for an unknown one."""
    return TRAINER if name == "GRPOTrainer" else None


FRAMEWORK = Framework("trl", adapt, find, lambda: ("GRPOTrainer",))
