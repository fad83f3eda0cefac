"""Teachers with another tokenizer: what they give a chunk of text is the signal of all ids in it.

`AlignedTeacher.ask` finds out which ids are in a chunk of both tokenizers (`alignment.py`), `score`
reads the chunks in the teacher's own ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from turnwright.errors import ConfigError, TurnwrightError
from turnwright.training.forward.batch import TeacherScores, TrainingBatch
from turnwright.training.forward.forward import LogitDistribution
from turnwright.training.forward.training_rows import TrainingRow
from turnwright.training.teachers.alignment import AlignedChunk, Translation
from turnwright.training.teachers.local import LocalTeacher
from turnwright.types import Trajectory


class AlignedTeacher(LocalTeacher):
    """A model in this process that reads the policy's text in its own ids, for
    `signal = "advantage"`.

    The advantage of each id of a chunk is that of the chunk,
    ``weight * (log p_teacher(chunk) - log p_policy(chunk))``: the policy's probability of a chunk
    is the product of its ids', so the gradient is that of the divergence per chunk.
    """

    def __init__(self, *args: Any, translation: Translation, banned_ids: frozenset[int]) -> None:
        """Raise `ConfigError` for a distribution over the vocabulary, which the tokenizers do not
        share."""
        super().__init__(*args)
        self._translation = translation
        law = self.policy.distribution
        self._law = LogitDistribution(law.temperature, banned_ids)
        self.unaligned = 0.0
        """Share of the last step's ids that no chunk has."""

        conflict = ""
        if self.config.signal == "loss":
            conflict = 'signal = "loss"'
        elif law.truncates:
            conflict = "rollout.top_p, top_k or min_p"
        if conflict:
            raise ConfigError(
                f"teacher {self.name}: its tokenizer is not the policy's, so {conflict} would "
                'compare other vocabularies; use signal = "advantage" without cuts, or a teacher '
                "with the policy's tokenizer"
            )

    def ask(self, trajectories: Sequence[Trajectory]) -> None:
        super().ask(trajectories)
        asked = 0
        lost = 0
        for trajectory in trajectories:
            answered = {span: list(has) for span, has in self._answered[id(trajectory)].items()}
            for sample in trajectory.samples() if answered else ():
                places = [place for place, weight in enumerate(sample.weights) if weight and place]
                _, chunks = self._chunks(sample.ids, places, trajectory)
                covered = {place for chunk in chunks for place in range(chunk.start, chunk.end)}
                for place in places:
                    span, offset = sample.slots[place]
                    if span in answered:
                        asked += 1
                        lost += place not in covered
                        answered[span][offset] &= place in covered
            self._answered[id(trajectory)] = answered

        self.unaligned = lost / max(asked, 1)
        if self.unaligned > self.config.max_unaligned:
            raise TurnwrightError(
                f"teacher {self.name}: {self.unaligned:.0%} of the sampled ids are in no text that "
                "its tokenizer splits alike, over teacher.max_unaligned = "
                f"{self.config.max_unaligned:g}: choose a closer tokenizer, or raise it"
            )

    def score(self, batch: TrainingBatch) -> TeacherScores:
        logp_n = torch.full_like(batch.weights_n, torch.nan)
        chunk_n = torch.arange(batch.size, device=logp_n.device)
        rows: list[TrainingRow] = []
        scored: list[_ScoredChunk] = []
        first = 0
        for row in batch.rows:
            trajectory = batch.trajectories[row.trajectory]
            index_of = {place: first + number for number, place in enumerate(row.places)}
            first += len(row.places)

            own_ids, chunks = self._chunks([*row.ids, row.targets[-1]], row.places, trajectory)
            chunks = self._answered_chunks(row, chunks, trajectory)
            if not chunks:
                continue
            for chunk in chunks:
                indices = [index_of[place] for place in range(chunk.start, chunk.end)]
                scored.append(_ScoredChunk(indices, chunk.own_end - chunk.own_start))
            rows.append(_own_row(row, self.preamble(trajectory), own_ids, chunks))

        # A chunk's log-probability is the sum over the teacher's ids; all its tokens have it.
        logprobs = self._logprobs(rows, batch)
        begin = 0
        for scored_chunk in scored:
            end = begin + scored_chunk.own_count
            logp_n[scored_chunk.indices] = logprobs[begin:end].sum()
            chunk_n[scored_chunk.indices] = scored_chunk.indices[0]
            begin = end
        return TeacherScores(
            self.config, self.name, logp_n, chunk_n=chunk_n, unaligned=self.unaligned
        )

    def _answered_chunks(
        self, row: TrainingRow, chunks: Sequence[AlignedChunk], trajectory: Trajectory
    ) -> list[AlignedChunk]:
        """Return the chunks of a row in which the teacher answered for each id."""
        answered = self.answered(trajectory)
        slots = dict(zip(row.places, row.slots, strict=True))

        def is_answered(place: int) -> bool:
            span, offset = slots[place]
            return span in answered and answered[span][offset]

        return [chunk for chunk in chunks if all(map(is_answered, range(chunk.start, chunk.end)))]

    def _logprobs(self, rows: Sequence[TrainingRow], batch: TrainingBatch) -> torch.Tensor:
        """Return the teacher's logprobs of its own ids, in the order of rows."""
        device = batch.weights_n.device
        count = sum(len(row.places) for row in rows)
        logprobs = torch.zeros(count, dtype=torch.float64, device=device)
        self._start()
        with torch.no_grad():
            for micro in self._pack(rows, self.policy.micro_tokens, device, None) if rows else ():
                stats = self.forward.stats(micro, None, self._law, entropy=False)
                logprobs[micro.tokens_m] = stats.logprobs_m.double()
        return logprobs

    def _chunks(
        self, ids: Sequence[int], places: Sequence[int], trajectory: Trajectory
    ) -> tuple[list[int], list[AlignedChunk]]:
        """Return the teacher's ids for a row, and the chunks of trained ids alone that it can
        read."""
        most = self.context
        if most is not None:
            most -= len(self.preamble(trajectory))

        trained = set(places)
        own_ids, chunks = self._translation.align(ids, trained)
        readable: list[AlignedChunk] = []
        for chunk in chunks:
            # The first id has no score.
            if chunk.own_start == 0 or (most is not None and chunk.own_end > most):
                continue
            if trained.issuperset(range(chunk.start, chunk.end)):
                readable.append(chunk)
        return own_ids, readable


class _ScoredChunk(NamedTuple):
    """A chunk that the teacher scores."""

    indices: list[int]
    """Its tokens in the batch."""
    own_count: int
    """Number of ids that the teacher has for it."""


def _own_row(
    row: TrainingRow,
    prefix: Sequence[int],
    own_ids: Sequence[int],
    chunks: Sequence[AlignedChunk],
) -> TrainingRow:
    """Return a row in the teacher's ids, whose targets are those of the chunks."""
    places = [place for chunk in chunks for place in range(chunk.own_start, chunk.own_end)]
    ones = [1.0] * len(places)
    return replace(
        row,
        ids=[*prefix, *own_ids[: places[-1]]],
        places=[len(prefix) + place for place in places],
        targets=[own_ids[place] for place in places],
        weights=ones,
        logprobs=ones,
        slots=[(0, 0)] * len(places),
        routes=None,
    )
