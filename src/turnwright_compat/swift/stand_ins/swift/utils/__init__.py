"""Helpers that plugins use."""

import logging
from typing import Any


def get_logger(*args: Any, **kwargs: Any) -> logging.Logger:
    """Return the logger of plugins."""
    return logging.getLogger("swift")


def remove_response(messages: list[dict[str, Any]]) -> Any:
    """Remove a last message of the assistant; return its content."""
    last = messages[-1]["role"] if messages else None
    return messages.pop()["content"] if last == "assistant" else None


def to_device(data: Any, device: Any, non_blocking: bool = False) -> Any:
    """Move tensors, also those in containers, to a device."""
    if isinstance(data, dict):
        return {key: to_device(one, device) for key, one in data.items()}
    if isinstance(data, (list, tuple)):
        return type(data)(to_device(one, device) for one in data)
    return data.to(device) if hasattr(data, "to") else data
