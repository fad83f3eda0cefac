"""State of Miles' rollouts before their classes."""

from slime.rollout.sglang_rollout import GenerateState

__all__ = ["GenerateState"]
