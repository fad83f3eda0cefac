"""Reward of word problems whose answer follows ####."""

from __future__ import annotations

import re

_END = 300  # characters of the solution that are read


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """Return the last answer after ####, or with `flexible` the last number; None without one."""
    end = solution_str[-_END:]
    if method == "strict":
        found = re.findall(r"#### (-?[0-9.,]+)", end)
        return found[-1].replace(",", "").replace("$", "") if found else None
    numbers = [one for one in re.findall(r"-?[0-9.,]+", end) if one.strip(".")]
    return numbers[-1] if numbers else None


def compute_score(
    solution_str: str, ground_truth: str, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """Return `score` for the right answer, `format_score` for another one, 0 without one."""
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0
    return score if answer == ground_truth else format_score
