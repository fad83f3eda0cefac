"""One turn: the answer is a number after ####."""

import re
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


class DigitsEnv(BaseTextEnv):
    def __init__(self, env_config: Any = None, extras: dict[str, Any] = {}):  # noqa: B006
        super().__init__()
        assert "reward_spec" in extras, "reward_spec is required"
        self.truth = extras["reward_spec"]["ground_truth"]

    def step(self, action: str) -> BaseTextEnvStepOutput:
        found = re.search(r"#### (\d+)", action)
        reward = float(found is not None and found[1] == self.truth)
        return BaseTextEnvStepOutput(
            observations=[], reward=reward, done=True, metadata={"answer": found and found[1]}
        )
