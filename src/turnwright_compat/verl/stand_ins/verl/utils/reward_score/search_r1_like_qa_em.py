"""Answers of questions between `<answer>` tags, compared as words."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable
from typing import Any

_MANY = 10
"""Tags from which on an answer is worth a quarter."""


def normalize_answer(s: str) -> str:
    """Return a text in lower case, without punctuation, articles and repeated spaces."""
    letters = "".join(char for char in s.lower() if char not in string.punctuation)
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", letters).split())


def _golden(answers: Any) -> Iterable[str]:
    return map(normalize_answer, [answers] if isinstance(answers, str) else answers)


def em_check(prediction: str, golden_answers: Any) -> int:
    """Return 1 if a text is one of the answers, else 0."""
    return int(normalize_answer(prediction) in _golden(golden_answers))


def subem_check(prediction: str, golden_answers: Any) -> int:
    """Return 1 if a text has one of the answers in it, else 0."""
    text = normalize_answer(prediction)
    return int(any(answer in text for answer in _golden(golden_answers)))


def extract_solution(solution_str: str) -> str | None:
    """Return what is between the last `<answer>` tags; None without them."""
    found = re.findall(r"<answer>(.*?)</answer>", solution_str, re.DOTALL)
    return found[-1].strip() if found else None


def count_answer_tags(text: str) -> tuple[int, int]:
    """Return the numbers of opening and of closing tags."""
    return text.count("<answer>"), text.count("</answer>")


def compute_score(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """Return `score` for an answer of `ground_truth["target"]`, a quarter of it with many tags, `format_score` for another
    answer, 0 without one."""
    answer = extract_solution(solution_str)
    if answer is None:
        return 0
    if not em_check(answer, ground_truth["target"]):
        return format_score
    return score / 4 if max(count_answer_tags(solution_str)) > _MANY else score


def compute_score_subem(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """Return `score` for a text that has an answer of `ground_truth["target"]` in it, `format_score` for another one."""
    answer = extract_solution(solution_str)
    if answer is None:
        return 0
    return score if subem_check(answer, ground_truth["target"]) else format_score
