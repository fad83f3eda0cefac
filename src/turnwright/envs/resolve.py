"""Resolve built-in names, `file.py:Name`, `package.module:Name`, `framework:id` and
objects to an `EnvSpec`."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from turnwright import plugins
from turnwright.config.names import PROGRAM
from turnwright.config.schema import EnvConfig
from turnwright.envs.env import Env
from turnwright.envs.foreign import (
    ForeignObject,
    Registered,
    adapt,
    import_object,
    load_registered,
    refuse_faithful,
)
from turnwright.envs.spec import EnvSpec, Play
from turnwright.envs.tasks import TaskSource, make_task_source
from turnwright.envs.tools.schema_check import schema_error
from turnwright.envs.tools.tool_schema import flatten, pydantic_hint
from turnwright.envs.user_code import load_user_module, user_location
from turnwright.envs.user_imports import stand_in_of
from turnwright.errors import ConfigError, did_you_mean, suggest_or_list

_FOREIGN_ARGUMENTS = frozenset(
    [
        "args",
        "sample",
        "samples",
        "input",
        "input_batch",
        "infer_request",
        "prompts",
        "completions",
        "data_source",
    ]
)
"""First arguments of asynchronous functions of other frameworks that no adapter
takes, such as rewards."""

_TRAINERS = ("GRPOTrainer", "AsyncGRPOTrainer", "RLOOTrainer")
"""Trainers of TRL, whose scripts are played by what they give them."""
ENV_ATTRIBUTES = ("solver", "demonstrator", "single_turn_best", "max_turns", "group_reward")


def resolve_env(
    config: EnvConfig | str, *, base: Path | str = ".", play: str | None = None
) -> EnvSpec:
    """Resolve one `[[env]]` section of a recipe.

    Args:
        config: the section, or only the value of its `use`.
        base: directory of relative paths.
        play: value of `rollout.function`; it replaces the environment, and `use` may be empty.

    Raises:
        ConfigError: for a wrong name, file or argument; one line with the remedy.
    """
    if isinstance(config, str):
        config = EnvConfig(use=config)
    base = Path(base)
    named = None if play is None else load_object(play, base=base)
    if named is not None:
        _check_play(named, play or "")
    target = load_object(config.use, base=base) if config.use else named
    if target is None:
        raise ConfigError(
            "[[env]] names no environment; give use = a built-in name or file.py:Name"
        )
    spec = as_env_spec(
        target,
        name=config.name or config.use or play or "",
        where=config.use or play or "",
        args=config.args,
        weight=config.weight,
        tasks=None if config.tasks is None else _source(config.tasks, base),
        eval_tasks=None if config.eval_tasks is None else _source(config.eval_tasks, base),
        play=named,
        return_multi_modal_inputs=config.return_multi_modal_inputs,
        columns=config.columns,
        media_root=None if config.media_root is None else base / config.media_root,
        base=base,
        faithful=config.faithful,
    )
    return replace(spec, rules=config)


def as_env_spec(
    target: Any,
    *,
    name: str = "",
    where: str = "",
    args: Mapping[str, Any] | None = None,
    weight: float = 1.0,
    tasks: TaskSource | None = None,
    eval_tasks: TaskSource | None = None,
    play: Play | None = None,
    return_multi_modal_inputs: bool = True,
    columns: Mapping[str, str] | None = None,
    media_root: Path | None = None,
    base: Path | str = ".",
    faithful: bool = False,
) -> EnvSpec:
    """Convert an Env class, a factory or an agent function to an `EnvSpec`;
    return an `EnvSpec` unchanged.

    Objects of other libraries are converted by installed packages, see `turnwright.envs.foreign`.

    Hooks (`tasks`, `solver`, `demonstrator`, `single_turn_best`, `max_turns`, `texts`) are read
    from the factory, then from an environment it makes, which is never reset. They may be static,
    class or instance methods; instance methods have access to the constructor's arguments.
    Constructors must therefore be cheap; expensive work belongs in `reset`.

    Raises:
        ConfigError: for any other object, or arguments that do not match its signature.
    """
    if isinstance(target, EnvSpec):
        return target
    where = where or getattr(target, "__name__", None) or type(target).__name__
    found, adapted = ForeignObject(target, where, dict(args or {}), Path(base), faithful), None
    if not (inspect.isclass(target) and issubclass(target, Env)):
        adapted = adapt(found)
    if adapted is None:
        refuse_faithful(found)
    else:
        target, args = adapted, {}
    if _is_play(target):
        if args:
            raise ConfigError(
                f"{where} is a play function and takes no [env.args]; remove {', '.join(args)}"
            )
        if adapted is None:
            _check_play(target, where)
        given = tasks if tasks is not None else getattr(target, "tasks", None)
        source = make_task_source(
            given, eval_tasks, where, return_multi_modal_inputs, columns, media_root
        )
        return EnvSpec(name or where, None, target, source, weight=weight)
    factory = _factory(target, dict(args or {}), where)
    prototype = _prototype(factory, where)

    def hook(key: str) -> Any:
        owned = None if inspect.isclass(target) else getattr(target, key, None)
        return owned if owned is not None else getattr(prototype, key, None)

    given = tasks if tasks is not None else hook("tasks")
    source = make_task_source(
        given, eval_tasks, name or where, return_multi_modal_inputs, columns, media_root
    )
    hooks = {key: hook(key) for key in ENV_ATTRIBUTES}
    return EnvSpec(
        name or where, factory, play, source, weight=weight, texts_function=hook("texts"), **hooks
    )


def load_object(use: str, *, base: Path | str = ".") -> Any:
    """Load a built-in environment by name, `file.py:Name`, `package.module:Name`, or
    `framework:id` of its registry."""
    if use == PROGRAM:
        return Registered(PROGRAM, "")
    if ".py" not in use and ":" not in use:
        from turnwright.envs.builtin import BUILTIN

        if use in BUILTIN:
            return BUILTIN[use]
        if use in plugins.names("environments"):
            return plugins.load("environments", use)
        near = did_you_mean(use, [*BUILTIN, *plugins.names("environments")], 0.6)
        near += " " * bool(near)
        raise ConfigError(
            f"unknown environment {use!r}; {near}Built in: {', '.join(BUILTIN)}; or file.py:Name"
        )
    prefix, _, id = use.partition(":")
    if prefix in frameworks():
        return load_registered(prefix, id)
    path, _, name = use.rpartition(":")
    if use.endswith((".py", ".py:")):
        raise ConfigError(f"{use}: which name of the file? Write {use.rstrip(':')}:Name")
    if not path.endswith(".py"):
        return _of_module(path, name, use, Path(base))
    module = load_user_module(Path(base) / path, path)
    if not hasattr(module, name):
        raise ConfigError(
            f"{path} has no {name!r}; {_inside(module, name) or _known_names(module, name)}"
        )
    return getattr(module, name)


def frameworks() -> list[str]:
    """Return the frameworks whose registered objects are named `framework:id`."""
    return [name for name in plugins.names("frameworks") if name != PROGRAM]


def _inside(module: ModuleType, name: str) -> str:
    """Return where a name is defined inside a function of a file, which no other code can reach;
    empty where it is not."""
    try:
        tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ""
    methods = {
        id(node) for one in ast.walk(tree) if isinstance(one, ast.ClassDef) for node in one.body
    }
    functions = [
        node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    for function in functions:
        for node in ast.walk(function):
            if (
                not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
                or node is function
            ):
                continue
            if node.name == name and id(node) not in methods:
                trainer = next((key for key in vars(module) if key in _TRAINERS), "")
                script = (
                    f"; or use = file.py:{trainer}, which runs the script up to its trainer"
                    if trainer
                    else ""
                )
                place = f"it is defined inside {function.name}(), at line {node.lineno}"
                return f"{place}; move it to the top level of the file{script}"
    return ""


def _of_module(path: str, name: str, use: str, base: Path) -> Any:
    """Load `package.module:Name`; a module that needs a framework that is not installed is
    loaded as a user's file."""
    if not all(part.isidentifier() for part in (*path.split("."), name)):
        raise ConfigError(
            f"{use}: not of the form file.py:Name, package.module:Name or framework:id "
            f"({', '.join(frameworks())})"
        )
    try:
        try:
            module = importlib.import_module(path)
        except ModuleNotFoundError as error:
            stand_in = stand_in_of(path)
            if stand_in is not None:
                module = stand_in
            else:
                spec = None if _within(error.name, path) else importlib.util.find_spec(path)
                if spec is None or not spec.has_location or spec.origin is None:
                    raise
                module = load_user_module(Path(spec.origin), path)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and _within(error.name, path):
            raise ConfigError(
                f"{use}: no module {error.name!r} is installed; {_near(path, name, base)}"
            ) from error
        place = user_location(error)
        message = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"{use}: {path} cannot be imported: {message}{place and f' ({place})'}"
        ) from error
    if not hasattr(module, name):
        raise ConfigError(f"{path} has no {name!r}; {_known_names(module, name)}")
    return getattr(module, name)


