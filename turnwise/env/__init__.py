"""Worlds: what an episode happens in."""

from turnwise.env.base import Action, Env, EnvFactory, Step

__all__ = ["Action", "Env", "EnvFactory", "Step"]
