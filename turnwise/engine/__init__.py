"""Whatever samples tokens."""

from turnwise.engine.base import Engine, Finish, Generation, Request, Sampling, UpdatableEngine
from turnwise.engine.scripted import ScriptedEngine
from turnwise.engine.stops import StopText

__all__ = ["Engine", "Finish", "Generation", "Request", "Sampling", "ScriptedEngine", "StopText", "UpdatableEngine"]
