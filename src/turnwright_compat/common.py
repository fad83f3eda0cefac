"""What the adapters of several frameworks share.

Configuration that user code reads by keys and by attributes (`attribute_config`, `settings`), and
questions about classes and signatures of user code (`derives_from`, `constructor_parameters`,
`accepted`). What an episode of such code returned is read in `sampled_rows.py`; our rollouts
inside another trainer are in `episodes.py`.
"""

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
    """Return a configuration that user code reads by keys, by attributes, and with `asdict`.

    It is an `AttributeConfig` and an instance of a dataclass called `name`, whose fields are the
    keys that can be names of attributes.
    """

    def reduced(self: AttributeConfig) -> tuple[Any, ...]:
        # The class is made here, so pickle cannot find it by its name.
        return settings, (name, dict(self))

    fields = [(key, Any) for key in values if key.isidentifier() and not keyword.iskeyword(key)]
    config_class = make_dataclass(
        name,
        fields,
        bases=(AttributeConfig,),
        namespace={"__reduce__": reduced},
        eq=False,
        repr=False,
        init=False,
    )
    return config_class({key: attribute_config(value) for key, value in values.items()})


def attribute_config(value: Any) -> Any:
    """Convert mappings, also nested ones, to `AttributeConfig`.

    >>> from turnwright_compat.common import attribute_config
    >>> config = attribute_config({"rollout": {"n": 8}})
    >>> config.rollout.n, config["rollout"]["n"]
    (8, 8)
    """
    if isinstance(value, AttributeConfig):
        return value
    if isinstance(value, Mapping):
        return AttributeConfig({str(key): attribute_config(inner) for key, inner in value.items()})
    if isinstance(value, list):
        return [attribute_config(item) for item in value]
    return value


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

    for base in target.__mro__[1:]:
        base_package = public_name(base.__module__).partition(".")[0]
        if (base_package, base.__name__) == (package, name):
            return True
    return False


def constructor_parameters(target: Any) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return the parameters of a class's constructor, and whether it takes any other keyword.

    A constructor of `*args, **kwargs` passes on what it gets, so those of the next class are
    added, up to one without.
    """
    named: dict[str, inspect.Parameter] = {}
    for base in inspect.getmro(target):
        if "__init__" not in vars(base):
            continue

        signature = inspect.signature(vars(base)["__init__"])
        parameters = list(signature.parameters.values())[1:]  # without self
        for parameter in parameters:
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                named.setdefault(parameter.name, parameter)

        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return named, False
    return named, True


def accepted(method: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a method takes; all of them where it takes any keyword."""
    parameters = inspect.signature(method).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(arguments)
    return {key: value for key, value in arguments.items() if key in parameters}
