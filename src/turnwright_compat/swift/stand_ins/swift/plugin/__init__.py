"""Names of release 3.6."""

from swift.rewards import ORM, PRM, AsyncORM, orms, prms, rm_plugins
from swift.rollout.gym_env import Env, envs
from swift.rollout.multi_turn import MultiTurnScheduler, multi_turns

__all__ = ["ORM", "PRM", "AsyncORM", "Env", "MultiTurnScheduler", "envs", "multi_turns", "orms", "prms", "rm_plugins"]
