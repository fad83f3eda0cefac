"""Rows: the paths of a trajectory that are trained, as ids with weights.

A trajectory whose history was rewritten has several paths; each trained id is in exactly one row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from turnwright.training.forward.routing_replay import routes_of
from turnwright.training.loss_weights import TokenWeights
from turnwright.types import ExpertRoutes, MediaPlacement, Trajectory, placements_between


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """One root-to-leaf path, up to the last id that carries loss."""

    ids: list[int]
    """Input ids, without the last target."""
    places: list[int]
    """Path positions of the ids that carry loss; each is predicted from the position before it."""
    targets: list[int]
    """The ids at those positions."""
    weights: list[float]
    logprobs: list[float]
    """The engine's logprobs, NaN if missing."""
    trajectory: int
    """Index into the batch's trajectories."""
    media: tuple[MediaPlacement, ...] = ()
    """Images and videos among the ids."""
    slots: list[tuple[int, int]] = field(default_factory=list)
    """(span, offset) of each id that carries loss."""
    routes: ExpertRoutes | None = None
    """Experts of each id; None without routing replay."""


def rows_of(
    trajectory: Trajectory, index: int, scale: TokenWeights | None = None, *, routes: bool = False
) -> list[TrainingRow]:
    """Return the paths of a trajectory with ids that carry loss; each trained id is in exactly one
    of them.

    `scale` has the weights of its ids, those that an agent function gave included
    (`with_turn_weights`); None has only those.
    """
    rows = []
    for sample in trajectory.samples():
        # Nothing predicts position 0; `NO_CONTEXT` counts it.
        places = [place for place, weight in enumerate(sample.weights) if weight and place]
        if scale is None:
            weights = [sample.weights[place] for place in places]
        else:
            places = [place for place in places if scale.of(*sample.slots[place])]
            weights = [scale.of(*sample.slots[place]) for place in places]
        if not places:
            continue

        end = places[-1]
        logprobs = [sample.logprobs[place] for place in places]
        rows.append(
            TrainingRow(
                ids=sample.ids[:end],
                places=places,
                targets=[sample.ids[place] for place in places],
                weights=weights,
                logprobs=[math.nan if logprob is None else logprob for logprob in logprobs],
                trajectory=index,
                media=placements_between(sample.media, 0, end),
                slots=[sample.slots[place] for place in places],
                routes=routes_of(sample, end) if routes else None,
            )
        )
    return rows
