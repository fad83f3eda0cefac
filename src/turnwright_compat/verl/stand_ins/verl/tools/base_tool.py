"""Base class of tools with a lifetime."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from .schemas import OpenAIFunctionToolSchema, ToolResponse


class BaseTool:
    """Tool whose one object serves all episodes; `create` begins an instance, `release` ends it."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        self.config = config
        found = tool_schema or self.get_openai_tool_schema()
        if found is None:
            raise ValueError(f"{type(self).__name__} has no schema: give tool_schema, or override get_openai_tool_schema")
        self.tool_schema: OpenAIFunctionToolSchema = found
        self.name = found.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema | None:
        """Return the schema."""
        return getattr(self, "tool_schema", None)

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Begin an instance; return its id, and a response for the model."""
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> tuple[Any, float, dict[str, Any]]:
        """Return a response, a reward and metrics."""
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return the reward of an instance."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End an instance."""
