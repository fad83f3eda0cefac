"""The configuration of a run."""

from turnwise.config.load import Resolved, load
from turnwise.config.schema import (
    CheckpointConfig,
    EnvConfig,
    EnvRules,
    EvalConfig,
    Limits,
    LoraConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
    WarmupConfig,
    tiny,
)

__all__ = [
    "CheckpointConfig",
    "EnvConfig",
    "EnvRules",
    "EvalConfig",
    "Limits",
    "LoraConfig",
    "ModelConfig",
    "Resolved",
    "RolloutConfig",
    "RunConfig",
    "TrainConfig",
    "WarmupConfig",
    "load",
    "tiny",
]
