"""Rewards of verl by the source of a row."""

from __future__ import annotations

from typing import Any

MATH = ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500")
DAPO = ("math_dapo", "math", "math_dapo_reasoning")
_QUESTIONS = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
SEARCH = tuple(f"searchR1_{name}" for name in _QUESTIONS)


def default_compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any) -> Any:
    """Return the score of a solution by the rule of its source: a number, or a dict with `score`.

    Raises:
        NotImplementedError: for another source, also where verl has a rule that is not here (`prime_math`, `prime_code`,
            `sandbox_fusion`).
    """
    from . import geo3k, gsm8k, math_dapo, math_reward, search_r1_like_qa_em

    found: Any
    if data_source == "openai/gsm8k":
        found = gsm8k.compute_score(solution_str, ground_truth)
    elif data_source in MATH:
        found = math_reward.compute_score(solution_str, ground_truth)
    elif data_source in DAPO or data_source.startswith("aime"):
        found = math_dapo.compute_score(solution_str, ground_truth)
    elif data_source == "hiyouga/geometry3k":
        found = geo3k.compute_score(solution_str, ground_truth)
    elif data_source in SEARCH:
        found = search_r1_like_qa_em.compute_score(solution_str, ground_truth)
    else:
        raise NotImplementedError(
            f"data_source {data_source!r} has no reward here; install verl for its others, or write compute_score"
        )
    return found if isinstance(found, dict) else float(found)


def get_default_compute_score(reward_name: str | None = None) -> Any:
    """Return `default_compute_score`."""
    return default_compute_score


__all__ = ["default_compute_score", "get_default_compute_score"]
