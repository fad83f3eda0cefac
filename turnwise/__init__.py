"""Turnwise trains LLM and VLM agents by multi-turn reinforcement learning, token for token.

Names are loaded when they are first used, so that `import turnwise` costs milliseconds and needs no torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_ROOMS = {
    "turnwise.types": "Failure Group ImageRef Key Message Origin Sample Span StopReason Task ToolCall Trajectory Turn",
    "turnwise.errors": "EngineError EnvError InvalidAction LimitReached RewardError TurnwiseError UsageError",
    "turnwise.api": "train",
    "turnwise.config": "Limits tiny",
    "turnwise.render": "Branch Extend Renderer byte_renderer load_renderer",
    "turnwise.env": "Action Env Step Tool ToolFailure World arithmetic as_world load_tasks resolve tool tool_env",
    "turnwise.engine": "Engine Generation Request Sampling ScriptedEngine",
    "turnwise.rollout": "Model Reply Rollout arollout rollout",
}
_HOME = {name: room for room, names in _ROOMS.items() for name in names.split()}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'turnwise' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
