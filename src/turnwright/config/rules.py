"""What a section of the configuration states about itself, beside its fields."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

Broken = Iterator[tuple[str, str]]
"""Keys of a section that break a rule, and why."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a check knows besides the configuration."""

    training: bool = True
    """Whether the run trains; evaluation alone needs no groups of two."""
    has_objects: bool = False
    """Whether environments are given as objects, so that the configuration names none."""
    envs: Collection[str] | None = None
    """Names of the built-in environments; None does not check names."""
    templates: Collection[str] | None = None
    """Names of the built-in chat templates; None does not check names."""


@dataclass(frozen=True, slots=True)
class Need:
    """What keys of a section need to have an effect, and whether a run has it."""

    keys: tuple[str, ...]
    """Names of the fields."""
    holds: bool
    """Whether the run has it."""
    words: str
    """The same in words, for errors and help (`train.kl > 0`), with the name of each key that
    decides."""


class Section:
    """A section of the configuration; `run`, in its methods, is the `RunConfig` that it belongs to.

    Example: rules of the fields `lr` and `kl_steps`::

        def check(self, run, context):
            if self.lr > 1:
                yield "lr", "must be at most 1"

        def needs(self, run):
            yield Need(("kl_steps",), run.train.kl > 0, "train.kl > 0")
    """

    __slots__ = ()

    def check(self, run: Any, context: Context) -> Broken:
        """Yield the keys that do not go together, or not with what is on this machine, and why."""
        return iter(())

    def needs(self, run: Any) -> Iterator[Need]:
        """Yield what keys need to have an effect: the same keys and words, whatever the run."""
        return iter(())
