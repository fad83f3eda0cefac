"""Answers of mathematics in boxes."""

from __future__ import annotations


def extract_answer(passage: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` of a text; None without one."""
    from turnwise.envs.builtin.answers import boxed

    _, found, rest = passage.rpartition("\\boxed")
    return boxed(found + rest) if found else None


def grade_answer_verl(solution_str: str, ground_truth: object) -> bool:
    r"""Whether the last ``\boxed{...}`` of a text is the right answer, which may stand in a box too."""
    from turnwise.envs.builtin.answers import is_correct

    found, right = extract_answer(solution_str), str(ground_truth or "")
    right = (extract_answer(right) or "") if "\\boxed" in right else right
    return found is not None and right != "" and is_correct(found, right)
