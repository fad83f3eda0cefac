"""Whatever samples tokens."""

from turnwise.engine.base import Engine, Finish, Generation, Request, Sampling, UpdatableEngine
from turnwise.engine.scripted import ScriptedEngine

__all__ = ["Engine", "Finish", "Generation", "Request", "Sampling", "ScriptedEngine", "UpdatableEngine"]
