"""The seam: a worker plays one group of episodes, given as plain data, and passes on each of their
events.

`GroupSpec` is what it is given, `RolloutWorker` what it does. The pool (`pool.py`) asks workers in
other processes (`remote.py`), which play on a stream of their own (`local.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from turnwright.engines import Sampling
from turnwright.errors import TurnwrightError
from turnwright.records.serialization import Event
from turnwright.types import EpisodeKey, GroupKey, Task

OnTurn = Callable[[Event], None]
"""Receives every event of a group's episodes in order, as in the journal, each before the next turn
begins."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One group to play: episodes of one task.

    A worker gets limits, rules and seed of the run when it joins.
    """

    env: str
    """Name of the environment in the recipe."""
    task: Task
    keys: tuple[EpisodeKey, ...]
    sampling: Sampling
    extras: frozenset[str] = frozenset()
    """Engine extras to request besides ids and logprobs."""
    min_version: int = 0
    """Oldest policy version that may sample."""
    blank: bool = False
    """Whether every image becomes a gray one of its size."""
    training: bool = False
    """Whether its engine calls are held while the engine is needed for something else."""
    plays: Mapping[EpisodeKey, tuple[tuple[Event, ...], ...]] = field(default_factory=dict)
    """Events of interrupted plays of its episodes, whose turns are not sampled again."""
    definitions: Mapping[str, Any] = field(default_factory=dict)
    """Values that these events refer to, by name."""

    @property
    def group(self) -> GroupKey:
        """Key of the group."""
        return self.keys[0].group


class PlayedGroup(NamedTuple):
    """End of a group.

    Its episodes are in the events, by value: what is trained is what the journal has.
    """

    key: GroupKey
    events: int
    """Number of its events."""


class RolloutWorker(Protocol):
    """Plays groups: in this process, in one that joined over HTTP, or in an actor of Ray."""

    name: str

    async def play(self, spec: GroupSpec, on_turn: OnTurn) -> PlayedGroup:
        """Play the episodes of a group and pass on their events.

        Raises:
            WorkerLost: when no answer will come.
        """

    async def close(self) -> None:
        """End its work."""


class WorkerLost(TurnwrightError, RuntimeError):
    """A worker that died, became unreachable, or takes too long; its groups are asked for again."""


class WorkerFailed(WorkerLost):
    """A worker that is there, but could not play a group, sent what does not fit, or did nothing
    for too long."""
