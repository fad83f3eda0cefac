"""Answers of mathematics in boxes, as slime's."""

from slime.rollout.rm_hub.math_utils import extract_answer

__all__ = ["extract_answer"]
