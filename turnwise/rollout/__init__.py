"""Episodes: one loop, many at once, every token written down."""

from turnwise.rollout.api import arollout, episodes, rollout, run_to_end
from turnwise.rollout.judge import EngineJudge
from turnwise.rollout.play import Model, Play, Reply
from turnwise.rollout.replay.loop import Replayed, replay_loop
from turnwise.rollout.runner import Rollout, group
from turnwise.rollout.settings import Episode

__all__ = [
    "EngineJudge",
    "Episode",
    "Model",
    "Play",
    "Replayed",
    "Reply",
    "Rollout",
    "arollout",
    "episodes",
    "group",
    "replay_loop",
    "rollout",
    "run_to_end",
]
