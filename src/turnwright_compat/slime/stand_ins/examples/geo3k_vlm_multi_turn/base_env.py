"""Base class of slime's interaction environments."""

from __future__ import annotations

from typing import Any


class BaseInteractionEnv:
    """An environment that answers each reply of the model."""

    def reset(self) -> Any:
        """Start the episode."""
        raise NotImplementedError

    def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        """Return the observation for a reply, whether the episode is over, and information."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what the environment holds."""

    def format_observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        """Return a user message with the media of an observation, then its text."""
        found = observation or {}
        media = [item for items in (found.get("multi_modal_data") or {}).values() for item in items]
        parts: list[dict[str, Any]] = [{"type": "image", "image": item} for item in media]
        return {"role": "user", "content": [*parts, {"type": "text", "text": found.get("obs_str", "")}]}
