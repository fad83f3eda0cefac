"""Answers of mathematics in boxes."""

from __future__ import annotations

from typing import Any


def last_boxed_only_string(string: str) -> str | None:
    r"""Return the last ``\boxed{...}`` or ``\fbox{...}`` of a text; None without one."""
    from turnwright_compat.graders.boxes import last_box

    return last_box(string)


def remove_boxed(s: str | None) -> str | None:
    r"""Return the content of ``\boxed{...}``; None for anything else."""
    from turnwright_compat.graders.boxes import content_of

    return content_of(s)


def extract_boxed_answer(solution: str) -> str | None:
    """Return the content of the last box of a text; None without one."""
    return remove_boxed(last_boxed_only_string(solution))


def extract_answer(passage: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` of a text; None without one."""
    return extract_boxed_answer(passage) if "\\boxed" in passage else None


def mathd_normalize_answer(answer: str | None) -> str | None:
    """Return an answer as `grade_answer_mathd` compares it."""
    from turnwright_compat.graders.hendrycks import normalize

    return normalize(answer)


def grade_answer_mathd(given_answer: str | None, ground_truth: str | None) -> bool:
    """Whether two answers are the same text after rewriting."""
    return mathd_normalize_answer(given_answer) == mathd_normalize_answer(ground_truth)


def grade_answer_sympy(given_answer: str, ground_truth: str | None) -> bool:
    """Whether SymPy finds an answer equal to the right one."""
    from turnwright_compat.graders.symbolic import equal_by_sympy

    return equal_by_sympy(given_answer, ground_truth)


def grade_answer_verl(solution_str: str, ground_truth: Any) -> bool:
    r"""Whether the last ``\boxed{...}`` of a text is the right answer, which may stand in a box too."""
    if not ground_truth:
        return False
    right: str | None = str(ground_truth)
    right = extract_answer(right) if "\\boxed" in right else right
    found = extract_answer(solution_str)
    return found is not None and (grade_answer_mathd(found, right) or grade_answer_sympy(found, right))
