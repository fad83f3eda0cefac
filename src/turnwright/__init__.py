"""Turnwright trains LLM and VLM agents by multi-turn reinforcement learning, token for token.

Names are loaded when they are first used, so that `import turnwright` costs
milliseconds and needs no torch.
"""

from typing import TYPE_CHECKING, Any

from turnwright._lazy import lazy_names
from turnwright._version import __version__

if TYPE_CHECKING:
    from turnwright.api import train as train
    from turnwright.config import EnvRules as EnvRules
    from turnwright.config import Limits as Limits
    from turnwright.config import RetryRules as RetryRules
    from turnwright.config import tiny as tiny
    from turnwright.engines import Engine as Engine
    from turnwright.engines import Generation as Generation
    from turnwright.engines import PolicyEngine as PolicyEngine
    from turnwright.engines import Request as Request
    from turnwright.engines import Sampling as Sampling
    from turnwright.engines import ScriptedEngine as ScriptedEngine
    from turnwright.engines import StopText as StopText
    from turnwright.engines import token_logprobs as token_logprobs
    from turnwright.envs import Action as Action
    from turnwright.envs import ChatJudge as ChatJudge
    from turnwright.envs import Env as Env
    from turnwright.envs import EnvSpec as EnvSpec
    from turnwright.envs import InlineObservation as InlineObservation
    from turnwright.envs import Judge as Judge
    from turnwright.envs import NewHistory as NewHistory
    from turnwright.envs import RewardPart as RewardPart
    from turnwright.envs import Rewards as Rewards
    from turnwright.envs import Scores as Scores
    from turnwright.envs import StatefulTool as StatefulTool
    from turnwright.envs import Step as Step
    from turnwright.envs import Tool as Tool
    from turnwright.envs import ToolFailure as ToolFailure
    from turnwright.envs import arithmetic as arithmetic
    from turnwright.envs import as_env_spec as as_env_spec
    from turnwright.envs import gym_env as gym_env
    from turnwright.envs import judged as judged
    from turnwright.envs import load_tasks as load_tasks
    from turnwright.envs import mcp_tools as mcp_tools
    from turnwright.envs import resolve_env as resolve_env
    from turnwright.envs import tool as tool
    from turnwright.envs.isolation.sandbox import Sandbox as Sandbox
    from turnwright.envs.isolation.sandbox import python_tool as python_tool
    from turnwright.envs.rewards.rewards import rewards as rewards
    from turnwright.envs.simulated_user import simulated_user as simulated_user
    from turnwright.envs.tool_env import tool_env as tool_env
    from turnwright.errors import EngineError as EngineError
    from turnwright.errors import EnvError as EnvError
    from turnwright.errors import InvalidAction as InvalidAction
    from turnwright.errors import JudgeError as JudgeError
    from turnwright.errors import LimitReached as LimitReached
    from turnwright.errors import MediaError as MediaError
    from turnwright.errors import ProcessDied as ProcessDied
    from turnwright.errors import RepeatedUserError as RepeatedUserError
    from turnwright.errors import RewardError as RewardError
    from turnwright.errors import ServerError as ServerError
    from turnwright.errors import TurnwrightError as TurnwrightError
    from turnwright.errors import UsageError as UsageError
    from turnwright.evaluation import EvaluationResult as EvaluationResult
    from turnwright.evaluation import evaluate as evaluate
    from turnwright.media import MediaLimits as MediaLimits
    from turnwright.media import MediaStore as MediaStore
    from turnwright.renderers import Branch as Branch
    from turnwright.renderers import Extend as Extend
    from turnwright.renderers import Renderer as Renderer
    from turnwright.renderers import byte_renderer as byte_renderer
    from turnwright.renderers import load_renderer as load_renderer
    from turnwright.rollouts import EngineJudge as EngineJudge
    from turnwright.rollouts import Model as Model
    from turnwright.rollouts import Reply as Reply
    from turnwright.rollouts import Rollout as Rollout
    from turnwright.rollouts import RolloutSettings as RolloutSettings
    from turnwright.rollouts import arollout as arollout
    from turnwright.rollouts import rollout as rollout
    from turnwright.saved_runs import load_run as load_run
    from turnwright.types import EpisodeKey as EpisodeKey
    from turnwright.types import Failure as Failure
    from turnwright.types import FailureKind as FailureKind
    from turnwright.types import Group as Group
    from turnwright.types import Image as Image
    from turnwright.types import ImageRef as ImageRef
    from turnwright.types import MediaPlacement as MediaPlacement
    from turnwright.types import Message as Message
    from turnwright.types import Origin as Origin
    from turnwright.types import Sample as Sample
    from turnwright.types import SamplingDistribution as SamplingDistribution
    from turnwright.types import Span as Span
    from turnwright.types import StopReason as StopReason
    from turnwright.types import Task as Task
    from turnwright.types import ToolCall as ToolCall
    from turnwright.types import Trajectory as Trajectory
    from turnwright.types import Turn as Turn
    from turnwright.types import Video as Video
    from turnwright.types import VideoRef as VideoRef

_MOVED = {
    "ReplayResult": "turnwright_view",
    "openenv_env": "turnwright_compat",
    "program": "turnwright_serve",
    "replay_loop": "turnwright_view",
    "verifiers_env": "turnwright_compat",
}
_NAMES, _load = lazy_names(__name__, __file__, _MOVED)

__all__ = ["__version__", *_NAMES]

if not TYPE_CHECKING:  # a checker knows the names above, and reports others

    def __getattr__(name: str) -> Any:
        value = globals()[name] = _load(name)
        return value


def __dir__() -> list[str]:
    return __all__
