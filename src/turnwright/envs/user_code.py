"""Load and call user code; classify its exceptions; locate the user's line.

`load_user_module` executes a file that a recipe names, `call_user` calls what is in it, and
`failure_of` makes a `Failure` of what it raises. What such a file can import is in
`user_imports.py`.
"""

from __future__ import annotations

import asyncio
import asyncio.runners
import dis
import hashlib
import importlib.util
import inspect
import math
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from decimal import Decimal
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from numbers import Real
from pathlib import Path
from types import FrameType, ModuleType, NoneType
from typing import Any, cast

from turnwright import plugins, shutdown
from turnwright.envs import user_imports
from turnwright.envs.likely_names import likely_name
from turnwright.envs.threads import run_in_thread
from turnwright.errors import (
    ConfigError,
    ControlTextError,
    EngineError,
    EnvError,
    MediaError,
    ProcessDied,
    RewardError,
    ToolFailure,
    TurnwrightError,
    UsageError,
    class_name,
    did_you_mean,
    words,
)
from turnwright.files import resolved
from turnwright.types import Failure, FailureKind

_BUGS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    NotImplementedError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""Built-in exceptions that the same code raises again.

Exceptions of libraries and of the system (OSError) may be transient.
"""

LARGEST = 1e15
"""Largest size of a reward: squares and sums over the episodes of a run stay in the range of
float32."""

_FINITE = f"rewards are finite and at most {LARGEST:g} in size"

USER_MODULE = "turnwright_user_"
"""Prefix of the names of modules that `load_user_module` makes."""

_RETRIED = (FailureKind.ENVIRONMENT, FailureKind.TOOL, FailureKind.TIMEOUT)
_PASSING = (*_RETRIED, FailureKind.ENGINE, FailureKind.REWARD)

_LIBRARIES = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_BUILTIN = str(Path(__file__).parent / "builtin")


class RemoteException(TurnwrightError, RuntimeError):
    """Exception raised by an environment in a separate process."""

    over = False
    """Whether the deadline of the episode had passed; overridden for recorded failures."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def failure_kind(error: BaseException, phase: str) -> FailureKind:
    """Classify an exception raised in a phase of an episode."""
    kind = type(error)  # `__class__` may be user code
    if issubclass(kind, RemoteException):
        return FailureKind(cast(RemoteException, error).failure.kind)
    if issubclass(kind, (TimeoutError, asyncio.TimeoutError)):
        return FailureKind.TIMEOUT
    if issubclass(kind, EngineError):
        return FailureKind.ENGINE
    if issubclass(kind, ToolFailure):
        return FailureKind.TOOL
    if _is_bug(error):
        return FailureKind.USER_BUG
    if phase == "reward" or issubclass(kind, RewardError):
        return FailureKind.REWARD
    return FailureKind.ENVIRONMENT


def retryable(failure: Failure) -> bool:
    """Whether restoring the environment and retrying the call may succeed."""
    return failure.kind in _RETRIED and failure.phase in ("reset", "step")


def passing(failure: Failure) -> bool:
    """Whether replaying the episode may succeed; a bug in the code and a non-finite reward would
    recur."""
    return failure.kind in _PASSING and failure.type != RewardError.__name__


def failure_of(error: BaseException, phase: str, turn: int = -1, env: str = "") -> Failure:
    """Convert an exception to a `Failure`, whose message names the environment of a reward that is
    refused.

    Never raises, even if methods of the exception do.
    """
    failure = _failure_of(error, phase, turn)
    # A replayed failure is raised with its recorded message.
    is_named = failure.message.startswith("environment ")
    if not env or is_named or failure.type != RewardError.__name__:
        return failure
    return replace(failure, message=f"environment {env!r}: {failure.message}")


def _failure_of(error: BaseException, phase: str, turn: int) -> Failure:
    try:
        if issubclass(type(error), RemoteException):
            remote = cast(RemoteException, error).failure  # mypy does not narrow by type()
            return replace(remote, phase=phase, turn=turn, recovery="")

        message = words(error) + likely_name(error)
        if not message and issubclass(type(error), TimeoutError):
            message = f"{phase} did not answer by its deadline"
        return Failure(
            class_name(error),
            message,
            phase,
            "".join(traceback.format_exception(error, limit=-8)),
            failure_kind(error, phase),
            user_location(error),
            turn,
        )
    except KeyboardInterrupt:
        raise
    except BaseException:  # the exception's attributes or class are user code
        return Failure(class_name(error), words(error), phase, "", FailureKind.USER_BUG, "", turn)


