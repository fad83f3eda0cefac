"""Answers in boxes after the thoughts."""

from __future__ import annotations

from typing import Any

from slime.rollout.rm_hub.math_utils import extract_answer, grade_answer_mathd, grade_answer_sympy


def get_deepscaler_rule_based_reward(response: str, label: Any) -> int:
    """Return 1 for the right answer in the last box after `</think>` or `###Response`, else 0."""
    if "</think>" in response:
        text = response.rpartition("</think>")[2]
    elif "###Response" in response:
        text = response.split("###Response")[1]
    else:
        return 0
    return _grade(text, label)


def get_gemma_math_reward(response: str, label: Any) -> int:
    """Return 1 for the right answer in the last box after Gemma's thoughts, if there are any, else 0."""
    return _grade(response.rpartition("<channel|>")[2], label)


def _grade(text: str, label: Any) -> int:
    found = extract_answer(text)
    if found is None or label == "":
        return 0
    if not isinstance(label, (str, float, int)):
        raise TypeError(f"the label of a row is {type(label).__name__}; this grader takes a text or a number")
    right: str | None = str(label)
    right = extract_answer(right) if "\\boxed" in right else right
    if right is None:
        return 0
    return int(grade_answer_mathd(found, right) or grade_answer_sympy(found, right))
