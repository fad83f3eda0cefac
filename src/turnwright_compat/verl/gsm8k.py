"""verl's word problems: their reward, and a tool and a simulated user that use it."""

from __future__ import annotations

import re
from typing import Any
from uuid import uuid4

from turnwright_compat.verl.tool_interface import (
    BaseInteraction,
    BaseTool,
    OpenAIFunctionToolSchema,
    ToolResponse,
)

_END = 300
"""Last characters of a solution, which alone are read."""


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """Return the last answer after ####, or with `flexible` the last number; None without one."""
    end = solution_str[-_END:]
    if method == "strict":
        answers = re.findall(r"#### (-?[0-9.,]+)", end)
        return answers[-1].replace(",", "").replace("$", "") if answers else None

    numbers = [match for match in re.findall(r"-?[0-9.,]+", end) if match.strip(".")]
    return numbers[-1] if numbers else None


def compute_score(
    solution_str: str,
    ground_truth: str,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Return `score` for the right answer, `format_score` for another one, 0 without one."""
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0
    return score if answer == ground_truth else format_score


class Gsm8kTool(BaseTool):
    """Checks answers; a repeated answer that is no better than the best so far costs 0.05."""

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
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
        tool_reward = 0.0 if reward > state["reward"] else -0.05
        state["reward"] = reward
        response = ToolResponse(text=f"Current parsed answer={answer!r} reward={reward!r}")
        return response, tool_reward, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        state = self._instance_dict[instance_id]
        return compute_score(
            state["response"], state["ground_truth"], method="flexible", format_score=0.0, score=1.0
        )

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self._instance_dict[instance_id]


class Gsm8kInteraction(BaseInteraction):
    """Ends at the right answer, with the reward 1."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._instance_dict: dict[str, dict[str, Any]] = {}

    async def start_interaction(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> str:
        instance_id = instance_id or str(uuid4())
        self._instance_dict[instance_id] = {"response": "", "ground_truth": ground_truth}
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        replies = (
            message["content"]
            for message in reversed(messages)
            if message.get("role") == "assistant"
        )
        self._instance_dict[instance_id]["response"] = next(replies, "")

        if await self.calculate_score(instance_id) == 1.0:
            return True, "Your response is correct!", 1.0, {}
        answer = "Your response is incorrect! You need to reflect on your answer and try again."
        return False, answer, 0.0, {}

    async def calculate_score(self, instance_id: str = "", **kwargs: Any) -> float:
        state = self._instance_dict[instance_id]
        return compute_score(state["response"], state["ground_truth"], method="strict")

    async def finalize_interaction(self, instance_id: str = "", **kwargs: Any) -> None:
        self._instance_dict.pop(instance_id, None)
