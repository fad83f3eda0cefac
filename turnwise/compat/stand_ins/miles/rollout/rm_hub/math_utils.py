"""Answers of mathematics in boxes, as slime's."""

from slime.rollout.rm_hub import extract_answer, grade_answer_verl

__all__ = ["extract_answer", "grade_answer_verl"]
