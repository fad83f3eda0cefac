"""The configuration of a run."""

from turnwise.config.load import ResolvedConfig, load
from turnwise.config.schema import (
    CheckpointConfig,
    EngineConfig,
    EnvConfig,
    EnvRules,
    EvalConfig,
    Limits,
    LoraConfig,
    ModelConfig,
    QuantConfig,
    RolloutConfig,
    RunConfig,
    ScaleConfig,
    ScheduleConfig,
    TrackConfig,
    TrainConfig,
    WarmupConfig,
    tiny,
)

__all__ = [
    "CheckpointConfig",
    "EngineConfig",
    "EnvConfig",
    "EnvRules",
    "EvalConfig",
    "Limits",
    "LoraConfig",
    "ModelConfig",
    "QuantConfig",
    "ResolvedConfig",
    "RolloutConfig",
    "RunConfig",
    "ScaleConfig",
    "ScheduleConfig",
    "TrackConfig",
    "TrainConfig",
    "WarmupConfig",
    "load",
    "tiny",
]
