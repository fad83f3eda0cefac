"""Rollouts: play many episodes concurrently and record every token."""

from turnwright.records.episode_metrics import group_by_task
from turnwright.rollouts.agent_function import AgentFunction, Model, Reply
from turnwright.rollouts.engine_judge import EngineJudge
from turnwright.rollouts.episode_spec import EpisodeSpec
from turnwright.rollouts.resume import EarlierEpisodes
from turnwright.rollouts.rollout_settings import RolloutSettings
from turnwright.rollouts.runner import Rollout
from turnwright.rollouts.standalone import arollout, make_episode_specs, rollout, run_sync

__all__ = [
    "AgentFunction",
    "EarlierEpisodes",
    "EngineJudge",
    "EpisodeSpec",
    "Model",
    "Reply",
    "Rollout",
    "RolloutSettings",
    "arollout",
    "group_by_task",
    "make_episode_specs",
    "rollout",
    "run_sync",
]
