"""Turnwise trains LLM and VLM agents by multi-turn reinforcement learning, token for token.

Names are loaded when they are first used, so that `import turnwise` costs milliseconds and needs no torch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turnwise.api import train as train
    from turnwise.rollout import rollout as rollout

__version__ = "0.1.0"

_ROOMS = {
    "turnwise.api": "train",
    "turnwise.config": "EnvRules Limits tiny",
    "turnwise.engine": "Engine Generation Request Sampling ScriptedEngine StopText token_logprobs",
    "turnwise.env": (
        "Action ChatJudge Env InlineObservation Judge RewardPart Rewards Scores StatefulTool Step Tool ToolFailure "
        "EnvSpec arithmetic "
        "as_env_spec gym_env judged load_tasks mcp_tools openenv_env resolve_env rewards simulated_user tool tool_env "
        "verifiers_env"
    ),
    "turnwise.env.process.sandbox": "Sandbox python_tool",
    "turnwise.errors": "EngineError EnvError InvalidAction JudgeError LimitReached MediaError ProcessDied RewardError "
    "ServerError TurnwiseError UsageError RepeatedUserError",
    "turnwise.render": "Branch Extend Renderer byte_renderer load_renderer",
    "turnwise.rollout": "EngineJudge Model ReplayResult Reply Rollout arollout replay_loop rollout",
    "turnwise.media": "MediaLimits MediaStore",
    "turnwise.types": "Failure FailureKind Group Image ImageRef EpisodeKey Message Origin MediaPlacement Sample "
    "SamplingDistribution Span "
    "StopReason Task ToolCall Trajectory Turn Video VideoRef",
}
_HOME = {name: room for room, names in _ROOMS.items() for name in names.split()}

_RENAMED = {
    "Inline": "InlineObservation",
    "Key": "EpisodeKey",
    "Part": "RewardPart",
    "Placed": "MediaPlacement",
    "Replayed": "ReplayResult",
    "UserBugs": "RepeatedUserError",
    "World": "EnvSpec",
    "as_world": "as_env_spec",
    "resolve": "resolve_env",
}

__all__ = ["__version__", *sorted(_HOME)]


class _Verb(ModuleType):
    """A room that shares its name with a verb (`rollout`, `train`): a package still, and calling it does the verb."""

    @property
    def _function(self) -> Any:
        name = self.__name__.rpartition(".")[2]
        return getattr(import_module(_HOME[name]), name)

    @property
    def __signature__(self) -> Any:
        from inspect import signature

        return signature(self._function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


class _Root(ModuleType):
    """This package: it sees its rooms arrive."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _HOME and isinstance(value, ModuleType):
            value.__class__ = _Verb
        super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        from warnings import warn

        warn(
            f"turnwise.{name} is now turnwise.{_RENAMED[name]}; the old name leaves with the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        return __getattr__(_RENAMED[name])
    if name not in _HOME:
        raise AttributeError(f"module 'turnwise' has no attribute {name!r}")
    if name in ("rollout", "train"):
        return import_module(f"turnwise.{name}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


sys.modules[__name__].__class__ = _Root
