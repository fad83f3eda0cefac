"""Answers after `Answer:`, else in boxes."""

from __future__ import annotations

from typing import Any


def normalize_final_answer(final_answer: str) -> str:
    """Return an answer as `compute_score` compares it."""
    from turnwright_compat.graders.minerva import normalize

    return normalize(final_answer)


def compute_score(
    solution_str: str, ground_truth: str, strict_box_verify: bool = False, pause_tokens_index: Any = None
) -> dict[str, Any]:
    """Return `score`, 1 or -1, with `acc` and `pred`: of the last line after `Answer:`; without one, or with
    `strict_box_verify`, of the last box, whose content must be the text of the answer."""
    from turnwright_compat.graders.minerva import LAST, MISSING, after_answer, strict_box

    reply = solution_str[-LAST:]
    correct: bool
    pred: str | None
    correct, pred = after_answer(reply, ground_truth, integer=False)
    if strict_box_verify:
        correct, pred = strict_box(reply, ground_truth)
    elif pred == MISSING:
        in_box, content = strict_box(reply, ground_truth)
        correct, pred = (in_box, content) if content is not None else (correct, pred)
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}
