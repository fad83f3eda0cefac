"""Base class of simulated users."""

from __future__ import annotations

from typing import Any
from uuid import uuid4


class BaseInteraction:
    """Simulated user whose one object serves all episodes."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin an instance; return its id."""
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Answer the model; return whether to end, the text, a reward and metrics."""
        return False, "Your current result seems acceptable.", 0.8, {}

    async def calculate_score(self) -> float:
        """Return the reward of an instance."""
        return 0.0

    async def finalize_interaction(self) -> None:
        """End an instance."""
