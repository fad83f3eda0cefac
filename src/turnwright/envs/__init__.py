"""Environments, tools and rewards."""

from turnwright.envs.env import Action, Env, EnvFactory, InlineObservation, NewHistory, Scores, Step
from turnwright.envs.gym import gym_env
from turnwright.envs.resolve import as_env_spec, resolve_env
from turnwright.envs.rewards.judge import ChatJudge, Judge, judged
from turnwright.envs.rewards.rewards import RewardPart, Rewards, rewards
from turnwright.envs.scripted_play import play_scripted, read_reply, take_step
from turnwright.envs.simulated_user import simulated_user
from turnwright.envs.spec import EnvSpec
from turnwright.envs.tasks import load_tasks, split_tasks
from turnwright.envs.tool_env import tool_env
from turnwright.envs.tools.arithmetic import arithmetic
from turnwright.envs.tools.mcp import mcp_tools
from turnwright.envs.tools.stateful import StatefulTool
from turnwright.envs.tools.tool import Tool, tool
from turnwright.errors import ToolFailure

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
    "play_scripted",
    "read_reply",
    "resolve_env",
    "rewards",
    "simulated_user",
    "split_tasks",
    "take_step",
    "tool",
    "tool_env",
]
