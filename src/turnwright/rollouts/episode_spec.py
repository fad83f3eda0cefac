"""What one episode is: its task, its key, and what plays it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from turnwright.config import EnvRules
from turnwright.envs import Env
from turnwright.envs.spec import EnvSpec
from turnwright.rollouts.agent_function import AgentFunction
from turnwright.rollouts.group_rewards import GroupReward
from turnwright.types import EpisodeKey, Task


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """One episode to play."""

    task: Task
    key: EpisodeKey
    make: Callable[[], Env] | None = None
    """Constructs its environment; None where `play` is set."""
    play: AgentFunction | None = None
    max_turns: int | None = None
    """Turn limit of the environment."""
    rules: EnvRules = field(default_factory=EnvRules)
    """Handling of invalid actions and of environment failures."""
    group_reward: GroupReward | None = None
    """Compares all episodes of its task, after the last of them has finished."""
    env: str = ""
    """Name of its environment in the recipe."""

    @classmethod
    def of(cls, env_spec: EnvSpec, task: Task, key: EpisodeKey) -> EpisodeSpec:
        """Specify one episode of an environment; only training compares the episodes of a task."""
        return cls(
            task=task,
            key=key,
            make=None if env_spec.agent_function is not None else env_spec.factory,
            play=env_spec.agent_function,
            max_turns=env_spec.max_turns,
            rules=env_spec.rules,
            group_reward=env_spec.group_reward if key.phase == "train" else None,
            env=env_spec.name,
        )
