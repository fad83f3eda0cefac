"""slime's generate function that reads streams; a reply is the same in one piece."""

from slime.rollout.sglang_rollout import generate as generate_streaming

__all__ = ["generate_streaming"]
