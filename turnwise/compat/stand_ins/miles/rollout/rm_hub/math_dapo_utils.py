"""Integers after `Answer:`, as slime's."""

from slime.rollout.rm_hub.math_dapo_utils import compute_score

__all__ = ["compute_score"]