def _near(path: str, name: str, base: Path) -> str:
    """Return what may have been meant by `path:name`, where there is no module `path`."""
    file = base / (path.replace(".", "/") + ".py")
    if file.is_file():
        return f"did you mean {file.relative_to(base)}:{name}?"
    if near := did_you_mean(path, frameworks(), 0.6):
        return near
    return f"write file.py:Name, or framework:id with one of {', '.join(frameworks())}"


def _within(missing: str | None, path: str) -> bool:
    return f"{path}.".startswith(f"{missing}.")


def _known_names(module: ModuleType, name: str) -> str:
    own = [
        key for key, value in vars(module).items() if callable(value) and not key.startswith("_")
    ]
    return suggest_or_list(name, own) or "it defines nothing that can be called"


def call_error(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return why a function cannot be called with such arguments; empty if it can, or is a
    builtin without a signature."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    except ValueError:
        pass
    return ""


def check_args(target: Callable[..., Any], args: Mapping[str, Any], where: str) -> None:
    """Check `[env.args]` against the signature of `target`."""
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return
    named = [
        p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for key in args:
            if key not in named:
                raise ConfigError(
                    f"{where} has no argument {key!r}; "
                    f"{suggest_or_list(key, named) or 'it takes none'}"
                )
    for key in named:
        if parameters[key].default is inspect.Parameter.empty and key not in args:
            raise ConfigError(f"{where} needs the argument {key!r}; give it under [env.args]")
    function: Any = target.__init__ if inspect.isclass(target) else target
    for key, value in args.items():
        from pydantic import TypeAdapter

        try:
            schema = flatten(
                TypeAdapter(pydantic_hint(get_type_hints(function)[key])).json_schema()
            )
        except Exception:  # no hint, or no JSON schema for it
            continue
        if problem := schema_error(value, schema):
            raise ConfigError(f"{where}: argument {key!r} {problem}")


def _source(named: str, base: Path) -> TaskSource:
    path, _, name = named.rpartition(":")
    if path.endswith(".py") and name:
        found: TaskSource = load_object(named, base=base)
        if not callable(found) and (
            isinstance(found, (str, bytes)) or not isinstance(found, Iterable)
        ):
            raise ConfigError(
                f"{named} is {type(found).__name__}; tasks come from a function or a list"
            )
        return found
    if named.endswith(".py"):
        raise ConfigError(f"{named}: which function of the file? Write {named}:function")
    return base / named


def _is_play(target: Any) -> bool:
    call = target if inspect.isroutine(target) else vars(type(target)).get("__call__")
    return inspect.iscoroutinefunction(call)


def _check_play(target: Any, where: str) -> None:
    if not callable(target) or not _is_play(target):
        raise ConfigError(
            f"{where} is not a play function; write async def {where.rpartition(':')[2]}(task, "
            "model)"
        )
    if wrong := call_error(target, None, None):
        raise ConfigError(f"{where} is called as play(task, model): {wrong}")
    first = _first_parameter(target)
    if first in _FOREIGN_ARGUMENTS:
        slime = (
            ", a generate function of slime async def generate(args, sample, sampling_params)"
            if first == "args"
            else ""
        )
        raise ConfigError(
            f"{where} takes {first!r} first, as functions of other frameworks do; an agent "
            f"function is async def {where.rpartition(':')[2]}(task, model){slime}"
        )


def _first_parameter(target: Callable[..., Any]) -> str:
    try:
        return next(iter(inspect.signature(target).parameters), "")
    except (TypeError, ValueError):
        return ""


def _factory(target: Any, args: dict[str, Any], where: str) -> Callable[[], Env]:
    if isinstance(target, Env):
        kind = type(target).__name__
        raise ConfigError(
            f"{where} is an instance of {kind}, which every episode would share; name the class "
            f"{kind} or a factory"
        )
    if not callable(target):
        raise ConfigError(
            f"{where} is {type(target).__name__}; an environment is a tw.Env class or a factory of "
            "one"
        )
    if inspect.isclass(target):
        if not issubclass(target, Env):
            raise ConfigError(
                f"{where} is a class but no environment; write class {target.__name__}(tw.Env)"
            )
        if missing := sorted(getattr(target, "__abstractmethods__", ())):
            raise ConfigError(
                f"{where} lacks {' and '.join(missing)}; every tw.Env has reset and step"
            )
        for method, written, given in (
            (target.reset, "reset(self, task, *, seed=None)", {"seed": 0}),
            (target.step, "step(self, action)", {}),
        ):
            if wrong := call_error(method, None, None, **given):
                raise ConfigError(f"{where}: {wrong}; write def {written}")
    check_args(target, args, where)
    return partial(target, **args) if args else target


def _prototype(factory: Callable[[], Any], where: str) -> Env:
    try:
        made = factory()
    except Exception as error:
        raise ConfigError(f"{where} cannot be made: {type(error).__name__}: {error}") from error
    if inspect.iscoroutine(made):
        made.close()
    if not isinstance(made, Env):
        raise ConfigError(
            f"{where} is not a factory of environments: it returned {type(made).__name__}, not a "
            "tw.Env"
        )
    return made


def load_named(named: Any, found: ForeignObject, key: str) -> Any:
    """Load what `key` of `[env.args]` names, if it is a name: `file.py:Name` from the recipe's
    directory, or `module:Name`."""
    if not isinstance(named, str):
        return named
    return (
        load_object(named, base=found.base)
        if ".py:" in named
        else import_object(named, f"{found.where}: {key}")
    )
