"""Load and call user code; classify its exceptions; locate the user's line."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import difflib
import hashlib
import importlib.util
import inspect
import math
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from turnwise.errors import (
    ConfigError,
    ControlTextError,
    EngineError,
    EnvError,
    MediaError,
    ProcessDied,
    RewardError,
    ToolFailure,
    TurnwiseError,
    UsageError,
    class_name,
    words,
)
from turnwise.types import Failure, FailureKind

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
"""Python's own exceptions that the same code raises again. A library's, and those of the system (OSError), may go away."""

_RETRIED = (FailureKind.ENVIRONMENT, FailureKind.TOOL, FailureKind.TIMEOUT)
_PASSING = (*_RETRIED, FailureKind.ENGINE, FailureKind.REWARD)
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_OURS = str(Path(__file__).parents[1])
_BUILTIN = str(Path(__file__).parent / "builtin")


class RemoteException(TurnwiseError, RuntimeError):
    """What an environment raised in a process of its own."""

    over = False
    """Whether the time of the whole episode was over; a class of recorded failures says so."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def failure_kind(error: BaseException, phase: str) -> FailureKind:
    """Whose doing an exception is that was raised in a phase of an episode."""
    kind = type(error)  # what `__class__` claims is user code
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
    """Whether it may go well when the environment is brought back and asked again."""
    return failure.kind in _RETRIED and failure.phase in ("reset", "step")


def passing(failure: Failure) -> bool:
    """Whether it may go well when the whole episode is played again: the world, the engine or a deadline failed it.

    A mistake in the code and a reward that is no finite number are the same the next time.
    """
    return failure.kind in _PASSING and failure.type != RewardError.__name__


def failure_of(error: BaseException, phase: str, turn: int = -1) -> Failure:
    """An exception as data. Never fails, whatever the exception's own methods do."""
    try:
        return _failure_of(error, phase, turn)
    except KeyboardInterrupt:
        raise
    except BaseException:  # its attributes, or its class, are the user's code
        return Failure(class_name(error), words(error), phase, "", FailureKind.USER_BUG, "", turn)


def _failure_of(error: BaseException, phase: str, turn: int) -> Failure:
    if issubclass(type(error), RemoteException):
        told = cast(RemoteException, error).failure  # mypy does not narrow by type()
        return Failure(told.type, told.message, phase, told.traceback, told.kind, told.place, turn)
    message = words(error)
    if not message and issubclass(type(error), TimeoutError):
        message = f"{phase} did not answer by its deadline"
    text = "".join(traceback.format_exception(error, limit=-8))
    return Failure(class_name(error), message, phase, text, failure_kind(error, phase), user_location(error), turn)


def user_location(error: BaseException) -> str:
    """`file.py:line` of the last line of a person's code that an exception passed through; empty where there is none."""
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        ours = file.startswith(_OURS) and not file.startswith(_BUILTIN)
        if not ours and not file.startswith((*_LIBRARIES, "<")):
            found = f"{file}:{line}"
    return found


def _is_bug(error: BaseException) -> bool:
    kind = type(error)
    if issubclass(kind, (ControlTextError, ProcessDied)):
        return False
    if issubclass(kind, MediaError):
        return bool(cast(MediaError, error).bug)  # else it is of one image, and not of the code
    if issubclass(kind, (EnvError, UsageError)):
        return True
    return issubclass(kind, _BUGS) and kind.__module__ == "builtins"


async def call_user(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """What a function gives: awaited when it is async, else run in a thread of its own.

    Raises:
        RuntimeError: where it asks the process to end. In a task of its own that would end the loop.
    """
    try:
        if inspect.iscoroutinefunction(function):
            return await function(**arguments)
        result = await run_in_thread(function, arguments)
        return await result if inspect.isawaitable(result) else result
    except SystemExit as end:
        raise RuntimeError(f"SystemExit: {words(end)}") from end


def carried(error: BaseException) -> Exception:
    """Make an exception of a thread one that a future can carry: `exit()` in a tool, say, must not look like ours."""
    kind = type(error)  # what `__class__` claims is user code
    if issubclass(kind, StopIteration):
        return RuntimeError("StopIteration")
    if issubclass(kind, Exception):
        return error  # type: ignore[return-value]
    return RuntimeError(f"{class_name(error)}: {words(error)}")


ABANDONED_THREADS: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("left", default=None)
"""Where the environment of this task notes calls that nobody waits for any more, and that still hold a thread."""


async def run_in_thread(function: Callable[..., Any], arguments: Mapping[str, Any], name: str = "") -> Any:
    """Run a function in a daemon thread of its own.

    A pool would do for what returns; a function that hangs for ever would keep a place of it, and the process from ending.
    """
    name = name or getattr(function, "__name__", "")
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        result, error = None, None
        try:
            result = context.run(function, **arguments)
        except BaseException as raised:
            error = carried(raised)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, result, error)

    thread = threading.Thread(target=work, name=f"tool {name}", daemon=True)
    thread.start()
    try:
        return await future
    except asyncio.CancelledError:
        left = ABANDONED_THREADS.get()
        if left is not None and thread.is_alive():
            thread.name = f"tool {name} abandoned"
            left.append(name)
        raise


