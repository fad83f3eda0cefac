"""Tool that checks the answer of a word problem."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from ..utils.reward_score import gsm8k
from .base_tool import BaseTool
from .schemas import OpenAIFunctionToolSchema, ToolResponse


class Gsm8kTool(BaseTool):
    """Checks answers; a repeated answer that is no better than the best so far costs 0.05."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        self._instance_dict: dict[str, dict[str, Any]] = {}

    async def create(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        instance_id = instance_id or str(uuid4())
        truth = ground_truth or (kwargs.get("create_kwargs") or {}).get("ground_truth")
        self._instance_dict[instance_id] = {"response": "", "ground_truth": truth, "reward": 0.0}
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        answer = str(parameters.get("answer", ""))
        state = self._instance_dict[instance_id]
        state["response"] = answer if answer.startswith("#### ") else f"#### {answer}"
        reward = await self.calc_reward(instance_id)
        cost = 0.0 if reward > state["reward"] else -0.05
        state["reward"] = reward
        return ToolResponse(text=f"Current parsed answer={answer!r} reward={reward!r}"), cost, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        state = self._instance_dict[instance_id]
        return gsm8k.compute_score(state["response"], state["ground_truth"], method="flexible", format_score=0.0, score=1.0)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self._instance_dict[instance_id]
