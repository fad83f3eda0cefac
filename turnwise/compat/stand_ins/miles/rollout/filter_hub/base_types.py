"""Result of a dynamic sampling filter, as slime's."""

from slime.rollout.filter_hub.base_types import DynamicFilterOutput

__all__ = ["DynamicFilterOutput"]
