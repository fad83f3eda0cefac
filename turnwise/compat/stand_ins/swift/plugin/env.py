"""Names of release 3.6."""

from swift.rollout.gym_env import Env, envs

__all__ = ["Env", "envs"]
