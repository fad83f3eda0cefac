"""Integers after `Answer:`."""

from __future__ import annotations

import re
from typing import Any

from slime.rollout.rm_hub.math_utils import extract_answer

LAST = 300
"""Characters of a reply that are read."""


def compute_score(
    solution_str: str, ground_truth: Any, strict_box_verify: bool = False, pause_tokens_index: Any = None
) -> dict[str, Any]:
    """Return `score`, 1 or -1, with `acc` and `pred`: of the last line after `Answer:`, or with `strict_box_verify` of the last
    box, whose content must be the text of the answer."""
    from turnwise.envs.builtin.answers import is_correct

    if strict_box_verify:
        pred = extract_answer(solution_str[-100:])
        correct = pred == ground_truth
    else:
        lines = re.findall(r"(?i)answer\s*:\s*([^\n]+)", solution_str[-LAST:])
        pred = lines[-1].strip().strip("$").strip() if lines else "[INVALID]"
        pred = extract_answer(pred) or pred
        correct = bool(lines) and is_correct(pred, str(int(float(ground_truth))))
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}
