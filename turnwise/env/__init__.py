"""Worlds: what an episode happens in."""

from turnwise.env.adapters.gym import gym_env
from turnwise.env.adapters.openenv import openenv_env
from turnwise.env.adapters.verifiers import verifiers_env
from turnwise.env.base import Action, Env, EnvFactory, InlineObservation, Scores, Step
from turnwise.env.resolve import as_env_spec, resolve_env
from turnwise.env.reward.chat_judge import ChatJudge
from turnwise.env.reward.judge import Judge, judged
from turnwise.env.reward.rewards import RewardPart, Rewards, rewards
from turnwise.env.simulator import simulated_user
from turnwise.env.tasks import load_tasks, split_tasks
from turnwise.env.tool_env import tool_env
from turnwise.env.tools.arithmetic import arithmetic
from turnwise.env.tools.lifetime import StatefulTool
from turnwise.env.tools.mcp import mcp_tools
from turnwise.env.tools.tools import Tool, tool
from turnwise.env.world import EnvSpec
from turnwise.errors import ToolFailure

__all__ = [
    "Action",
    "ChatJudge",
    "Env",
    "EnvFactory",
    "EnvSpec",
    "InlineObservation",
    "Judge",
    "RewardPart",
    "Rewards",
    "Scores",
    "StatefulTool",
    "Step",
    "Tool",
    "ToolFailure",
    "arithmetic",
    "as_env_spec",
    "gym_env",
    "judged",
    "load_tasks",
    "mcp_tools",
    "openenv_env",
    "resolve_env",
    "rewards",
    "simulated_user",
    "split_tasks",
    "tool",
    "tool_env",
    "verifiers_env",
]
