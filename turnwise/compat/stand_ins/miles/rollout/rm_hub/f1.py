"""Overlap of words, as slime's."""

from slime.rollout.rm_hub.f1 import f1_score, normalize_answer

__all__ = ["f1_score", "normalize_answer"]
