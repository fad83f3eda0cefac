"""Answers in boxes after the thoughts."""

from __future__ import annotations

from typing import Any

from slime.rollout.rm_hub.math_utils import extract_answer


def get_deepscaler_rule_based_reward(response: str, label: Any) -> int:
    """Return 1 for the right answer in the last box after `</think>` or `###Response`, else 0."""
    from turnwise.envs.builtin.answers import is_correct

    if "</think>" in response:
        text = response.rpartition("</think>")[2]
    elif "###Response" in response:
        text = response.split("###Response")[1]
    else:
        return 0
    found, right = extract_answer(text), str(label)
    right = (extract_answer(right) or "") if "\\boxed" in right else right
    return int(found is not None and right != "" and is_correct(found, right))
