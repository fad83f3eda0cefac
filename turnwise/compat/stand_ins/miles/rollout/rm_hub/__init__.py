"""Rewards of Miles by name, as slime's."""

from slime.rollout.rm_hub import REMOTE, RULES, async_rm, batched_async_rm, extract_answer, grade_answer_verl

__all__ = ["REMOTE", "RULES", "async_rm", "batched_async_rm", "extract_answer", "grade_answer_verl"]
