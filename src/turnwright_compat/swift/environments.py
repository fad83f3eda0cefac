"""Environments of ms-swift's schedulers, by name, and sessions on OpenEnv servers."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any

from turnwright.envs.user_imports import import_for_user

# ms-swift's own, where it is installed: its objects reach the environments.
RolloutInferRequest: Any = import_for_user(
    "swift.infer_engine.protocol", fromlist=("RolloutInferRequest",)
).RolloutInferRequest
MathAccuracy: Any = import_for_user("swift.rewards.orm", fromlist=("MathAccuracy",)).MathAccuracy


class Env(ABC):
    """Environment of one trajectory."""

    def __init__(self, env_config: dict[str, Any]) -> None:
        self.env_config = env_config

    @abstractmethod
    async def reset(self, config: RolloutInferRequest) -> tuple[Any, dict[str, Any], str]:
        """Return the first observation, an info and the system message."""

    @abstractmethod
    async def step(self, action: list[dict[str, Any]]) -> tuple[Any, float, bool, dict[str, Any]]:
        """Return the next observation, the reward, whether the trajectory is over, and an info.

        The last message acts.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release what the environment holds."""


class SimpleMathEnv(Env):
    """A problem that is asked again until its answer is right."""

    tips_prompt = (
        "The answer is not correct, It seems You made a mistake, you need to recheck "
        "very carefully."
    )
    # ours
    system = (
        "First think about the problem, then answer it: <think> the reasoning "
        "</think><answer> the answer </answer>"
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


class OpenEnvWrapper:
    """One environment of a server: `base_url` and `reset_kwargs` are those of
    the row's `env_config`."""

    def __init__(self, env_config: dict[str, Any]) -> None:
        self.base_url = env_config.get("base_url", "http://localhost:8000")
        self.reset_kwargs = dict(env_config.get("reset_kwargs") or {})
        self._client: Any = None

    def reset(self) -> tuple[Any, Any]:
        """Connect and reset; return the observation and the server's metadata."""
        client = importlib.import_module("openenv.core.generic_client").GenericEnvClient(
            base_url=self.base_url
        )
        self._client = client.sync()
        self._client.__enter__()
        result = self._client.reset(**self.reset_kwargs)
        return result.observation, getattr(result, "metadata", None)

    def step(self, action_dict: dict[str, Any]) -> tuple[Any, float, bool, Any]:
        """Take an action; return the observation, the reward, whether the episode is
        over, and the metadata."""
        result = self._client.step(action_dict)
        return (
            result.observation,
            float(result.reward or 0.0),
            bool(result.done),
            getattr(result, "metadata", None),
        )

    def close(self) -> None:
        """Close the session, and with it the server's environment."""
        client, self._client = self._client, None
        if client is not None:
            with suppress(Exception):  # a connection that broke is closed
                client.__exit__(None, None, None)
