"""What the adapters of several frameworks share."""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable, Mapping
from dataclasses import dataclass, make_dataclass
from typing import Any

from turnwright.envs.user_imports import public_name


class AttributeConfig(dict[str, Any]):
    """Configuration whose keys are attributes too; a missing one is an AttributeError.

    What is set is a key as well.
    """

    def __setattr__(self, key: str, value: Any) -> None:
        self[key] = attribute_config(value)

    def __delattr__(self, key: str) -> None:
        if key not in self:
            raise AttributeError(f"the configuration has no {key!r}")
        del self[key]

    def __getattr__(self, key: str) -> Any:
        try:
            return self[key]
        except KeyError:
            raise AttributeError(
                f"the configuration has no {key!r}; give it under [env.args]"
            ) from None

    def __reduce__(self) -> tuple[Any, ...]:
        return AttributeConfig, (dict(self),)


@dataclass(frozen=True)
class TrainerState:
    """`trainer_state` of reward functions, as far as a rollout knows it."""

    global_step: int
    """Step of the episode, from 0."""

    def __getattr__(self, key: str) -> Any:
        raise AttributeError(
            f"trainer_state has no {key!r} here: a rollout knows global_step alone"
        )


def settings(name: str, values: Mapping[str, Any]) -> Any:
    """Return a configuration that is a dataclass too: user code reads it by keys, by
    attributes, and with `asdict`."""
    fields = [key for key in values if key.isidentifier() and not keyword.iskeyword(key)]

    def reduced(self: AttributeConfig) -> tuple[Any, ...]:
        return settings, (name, dict(self))

    typed = [(key, Any) for key in fields]
    methods = {"__reduce__": reduced}
    made = make_dataclass(
        name, typed, bases=(AttributeConfig,), namespace=methods, eq=False, repr=False, init=False
    )
    return made({key: attribute_config(value) for key, value in values.items()})


def attribute_config(value: Any) -> Any:
    """Convert mappings, also nested ones, to `AttributeConfig`."""
    if isinstance(value, AttributeConfig):
        return value
    if isinstance(value, Mapping):
        return AttributeConfig({str(key): attribute_config(inner) for key, inner in value.items()})
    return [attribute_config(item) for item in value] if isinstance(value, list) else value


def plain(value: Any) -> Any:
    """Copy JSON data, and the elements of other containers; text in place of any other object."""
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    return f"{value!r:.200}"


def derives_from(target: Any, package: str, name: str) -> bool:
    """Whether a class derives from a class of a framework, installed or a stand-in."""
    if not inspect.isclass(target):
        return False
    found = (
        (public_name(base.__module__).partition(".")[0], base.__name__)
        for base in target.__mro__[1:]
    )
    return (package, name) in found


def constructor_parameters(target: Any) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return the parameters of a class's constructor, and whether it takes any other keyword.

    A constructor of `*args, **kwargs` passes on what it gets, so those of the next class are
    added, up to one without.
    """
    found: dict[str, inspect.Parameter] = {}
    for base in inspect.getmro(target):
        if "__init__" not in vars(base):
            continue
        own = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
        for one in own:
            if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL):
                found.setdefault(one.name, one)
        if not any(one.kind is one.VAR_KEYWORD for one in own):
            return found, False
    return found, True


def accepted(method: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a method takes."""
    parameters = inspect.signature(method).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return dict(given)
    return {key: value for key, value in given.items() if key in parameters}
