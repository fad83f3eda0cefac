"""Whose doing a failure is, and where it stands in a person's code."""

from __future__ import annotations

import asyncio
import sysconfig
import traceback
from pathlib import Path

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
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_OURS = str(Path(__file__).parents[1])
_BUILTIN = str(Path(__file__).parent / "builtin")


class Remote(TurnwiseError, RuntimeError):
    """What an environment raised in a process of its own."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def kind_of(error: BaseException, phase: str) -> FailureKind:
    """Whose doing an exception is that was raised in a phase of an episode."""
    if isinstance(error, Remote):
        return FailureKind(error.failure.kind)
    if isinstance(error, (TimeoutError, asyncio.TimeoutError)):
        return FailureKind.TIMEOUT
    if isinstance(error, EngineError):
        return FailureKind.ENGINE
    if isinstance(error, ToolFailure):
        return FailureKind.TOOL
    if _is_bug(error):
        return FailureKind.USER_BUG
    if phase == "reward" or isinstance(error, RewardError):
        return FailureKind.REWARD
    return FailureKind.ENVIRONMENT


def retryable(failure: Failure) -> bool:
    """Whether it may go well when the environment is brought back and asked again."""
    return failure.kind in _RETRIED and failure.phase in ("reset", "step")


def failure_of(error: BaseException, phase: str, turn: int = -1) -> Failure:
    """An exception as data."""
    if isinstance(error, Remote):
        told = error.failure
        return Failure(told.type, told.message, phase, told.traceback, told.kind, told.place, turn)
    message = str(error)
    if not message and isinstance(error, TimeoutError):
        message = f"{phase} did not answer by its deadline"
    text = "".join(traceback.format_exception(error, limit=-8))
    return Failure(type(error).__name__, message, phase, text, kind_of(error, phase), place_of(error), turn)


def place_of(error: BaseException) -> str:
    """`file.py:line` of the last line of a person's code that an exception passed through; empty where there is none."""
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        ours = file.startswith(_OURS) and not file.startswith(_BUILTIN)
        if not ours and not file.startswith((*_LIBRARIES, "<")):
            found = f"{file}:{line}"
    return found


def _is_bug(error: BaseException) -> bool:
    if isinstance(error, (ControlTextError, ProcessDied)):
        return False
    if isinstance(error, MediaError):
        return error.bug  # else it is of one image, and not of the code
    if isinstance(error, (EnvError, UsageError)):
        return True
    return isinstance(error, _BUGS) and type(error).__module__ == "builtins"
