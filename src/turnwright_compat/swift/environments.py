"""Environments of ms-swift's schedulers, by name, and sessions on OpenEnv servers.

Plugins derive their environments from `Env` and register them in `envs`; `schedulers` plays them.
`OpenEnvWrapper` is the client of one environment that a server has.
"""

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
    # The wording is ours.
    system = (
        "First think about the problem, then answer it: <think> the reasoning "
        "</think><answer> the answer </answer>"
    )

    def __init__(self, env_config: dict[str, Any]) -> None:
        super().__init__(env_config)
        self.acc_func = MathAccuracy()
        self.solution = ""

    async def reset(self, config: RolloutInferRequest) -> tuple[Any, dict[str, Any], str]:
        self.solution = config.data_dict["solution"]
        return config.data_dict["problem"], {}, self.system

    async def step(self, action: list[dict[str, Any]]) -> tuple[Any, float, bool, dict[str, Any]]:
        reply = action[-1]["content"]
        is_right = self.acc_func([reply], [self.solution])[0] == 1
        reward = float(is_right)
        return self.tips_prompt, reward, is_right, {"math_reward": reward}

    async def close(self) -> None:
        pass


envs: dict[str, Any] = {"math_env": SimpleMathEnv}


class OpenEnvWrapper:
    """One environment of a server.

    `base_url` and `reset_kwargs` are those of the row's `env_config`.
    """

    def __init__(self, env_config: dict[str, Any]) -> None:
        self.base_url = env_config.get("base_url", "http://localhost:8000")
        self.reset_kwargs = dict(env_config.get("reset_kwargs") or {})
        self._client: Any = None

    def reset(self) -> tuple[Any, Any]:
        """Connect and reset; return the observation and the server's metadata."""
        openenv_client = importlib.import_module("openenv.core.generic_client")
        client = openenv_client.GenericEnvClient(base_url=self.base_url)
        # The session stays open between calls; `close` leaves it.
        self._client = client.sync()
        self._client.__enter__()

        result = self._client.reset(**self.reset_kwargs)
        return result.observation, getattr(result, "metadata", None)

    def step(self, action_dict: dict[str, Any]) -> tuple[Any, float, bool, Any]:
        """Take an action; return the observation, the reward, whether the episode is over, and
        the metadata."""
        result = self._client.step(action_dict)
        # A scheduler takes a number; a server may give none.
        reward = float(result.reward or 0.0)
        metadata = getattr(result, "metadata", None)
        return result.observation, reward, bool(result.done), metadata

    def close(self) -> None:
        """Close the session, and with it the server's environment."""
        client = self._client
        self._client = None
        if client is None:
            return

        # A connection that broke is closed already.
        with suppress(Exception):
            client.__exit__(None, None, None)
