"""SkyRL: environments of SkyRL-Gym (`BaseTextEnv`, by class or registered id) and generators
(`GeneratorInterface`)."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from turnwright.config import Limits
from turnwright.envs.env import Action, Env, NewHistory, Scores, Step
from turnwright.envs.foreign import ForeignObject, Framework, import_object, refuse_faithful
from turnwright.envs.user_code import describe_value, number_of
from turnwright.envs.user_imports import import_foreign, public_name
from turnwright.errors import ConfigError, EnvError, suggest_or_list
from turnwright.types import Message, Task, Trajectory
from turnwright_compat.common import attribute_config, derives_from, plain
from turnwright_compat.skyrl.generator import extras_of, given_messages, make_agent_function

CALLED = "SkyRL-Gym calls it as {}(env_config=..., extras=...)"


def adapt(found: ForeignObject) -> Any:
    """Make a factory of a `BaseTextEnv` class or of an entry of the registry, or an agent function
    of a generator class."""
    if any(
        derives_from(found.target, package, "GeneratorInterface")
        for package in ("skyrl", "skyrl_train")
    ):
        refuse_faithful(found)
        return make_agent_function(found.target, found.args, found.where)
    target, given = found.target, {}
    if _is_spec(target):
        entry, given = target.entry_point, dict(target.kwargs)
        target = import_object(entry, found.where) if isinstance(entry, str) else entry
    elif not derives_from(target, "skyrl_gym", "Env"):
        return None
    name = getattr(target, "__name__", type(target).__name__)
    try:
        inspect.signature(target).bind(**given, env_config=None, extras={})
    except TypeError as error:
        raise ConfigError(f"{found.where}: {error}; {CALLED.format(name)}") from None
    for hook in ("step", "init"):
        if inspect.isclass(target) and not callable(getattr(target, hook, None)):
            raise ConfigError(
                f"{found.where}: {name} has no {hook}; a SkyRL-Gym environment has init and step"
            )
    config = _config(target, found.args, found.where)
    return SkyRLFactory(target, given, config, name, "continue" if found.faithful else None)


def _is_spec(target: Any) -> bool:
    return (
        public_name(type(target).__module__).startswith("skyrl_gym.")
        and type(target).__name__ == "EnvSpec"
    )


def _registry() -> Mapping[str, Any]:
    try:
        registry: Mapping[str, Any] = import_foreign("skyrl_gym").registry
    except ImportError as error:
        raise ConfigError(
            f"skyrl_gym cannot be imported ({error}); pip install skyrl-gym, or name the class: "
            "use = file.py:Class"
        ) from error
    return registry


def _config(target: Any, args: Mapping[str, Any], where: str) -> Any:
    """Return `[env.args]` as the dataclass that `env_config` is annotated with, else as an
    object with attributes."""
    try:
        hint = get_type_hints(target.__init__ if inspect.isclass(target) else target).get(
            "env_config"
        )
    except Exception:  # an annotation of a type that is not installed
        hint = None
    for one in (hint, *get_args(hint)):
        if inspect.isclass(one) and dataclasses.is_dataclass(one):
            known = [field.name for field in dataclasses.fields(one) if field.init]
            for key in args:
                if key not in known:
                    raise ConfigError(
                        f"{where} has no setting {key!r}; "
                        f"{suggest_or_list(key, known) or 'it takes none'}"
                    )
            try:
                return one(**args)
            except TypeError as error:
                raise ConfigError(f"{where}: [env.args]: {error}") from None
    return attribute_config(args)


class ChatHistory:
    """The list that `init` returned: SkyRL's generator appends to that very list, so an
    environment may change it."""

    def __init__(self, messages: Any) -> None:
        self._messages = messages
        self._known = [(message, copy.copy(message)) for message in messages]
        """Each message of the conversation, and a copy as it was."""

    def after(self, reply: str, observations: Iterable[Any]) -> Any:
        """Append a reply and what follows; return the observation: a new conversation if the
        environment changed the list."""
        new = list(observations)
        changed = len(self._messages) != len(self._known)
        kept: list[Any] = []
        for message in self._messages:
            index = next(
                (
                    at
                    for at, known in enumerate(self._known)
                    if known[0] is message and known[1] == message
                ),
                None,
            )
            changed = changed or index != len(kept)
            kept.append(Message.of(message) if index is None else index)

        of_reply = {"role": "assistant", "content": reply}
        size = len(self._known)
        if isinstance(self._messages, list):
            self._messages += [of_reply, *new]
        items = (
            [*self._messages]
            if isinstance(self._messages, list)
            else [*self._messages, of_reply, *new]
        )
        self._known = [(message, copy.copy(message)) for message in items]

        if changed:
            return NewHistory([*kept, size, *map(Message.of, new)])
        return [Message.of(message) for message in new] or None


@dataclass(frozen=True, slots=True)
class SkyRLFactory:
    """Factory of one SkyRL-Gym environment."""

    make: Callable[..., Any]
    given: Mapping[str, Any]
    """Arguments of its registration."""
    config: Any
    name: str
    on_turn_length: Any

    def __call__(self) -> SkyRLEnv:
        return SkyRLEnv(self)

    def __repr__(self) -> str:
        return f"skyrl:{self.name}"


class SkyRLEnv(Env):
    """One episode of a SkyRL-Gym environment.

    Its methods are synchronous, so each call runs in a thread.
    """

    def __init__(self, factory: SkyRLFactory) -> None:
        self._factory = factory
        self._limits = Limits()
        self._env: Any = None
        self._history = ChatHistory([])
        self.on_turn_length = factory.on_turn_length

    def set_limits(self, limits: Limits) -> None:
        """Keep the limits: `max_turns` of `extras`."""
        self._limits = limits

    def reset(self, task: Task, *, seed: int | None = None) -> list[Message]:
        """Make the environment with the columns of the row; return the prompt of `init`."""
        factory = self._factory
        extras, given = extras_of(task, self._limits), copy.deepcopy(dict(factory.given))
        self._env = factory.make(**given, env_config=copy.deepcopy(factory.config), extras=extras)
        opened = self._env.init(given_messages(task.messages))
        if not isinstance(opened, tuple) or len(opened) != 2:
            raise EnvError(
                f"{factory.name}.init returned {describe_value(opened)}; return (prompt, metadata)"
            )
        self._history = ChatHistory(opened[0])
        return [Message.of(message) for message in opened[0]]

    def step(self, action: Action) -> Step:
        """Pass the text of a reply, without its end token, to the environment."""
        found = self._env.step(action.raw)
        if not isinstance(found, Mapping) or not {"observations", "reward", "done"} <= set(found):
            raise EnvError(
                f"{self._factory.name}.step returned {describe_value(found)}; return "
                "BaseTextEnvStepOutput(observations=..., reward=..., done=..., metadata=...)"
            )
        metadata = found.get("metadata") or {}
        info = plain(metadata) if isinstance(metadata, Mapping) else {"metadata": plain(metadata)}
        replaced = found.get("postprocessed_action")
        if replaced is not None and replaced != action.raw:
            # The sampled ids stay; see docs/compat.md.
            info["postprocessed_action"] = replaced
        observation = self._history.after(
            action.raw if replaced is None else replaced, found["observations"] or ()
        )
        return Step(observation, found["reward"], bool(found["done"]), info=info)

    def reward(self, trajectory: Trajectory) -> Scores:
        """Return 0.0, since steps have the rewards, and the numeric metrics of the environment."""
        metrics = {
            key: float(value) if isinstance(value, bool) else number_of(value)
            for key, value in self._metrics()
        }
        return Scores(
            metrics={
                f"environment/{key}": value for key, value in metrics.items() if value is not None
            }
        )

    def _metrics(self) -> Iterable[tuple[str, Any]]:
        found = self._env.get_metrics() if hasattr(self._env, "get_metrics") else {}
        if not isinstance(found, Mapping):
            raise EnvError(
                f"{self._factory.name}.get_metrics returned {describe_value(found)}; return a dict"
            )
        return found.items()

    def close(self) -> None:
        """Close the environment if it was made."""
        if self._env is not None:
            self._env.close()


FRAMEWORK = Framework(
    "skyrl", adapt, lambda name: _registry().get(name), lambda: _registry(), "skyrl-gym"
)
