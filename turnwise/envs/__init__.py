"""Environments, tools and rewards."""

from turnwise.envs.adapters.gym import gym_env
from turnwise.envs.adapters.openenv import openenv_env
from turnwise.envs.adapters.verifiers import verifiers_env
from turnwise.envs.base import Action, Env, EnvFactory, InlineObservation, NewHistory, Scores, Step
from turnwise.envs.resolve import as_env_spec, resolve_env
from turnwise.envs.rewards.judge import ChatJudge, Judge, judged
from turnwise.envs.rewards.rewards import RewardPart, Rewards, rewards
from turnwise.envs.scripted_play import play_scripted, read_reply, take_step
from turnwise.envs.simulated_user import simulated_user
from turnwise.envs.spec import EnvSpec
from turnwise.envs.tasks import load_tasks, split_tasks
from turnwise.envs.tool_env import tool_env
from turnwise.envs.tools.arithmetic import arithmetic
from turnwise.envs.tools.mcp import mcp_tools
from turnwise.envs.tools.stateful import StatefulTool
from turnwise.envs.tools.tool import Tool, tool
from turnwise.errors import ToolFailure

__all__ = [
    "Action",
    "ChatJudge",
    "Env",
    "EnvFactory",
    "EnvSpec",
    "InlineObservation",
    "Judge",
    "NewHistory",
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
    "play_scripted",
    "read_reply",
    "resolve_env",
    "rewards",
    "simulated_user",
    "split_tasks",
    "take_step",
    "tool",
    "tool_env",
    "verifiers_env",
]
