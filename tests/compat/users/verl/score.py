"""Rewards of a finished episode."""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    found = re.findall(r"#### (\d+)", solution_str)
    right = bool(found) and found[-1] == ground_truth
    return {
        "score": float(right),
        "turns": extra_info["num_turns"],
        "text": solution_str,
        "known": data_source == "toy",
    }


def plain(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return float("tool\n7" in solution_str and "<|im_end|>" not in solution_str)
