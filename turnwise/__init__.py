"""Turnwise trains LLM and VLM agents by multi-turn reinforcement learning, token for token.

Names are loaded when they are first used, so that `import turnwise` costs milliseconds and needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from turnwise._old_names import PUBLIC, install, warn_renamed

if TYPE_CHECKING:
    from turnwise.api import train as train
    from turnwise.rollouts import rollout as rollout

__version__ = "0.1.0"

_MODULES = {
    "turnwise.api": "train",
    "turnwise.config": "EnvRules Limits tiny",
    "turnwise.engines": "Engine Generation Request Sampling ScriptedEngine StopText token_logprobs",
    "turnwise.envs": (
        "Action ChatJudge Env InlineObservation Judge RewardPart Rewards Scores StatefulTool Step Tool ToolFailure "
        "EnvSpec arithmetic "
        "as_env_spec gym_env judged load_tasks mcp_tools openenv_env resolve_env rewards simulated_user tool tool_env "
        "verifiers_env"
    ),
    "turnwise.envs.isolation.sandbox": "Sandbox python_tool",
    "turnwise.errors": "EngineError EnvError InvalidAction JudgeError LimitReached MediaError ProcessDied RewardError "
    "ServerError TurnwiseError UsageError RepeatedUserError",
    "turnwise.renderers": "Branch Extend Renderer byte_renderer load_renderer",
    "turnwise.rollouts": "EngineJudge Model ReplayResult Reply Rollout arollout replay_loop rollout",
    "turnwise.media": "MediaLimits MediaStore",
    "turnwise.types": "Failure FailureKind Group Image ImageRef EpisodeKey Message Origin MediaPlacement Sample "
    "SamplingDistribution Span "
    "StopReason Task ToolCall Trajectory Turn Video VideoRef",
}
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name in PUBLIC:
        warn_renamed(f"turnwise.{name}", f"turnwise.{PUBLIC[name]}")
        return __getattr__(PUBLIC[name])
    if name not in _HOME:
        raise AttributeError(f"module 'turnwise' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


install()
