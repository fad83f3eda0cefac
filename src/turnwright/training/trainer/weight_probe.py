"""Does the engine sample with the last update? A probe that asks it.

A fingerprint is the engine's own report, and a bound on |dlogp| lets a small lost update pass. So
the trainer records its distribution at a few positions of the last step's trajectories, before and
after the update, and the engine reports its most likely id there. The missing share of the update
at a position is ``(engine - after) / (before - after)`` of that id's logprob: 0 with the update, 1
with the old weights, anything if rounding exceeds the update. Of 16 positions where rounding alone
decides, 13 have a share from 0.5 to 1.5 once in 38 million steps: a ratio of two independent
centered normals is in there with a probability of at most 1/6, whatever their sizes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from turnwright.config import TrainConfig
from turnwright.engines import Engine, Generation, Request, Sampling
from turnwright.errors import SyncError
from turnwright.training.credit import Credit
from turnwright.training.forward.passes import MicroBatch, padded
from turnwright.training.forward.training_rows import TrainingRow, rows_of
from turnwright.training.trainer.mismatch import EXACT, mismatch_bound

PROBE_EVERY = 20
PROBED = 2
"""In float32, so many steps of each `PROBE_EVERY` have a probe, which takes three short passes."""
TRAJECTORIES = 4
"""Trajectories of a step that are probed."""
POSITIONS = 4
"""Positions in each."""
NEAR = (0.5, 1.5)
"""Missing share that counts as the full update."""
MIN_POSITIONS = 12
MAX_SHARE = 0.8
"""The check fails only with at least `MIN_POSITIONS`, if this share of them lacks about the full
update."""


def needs_probe(
    config: TrainConfig, dtype: torch.dtype, step: int, *, rounded_inputs: bool
) -> bool:
    """Return whether to check that an engine has the update of a step.

    That is always where `check_mismatch` allows as much as an update changes, else in two steps of
    twenty, since updates that are lost in between add up to `EXACT` at most.
    """
    if rounded_inputs or mismatch_bound(config, dtype) > EXACT:
        return True
    return step % PROBE_EVERY < PROBED


@dataclass(slots=True)
class WeightSyncProbe:
    """Change of the trainer's distribution by an update, at K positions."""

    contexts: list[list[int]]
    micros: list[MicroBatch]
    before_kv: Tensor
    """Log-probabilities, on the CPU."""
    after_kv: Tensor | None = None

    @classmethod
    def before(
        cls,
        credits: Sequence[Credit],
        score: Callable[[MicroBatch], Tensor],
        device: torch.device,
    ) -> WeightSyncProbe | None:
        """Record the distribution (M, vocabulary) before an update; None if no text-only trajectory
        is trained."""
        usable = []
        for credit in credits:
            has_media = any(span.media for span in credit.trajectory.spans)
            if credit.reason is None and credit.tokens and not has_media:
                usable.append(credit)
        chosen = usable[:: max(1, len(usable) // TRAJECTORIES)][:TRAJECTORIES]
        rows = [_thinned(rows_of(credit.trajectory, 0, credit.weights)[0]) for credit in chosen]
        if not rows:
            return None

        micros = padded(rows, max(len(row.ids) for row in rows) * len(rows), device)
        contexts = [row.ids[:place] for row in rows for place in row.places]
        return cls(contexts, micros, _scored(micros, score, len(contexts)))

    def after(self, score: Callable[[MicroBatch], Tensor]) -> WeightSyncProbe:
        """Record the distribution after the update."""
        self.after_kv = _scored(self.micros, score, len(self.contexts))
        return self

    async def ask(
        self, engine: Engine, version: int, banned_ids: Collection[int], seconds: float
    ) -> None:
        """Ask the engine for its most likely id at each position.

        Raises:
            SyncError: when the engine lacks a part of the update.
            EngineError: when it does not answer.
        """
        replies = await self._replies(engine, version, banned_ids, seconds)
        differences = self._differences(replies, version)
        lost, positions = count_missing(differences)
        if positions < MIN_POSITIONS or lost < MAX_SHARE * positions:
            return

        from_engine = sum(abs(difference) for difference, _ in differences) / len(differences)
        by_update = sum(abs(change) for _, change in differences) / len(differences)
        cached = sum(reply.cached_tokens > 0 for reply in replies)
        cache = ""
        if cached:
            cache = (
                f", or its prefix cache ({cached} of {len(replies)} answers used it) outlived the "
                "update"
            )
        raise SyncError(
            f"the engine reports policy {version}, but at {lost} of {positions} positions of "
            "the last step's trajectories its logprobs lack the last update: |logprob of "
            f"engine - of trainer| is {from_engine:.3g} on average, and the update changed them by "
            f"{by_update:.3g}. It has the old weights, ignores the LoRA it received{cache}: check "
            "how it loads weights; nothing was trained on its episodes"
        )

    async def _replies(
        self, engine: Engine, version: int, banned_ids: Collection[int], seconds: float
    ) -> list[Generation]:
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
            pending = asyncio.gather(*(engine.generate(request) for request in requests))
            return await asyncio.wait_for(pending, seconds)
        finally:
            for request in requests:
                engine.release(request.session)

    def _differences(
        self, replies: Sequence[Generation], version: int
    ) -> list[tuple[float, float]]:
        """Return (engine - after, before - after) of the id that the engine found most likely, in
        nats, at each position where that tells something."""
        assert self.after_kv is not None
        differences = []
        for number, reply in enumerate(replies):
            # A cache kept on purpose lacks a part of the update.
            keeps_cache = reply.cache_version is not None and reply.cache_version < version
            if not reply.ids or reply.logprobs[0] is None or keeps_cache:
                continue
            after = float(self.after_kv[number, reply.ids[0]])
            before = float(self.before_kv[number, reply.ids[0]])
            differences.append((reply.logprobs[0] - after, before - after))
        return differences


def count_missing(differences: Sequence[tuple[float, float]]) -> tuple[int, int]:
    """Count the positions where an engine lacks about the full update, and those where the update
    changed anything, from (engine - after, before - after) of each in nats."""
    shares = []
    for difference, change in differences:
        if change and math.isfinite(difference) and math.isfinite(change):
            shares.append(difference / change)
    return sum(NEAR[0] < share < NEAR[1] for share in shares), len(shares)


def _scored(
    micros: Sequence[MicroBatch], score: Callable[[MicroBatch], Tensor], positions: int
) -> Tensor:
    """Return the log-probabilities (K, vocabulary) of all passes, in the order of the contexts."""
    parts = [(micro.tokens_m.cpu(), score(micro).cpu()) for micro in micros]
    scored = parts[0][1].new_empty((positions, parts[0][1].shape[-1]))
    for tokens_m, logp_mv in parts:
        scored[tokens_m] = logp_mv
    return scored


def _thinned(row: TrainingRow) -> TrainingRow:
    """Reduce a row to a few of its targets, spread over it."""
    chosen = range(0, len(row.places), max(1, len(row.places) // POSITIONS))[:POSITIONS]
    places = [row.places[index] for index in chosen]
    return TrainingRow(
        ids=row.ids[: places[-1]],
        places=places,
        targets=[row.targets[index] for index in chosen],
        weights=[row.weights[index] for index in chosen],
        logprobs=[row.logprobs[index] for index in chosen],
        trajectory=0,
    )
