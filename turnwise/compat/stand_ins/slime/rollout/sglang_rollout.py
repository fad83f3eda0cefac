"""State of slime's rollouts."""

from turnwise.compat.slime_engine import GenerateState

__all__ = ["GenerateState"]
