"""Rewards of slime by name."""

from __future__ import annotations

from slime.rollout.rm_hub.math_utils import extract_answer


def grade_answer_verl(solution_str: str, ground_truth: object) -> bool:
    r"""Whether the last ``\boxed{...}`` of a text is the right answer."""
    from turnwise.envs.builtin.answers import is_correct

    found = extract_answer(solution_str)
    return found is not None and is_correct(found, str(ground_truth))


__all__ = ["extract_answer", "grade_answer_verl"]
