"""Old names of release 0.1: public names, members and module paths, kept for one more release with a DeprecationWarning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import MutableSequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PUBLIC = {
    "Inline": "InlineObservation",
    "Key": "EpisodeKey",
    "Part": "RewardPart",
    "Placed": "MediaPlacement",
    "Replayed": "ReplayResult",
    "UserBugs": "RepeatedUserError",
    "World": "EnvSpec",
    "as_world": "as_env_spec",
    "resolve": "resolve_env",
}
"""Old names in `turnwise` -> new names."""
_PATHS = {
    "turnwise.engine": "turnwise.engines",
    "turnwise.engine.remote": "turnwise.engines.remote",
    "turnwise.env": "turnwise.envs",
    "turnwise.env.builtin": "turnwise.envs.builtin",
    "turnwise.env.process": "turnwise.envs.isolation",
    "turnwise.env.process.sandbox": "turnwise.envs.isolation.sandbox",
    "turnwise.render": "turnwise.renderers",
    "turnwise.render.history": "turnwise.renderers.history",
    "turnwise.render.marks": "turnwise.renderers.render_check",
    "turnwise.render.named": "turnwise.renderers.template",
    "turnwise.render.parsers": "turnwise.renderers.parsers",
    "turnwise.render.sanity": "turnwise.renderers.render_check",
    "turnwise.render.template": "turnwise.renderers.template",
    "turnwise.rollout": "turnwise.rollouts",
    "turnwise.rollout.sanity": "turnwise.rollouts.render_check",
    "turnwise.trace": "turnwise.records",
    "turnwise.trace.export": "turnwise.records.export",
    "turnwise.trace.measure": "turnwise.records.metrics",
    "turnwise.train": "turnwise.training",
    "turnwise.train.algorithms": "turnwise.training.algorithms",
    "turnwise.train.algorithms.base": "turnwise.training.loss",
    "turnwise.train.model": "turnwise.training.model",
    "turnwise.train.model.lora": "turnwise.training.model.lora",
}
_NAMES = {
    "turnwise.env.resolve": "resolve_env",
    "turnwise.env.as_world": "as_env_spec",
    "turnwise.env.Inline": "InlineObservation",
    "turnwise.env.Part": "RewardPart",
    "turnwise.env.World": "EnvSpec",
    "turnwise.render.marks.assistant_mask": "template_assistant_mask",
    "turnwise.render.named.preset": "with_preset_variables",
    "turnwise.render.named.source_of": "template_source",
    "turnwise.render.sanity.compare": "compare_with_render",
    "turnwise.render.template.Template": "ChatTemplate",
    "turnwise.rollout.Replayed": "ReplayResult",
    "turnwise.rollout.sanity.as_built": "built_conversation",
    "turnwise.trace.replay": "rebuild_trajectories",
    "turnwise.trace.measure.flat": "flatten_row",
    "turnwise.trace.measure.measure": "rollout_metrics",
}


def warn_renamed(old: str, new: str) -> None:
    """Warn the caller's caller that a name changed."""
    warnings.warn(f"{old} is now {new}; the next release removes the old name", DeprecationWarning, stacklevel=3)


class Renamed:
    """Deprecated name of a member: warns, and returns the member under its new name."""

    def __init__(self, new: str) -> None:
        self.new, self.old = new, ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.old = f"{owner.__name__}.{name}"

    def __get__(self, instance: Any, owner: type) -> Any:
        warn_renamed(self.old, self.new)
        return getattr(owner if instance is None else instance, self.new)


def old_member(owner: Any, old: str, new: str) -> Any:
    """Return a member that users implement under its old name, with a warning; None where there is none."""
    found = getattr(owner, old, None)
    if found is not None:
        warn_renamed(f"{type(owner).__name__}.{old}", new)
    return found


class _OldModule(ModuleType):
    """Forwards every attribute to the renamed module."""

    __path__: MutableSequence[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        new = _PATHS[self.__name__]
        value = getattr(import_module(new), _NAMES.get(f"{self.__name__}.{name}", name))
        warn_renamed(self.__name__, new)
        return value


class _OldPaths(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname in _PATHS else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _OldModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def install() -> None:
    """Make the old paths importable; `turnwise.rollout` and `turnwise.train` remain functions as attributes."""
    sys.meta_path.append(_OldPaths())
    for name in ("turnwise.rollout", "turnwise.train"):
        sys.modules.setdefault(name, _OldModule(name))
