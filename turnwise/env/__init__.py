"""Worlds: what an episode happens in."""

from turnwise.env.adapters.gym import gym_env
from turnwise.env.adapters.openenv import openenv_env
from turnwise.env.adapters.verifiers import verifiers_env
from turnwise.env.base import Action, Env, EnvFactory, Inline, Scores, Step
from turnwise.env.resolve import as_world, resolve
from turnwise.env.reward.chat_judge import ChatJudge
from turnwise.env.reward.judge import Judge, judged
from turnwise.env.reward.rewards import Part, Rewards, rewards
from turnwise.env.simulator import simulated_user
from turnwise.env.tasks import load_tasks, split_tasks
from turnwise.env.tool_env import tool_env
from turnwise.env.tools.arithmetic import arithmetic
from turnwise.env.tools.lifetime import StatefulTool
from turnwise.env.tools.mcp import mcp_tools
from turnwise.env.tools.tools import Tool, tool
from turnwise.env.world import World
from turnwise.errors import ToolFailure

__all__ = [
    "Action",
    "ChatJudge",
    "Env",
    "EnvFactory",
    "Inline",
    "Judge",
    "Part",
    "Rewards",
    "Scores",
    "StatefulTool",
    "Step",
    "Tool",
    "ToolFailure",
    "World",
    "arithmetic",
    "as_world",
    "gym_env",
    "judged",
    "load_tasks",
    "mcp_tools",
    "openenv_env",
    "resolve",
    "rewards",
    "simulated_user",
    "split_tasks",
    "tool",
    "tool_env",
    "verifiers_env",
]
