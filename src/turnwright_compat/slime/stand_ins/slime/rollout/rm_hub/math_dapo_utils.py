"""Integers after `Answer:`."""

from __future__ import annotations

from typing import Any


def normalize_final_answer(final_answer: Any) -> str:
    """Return an answer as `compute_score` compares it."""
    from turnwright_compat.graders.minerva import END_TOKENS, normalize

    return normalize(str(final_answer), END_TOKENS)


def compute_score(
    solution_str: str, ground_truth: Any, strict_box_verify: bool = False, pause_tokens_index: Any = None
) -> dict[str, Any]:
    """Return `score`, 1 or -1, with `acc` and `pred`: of the last line after `Answer:`, or with `strict_box_verify` of the last
    box, whose content must be the text of the answer."""
    from turnwright_compat.graders.minerva import END_TOKENS, LAST, after_answer, strict_box

    reply = solution_str[-LAST:]
    correct: bool
    pred: str | None
    if strict_box_verify:
        correct, pred = strict_box(reply, ground_truth)
    else:
        correct, pred = after_answer(reply, ground_truth, END_TOKENS, integer=True)
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}
