"""Configuration of generators and environments."""

from .config import (
    BaseConfig,
    ChatTemplateConfig,
    EnvironmentConfig,
    GeneratorConfig,
    InferenceEngineConfig,
    SamplingParams,
    SkyRLGymConfig,
)

__all__ = [
    "BaseConfig",
    "ChatTemplateConfig",
    "EnvironmentConfig",
    "GeneratorConfig",
    "InferenceEngineConfig",
    "SamplingParams",
    "SkyRLGymConfig",
]
