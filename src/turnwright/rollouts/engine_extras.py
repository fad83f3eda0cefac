"""What an engine returns besides ids and logprobs: what an episode asks for, and what it has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from turnwright.engines import Generation
from turnwright.errors import BackendContractError, UsageError
from turnwright.rollouts.conversation import ConversationPath
from turnwright.rollouts.counts import add_counts
from turnwright.types import ROUTES, ExpertRoutes, Trajectory, Turn

KNOWN = frozenset([ROUTES])
"""Supported extras."""


def parse_extras(names: Iterable[str]) -> frozenset[str]:
    """Return extras by name; raise `UsageError` for an unknown one."""
    extras = frozenset([names] if isinstance(names, str) else names)
    unknown = sorted(extras - KNOWN)
    if unknown:
        supported = ", ".join(sorted(KNOWN))
        raise UsageError(f"want names {unknown[0]!r}; supported extras: {supported}")
    return extras


class EngineExtras:
    """Extras requested for one episode, and the known positions of each span.

    Known positions are stored by span, so a branch from a shared trunk does not request them again.
    """

    def __init__(self, want: frozenset[str], trajectory: Trajectory) -> None:
        self.want = want
        self._trajectory = trajectory
        self._known_positions: dict[int, int] = {}
        """By span: number of first positions whose expert routes are known."""

    def first_unknown(
        self, path: ConversationPath, reply_extras: Mapping[str, tuple[int, Any]]
    ) -> int:
        """Return the first position of a path with unknown routes.

        `reply_extras` are those of the reply's earlier calls.
        """
        if ROUTES not in self.want:
            return 0
        if ROUTES in reply_extras:
            start, routes = reply_extras[ROUTES]
            return start + len(routes)

        position = 0
        for index, used in self._trajectory.chain(path.leaf):
            known = min(self._known_positions.get(index, 0), used)
            position = self._trajectory.spans[index].start + known
            if known < used:
                break
        return min(position, len(path.ids))

    def add(
        self, reply_extras: dict[str, tuple[int, Any]], generation: Generation, asked_from: int
    ) -> None:
        """Merge the extras of one call into those of earlier calls of the same reply.

        Known positions are dropped. `generation.extras` then holds the merged extras. Draft ids are
        counted in the metrics. Raises `BackendContractError` for routes that do not fit together.
        """
        if not (reply_extras or generation.extras or generation.drafted):
            return

        for name, (start, reported) in generation.extras.items():
            if name != ROUTES:
                reply_extras[name] = (start, reported)
                continue
            routes = ExpertRoutes.of(reported)
            new = routes.slice(asked_from - start, len(routes))
            if not len(new):
                continue
            if name not in reply_extras:
                reply_extras[name] = (asked_from, new)
                continue
            first, earlier = reply_extras[name]
            try:
                reply_extras[name] = (first, earlier.concat(new))
            except ValueError as error:
                raise BackendContractError(f"the engine returned {error} in one reply") from error

        generation.extras = reply_extras
        if generation.drafted:
            add_counts(self._trajectory, "draft_ids", by=generation.drafted)
            add_counts(self._trajectory, "draft_ids_accepted", by=generation.accepted)

    def recorded(self, turn: Turn, generation: Generation) -> None:
        """Store the extras of a recorded turn, and update the known positions of its spans."""
        if not generation.extras:
            return
        turn.extras = dict(generation.extras)
        if ROUTES not in turn.extras:
            return

        start, routes = turn.extras[ROUTES]
        end = start + len(routes)
        leaf = turn.spans[-1] if turn.spans else turn.prompt
        for index, used in self._trajectory.chain(leaf):
            known = min(used, end - self._trajectory.spans[index].start)
            if known > self._known_positions.get(index, 0):
                self._known_positions[index] = known
