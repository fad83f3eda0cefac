"""Whatever samples tokens."""

from turnwise.engine.base import Engine, Finish, Generation, MissingLogprobs, Request, Sampling, UpdatableEngine
from turnwise.engine.scripted import ScriptedEngine
from turnwise.engine.stops import StopText

__all__ = [
    "Engine",
    "Finish",
    "Generation",
    "MissingLogprobs",
    "Request",
    "Sampling",
    "ScriptedEngine",
    "StopText",
    "UpdatableEngine",
]
