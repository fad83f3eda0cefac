"""A file with a module of its own beside it."""

from typing import Any

from multiply_numbers import boxed
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


class MultiplyEnv(BaseTextEnv):
    def __init__(self, env_config: dict[str, Any], extras: dict[str, Any] = {}):  # noqa: B006
        super().__init__()
        self.truth = extras["reward_spec"]["ground_truth"]
        self.max_turns = extras.get("max_turns", 3)
        self.credit = env_config.get("credit", 0.5)

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        answer = boxed(action)
        right = answer == self.truth
        done = right or self.turns >= self.max_turns
        reward = 1.0 if right else self.credit if done and answer is not None else 0.0
        text = "Write \\boxed{answer}." if answer is None else f"{answer} is wrong."
        observations = [] if done else [{"role": "user", "content": text}]
        return BaseTextEnvStepOutput(
            observations=observations, reward=reward, done=done, metadata={"parsed": answer}
        )
