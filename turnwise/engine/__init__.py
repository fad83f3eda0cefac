"""Whatever samples tokens."""

from turnwise.engine.base import Engine, Finish, Generation, MissingLogprobs, Request, Sampling, SleepingEngine, UpdatableEngine
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
    "SleepingEngine",
    "StopText",
    "UpdatableEngine",
]
