"""What environments of skyrl-gym 0.4.0 are written against: base classes, the registry, metrics."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NotRequired, TypedDict, TypeVar

from turnwright.envs.user_imports import import_for_user, import_foreign

ObsType = TypeVar("ObsType")
ActType = TypeVar("ActType")


class EnvStepOutput(TypedDict):
    """Return value of `Env.step`."""

    observations: Any
    reward: Any
    done: bool
    metadata: dict[str, Any] | None


class Env(Generic[ObsType, ActType]):
    """Environment of one episode: `init`, `step` until done, `close`."""

    def init(self, *prompt: Any) -> tuple[ObsType, dict[str, Any]]:
        """Begin the episode; return the prompt and metadata."""
        raise NotImplementedError

    def step(self, action: ActType) -> Any:
        """Respond to one reply."""
        raise NotImplementedError

    def close(self) -> None:
        """Release all resources."""

    def __enter__(self) -> Env[ObsType, ActType]:
        return self

    def __exit__(self, *error: object) -> Literal[False]:
        self.close()
        return False

    def __str__(self) -> str:
        return f"Env({type(self).__name__})"


class Error(Exception):
    """Unknown environment id."""


class RegistrationError(Error):
    """Id that is registered already."""


def default_aggregate_metrics(metrics: list[dict[str, Any]]) -> dict[str, float]:
    """Return the mean of each numeric metric over the episodes that have it."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for row in metrics:
        for key, value in row.items():
            if isinstance(value, (bool, int, float)):
                values[key].append(float(value))
    return {key: sum(found) / len(found) for key, found in values.items()}


def aggregate_for_environment(env_name: str, metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the metrics of many episodes as the environment of an id combines them."""
    registration = import_for_user(
        "skyrl_gym.envs.registration", fromlist=("spec", "load_env_creator")
    )
    entry = registration.spec(env_name).entry_point
    env_class = registration.load_env_creator(entry) if isinstance(entry, str) else entry
    aggregated: dict[str, Any] = env_class.aggregate_metrics(metrics)
    return aggregated


MessageType = dict[str, str]
ConversationType = list[MessageType]


class BaseTextEnvStepOutput(TypedDict):
    """Return value of `BaseTextEnv.step`."""

    observations: ConversationType
    reward: float
    done: bool
    metadata: dict[str, Any]
    postprocessed_action: NotRequired[str | None]


class BaseTextEnv(Env[ConversationType, str]):
    """Environment whose observations are messages and whose actions are the model's texts."""

    def __init__(self) -> None:
        self.turns = 0
        self.max_turns = 1
        self.tool_groups: list[Any] = []
        self.tool_to_toolgroup: dict[str, str] = {}

    def init_tool_groups(self, tool_groups: list[Any] | None = None) -> None:
        """Set the groups of tools."""
        self.tool_groups = list(tool_groups or ())
        self.tool_to_toolgroup = {}
        for group in self.tool_groups:
            self.tool_to_toolgroup |= group.get_tool_to_group_mapping()

    def _execute_tool(self, tool_group_name: str, tool_name: str, tool_input: Any) -> Any:
        for group in self.tool_groups:
            if group.name == tool_group_name:
                return group.execute_tool(tool_name, *tool_input)
        raise ValueError(f"ToolGroup '{tool_group_name}' not found.")

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """Return the prompt and metadata."""
        return prompt, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Respond to one reply."""
        raise NotImplementedError(f"{type(self).__name__} has no step")

    def get_metrics(self) -> dict[str, Any]:
        """Return metrics of the episode."""
        return {}

    @staticmethod
    def aggregate_metrics(metrics: list[dict[str, Any]]) -> dict[str, Any]:
        """Combine the metrics of many episodes."""
        return default_aggregate_metrics(metrics)


@dataclass
class EnvSpec:
    """Registered environment."""

    id: str
    entry_point: Callable[..., Any] | str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The id."""
        return self.id

    def make(self, **kwargs: Any) -> Any:
        """Make an environment."""
        return make(self, **kwargs)


registry: dict[str, EnvSpec] = {}


def register(
    id: str,
    entry_point: Callable[..., Any] | str | None = None,
    kwargs: dict[str, Any] | None = None,
) -> None:
    """Register a class, or `module:Class`, under an id; the same registration may repeat."""
    if entry_point is None:
        raise ValueError(f"register({id!r}) needs an entry_point: a class, or 'module:Class'")

    new_spec = EnvSpec(id, entry_point, dict(kwargs or {}))
    registered = registry.setdefault(id, new_spec)
    if registered != new_spec and not _reloaded(registered.entry_point, entry_point):
        raise RegistrationError(f"the environment {id!r} is registered already")
    registry[id] = new_spec


def _reloaded(first: Any, second: Any) -> bool:
    """Whether two classes are one class of a file that was loaded twice."""
    return callable(first) and _name_in_file(first) == _name_in_file(second)


def _name_in_file(entry_point: Any) -> tuple[Any, str]:
    """Return the name of a class, and that of its module without the number of the loading."""
    module = getattr(entry_point, "__module__", "")
    return getattr(entry_point, "__qualname__", entry_point), module.rpartition("_")[0]


def deregister(id: str) -> None:
    """Remove an id."""
    del registry[spec(id).id]


def spec(env_id: str) -> EnvSpec:
    """Return a registered environment."""
    if env_id not in registry:
        raise Error(f"no registered environment {env_id!r}")
    return registry[env_id]


def load_env_creator(name: str) -> Any:
    """Import `module:Class`, also of the user's own files."""
    module, _, attribute = name.partition(":")
    return getattr(import_foreign(module), attribute)


def make(id: str | EnvSpec, **kwargs: Any) -> Any:
    """Make an environment by id."""
    env_spec = id if isinstance(id, EnvSpec) else spec(id)
    creator = env_spec.entry_point
    if isinstance(creator, str):
        creator = load_env_creator(creator)
    assert creator is not None

    env = creator(**(copy.deepcopy(env_spec.kwargs) | kwargs))
    env.spec = env_spec
    return env


def pprint_registry(
    print_registry: dict[str, EnvSpec] = registry, *, num_cols: int = 3, disable_print: bool = False
) -> str | None:
    """Print the ids, or return them as text."""
    ids = sorted(print_registry)
    lines = ["  ".join(ids[start : start + num_cols]) for start in range(0, len(ids), num_cols)]
    text = "\n".join(lines) or "no environments registered"
    if disable_print:
        return text
    print(text)
    return None
