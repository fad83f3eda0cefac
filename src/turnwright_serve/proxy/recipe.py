"""`use = "program"`: a program as the agent function of a recipe, with the arguments of
`turnwright_serve.proxy.program`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwright.envs.foreign import ForeignObject, Framework, Registered
from turnwright.envs.resolve import load_named
from turnwright.errors import ConfigError, UsageError, suggest_or_list

if TYPE_CHECKING:
    from turnwright_serve.proxy.programs import Program

_ARGUMENTS = (
    "command",
    "agent",
    "score",
    "files",
    "env",
    "exit_codes",
    "seconds",
    "untrained",
    "models",
    "sandbox",
)


def adapt(foreign: ForeignObject) -> Program | None:
    """Make the agent function of `[env.args]`.

    `command` (a list; `{recipe}` is the recipe's directory) or `agent` (`file.py:function`), and
    `score` (`file.py:function`) are needed; `files` and `env` are tables, `files` also
    `file.py:function`.
    """
    if not isinstance(foreign.target, Registered):
        return None
    args = dict(foreign.args)
    for key in args:
        if key not in _ARGUMENTS:
            raise ConfigError(
                f'use = "program" has no argument {key!r}; {suggest_or_list(key, _ARGUMENTS)}'
            )
    if ("command" in args) == ("agent" in args):
        raise ConfigError(
            'use = "program" needs one of args.command = ["python", "agent.py"] and args.agent = '
            '"file.py:function"'
        )
    if "score" not in args:
        raise ConfigError(
            'use = "program" needs args.score = "file.py:function", called with the result of '
            "each episode"
        )

    command: Sequence[str] | Callable[..., Any]
    if "agent" in args:
        command = _function(args.pop("agent"), "agent", foreign)
    else:
        command = _command(args.pop("command"), foreign.base)

    files = args.pop("files", None)
    if files is not None and not isinstance(files, Mapping):
        files = _function(files, "files", foreign)
    env = args.pop("env", {})
    if not isinstance(env, Mapping) or not all(isinstance(text, str) for text in env.values()):
        raise ConfigError("args.env is a table of texts, the variables of the program")

    from turnwright_serve.proxy import program

    try:
        return program(
            command,
            score=_function(args.pop("score"), "score", foreign),
            files=files,
            env=env,
            **args,
        )
    except UsageError as error:
        raise ConfigError(f'use = "program": {error}') from None


def _command(value: Any, base: Path) -> list[str]:
    is_list = isinstance(value, (list, tuple))
    if not is_list or not value or not all(isinstance(argument, str) for argument in value):
        raise ConfigError(
            f'args.command is a list of texts, such as ["python", "agent.py"], not {value!r:.80}'
        )
    from turnwright_serve.proxy.programs import fill

    values = {"recipe": str(base.resolve())}
    return [fill(argument, values) for argument in value]


def _function(value: Any, name: str, foreign: ForeignObject) -> Callable[..., Any]:
    function = load_named(value, foreign, f"args.{name}")
    if not callable(function):
        raise ConfigError(f"args.{name} = {value!r:.80} is no function; write file.py:function")
    return function  # type: ignore[no-any-return]


FRAMEWORK = Framework("program", adapt, recognizes=False)
