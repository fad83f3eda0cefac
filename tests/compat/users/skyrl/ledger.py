"""Queries of a real SQLite database, named by a column of the row."""

import os
import re
import sqlite3
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.tools.core import ToolGroup, tool


class Sql(ToolGroup):
    def __init__(self, path: str):
        self.path = path
        super().__init__("Sql")

    @tool
    def sql(self, query: str, left: int) -> str:
        with sqlite3.connect(self.path) as connection:
            rows = connection.execute(query).fetchall()
        return f"<observation>{rows}\n<reminder>{left} turns left</reminder></observation>"


class LedgerEnv(BaseTextEnv):
    def __init__(self, env_config: Any, extras: dict[str, Any] = {}):  # noqa: B006
        super().__init__()
        assert "db_id" in extras
        assert "data" in extras
        path = os.path.join(env_config.db_path, extras["data"], extras["db_id"] + ".sqlite")
        if not os.path.exists(path):
            raise FileNotFoundError(f"no database {extras['db_id']}")
        self.gold = extras["reward_spec"]["ground_truth"]
        self.max_turns = extras["max_turns"]
        self.tools = Sql(path)
        self.init_tool_groups([self.tools])

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        if "<solution>" in action:
            right = self.gold in action
            return BaseTextEnvStepOutput(
                observations=[], reward=1.0 if right else -1.0, done=True, metadata={}
            )
        query = re.search(r"<sql>(.*?)</sql>", action, re.DOTALL)
        try:
            assert query is not None, "write <sql>...</sql>"
            text = self._execute_tool("Sql", "sql", (query[1], self.max_turns - self.turns))
        except Exception as error:
            text = f"Error: {error}"
        done = self.turns >= self.max_turns
        message = {"role": "user", "content": text}
        return BaseTextEnvStepOutput(observations=[message], reward=0.0, done=done, metadata={})
