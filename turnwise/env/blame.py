"""Whose doing a failure is, and where it stands in a person's code."""

from __future__ import annotations

import asyncio
import sysconfig
import traceback
from pathlib import Path
from typing import cast

from turnwise.errors import (
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
