"""Interface of generators, under its name before skyrl 0.2."""

from skyrl.train.generators.base import (
    BatchMetadata,
    ConversationType,
    GeneratorInput,
    GeneratorInterface,
    GeneratorOutput,
    TrainingPhase,
    TrajectoryID,
)

__all__ = [
    "BatchMetadata",
    "ConversationType",
    "GeneratorInput",
    "GeneratorInterface",
    "GeneratorOutput",
    "TrainingPhase",
    "TrajectoryID",
]
