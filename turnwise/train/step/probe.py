"""Whether the last update has reached the engine, by what it says and not by what it says of itself.

A fingerprint is the engine's own word, and a bound on |dlogp| lets a small update pass that was lost. So at a few places of the
last step's trajectories the trainer notes its distribution before and after the update, and the engine is asked there for its
likeliest id. At each place the share of the update that is missing is ``(engine - after) / (before - after)`` of that id's
logprob: 0 for an engine that has the update, 1 for one that has the weights of before, anything where rounding is larger than
the update. Of 16 places at which rounding alone decides, 13 have a share from 0.5 to 1.5 once in 38 million steps: a ratio of
two independent centred normals is in there with a probability of at most 1/6, whatever their sizes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from turnwise.engine import Engine, Generation, Request, Sampling
from turnwise.errors import SyncError
from turnwise.train.credit.advantage import Credit
from turnwise.train.forward.batch import MicroBatch, TrainingRow, padded, rows_of

TRAJECTORIES, PLACES = 4, 4
"""Looked at: trajectories of a step, and places in each."""
NEAR = (0.5, 1.5)
"""The share that is missing, about the whole."""
LEAST, MOST_PLACES = 12, 0.8
"""An engine is told apart by no fewer places than these, where at this share of them about the whole update is missing."""


@dataclass(slots=True)
class WeightSyncProbe:
    """What an update changed at K places."""

    contexts: list[list[int]]
    micros: list[MicroBatch]
    before_kv: Tensor
    """Log-probabilities, on the CPU."""
    after_kv: Tensor | None = None

    @classmethod
    def before(
        cls, credits: Sequence[Credit], score: Callable[[MicroBatch], Tensor], device: torch.device
    ) -> WeightSyncProbe | None:
        """Note the distribution before an update; None where there is nothing to look at (no text that is trained).

        Args:
            score: the log-probabilities (M, vocabulary) at the targets of a pass.
        """
        able = [c for c in credits if c.reason is None and c.tokens and not any(s.media for s in c.trajectory.spans)]
        chosen = able[:: max(1, len(able) // TRAJECTORIES)][:TRAJECTORIES]
        rows = [_thinned(rows_of(credit.trajectory, 0, credit.weights)[0]) for credit in chosen]
        if not rows:
            return None
        micros = padded(rows, max(len(row.ids) for row in rows) * len(rows), device)
        contexts = [row.ids[:place] for row in rows for place in row.places]
        return cls(contexts, micros, _scored(micros, score, len(contexts)))

    def after(self, score: Callable[[MicroBatch], Tensor]) -> WeightSyncProbe:
        """Note the distribution after the update."""
        self.after_kv = _scored(self.micros, score, len(self.contexts))
        return self

    async def ask(self, engine: Engine, version: int, banned_ids: Collection[int], seconds: float) -> None:
        """See that the engine has the update.

        Raises:
            SyncError: when it lacks a part of it.
            EngineError: when it does not answer.
        """
        requests = [
            Request(
                context,
                1,
                frozenset(),
                seed=0,
                session=f"probe/{version}/{number}",
                sampling=Sampling(temperature=0.0),
                banned_ids=frozenset(banned_ids),
                min_version=version,
            )
            for number, context in enumerate(self.contexts)
        ]
        try:
            asked = asyncio.gather(*(engine.generate(request) for request in requests))
            replies: list[Generation] = await asyncio.wait_for(asked, seconds)
        finally:
            for request in requests:
                engine.release(request.session)
        assert self.after_kv is not None
        found = []
        for number, reply in enumerate(replies):
            said = reply.logprobs[0] if reply.ids else None
            if said is not None:
                after = float(self.after_kv[number, reply.ids[0]])
                found.append((said - after, float(self.before_kv[number, reply.ids[0]]) - after))
        lost, places = count_missing(found)
        if places >= LEAST and lost >= MOST_PLACES * places:
            gap, moved = (_mean(pair[side] for pair in found) for side in (0, 1))
            raise SyncError(
                f"the engine says that it has policy {version}, but at {lost} of {places} places of the last step's "
                f"trajectories its logprobs lack what the last update changed: |logprob of engine - of trainer| is {gap:.3g} "
                f"on average, and the update moved them by {moved:.3g}. It has the weights of before, or none of a LoRA "
                "that it was sent: look at how it takes weights; nothing was trained on its episodes"
            )


def count_missing(found: Sequence[tuple[float, float]]) -> tuple[int, int]:
    """At how many places an engine lacks about the whole update, and at how many it changed anything.

    Args:
        found: (engine - after, before - after) per place, in nats.
    """
    shares = [d / s for d, s in found if s and math.isfinite(d) and math.isfinite(s)]
    return sum(NEAR[0] < share < NEAR[1] for share in shares), len(shares)


def _mean(values: Iterable[float]) -> float:
    sizes = [abs(value) for value in values]
    return sum(sizes) / max(len(sizes), 1)


def _scored(micros: Sequence[MicroBatch], score: Callable[[MicroBatch], Tensor], places: int) -> Tensor:
    parts = [(micro.tokens_m.cpu(), score(micro).cpu()) for micro in micros]
    found = parts[0][1].new_empty((places, parts[0][1].shape[-1]))
    for tokens_m, logp_mv in parts:
        found[tokens_m] = logp_mv
    return found


def _thinned(row: TrainingRow) -> TrainingRow:
    """A row with a few of its places, spread over it."""
    kept = range(0, len(row.places), max(1, len(row.places) // PLACES))[:PLACES]
    places = [row.places[k] for k in kept]
    return TrainingRow(
        ids=row.ids[: places[-1]],
        places=places,
        targets=[row.targets[k] for k in kept],
        weights=[row.weights[k] for k in kept],
        logprobs=[row.logprobs[k] for k in kept],
        trajectory=0,
    )
