"""The reward of recipes/compat/verl_gsm8k.toml, as a file for verl's `custom_reward_function.path`.

The tool's own reward is 1 for a right answer, so a success (1 or more) needs both: the
tool's and the last reply's.
"""

from verl.utils.reward_score import gsm8k


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return gsm8k.compute_score(solution_str, ground_truth, method="strict") or -0.5
