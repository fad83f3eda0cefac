"""Teachers with another tokenizer: what they give a chunk of text is the
signal of all ids in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from turnwright.errors import ConfigError, TurnwrightError
from turnwright.training.forward.batch import TeacherScores, TrainingBatch
from turnwright.training.forward.forward import LogitDistribution
from turnwright.training.forward.training_rows import TrainingRow
from turnwright.training.teachers.alignment import AlignedChunk, Translation
from turnwright.training.teachers.local import LocalTeacher
from turnwright.types import Trajectory


class AlignedTeacher(LocalTeacher):
    """A model in this process that reads the policy's text in its own ids;
    for `signal = "advantage"`.

    The advantage of each id of a chunk is that of the chunk,
    ``weight * (log p_teacher(chunk) - log p_policy(chunk))``: the policy's probability of a chunk
    is the product of its ids', so the gradient is that of the divergence per chunk.
    """

    def __init__(self, *args: Any, translation: Translation, banned_ids: frozenset[int]) -> None:
        """Raise `ConfigError` for a distribution over the vocabulary, which the
        tokenizers do not share."""
        super().__init__(*args)
        self._translation = translation
        law = self.policy.distribution
        self._law = LogitDistribution(law.temperature, banned_ids)
        self.unaligned = 0.0
        """Share of the last step's ids that no chunk has."""
        for fault, why in (
            (self.config.signal == "loss", 'signal = "loss"'),
            (law.truncates, "rollout.top_p, top_k or min_p"),
        ):
            if fault:
                raise ConfigError(
                    f"teacher {self.name}: its tokenizer is not the policy's, so {why} would "
                    "compare other vocabularies; use "
                    'signal = "advantage" without cuts, or a teacher with the policy\'s tokenizer'
                )

    def ask(self, trajectories: Sequence[Trajectory]) -> None:
        super().ask(trajectories)
        asked = lost = 0
        for trajectory in trajectories:
            answered = {span: list(has) for span, has in self._answered[id(trajectory)].items()}
            for sample in trajectory.samples() if answered else ():
                places = [place for place, weight in enumerate(sample.weights) if weight and place]
                chunks = self._chunks(sample.ids, places, trajectory)[1]
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
        tokens: list[
            tuple[list[int], int]
        ] = []  # of each chunk: its tokens, and how many ids the teacher has for it
        first = 0
        for row in batch.rows:
            trajectory = batch.trajectories[row.trajectory]
            answered, number = (
                self.answered(trajectory),
                {place: first + k for k, place in enumerate(row.places)},
            )
            first += len(row.places)
            made, chunks = self._chunks([*row.ids, row.targets[-1]], row.places, trajectory)
            slot = dict(zip(row.places, row.slots, strict=True))
            fit = [
                chunk
                for chunk in chunks
                if all(
                    slot[p][0] in answered and answered[slot[p][0]][slot[p][1]]
                    for p in range(chunk.start, chunk.end)
                )
            ]
            if not fit:
                continue
            places = [place for chunk in fit for place in range(chunk.own_start, chunk.own_end)]
            prefix = self.preamble(trajectory)
            tokens += [
                ([number[p] for p in range(c.start, c.end)], c.own_end - c.own_start) for c in fit
            ]
            ones = [1.0] * len(places)
            targets = [made[place] for place in places]
            rows.append(
                replace(
                    row,
                    ids=[*prefix, *made[: places[-1]]],
                    places=[len(prefix) + place for place in places],
                    targets=targets,
                    weights=ones,
                    logprobs=ones,
                    slots=[(0, 0)] * len(places),
                    routes=None,
                )
            )
        logps = self._logprobs(rows, batch)
        at = 0
        for numbers, count in tokens:
            logp_n[numbers] = logps[at : at + count].sum()
            chunk_n[numbers] = numbers[0]
            at += count
        return TeacherScores(
            self.config, self.name, logp_n, chunk_n=chunk_n, unaligned=self.unaligned
        )

    def _logprobs(self, rows: Sequence[TrainingRow], batch: TrainingBatch) -> torch.Tensor:
        """Return the teacher's logprobs of its own ids, in the order of rows."""
        device, limit = batch.weights_n.device, self.policy.micro_tokens
        found = torch.zeros(
            sum(len(row.places) for row in rows), dtype=torch.float64, device=device
        )
        self._start()
        with torch.no_grad():
            for micro in self._pack(rows, limit, device, None) if rows else ():
                stats = self.forward.stats(micro, None, self._law, entropy=False)
                found[micro.tokens_m] = stats.logprobs_m.double()
        return found

    def _chunks(
        self, ids: Sequence[int], places: Sequence[int], trajectory: Trajectory
    ) -> tuple[list[int], list[AlignedChunk]]:
        """Return the teacher's ids for a row, and the chunks of trained ids
        alone that it can read."""
        trained, most = set(places), self.context
        most = None if most is None else most - len(self.preamble(trajectory))
        made, chunks = self._translation.align(ids, trained)
        return made, [
            chunk
            for chunk in chunks
            if chunk.own_start
            and trained.issuperset(range(chunk.start, chunk.end))
            and (most is None or chunk.own_end <= most)
        ]
