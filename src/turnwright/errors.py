"""Exceptions of Turnwright.

TurnwrightError
├── UsageError (ValueError)            user error: a command prints one line and exits with 2
│   ├── ConfigError                    invalid recipe, override or referenced file
│   ├── ModelError                     unusable model directory
│   ├── TemplateError                  chat template that cannot be rendered exactly
│   │   └── ControlTextError           control text in a message, where it is rejected
│   ├── TaskError                      invalid dataset row
│   └── NotTrainable                   training with an engine that supports only evaluation
├── EnvError (RuntimeError)            environment broke its contract
│   └── MediaError                     unusable image or video
├── ProcessDied (RuntimeError)         process of an isolated environment exited
├── ServerError (RuntimeError)         server of a remote environment failed or is unreachable
├── InvalidAction (ValueError)         raised *by* an environment: the model's mistake
├── RewardError (ValueError)           reward that is not a finite number, or out of range
├── JudgeError (RuntimeError)          no usable answer from a judge or simulated user
├── RepeatedUserError (RuntimeError)   same bug in user code in many episodes: the run stops
├── ToolFailure (RuntimeError)         raised *by* a tool: a failure through no fault of the model
├── LimitReached (RuntimeError)        agent function exceeded its limits
├── EngineError (RuntimeError)         engine failed
│   ├── BackendContractError           engine's answer does not match the request
│   │   └── StaleWeights               server answered with weights of another policy version
│   └── EngineUnavailable              no answer from a server: connection, deadline, 5xx
├── SyncError (RuntimeError)           weight update failed
├── RoutesMissing (RuntimeError)       expert routes needed for training were not reported
└── TraceError (RuntimeError)          unreadable or unwritable run directory
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable


class TurnwrightError(Exception):
    """Base class of all exceptions of this package."""


class UsageError(TurnwrightError, ValueError):
    """User error. The message states cause, location and remedy."""


class ConfigError(UsageError):
    """Invalid recipe, override, or file that one of them names."""


class ModelError(UsageError):
    """Unusable model directory."""


class TemplateError(UsageError):
    """Chat template that cannot be rendered exactly."""


class ControlTextError(TemplateError):
    """Control text in a message, where `rollout.control_text` rejects it."""


class TaskError(UsageError):
    """Dataset row that is not a valid task."""


class NotTrainable(UsageError):
    """Training was requested with an engine that returns no ids or no logprobs."""


class EnvError(TurnwrightError, RuntimeError):
    """An environment broke its contract."""


class MediaError(EnvError):
    """An image or a video that is broken, over a limit, unknown, or unsupported by the model.

    `bug` marks an error in user code that recurs every time: an image without `alt`, for a
    text-only model.
    """

    bug = False

    def __init__(self, message: str, *, bug: bool = False) -> None:
        super().__init__(message)
        self.bug = bug


class ProcessDied(TurnwrightError, RuntimeError):
    """The process of an isolated environment exited: a signal, `exit`, or out of memory.

    `status` is its exit status, negative for a signal; None where it is not known.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class ServerError(TurnwrightError, RuntimeError):
    """The server of a remote environment failed; `code` is the server's error code.

    Besides the server's own codes: `connection` (unreachable, or disconnected) and `schema` (an
    answer in another format).
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[type[ServerError], tuple[str, str]]:
        return type(self), (self.code, str(self))


class InvalidAction(TurnwrightError, ValueError):
    """Raised by an environment for a mistake of the model; its message becomes the observation."""


class RewardError(TurnwrightError, ValueError):
    """A reward that is not a finite number, or out of range."""


class JudgeError(TurnwrightError, RuntimeError):
    """No usable answer from a judge or a simulated user; `cause` names the reason in one word.

    `deadline`, `connection`, `status` (an HTTP error), `schema` (an answer in another format),
    `verdict` (no verdict in the answer), `budget`, `engine`, or a word of the judge's own.
    """

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class RepeatedUserError(TurnwrightError, RuntimeError):
    """The same bug in user code broke many episodes; no retry fixes it."""


class ToolFailure(TurnwrightError, RuntimeError):
    """Raised by a tool for a failure through no fault of the model, such as a service that is down.

    The episode fails and is not trained on.
    """


class LimitReached(TurnwrightError, RuntimeError):
    """An episode met one of its limits; `reason` is the stop reason's value."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class EngineError(TurnwrightError, RuntimeError):
    """An engine failed."""

    status: int | None = None
    """HTTP status of the server's answer, if any."""
    retry_after: float = 0.0
    """Seconds after which the server accepts a retry."""


class BackendContractError(EngineError):
    """An engine's answer does not match the request (ids, logprobs or version missing or wrong)."""


class StaleWeights(BackendContractError):
    """A server answered with weights of another policy version (a restart, a lost update)."""


class EngineUnavailable(EngineError):
    """A server gave no answer (connection, deadline, 5xx).

    The same request may be retried, there or elsewhere.
    """


class SyncError(TurnwrightError, RuntimeError):
    """A weight update failed."""


class TraceError(TurnwrightError, RuntimeError):
    """An unreadable or unwritable run directory."""


class RoutesMissing(TurnwrightError, RuntimeError):
    """Training needs expert routes of the context that the engine did not report."""


_TRAINING = ("torch", "transformers", "safetensors", "numpy", "numba")


def missing_training(error: ModuleNotFoundError) -> UsageError | None:
    """Return the error for a missing package that training needs; None for any other module."""
    if error.name is None or error.name.partition(".")[0] not in _TRAINING:
        return None
    return UsageError(
        f"{error.name} is not installed; training and local models need it: pip install "
        "'turnwright[train]'"
    )


def first_exception(error: BaseException) -> BaseException:
    """Return the first exception of an exception group, nested ones included.

    Any other exception is returned unchanged.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def did_you_mean(word: str, choices: Iterable[str], cutoff: float = 0.55) -> str:
    """Return `did you mean 'x'?` for the closest choice other than the word itself.

    Empty where no choice is close.
    """
    others = [choice for choice in choices if choice != word]
    near = difflib.get_close_matches(word, others, n=1, cutoff=cutoff)
    return f"did you mean {near[0]!r}?" if near else ""


def suggest_or_list(word: str, choices: Iterable[str]) -> str:
    """Return `did you mean 'x'?`, else the list of choices; empty without choices."""
    names = [choice for choice in choices if choice]
    question = did_you_mean(word, names, 0.6)
    if question or not names:
        return question
    return "known: " + ", ".join(names[:20])


def words(value: object, convert: Callable[[object], str] = str) -> str:
    """Convert a value of user code to text, with `str` or `repr`.

    Never fails: an exception is named in place of the text.
    """
    try:
        return str.__str__(convert(value))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # raised by user code
        return f"<{class_name(value)} whose {convert.__name__} raises {class_name(error)}>"


def class_name(value: object) -> str:
    """Return the name of a value's class, ignoring `__class__` and metaclasses."""
    name: str = type.__dict__["__name__"].__get__(type(value))
    return name
