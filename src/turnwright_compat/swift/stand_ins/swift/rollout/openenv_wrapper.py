"""A session on an OpenEnv server, for blocking code."""

from __future__ import annotations

import importlib
from contextlib import suppress
from typing import Any


class OpenEnvWrapper:
    """One environment of a server: `base_url` and `reset_kwargs` are those of the row's `env_config`."""

    def __init__(self, env_config: dict[str, Any]) -> None:
        self.base_url = env_config.get("base_url", "http://localhost:8000")
        self.reset_kwargs = dict(env_config.get("reset_kwargs") or {})
        self._client: Any = None

    def reset(self) -> tuple[Any, Any]:
        """Connect and reset; return the observation and the server's metadata."""
        client = importlib.import_module("openenv.core.generic_client").GenericEnvClient(base_url=self.base_url)
        self._client = client.sync()
        self._client.__enter__()
        result = self._client.reset(**self.reset_kwargs)
        return result.observation, getattr(result, "metadata", None)

    def step(self, action_dict: dict[str, Any]) -> tuple[Any, float, bool, Any]:
        """Take an action; return the observation, the reward, whether the episode is over, and the metadata."""
        result = self._client.step(action_dict)
        return result.observation, float(result.reward or 0.0), bool(result.done), getattr(result, "metadata", None)

    def close(self) -> None:
        """Close the session, and with it the server's environment."""
        client, self._client = self._client, None
        if client is not None:
            with suppress(Exception):  # a connection that broke is closed
                client.__exit__(None, None, None)
