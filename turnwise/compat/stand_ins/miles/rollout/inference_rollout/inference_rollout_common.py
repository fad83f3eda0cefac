"""State of Miles' rollouts."""

from slime.rollout.sglang_rollout import GenerateState

__all__ = ["GenerateState"]
