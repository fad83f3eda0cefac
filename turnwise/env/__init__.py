"""Worlds: what an episode happens in."""

from turnwise.env.base import Action, Env, EnvFactory, Step
from turnwise.env.resolve import as_world, resolve
from turnwise.env.tasks import load_tasks, split_tasks
from turnwise.env.world import World

__all__ = ["Action", "Env", "EnvFactory", "Step", "World", "as_world", "load_tasks", "resolve", "split_tasks"]
