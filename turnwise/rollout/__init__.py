"""Episodes: one loop, many at once, every token written down."""

from turnwise.rollout.api import arollout, make_episode_specs, rollout, run_sync
from turnwise.rollout.judge import EngineJudge
from turnwise.rollout.play import AgentFunction, Model, Reply
from turnwise.rollout.replay.loop import ReplayResult, replay_loop
from turnwise.rollout.runner import Rollout, group_by_task
from turnwise.rollout.settings import EpisodeSpec

__all__ = [
    "AgentFunction",
    "EngineJudge",
    "EpisodeSpec",
    "Model",
    "ReplayResult",
    "Reply",
    "Rollout",
    "arollout",
    "group_by_task",
    "make_episode_specs",
    "replay_loop",
    "rollout",
    "run_sync",
]