def is_interrupt(error: BaseException) -> bool:
    """Return whether an exception is that of Ctrl-C, which no code has raised.

    A signal's exception begins between two instructions, or in what handles signals; one that code
    raises begins at a `raise`.
    """
    if not issubclass(type(error), KeyboardInterrupt):
        return False
    begins_in = error.__traceback__
    while begins_in is not None and begins_in.tb_next is not None:
        begins_in = begins_in.tb_next
    if begins_in is None:
        return True

    code = begins_in.tb_frame.f_code
    is_raised = code.co_code[begins_in.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return not is_raised or code.co_filename in (asyncio.runners.__file__, shutdown.__file__)


def user_location(error: BaseException) -> str:
    """Return `file.py:line` of the innermost user code in the traceback; empty without any."""
    location = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if _is_user_code(frame):
            location = f"{frame.f_code.co_filename}:{line}"
    return location


def user_line(frame: FrameType | None) -> str:
    """Return `file.py:line` of the innermost user code of a running call; empty without any."""
    if frame is None:
        return ""
    for caller, line in traceback.walk_stack(frame):
        if _is_user_code(caller):
            return f"{caller.f_code.co_filename}:{line}"
    return ""


def _is_user_code(frame: FrameType) -> bool:
    """Return whether code is the user's; our built-in environments count as the user's."""
    file = frame.f_code.co_filename
    is_ours = file.startswith(plugins.FOLDERS) and not file.startswith(_BUILTIN)
    return not is_ours and not file.startswith((*_LIBRARIES, "<"))


def _is_bug(error: BaseException) -> bool:
    """Return whether the same code would raise an exception again."""
    kind = type(error)
    if issubclass(kind, (ControlTextError, ProcessDied)):
        return False
    if issubclass(kind, MediaError):
        return bool(cast(MediaError, error).bug)  # otherwise one image is at fault, not the code
    if issubclass(kind, (EnvError, UsageError)):
        return True
    return issubclass(kind, _BUGS) and kind.__module__ == "builtins"


_PLAIN = frozenset({NoneType, str, bool, int, float, tuple, list, dict})


def is_awaitable(value: Any) -> bool:
    """Return what `inspect.isawaitable` does, faster for most results."""
    return type(value) not in _PLAIN and inspect.isawaitable(value)


async def call_user(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a function, a sync one in a thread.

    SystemExit, which would end the event loop, becomes a RuntimeError.
    """
    try:
        if inspect.iscoroutinefunction(function):
            return await function(**arguments)
        result = await run_in_thread(function, arguments)
        return await result if is_awaitable(result) else result
    except SystemExit as end:
        raise RuntimeError(f"SystemExit: {words(end)}") from end


def as_number(value: Any, what: str) -> float | None:
    """Convert a number returned by user code (reward, score, metric) to a float; None (not
    computed) stays None.

    Accepts ints, floats, other real numbers (NumPy scalars, fractions, decimals) and
    zero-dimensional arrays and tensors. Raises `RewardError`, with the name `what`, for anything
    else and for a number that is not finite or above `LARGEST`: "1", b"1" and True are mistakes
    more often than rewards.
    """
    if value is None:
        return None
    number = number_of(value)
    if number is None:
        hint = ", float(...) where it is a yes or a no" if isinstance(scalar(value), bool) else ""
        raise RewardError(
            f"{what} is {describe_value(value)}, not a number; None where there is none{hint}"
        )
    if not math.isfinite(number):
        if isinstance(scalar(value), int):
            raise RewardError(
                f"{what} is {describe_value(value)}, which no float can hold; {_FINITE}"
            )
        raise RewardError(f"{what} is {number}; {_FINITE}, None where there is none")
    if abs(number) > LARGEST:
        raise RewardError(
            f"{what} is {number:g}; {_FINITE}, for sums and float32 to hold them: scale it down"
        )
    return number


def number_of(value: Any) -> float | None:
    """Return a number as a float, infinite if it overflows; None for anything else.

    See `as_number`.
    """
    if type(value) is float:
        return value
    plain = scalar(value)
    if not isinstance(plain, (Real, Decimal)) or isinstance(plain, bool):
        return None
    try:
        return float(plain)
    except (OverflowError, ValueError):
        return math.inf


def as_flag(value: Any, what: str) -> bool:
    """Convert a Python or NumPy boolean; raise `EnvError` for anything else, although Python would
    give it a truth value."""
    if value is True or value is False:
        return value
    plain = scalar(value)
    if isinstance(plain, bool):
        return plain
    raise EnvError(f"{what} is {describe_value(value)}, neither True nor False")


def describe_value(value: Any) -> str:
    """Describe a value for an error: its truncated repr, with the type where the repr does not show
    it."""
    try:
        text = f"{value!r:.80}"
    except Exception:
        return f"a {type(value).__name__} without a repr"
    if isinstance(value, (str, bytes, bool, type(None), dict, list, tuple)):
        return text
    return f"{text} ({type(value).__name__})"


def scalar(value: Any) -> Any:
    """Return the item of a zero-dimensional array, tensor or NumPy scalar; any other value
    unchanged."""
    try:
        return value.item() if tuple(value.shape) == () else value
    except Exception:  # not an array
        return value


def load_user_module(path: Path, name_in_errors: str) -> ModuleType:
    """Execute a file under a unique module name, once per version.

    It can import modules of its directory and of its package, and what
    `turnwright.envs.user_imports` finds.

    Raises:
        ConfigError: where there is no such file, or its code raises.
    """
    path = resolved(path)
    if not path.is_file():
        near = did_you_mean(path.name, [entry.name for entry in path.parent.glob("*.py")], 0.6)
        raise ConfigError(f"{name_in_errors}: no such file; {near or 'check the path'}")
    name = _module_name(path)
    if name in sys.modules:
        return sys.modules[name]

    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{name_in_errors}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    module.__package__ = user_imports.private_package(path)
    user_imports.prepare(module)

    sys.modules[name] = module
    try:
        source = path.read_text(encoding="utf-8", errors="replace")
        with user_imports.registrations_of_a_load(source), _on_path(path.parent):
            spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, (Exception, SystemExit)):
            raise
        raise ConfigError(f"{name_in_errors}: {_place(error, path)}{_why(error)}") from error

    load_there = (
        f"from turnwright.envs.user_code import load_again\n\nload_again(__name__, {str(path)!r})\n"
    )
    user_imports.publish(name, load_there)
    return module


@contextmanager
def _on_path(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def load_again(name: str, file: str) -> None:
    """Load the file of a module, in place of the module that asks for it, in a process that knows
    only its name."""
    del sys.modules[name]
    UserModules({name: file}).create_module(ModuleSpec(name, None))


def _module_name(path: Path) -> str:
    """Return the module name of a file's present version."""
    version = f"{path}\0{path.stat().st_mtime_ns}"
    digest = hashlib.blake2b(version.encode(), digest_size=6).hexdigest()
    return f"{USER_MODULE}{path.stem}_{digest}"


class UserModules(MetaPathFinder, Loader):
    """Loads files when pickled objects first need them, under the names that their modules have in
    another process."""

    def __init__(self, files: Mapping[str, str]) -> None:
        """`files`: file of each module's name."""
        self._files = files

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of the other process."""
        if fullname not in self._files:
            return None
        return ModuleSpec(fullname, self, origin=self._files[fullname])

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Execute the file; `ImportError` if it is not as the other process loaded it."""
        file = Path(self._files[spec.name])
        if not file.is_file() or _module_name(file) != spec.name:
            raise ImportError(
                f"{file} has changed since it was loaded; start the run again", name=spec.name
            )
        return load_user_module(file, str(file))

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: `create_module` executed it."""


def _why(error: BaseException) -> str:
    """Describe why a file cannot be loaded, with the remedy for a module that is missing; its own
    modules by their names."""
    missing = user_imports.missing_module(error)
    if missing is not None:
        module, remedy = missing
        return f"ModuleNotFoundError: No module named {module!r}; {remedy}"
    name = user_imports.missing_name(error)
    if name is not None:
        return f"ImportError: {name}"

    message = " ".join(f"{type(error).__name__}: {error}".split())
    private = rf"{re.escape(user_imports.PACKAGE)}[0-9a-f]+\.|{re.escape(user_imports.STAND_INS)}\."
    return re.sub(private, "", message)


def _place(error: BaseException, path: Path) -> str:
    """Return `line N: ` of the innermost frame in a file; empty without one."""
    last_line: int | None = None
    if isinstance(error, SyntaxError) and error.filename == str(path):
        last_line = error.lineno
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename == str(path):
            last_line = line
    return "" if last_line is None else f"line {last_line}: "
