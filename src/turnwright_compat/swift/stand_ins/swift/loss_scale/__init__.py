"""Weights of tokens, by parts of a message."""

from __future__ import annotations

from typing import Any

ALL_BASE_STRATEGY = ["default", "last_round", "all"]


class LossScale:
    """Splits a message into parts with weights."""

    is_binary = True

    def __init__(self, base_strategy: str = "default") -> None:
        if base_strategy not in ALL_BASE_STRATEGY:
            raise ValueError(f"base_strategy is {base_strategy!r}; write one of {', '.join(ALL_BASE_STRATEGY)}")
        self.base_strategy = base_strategy

    def get_loss_scale(self, context: str, **kwargs: Any) -> tuple[list[str], list[float]]:
        """Return the parts of a text and their weights; `query` is the message of the user before it."""
        return [context], [1.0]


loss_scale_map: dict[str, Any] = {"base": LossScale}
