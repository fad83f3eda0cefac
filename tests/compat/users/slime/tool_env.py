"""An interaction environment with a tool of the row, an observation of its own form, and a
reward that is a dict."""

import json
import re

from examples.geo3k_vlm_multi_turn.base_env import BaseInteractionEnv
from slime.utils.types import Sample


class ToolEnv(BaseInteractionEnv):
    def __init__(self, tools, max_turns):
        self.names = [tool["function"]["name"] for tool in tools]
        self.left = max_turns

    def reset(self):
        return {}, {}

    def step(self, response_text):
        self.left -= 1
        found = re.search(r"<tool_call>(.*?)</tool_call>", response_text)
        if found is None:
            return {}, True, {"calls": 0}
        call = json.loads(found[1])
        assert call["name"] in self.names
        return (
            {"result": sum(call["arguments"]["numbers"])},
            self.left == 0,
            {"calls": 1, "call": call},
        )

    def format_observation(self, observation):
        return {"role": "tool", "content": str(observation["result"])}


def build_env(sample: Sample | None = None, args=None, **_):
    return ToolEnv(sample.metadata["tools"], args.max_turns)


async def reward(args, sample, **kwargs):
    right = sample.response.strip().endswith(f"is {sample.label}")
    return {"right": float(right), "length": len(sample.response), "weight": args.weight * right}