def as_number(value: Any, what: str) -> float | None:
    """Read a number that a user's code returned: a reward, a score, a metric. None, which is not computed, stays None.

    A number is an int, a float, any other real number (numpy's scalars, fractions, decimals), or an array or tensor without
    dimensions that holds one. Text, bytes and booleans are none: "1", b"1" and True are mistakes more often than rewards.

    Args:
        what: the value's name in errors.

    Raises:
        RewardError: for anything else, and for a number that is not finite.
    """
    if value is None:
        return None
    number = number_of(value)
    if number is None:
        hint = ", float(...) where it is a yes or a no" if isinstance(_scalar(value), bool) else ""
        raise RewardError(f"{what} is {shown(value)}, not a number; None where there is none{hint}")
    if not math.isfinite(number):
        if isinstance(_scalar(value), int):
            raise RewardError(f"{what} is {shown(value)}, which no float can hold; rewards are finite")
        raise RewardError(f"{what} is {number}; rewards are finite, None where there is none")
    return number


def number_of(value: Any) -> float | None:
    """Return a number as a float, infinite where no float can hold it; None for anything else. See `as_number`."""
    if type(value) is float:
        return value
    plain = _scalar(value)
    if not isinstance(plain, (Real, Decimal)) or isinstance(plain, bool):
        return None
    try:
        return float(plain)
    except (OverflowError, ValueError):
        return math.inf


def as_flag(value: Any, what: str) -> bool:
    """Read a flag that a user's code returned, numpy's too.

    Raises:
        EnvError: for anything else, which Python would take for true or false.
    """
    if value is True or value is False:
        return value
    plain = _scalar(value)
    if isinstance(plain, bool):
        return plain
    raise EnvError(f"{what} is {shown(value)}, neither True nor False")


def shown(value: Any) -> str:
    """What was returned, for an error: its repr, cut, with its type where the repr does not tell it."""
    try:
        text = f"{value!r:.80}"
    except Exception:
        return f"a {type(value).__name__} without a repr"
    return text if isinstance(value, (str, bytes, bool, type(None), dict, list, tuple)) else f"{text} ({type(value).__name__})"


def _scalar(value: Any) -> Any:
    """What an array, a tensor or a numpy scalar without dimensions holds; anything else as it is."""
    try:
        return value.item() if tuple(value.shape) == () else value
    except Exception:  # no array, or one that does not say
        return value


def suggest_or_list(word: str, choices: Iterable[str]) -> str:
    """`did you mean 'x'?` for the closest choice, else the choices, or nothing where there are none.

    Example: ``did_you_mean("expresion", ["expression"]) == "did you mean 'expression'?"``
    """
    known = [choice for choice in choices if choice]
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return "known: " + ", ".join(known[:20]) if known else ""


def load_user_module(path: Path, shown: str) -> ModuleType:
    """Execute a file once per version of it, under a module name of its own; modules beside it can be imported."""
    path = path.expanduser().resolve()
    if not path.is_file():
        beside = [entry.name for entry in path.parent.glob("*.py")] if path.parent.is_dir() else []
        near = suggest_or_list(path.name, beside)
        raise ConfigError(f"{shown}: no such file; {near if near.startswith('did') else 'check the path'}")
    version = hashlib.blake2b(f"{path}\0{path.stat().st_mtime_ns}".encode(), digest_size=6).hexdigest()
    name = f"turnwise_user_{path.stem}_{version}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{shown}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, (Exception, SystemExit)):
            raise
        raise ConfigError(f"{shown}: {_place(error, path)}{type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(path.parent))
    return module


def _place(error: BaseException, path: Path) -> str:
    """The last line of a file that an exception passed through."""
    lines = [error.lineno] if isinstance(error, SyntaxError) and error.filename == str(path) else []
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    return f"line {lines[-1]}: " if lines else ""
