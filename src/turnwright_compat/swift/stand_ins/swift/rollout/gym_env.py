"""Environments of the Gym scheduler, by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from swift.infer_engine.protocol import RolloutInferRequest
from swift.rewards.orm import MathAccuracy


class Env(ABC):
    """Environment of one trajectory."""

    def __init__(self, env_config: dict[str, Any]) -> None:
        self.env_config = env_config

    @abstractmethod
    async def reset(self, config: RolloutInferRequest) -> tuple[Any, dict[str, Any], str]:
        """Return the first observation, an info and the system message."""

    @abstractmethod
    async def step(self, action: list[dict[str, Any]]) -> tuple[Any, float, bool, dict[str, Any]]:
        """Return the next observation, the reward, whether the trajectory is over, and an info. The last message acts."""

    @abstractmethod
    async def close(self) -> None:
        """Release what the environment holds."""


class SimpleMathEnv(Env):
    """A problem that is asked again until its answer is right."""

    tips_prompt = "The answer is not correct, It seems You made a mistake, you need to recheck very carefully."
    system = (
        "First think about the problem, then answer it: <think> the reasoning </think><answer> the answer </answer>"  # ours
    )

    def __init__(self, env_config: dict[str, Any]) -> None:
        super().__init__(env_config)
        self.acc_func, self.solution = MathAccuracy(), ""

    async def reset(self, config: RolloutInferRequest) -> tuple[Any, dict[str, Any], str]:
        self.solution = config.data_dict["solution"]
        return config.data_dict["problem"], {}, self.system

    async def step(self, action: list[dict[str, Any]]) -> tuple[Any, float, bool, dict[str, Any]]:
        right = self.acc_func([action[-1]["content"]], [self.solution])[0] == 1
        return self.tips_prompt, float(right), right, {"math_reward": float(right)}

    async def close(self) -> None:
        pass


envs: dict[str, Any] = {"math_env": SimpleMathEnv}
