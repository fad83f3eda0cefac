"""Turnwright trains LLM and VLM agents by multi-turn reinforcement learning, token for token.

Names are loaded when they are first used, so that `import turnwright` costs milliseconds and needs no torch.
"""

from typing import TYPE_CHECKING, Any

from turnwright._lazy import lazy_names

if TYPE_CHECKING:
    from turnwright.api import train as train
    from turnwright.proxy.programs import program as program
    from turnwright.rollouts import rollout as rollout

__version__ = "0.1.0"

_NAMES, _load = lazy_names(
    __name__,
    {
        "api": "train",
        "config": "EnvRules Limits tiny",
        "engines": "Engine Generation PolicyEngine Request Sampling ScriptedEngine StopText token_logprobs",
        "envs": (
            "Action ChatJudge Env InlineObservation Judge NewHistory RewardPart Rewards Scores StatefulTool Step Tool "
            "ToolFailure EnvSpec arithmetic "
            "as_env_spec gym_env judged load_tasks mcp_tools openenv_env resolve_env rewards simulated_user tool tool_env "
            "verifiers_env"
        ),
        "envs.isolation.sandbox": "Sandbox python_tool",
        "errors": "EngineError EnvError InvalidAction JudgeError LimitReached MediaError ProcessDied RewardError "
        "ServerError TurnwrightError UsageError RepeatedUserError",
        "renderers": "Branch Extend Renderer byte_renderer load_renderer",
        "rollouts": "EngineJudge Model ReplayResult Reply Rollout arollout replay_loop rollout",
        "media": "MediaLimits MediaStore",
        "proxy.programs": "program",
        "types": "Failure FailureKind Group Image ImageRef EpisodeKey Message Origin MediaPlacement Sample "
        "SamplingDistribution Span "
        "StopReason Task ToolCall Trajectory Turn Video VideoRef",
    },
)

__all__ = ["__version__", *_NAMES]


def __getattr__(name: str) -> Any:
    value = globals()[name] = _load(name)
    return value


def __dir__() -> list[str]:
    return __all__
