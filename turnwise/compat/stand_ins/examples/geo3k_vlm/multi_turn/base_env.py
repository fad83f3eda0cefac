"""The base class of interaction environments, as slime's."""

from examples.geo3k_vlm_multi_turn.base_env import BaseInteractionEnv

__all__ = ["BaseInteractionEnv"]
