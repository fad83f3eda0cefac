"""What an engine tells beside ids and logprobs, brought into the coordinates of a turn's path."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from turnwise.engine import Generation
from turnwise.errors import BackendContractError, UsageError
from turnwise.rollout.path import ConversationPath
from turnwise.rollout.tally import add_counts
from turnwise.types import ROUTES, ExpertRoutes, Trajectory, Turn

KNOWN = frozenset([ROUTES])
"""What can be asked for."""


def parse_extras(names: Iterable[str]) -> frozenset[str]:
    """Names of extras.

    Raises:
        UsageError: for one that nobody knows.
    """
    found = frozenset([names] if isinstance(names, str) else names)
    if strange := sorted(found - KNOWN):
        raise UsageError(f"want names {strange[0]!r}; an engine can be asked for {', '.join(sorted(KNOWN))}")
    return found


class EngineExtras:
    """What one episode asks for, and how much of each span it was told of.

    By span, not by path: whoever continues a trunk need not be told of it again, whatever became of the branch beside it.
    """

    def __init__(self, want: frozenset[str], trajectory: Trajectory) -> None:
        self.want = want
        self._trajectory = trajectory
        self._told: dict[int, int] = {}
        """By span: of how many first positions the experts are known."""

    def first_unknown(self, path: ConversationPath, mine: Mapping[str, tuple[int, Any]]) -> int:
        """The first position of a path whose experts are not known.

        Args:
            mine: what earlier calls of the same reply told.
        """
        if ROUTES not in self.want:
            return 0
        if ROUTES in mine:
            start, routes = mine[ROUTES]
            return start + len(routes)
        held = 0
        for index, used in self._trajectory.chain(path.leaf):
            known = min(self._told.get(index, 0), used)
            held = self._trajectory.spans[index].start + known
            if known < used:
                break
        return min(held, len(path.ids))

    def add(self, mine: dict[str, tuple[int, Any]], generation: Generation, asked_from: int) -> None:
        """What one call told, behind what earlier calls of the same reply did; what is known already is left out.

        The generation has all of it then. What was drafted for it is counted.

        Raises:
            BackendContractError: when calls tell of unlike numbers of layers or experts.
        """
        if not (mine or generation.extras or generation.drafted):
            return
        for name, (start, given) in generation.extras.items():
            if name != ROUTES:
                mine[name] = (start, given)
                continue
            routes = ExpertRoutes.of(given)
            fresh = routes.slice(asked_from - start, len(routes))
            if not len(fresh):
                continue
            try:
                mine[name] = (mine[name][0], mine[name][1].followed(fresh)) if name in mine else (asked_from, fresh)
            except ValueError as error:
                raise BackendContractError(f"the engine gave {error} in one reply") from error
        generation.extras = mine
        if generation.drafted:
            add_counts(self._trajectory, "draft_ids", by=generation.drafted)
            add_counts(self._trajectory, "draft_ids_accepted", by=generation.accepted)

    def recorded(self, turn: Turn, generation: Generation) -> None:
        """A turn is a part of the record now, and carries what its last answer has."""
        if not generation.extras:
            return
        turn.extras = dict(generation.extras)
        if ROUTES in turn.extras:
            start, routes = turn.extras[ROUTES]
            end = start + len(routes)
            for index, used in self._trajectory.chain(turn.spans[-1] if turn.spans else turn.prompt):
                known = min(used, end - self._trajectory.spans[index].start)
                if known > self._told.get(index, 0):
                    self._told[index] = known
