"""Base class of environments of text."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

from ..core import Env
from ..metrics import default_aggregate_metrics

MessageType = dict[str, str]
ConversationType = list[MessageType]


class BaseTextEnvStepOutput(TypedDict):
    """Return value of `BaseTextEnv.step`."""

    observations: ConversationType
    reward: float
    done: bool
    metadata: dict[str, Any]
    postprocessed_action: NotRequired[str | None]


class BaseTextEnv(Env[ConversationType, str]):
    """Environment whose observations are messages and whose actions are the model's texts."""

    def __init__(self) -> None:
        self.turns = 0
        self.max_turns = 1
        self.tool_groups: list[Any] = []
        self.tool_to_toolgroup: dict[str, str] = {}

    def init_tool_groups(self, tool_groups: list[Any] | None = None) -> None:
        """Set the groups of tools."""
        self.tool_groups = list(tool_groups or ())
        self.tool_to_toolgroup = {}
        for group in self.tool_groups:
            self.tool_to_toolgroup |= group.get_tool_to_group_mapping()

    def _execute_tool(self, tool_group_name: str, tool_name: str, tool_input: Any) -> Any:
        found = next((group for group in self.tool_groups if group.name == tool_group_name), None)
        if found is None:
            raise ValueError(f"ToolGroup '{tool_group_name}' not found.")
        return found.execute_tool(tool_name, *tool_input)

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """Return the prompt and metadata."""
        return prompt, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Respond to one reply."""
        raise NotImplementedError(f"{type(self).__name__} has no step")

    def get_metrics(self) -> dict[str, Any]:
        """Return metrics of the episode."""
        return {}

    @staticmethod
    def aggregate_metrics(metrics: list[dict[str, Any]]) -> dict[str, Any]:
        """Combine the metrics of many episodes."""
        return default_aggregate_metrics(metrics)
