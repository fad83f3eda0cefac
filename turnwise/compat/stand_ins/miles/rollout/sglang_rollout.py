"""State of Miles' rollouts before their classes, and their generate function."""

from slime.rollout.sglang_rollout import GenerateState, generate

__all__ = ["GenerateState", "generate"]
