"""A tool with a lifetime: created with the row's arguments, rewarded, released."""

import asyncio
from typing import Any
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op


class CounterTool(BaseTool):
    log: list = []  # noqa: RUF012

    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._instances: dict[str, dict[str, Any]] = {}
        self.step = config.get("step", 1)

    async def create(self, instance_id: str | None = None, **kwargs) -> tuple[str, ToolResponse]:
        instance_id = instance_id or str(uuid4())
        start = kwargs.get("create_kwargs", {}).get("start", 0)
        self._instances[instance_id] = {
            "n": start,
            "goal": kwargs.get("create_kwargs", {}).get("goal"),
        }
        await asyncio.sleep(0)
        self.log.append("create")
        return instance_id, ToolResponse(text=f"The counter is at {start}.")

    @rollout_trace_op
    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs
    ) -> tuple[ToolResponse, float, dict]:
        state = self._instances[instance_id]
        await asyncio.sleep(0)
        state["n"] += self.step * int(parameters["by"])
        seen = len(kwargs["agent_data"].messages)
        return ToolResponse(text=f"{state['n']} after {seen} messages"), 0.1, {"n": state["n"]}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        return float(self._instances[instance_id]["n"] == self._instances[instance_id]["goal"])

    async def release(self, instance_id: str, **kwargs) -> None:
        del self._instances[instance_id]
        self.log.append("release")
