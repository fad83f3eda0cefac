"""Multiple choice by letter, as slime's."""

from slime.rollout.rm_hub.gpqa import compute_gpqa_reward

__all__ = ["compute_gpqa_reward"]
