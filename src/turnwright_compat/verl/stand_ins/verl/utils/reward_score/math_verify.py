"""Answers compared by math-verify."""

from __future__ import annotations


def compute_score(model_output: str, ground_truth: str, timeout_score: float = 0, timeout: float = 30.0) -> float:
    """Return 1.0 for the right answer, else 0.0, and `timeout_score` where the comparison does not end."""
    from turnwright_compat.graders.verified import by_verl

    return by_verl(model_output, ground_truth, timeout_score)
