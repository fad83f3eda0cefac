"""Every exception that Turnwise raises on purpose.

TurnwiseError
├── UsageError (ValueError)            a person's mistake: the command line shows one line and exits with status 2
│   ├── ConfigError                    a recipe, an override or a file that it names
│   ├── ModelError                     a model directory that cannot be used
│   ├── TemplateError                  a chat template that cannot be rendered, or not exactly
│   │   └── ControlTextError           control text in what the world says, where it is to be rejected
│   ├── TaskError                      a row of a dataset
│   └── NotTrainable                   an engine was asked to train that can only be evaluated
├── EnvError (RuntimeError)            an environment broke its contract
│   └── MediaError                     an image or a video that cannot be shown
├── ProcessDied (RuntimeError)         the process of an isolated environment ended by itself
├── ServerError (RuntimeError)         the server of a remote environment failed, or cannot be reached
├── InvalidAction (ValueError)         raised *by* an environment: the model's mistake, which becomes an observation
├── RewardError (ValueError)           a reward that is not a finite number, or outside its range
├── JudgeError (RuntimeError)          a judge or a simulated user gave no answer, or none that can be read
├── RepeatedUserError (RuntimeError)            the same mistake in a person's code again and again: the run stops with it
├── LimitReached (RuntimeError)        a play function asked for more than its limits allow
├── EngineError (RuntimeError)         an engine failed
│   ├── BackendContractError           an engine answered, but not what was asked
│   │   └── StaleWeights               a server answered with other weights than the policy that was asked for
│   └── EngineUnavailable              a server gave no answer: connection, deadline, 5xx; another may
├── SyncError (RuntimeError)           new weights did not reach an engine
├── RoutesMissing (RuntimeError)       ids are to be trained with the engine's experts, and it did not tell them
└── TraceError (RuntimeError)          a run directory that cannot be written or read
"""

from __future__ import annotations

from collections.abc import Callable


class TurnwiseError(Exception):
    """Root of all exceptions of this package."""


class UsageError(TurnwiseError, ValueError):
    """A person's mistake. The message says what, where, and what to do."""


class ConfigError(UsageError):
    """A recipe, an override, or a file that one of them names."""


class ModelError(UsageError):
    """A model directory that cannot be used as it is."""


class TemplateError(UsageError):
    """A chat template that cannot be rendered, or not exactly."""


class ControlTextError(TemplateError):
    """A message from the world holds control text, and `rollout.control_text` says to reject it."""


class TaskError(UsageError):
    """A row of a dataset that is not a task."""


class NotTrainable(UsageError):
    """An engine that gives no ids or no logprobs was asked to take part in training."""


class EnvError(TurnwiseError, RuntimeError):
    """An environment broke its contract."""


class MediaError(EnvError):
    """An image or a video that is broken, over a limit, not known, or not for this model.

    `bug` says that a person's code does it every time: an image without words, for a model that sees none.
    """

    bug = False

    def __init__(self, message: str, *, bug: bool = False) -> None:
        super().__init__(message)
        self.bug = bug


class ProcessDied(TurnwiseError, RuntimeError):
    """The process of an isolated environment ended by itself: a signal, `exit`, or no memory."""


class ServerError(TurnwiseError, RuntimeError):
    """The server of a remote environment failed; `code` is its own word for why.

    Besides a server's own codes: `connection` (it cannot be reached, or went away) and `schema` (an answer of another form).
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[type[ServerError], tuple[str, str]]:
        return type(self), (self.code, str(self))


class InvalidAction(TurnwiseError, ValueError):
    """Raised by an environment for a mistake of the model's; its message becomes the observation."""


class RewardError(TurnwiseError, ValueError):
    """A reward that is not a finite number, or outside its range."""


class JudgeError(TurnwiseError, RuntimeError):
    """A judge or a simulated user gave no answer that can be used; `cause` is a word for why.

    `deadline`, `connection`, `status` (an HTTP error), `schema` (an answer of another form), `verdict` (no verdict in the
    answer), `budget`, `engine`, or a word of the judge's own.
    """

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class RepeatedUserError(TurnwiseError, RuntimeError):
    """The same mistake in a person's code broke one episode after another; no retry mends it."""


class ToolFailure(TurnwiseError, RuntimeError):
    """Raised by a tool for what is not the model's doing (a service is down): the episode fails, nothing is trained on it."""


class LimitReached(TurnwiseError, RuntimeError):
    """A play function asked for a reply that its limits do not allow; `reason` is the stop reason's value."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class EngineError(TurnwiseError, RuntimeError):
    """An engine failed."""

    status: int | None = None
    """The HTTP status that a server answered with, where it did."""
    retry_after: float = 0.0
    """Seconds after which the server said that it may be asked again."""


class BackendContractError(EngineError):
    """An engine answered with something other than what was asked (ids, logprobs, version missing or wrong)."""


class StaleWeights(BackendContractError):
    """A server answered with other weights than those of the policy that was asked for (a restart, an update that was lost)."""


class EngineUnavailable(EngineError):
    """A server gave no answer (connection, deadline, 5xx); the same request may be asked again, there or elsewhere."""


class SyncError(TurnwiseError, RuntimeError):
    """New weights did not reach an engine."""


class TraceError(TurnwiseError, RuntimeError):
    """A run directory that cannot be written or read."""


class RoutesMissing(TurnwiseError, RuntimeError):
    """Ids are to be trained with the experts that the engine chose, and it did not tell those of their context."""


_TRAINING = ("torch", "transformers", "safetensors", "numpy", "numba")


def missing_training(error: ModuleNotFoundError) -> UsageError | None:
    """Return the error to show for a package that training needs and that is not installed; None for any other module."""
    if error.name is None or error.name.partition(".")[0] not in _TRAINING:
        return None
    return UsageError(
        f"{error.name} is not installed: the core does without, training and models do not; pip install 'turnwise[train]'"
    )


def words(value: object, how: Callable[[object], str] = str) -> str:
    """Render a value of user code as text, with `str` or `repr`. Never fails: what raises is named in place of the text."""
    try:
        return str.__str__(how(value))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # its code is the user's
        return f"<{class_name(value)} whose {how.__name__} raises {class_name(error)}>"


# Names in records and metrics of classes that are called otherwise by now.
_RECORDED_NAMES = {
    "RestartEpisode": "Afresh",
    "ReplayDiverged": "Diverged",
    "TemplateBudgetExceeded": "TooMuch",
    "RepeatedUserError": "UserBugs",
}


def class_name(value: object) -> str:
    """Return the name of a value's class, whatever `__class__` or a metaclass claims."""
    kind = type(value)
    name: str = type.__dict__["__name__"].__get__(kind)
    ours = name in _RECORDED_NAMES and str(type.__dict__["__module__"].__get__(kind)).startswith("turnwise.")
    return _RECORDED_NAMES[name] if ours else name
