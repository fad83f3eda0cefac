"""Resolve built-in names, `file.py:Name`, `package.module:Name`, `framework:id` and objects to an
`EnvSpec`.

`resolve_env` reads an `[[env]]` section: `load_object` finds what it names, `as_env_spec` makes the
specification. Objects of other libraries are converted in `foreign.py`; the tasks are read in
`tasks.py`.
"""

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
"""First arguments of asynchronous functions of other frameworks that no adapter takes, such as
rewards."""

_TRAINERS = ("GRPOTrainer", "AsyncGRPOTrainer", "RLOOTrainer")
"""Trainers of TRL, whose scripts are played by what they give them."""

ENV_ATTRIBUTES = ("solver", "demonstrator", "single_turn_best", "max_turns", "group_reward")
"""Hooks that a specification has under the same name."""


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

    Example::

        >>> env_spec = resolve_env("calculator")
        >>> [task] = env_spec.tasks("train", n=1)
        >>> task.messages[0].content, task.answer
        ('(57 + 56) * 27 = ?', '3051')
    """
    if isinstance(config, str):
        config = EnvConfig(use=config)
    base = Path(base)

    play_function = None
    if play is not None:
        play_function = load_object(play, base=base)
    if play_function is not None:
        _check_play(play_function, play or "")
    target = load_object(config.use, base=base) if config.use else play_function
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
        tasks=None if config.tasks is None else _load_source(config.tasks, base),
        eval_tasks=None if config.eval_tasks is None else _load_source(config.eval_tasks, base),
        play=play_function,
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
    """Convert an Env class, a factory or an agent function to an `EnvSpec`; return an `EnvSpec`
    unchanged.

    Objects of other libraries are converted by installed packages, see `turnwright.envs.foreign`.

    Hooks (`tasks`, `solver`, `demonstrator`, `single_turn_best`, `max_turns`, `texts`) are read
    from the factory, then from an environment it makes, which is never reset. They may be static,
    class or instance methods; instance methods have access to the constructor's arguments.
    Constructors must therefore be cheap; expensive work belongs in `reset`.

    Example::

        >>> class Coin(tw.Env):
        ...     def reset(self, task, *, seed=None):
        ...         return task.messages
        ...     def step(self, action):
        ...         return tw.Step(reward=float(action.text == "heads"), terminated=True)
        >>> env_spec = tw.as_env_spec(Coin, tasks=[tw.Task("Heads or tails?")])
        >>> env_spec.name, [task.messages[0].text for task in env_spec.tasks("train", 1)]
        ('Coin', ['Heads or tails?'])

    Raises:
        ConfigError: for any other object, or arguments that do not match its signature.
    """
    if isinstance(target, EnvSpec):
        return target
    where = where or getattr(target, "__name__", None) or type(target).__name__

    # An adapter consumes the arguments.
    foreign = ForeignObject(target, where, dict(args or {}), Path(base), faithful)
    adapted = None
    if not (inspect.isclass(target) and issubclass(target, Env)):
        adapted = adapt(foreign)
    if adapted is None:
        refuse_faithful(foreign)
    else:
        target = adapted
        args = {}

    # A play function has no hook but its tasks.
    if _is_play(target):
        if args:
            raise ConfigError(
                f"{where} is a play function and takes no [env.args]; remove {', '.join(args)}"
            )
        if adapted is None:
            _check_play(target, where)
        train_tasks = tasks if tasks is not None else getattr(target, "tasks", None)
        source = make_task_source(
            train_tasks, eval_tasks, where, return_multi_modal_inputs, columns, media_root
        )
        return EnvSpec(name or where, None, target, source, weight=weight)

    factory = _factory(target, dict(args or {}), where)
    prototype = _prototype(factory, where)

    def hook(key: str) -> Any:
        # Of a class, the hook of an instance: it may read the constructor's arguments.
        of_factory = None if inspect.isclass(target) else getattr(target, key, None)
        return of_factory if of_factory is not None else getattr(prototype, key, None)

    train_tasks = tasks if tasks is not None else hook("tasks")
    source = make_task_source(
        train_tasks, eval_tasks, name or where, return_multi_modal_inputs, columns, media_root
    )
    hooks = {key: hook(key) for key in ENV_ATTRIBUTES}
    return EnvSpec(
        name or where, factory, play, source, weight=weight, texts_function=hook("texts"), **hooks
    )


def load_object(use: str, *, base: Path | str = ".") -> Any:
    """Load a built-in environment by name, `file.py:Name`, `package.module:Name`, or `framework:id`
    of its registry.

    Raises:
        ConfigError: where there is no such object.
    """
    if use == PROGRAM:
        return Registered(PROGRAM, "")
    if ".py" not in use and ":" not in use:
        return _load_named_env(use)

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
        hint = _where_inside(module, name) or _known_names(module, name)
        raise ConfigError(f"{path} has no {name!r}; {hint}")
    return getattr(module, name)


def _load_named_env(name: str) -> Any:
    """Load a built-in environment, or one of an installed package, by its name."""
    from turnwright.envs.builtin import BUILTIN

    if name in BUILTIN:
        return BUILTIN[name]
    if name in plugins.names("environments"):
        return plugins.load("environments", name)
    near = did_you_mean(name, [*BUILTIN, *plugins.names("environments")], 0.6)
    if near:
        near += " "
    raise ConfigError(
        f"unknown environment {name!r}; {near}Built in: {', '.join(BUILTIN)}; or file.py:Name"
    )


def frameworks() -> list[str]:
    """Return the frameworks whose registered objects are named `framework:id`."""
    return [name for name in plugins.names("frameworks") if name != PROGRAM]


def _where_inside(module: ModuleType, name: str) -> str:
    """Return where a name is defined inside a function of a file, which no other code can reach.

    Empty where it is not.
    """
    try:
        tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ""

    methods: set[int] = set()  # by id of their node
    functions = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            methods.update(id(member) for member in node.body)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            functions.append(node)

    for function in functions:
        for node in ast.walk(function):
            if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            if node is function or node.name != name or id(node) in methods:
                continue
            place = f"it is defined inside {function.name}(), at line {node.lineno}"
            hint = f"{place}; move it to the top level of the file"
            trainer = next((key for key in vars(module) if key in _TRAINERS), None)
            if trainer is not None:
                hint += f"; or use = file.py:{trainer}, which runs the script up to its trainer"
            return hint
    return ""


def _of_module(path: str, name: str, use: str, base: Path) -> Any:
    """Load `package.module:Name`."""
    if not all(part.isidentifier() for part in (*path.split("."), name)):
        raise ConfigError(
            f"{use}: not of the form file.py:Name, package.module:Name or framework:id "
            f"({', '.join(frameworks())})"
        )

    try:
        module = _import_or_load(path)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and _is_within(error.name, path):
            raise ConfigError(
                f"{use}: no module {error.name!r} is installed; {_likely_use(path, name, base)}"
            ) from error
        message = " ".join(f"{type(error).__name__}: {error}".split())
        place = user_location(error)
        suffix = f" ({place})" if place else ""
        raise ConfigError(f"{use}: {path} cannot be imported: {message}{suffix}") from error

    if not hasattr(module, name):
        raise ConfigError(f"{path} has no {name!r}; {_known_names(module, name)}")
    return getattr(module, name)


def _import_or_load(path: str) -> Any:
    """Import a module; where it needs a framework that is not installed, take our stand-in of it or
    load it as a user's file."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        stand_in = stand_in_of(path)
        if stand_in is not None:
            return stand_in
        if _is_within(error.name, path):
            raise  # the module itself is missing, not what it imports
        spec = importlib.util.find_spec(path)
        if spec is None or not spec.has_location or spec.origin is None:
            raise
        return load_user_module(Path(spec.origin), path)


