"""Schedulers and environments."""

from .gym_env import Env, envs
from .multi_turn import MultiTurnScheduler, RolloutScheduler, multi_turns

__all__ = ["Env", "MultiTurnScheduler", "RolloutScheduler", "envs", "multi_turns"]
