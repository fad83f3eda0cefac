"""Reward models: only the names, since a model of its own needs ms-swift."""

from typing import Any


class DefaultRMPlugin:
    """Base class of the plugins of reward models."""

    def __init__(self, model: Any, template: Any) -> None:
        self.model, self.template = model, template


rm_plugins: dict[str, Any] = {"default": DefaultRMPlugin}