def _likely_use(path: str, name: str, base: Path) -> str:
    """Return what may have been meant by `path:name`, where there is no module `path`."""
    file = base / (path.replace(".", "/") + ".py")
    if file.is_file():
        return f"did you mean {file.relative_to(base)}:{name}?"
    near = did_you_mean(path, frameworks(), 0.6)
    return near or f"write file.py:Name, or framework:id with one of {', '.join(frameworks())}"


def _is_within(missing: str | None, path: str) -> bool:
    """Return whether the missing module is the one at `path`, or a package around it."""
    return f"{path}.".startswith(f"{missing}.")


def _known_names(module: ModuleType, name: str) -> str:
    callables = [
        key for key, value in vars(module).items() if callable(value) and not key.startswith("_")
    ]
    return suggest_or_list(name, callables) or "it defines nothing that can be called"


def call_error(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return why a function cannot be called with such arguments.

    Empty if it can, or is a builtin without a signature.
    """
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    except ValueError:
        pass
    return ""


def check_args(target: Callable[..., Any], args: Mapping[str, Any], where: str) -> None:
    """Check `[env.args]` against the signature of `target`: names first, then the values against
    their hints."""
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return

    # Names: none that it lacks, and all that have no default.
    named = []
    takes_any = False
    for parameter in parameters.values():
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            named.append(parameter.name)
        takes_any |= parameter.kind is parameter.VAR_KEYWORD
    if not takes_any:
        for key in args:
            if key not in named:
                hint = suggest_or_list(key, named) or "it takes none"
                raise ConfigError(f"{where} has no argument {key!r}; {hint}")
    for key in named:
        if parameters[key].default is inspect.Parameter.empty and key not in args:
            raise ConfigError(f"{where} needs the argument {key!r}; give it under [env.args]")

    # Values.
    function: Any = target.__init__ if inspect.isclass(target) else target
    for key, value in args.items():
        from pydantic import TypeAdapter

        try:
            hint = pydantic_hint(get_type_hints(function)[key])
            schema = flatten(TypeAdapter(hint).json_schema())
        except Exception:  # no hint, or no JSON schema for it
            continue
        problem = schema_error(value, schema)
        if problem:
            raise ConfigError(f"{where}: argument {key!r} {problem}")


def _load_source(use: str, base: Path) -> TaskSource:
    """Return what `tasks` of a recipe names: `file.py:function`, loaded, or the path of a file."""
    path, _, name = use.rpartition(":")
    if path.endswith(".py") and name:
        source: TaskSource = load_object(use, base=base)
        is_list = isinstance(source, Iterable) and not isinstance(source, (str, bytes))
        if not callable(source) and not is_list:
            raise ConfigError(
                f"{use} is {type(source).__name__}; tasks come from a function or a list"
            )
        return source
    if use.endswith(".py"):
        raise ConfigError(f"{use}: which function of the file? Write {use}:function")
    return base / use


def _is_play(target: Any) -> bool:
    call = target if inspect.isroutine(target) else vars(type(target)).get("__call__")
    return inspect.iscoroutinefunction(call)


def _check_play(target: Any, where: str) -> None:
    """Check that an agent function is asynchronous, and is called as `play(task, model)`."""
    function_name = where.rpartition(":")[2]
    if not callable(target) or not _is_play(target):
        raise ConfigError(
            f"{where} is not a play function; write async def {function_name}(task, model)"
        )
    wrong = call_error(target, None, None)
    if wrong:
        raise ConfigError(f"{where} is called as play(task, model): {wrong}")

    try:
        first = next(iter(inspect.signature(target).parameters), "")
    except (TypeError, ValueError):
        return
    if first in _FOREIGN_ARGUMENTS:
        slime = ""
        if first == "args":
            slime = (
                ", a generate function of slime async def generate(args, sample, sampling_params)"
            )
        raise ConfigError(
            f"{where} takes {first!r} first, as functions of other frameworks do; an agent "
            f"function is async def {function_name}(task, model){slime}"
        )


def _factory(target: Any, args: dict[str, Any], where: str) -> Callable[[], Env]:
    """Return a factory with its arguments, checked."""
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
        _check_env_class(target, where)
    check_args(target, args, where)
    return partial(target, **args) if args else target


def _check_env_class(target: type, where: str) -> None:
    """Check that a class is an environment with `reset` and `step`, as they are called."""
    if not issubclass(target, Env):
        raise ConfigError(
            f"{where} is a class but no environment; write class {target.__name__}(tw.Env)"
        )
    missing = sorted(getattr(target, "__abstractmethods__", ()))
    if missing:
        raise ConfigError(f"{where} lacks {' and '.join(missing)}; every tw.Env has reset and step")

    wrong = call_error(target.reset, None, None, seed=0)
    if wrong:
        raise ConfigError(f"{where}: {wrong}; write def reset(self, task, *, seed=None)")
    wrong = call_error(target.step, None, None)
    if wrong:
        raise ConfigError(f"{where}: {wrong}; write def step(self, action)")


def _prototype(factory: Callable[[], Any], where: str) -> Env:
    """Make the environment whose hooks are read; it is never reset."""
    try:
        env = factory()
    except Exception as error:
        raise ConfigError(f"{where} cannot be made: {type(error).__name__}: {error}") from error
    if inspect.iscoroutine(env):
        env.close()  # else Python warns that it was never awaited
    if not isinstance(env, Env):
        raise ConfigError(
            f"{where} is not a factory of environments: it returned {type(env).__name__}, not a "
            "tw.Env"
        )
    return env


def load_named(named: Any, found: ForeignObject, key: str) -> Any:
    """Load what `key` of `[env.args]` names, if it is a name: `file.py:Name` from the recipe's
    directory, or `module:Name`."""
    if not isinstance(named, str):
        return named
    if ".py:" in named:
        return load_object(named, base=found.base)
    return import_object(named, f"{found.where}: {key}")
