"""Worlds: what an episode happens in."""

from turnwise.env.arithmetic import arithmetic
from turnwise.env.base import Action, Env, EnvFactory, Inline, Scores, Step
from turnwise.env.chat_judge import ChatJudge
from turnwise.env.gym import gym_env
from turnwise.env.judge import Judge, judged
from turnwise.env.lifetime import StatefulTool
from turnwise.env.mcp import mcp_tools
from turnwise.env.openenv import openenv_env
from turnwise.env.resolve import as_world, resolve
from turnwise.env.rewards import Part, Rewards, rewards
from turnwise.env.simulator import simulated_user
from turnwise.env.tasks import load_tasks, split_tasks
from turnwise.env.tool_env import tool_env
from turnwise.env.tools import Tool, ToolFailure, tool
from turnwise.env.verifiers import verifiers_env
from turnwise.env.world import World

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
