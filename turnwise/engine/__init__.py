"""Whatever samples tokens."""

from turnwise.engine.base import Engine, Finish, Generation, MissingLogprobs, Request, SleepingEngine, UpdatableEngine
from turnwise.engine.distribution import token_logprobs
from turnwise.engine.scripted import ScriptedEngine
from turnwise.engine.stops import StopText
from turnwise.types import Sampling

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
    "token_logprobs",
]
