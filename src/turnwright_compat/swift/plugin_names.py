"""Small things that plugins of ms-swift import: weights of tokens, types of conversations,
helpers."""

from __future__ import annotations

import logging
from typing import Any

ALL_BASE_STRATEGY = ["default", "last_round", "all"]


class LossScale:
    """Weights of the parts of a message; this one gives all of it the weight 1."""

    is_binary = True

    def __init__(self, base_strategy: str = "default") -> None:
        if base_strategy not in ALL_BASE_STRATEGY:
            raise ValueError(
                f"base_strategy is {base_strategy!r}; write one of {', '.join(ALL_BASE_STRATEGY)}"
            )
        self.base_strategy = base_strategy

    def get_loss_scale(self, context: str, **kwargs: Any) -> tuple[list[str], list[float]]:
        """Return the parts of a text and their weights.

        ms-swift passes the user's message before it as `query`.
        """
        return [context], [1.0]


loss_scale_map: dict[str, Any] = {"base": LossScale}

Messages = list[dict[str, Any]]
Tool = dict[str, Any]


class Template:
    """Type of templates, in annotations."""


def get_logger(*args: Any, **kwargs: Any) -> logging.Logger:
    """Return the logger of plugins."""
    return logging.getLogger("swift")


def remove_response(messages: list[dict[str, Any]]) -> Any:
    """Remove a last message of the assistant; return its content."""
    if not messages or messages[-1]["role"] != "assistant":
        return None
    return messages.pop()["content"]


def to_device(data: Any, device: Any, non_blocking: bool = False) -> Any:
    """Move tensors, also those in containers, to a device."""
    if isinstance(data, dict):
        return {key: to_device(value, device) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return type(data)(to_device(item, device) for item in data)
    return data.to(device) if hasattr(data, "to") else data
