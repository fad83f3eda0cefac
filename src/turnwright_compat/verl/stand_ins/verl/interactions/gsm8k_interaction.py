"""User who asks again until the answer of a word problem is right."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from ..utils.reward_score import gsm8k
from .base import BaseInteraction


class Gsm8kInteraction(BaseInteraction):
    """Ends at the right answer, with the reward 1."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._instance_dict: dict[str, dict[str, Any]] = {}

    async def start_interaction(self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any) -> str:
        instance_id = instance_id or str(uuid4())
        self._instance_dict[instance_id] = {"response": "", "ground_truth": ground_truth}
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        last = next((one["content"] for one in reversed(messages) if one.get("role") == "assistant"), "")
        self._instance_dict[instance_id]["response"] = last
        if await self.calculate_score(instance_id) == 1.0:
            return True, "Your response is correct!", 1.0, {}
        return False, "Your response is incorrect! You need to reflect on your answer and try again.", 0.0, {}

    async def calculate_score(self, instance_id: str = "", **kwargs: Any) -> float:
        state = self._instance_dict[instance_id]
        return gsm8k.compute_score(state["response"], state["ground_truth"], method="strict")

    async def finalize_interaction(self, instance_id: str = "", **kwargs: Any) -> None:
        self._instance_dict.pop(instance_id, None)
