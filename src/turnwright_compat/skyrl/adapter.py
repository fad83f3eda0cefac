"""SkyRL: environments of SkyRL-Gym (`BaseTextEnv`, by class or registered id) and generators
(`GeneratorInterface`).

`adapt` decides which of these a recipe names. `SkyRLEnv` plays an environment turn by turn; a
generator plays its episode itself, in `generator.py`. What user code imports of SkyRL is in
`stand_ins.py`; launch scripts are converted in `convert.py`.
"""

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
    target = found.target
    if any(
        derives_from(target, package, "GeneratorInterface") for package in ("skyrl", "skyrl_train")
    ):
        refuse_faithful(found)
        return make_agent_function(target, found.args, found.where)

    registered_kwargs: dict[str, Any] = {}
    if _is_spec(target):
        registered_kwargs = dict(target.kwargs)
        target = target.entry_point
        if isinstance(target, str):
            target = import_object(target, found.where)
    elif not derives_from(target, "skyrl_gym", "Env"):
        return None

    name = getattr(target, "__name__", type(target).__name__)
    try:
        inspect.signature(target).bind(**registered_kwargs, env_config=None, extras={})
    except TypeError as error:
        raise ConfigError(f"{found.where}: {error}; {CALLED.format(name)}") from None
    for hook in ("step", "init"):
        if inspect.isclass(target) and not callable(getattr(target, hook, None)):
            raise ConfigError(
                f"{found.where}: {name} has no {hook}; a SkyRL-Gym environment has init and step"
            )

    config = _config(target, found.args, found.where)
    on_turn_length = "continue" if found.faithful else None
    return SkyRLFactory(target, registered_kwargs, config, name, on_turn_length)


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
    constructor = target.__init__ if inspect.isclass(target) else target
    try:
        hint = get_type_hints(constructor).get("env_config")
    except Exception:  # an annotation of a type that is not installed
        hint = None

    for config_class in (hint, *get_args(hint)):  # also a part of `Config | None`
        if not (inspect.isclass(config_class) and dataclasses.is_dataclass(config_class)):
            continue
        known = [field.name for field in dataclasses.fields(config_class) if field.init]
        for key in args:
            if key not in known:
                raise ConfigError(
                    f"{where} has no setting {key!r}; "
                    f"{suggest_or_list(key, known) or 'it takes none'}"
                )
        try:
            return config_class(**args)
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
        new_messages = list(observations)
        changed = len(self._messages) != len(self._known)
        # Messages of the list: by their number where they are as they were, else themselves.
        kept: list[Any] = []
        for message in self._messages:
            index = self._number_of(message)
            changed = changed or index != len(kept)
            kept.append(Message.of(message) if index is None else index)

        reply_number = len(self._known)
        reply_message = {"role": "assistant", "content": reply}
        if isinstance(self._messages, list):
            self._messages += [reply_message, *new_messages]
            conversation = [*self._messages]
        else:
            conversation = [*self._messages, reply_message, *new_messages]
        self._known = [(message, copy.copy(message)) for message in conversation]

        if changed:
            return NewHistory([*kept, reply_number, *map(Message.of, new_messages)])
        return [Message.of(message) for message in new_messages] or None

    def _number_of(self, message: Any) -> int | None:
        """Return the number of a message that is the same object with the same content."""
        for number, (known, as_it_was) in enumerate(self._known):
            if known is message and as_it_was == message:
                return number
        return None


@dataclass(frozen=True, slots=True)
class SkyRLFactory:
    """Factory of one SkyRL-Gym environment."""

    make: Callable[..., Any]
    registered_kwargs: Mapping[str, Any]
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
        extras = extras_of(task, self._limits)
        # Copies: an environment may change what it is given, and others are made of it too.
        kwargs = copy.deepcopy(dict(factory.registered_kwargs))
        config = copy.deepcopy(factory.config)
        self._env = factory.make(**kwargs, env_config=config, extras=extras)

        returned = self._env.init(given_messages(task.messages))
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise EnvError(
                f"{factory.name}.init returned {describe_value(returned)}; return (prompt, "
                "metadata)"
            )
        prompt, _ = returned
        self._history = ChatHistory(prompt)
        return [Message.of(message) for message in prompt]

    def step(self, action: Action) -> Step:
        """Pass the text of a reply, without its end token, to the environment."""
        output = self._env.step(action.raw)
        if not isinstance(output, Mapping) or not {"observations", "reward", "done"} <= set(output):
            raise EnvError(
                f"{self._factory.name}.step returned {describe_value(output)}; return "
                "BaseTextEnvStepOutput(observations=..., reward=..., done=..., metadata=...)"
            )

        metadata = output.get("metadata") or {}
        info = plain(metadata) if isinstance(metadata, Mapping) else {"metadata": plain(metadata)}
        reply = action.raw
        replaced = output.get("postprocessed_action")
        if replaced is not None:
            reply = replaced
            if replaced != action.raw:
                # The sampled ids stay; see docs/compat.md.
                info["postprocessed_action"] = replaced

        observation = self._history.after(reply, output["observations"] or ())
        return Step(observation, output["reward"], bool(output["done"]), info=info)

    def reward(self, trajectory: Trajectory) -> Scores:
        """Return 0.0, since steps have the rewards, and the numeric metrics of the environment."""
        metrics: dict[str, float] = {}
        for key, value in self._metrics():
            number = float(value) if isinstance(value, bool) else number_of(value)
            if number is not None:
                metrics[f"environment/{key}"] = number
        return Scores(metrics=metrics)

    def _metrics(self) -> Iterable[tuple[str, Any]]:
        metrics = self._env.get_metrics() if hasattr(self._env, "get_metrics") else {}
        if not isinstance(metrics, Mapping):
            raise EnvError(
                f"{self._factory.name}.get_metrics returned {describe_value(metrics)}; return a "
                "dict"
            )
        return metrics.items()

    def close(self) -> None:
        """Close the environment if it was made."""
        if self._env is not None:
            self._env.close()


FRAMEWORK = Framework(
    "skyrl", adapt, lambda name: _registry().get(name), lambda: _registry(), "skyrl-gym"
)
