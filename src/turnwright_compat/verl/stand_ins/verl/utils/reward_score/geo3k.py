"""Questions about figures: the answer in a box, after thoughts."""

from __future__ import annotations

import re

_FORM = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)


def format_reward(predict_str: str) -> float:
    """Return 1.0 for thoughts and then a box, else 0.0."""
    return float(_FORM.fullmatch(predict_str) is not None)


def acc_reward(predict_str: str, ground_truth: str, use_boxed: bool = True) -> float:
    """Return 1.0 for the right answer, else 0.0."""
    from turnwright_compat.graders.boxes import BOX, content_of, last_box
    from turnwright_compat.graders.symbolic import equal

    answer = predict_str
    if use_boxed:
        content = content_of(last_box(predict_str, (BOX,)))
        answer = "None" if content is None else content.strip()
    return float(equal(answer, ground_truth, percent=True))


def compute_score(predict_str: str, ground_truth: str, use_boxed: bool = True, format_score: float = 0.1) -> float:
    """Return the score of the answer, of which `format_score` is for the form."""
    return (1.0 - format_score) * acc_reward(predict_str, ground_truth, use_boxed) + format_score * format_reward(predict_str)
