"""Answers in boxes after the thoughts, as slime's."""

from slime.rollout.rm_hub.deepscaler import get_deepscaler_rule_based_reward

__all__ = ["get_deepscaler_rule_based_reward"]
