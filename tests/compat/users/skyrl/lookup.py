"""A group of tools, with a configuration of its own, called by tags in the reply."""

import re
from dataclasses import dataclass
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType
from skyrl_gym.tools.core import ToolGroup, tool

PLACES = {"amber": "the Baltic", "tea": "Assam", "salt": "Wieliczka"}


@dataclass
class LookupConfig:
    limit: int = 1
    prefix: str = "\n<information>"


class LookupToolGroup(ToolGroup):
    def __init__(self, limit: int):
        self.limit = limit
        super().__init__(name="LookupToolGroup")

    @tool
    def search(self, query: str) -> str:
        found = [place for thing, place in PLACES.items() if thing in query]
        if not found:
            raise KeyError(query)
        return "; ".join(found[: self.limit])


class LookupEnv(BaseTextEnv):
    def __init__(self, env_config: LookupConfig, extras: dict[str, Any] = {}):  # noqa: B006
        super().__init__()
        self.prefix = env_config.prefix
        self.truth = extras["reward_spec"]["ground_truth"]["target"]
        self.max_turns = extras.get("max_turns", 2)
        self.group = LookupToolGroup(env_config.limit)
        self.init_tool_groups([self.group])
        self.chat_history: ConversationType = []

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        self.chat_history.append({"role": "assistant", "content": action})
        done = self.turns >= self.max_turns or "</answer>" in action
        if done:
            text = "".join(message["content"] for message in self.chat_history)
            found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
            reward = float(bool(found) and found[-1].strip() == self.truth)
            return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})
        query = re.search(r"<search>(.*?)</search>", action, re.DOTALL)
        try:
            tool_name = self.group.get_tool_names()[0]
            assert self.tool_to_toolgroup == {"search": "LookupToolGroup"}
            text = self._execute_tool(self.group.get_name(), tool_name, [query[1] if query else ""])
            content = f"{self.prefix}{text}</information>\n"
        except Exception as error:
            content = f"nothing found for {error}"
        observation = {"role": "user", "content": content}
        self.chat_history.append(observation)
        info = {"tool_group": self.group.name, "tool_name": tool_name}
        return BaseTextEnvStepOutput(
            observations=[observation], reward=0, done=False, metadata=info
        )
