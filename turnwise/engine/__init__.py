"""Whatever samples tokens."""

from turnwise.engine.base import Engine, Finish, Generation, Request, Sampling, UpdatableEngine

__all__ = ["Engine", "Finish", "Generation", "Request", "Sampling", "UpdatableEngine"]
