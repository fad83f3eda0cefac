"""What training made of each sampled id, for whoever looks at it later: `training.jsonl`, and mismatch by turn."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from turnwise.trace.measure import MOST_TURNS
from turnwise.trace.record import key_row
from turnwise.trace.run import JsonLines
from turnwise.train.credit.advantage import Credit
from turnwise.train.forward.batch import TrainingBatch
from turnwise.types import Trajectory

FILE = "training.jsonl"
_Found = list[tuple[int, int, float, float]]
"""(span, offset in it, logprob of the trainer, logprob of the engine) of ids that carried loss."""


def write_token_records(run: Path, step: int, credits: Sequence[Credit], batches: Sequence[TrainingBatch]) -> dict[str, Any]:
    """Write down what a step of training made of each token; gives what its row of metrics says of it.

    Raises:
        TraceError: when the file cannot be written.
    """
    lines = JsonLines(run / FILE)
    try:
        for row in token_rows(step, credits, batches):
            lines.append(row)
    finally:
        lines.close()
    found = mismatch_by_turn(batches)
    return {"mismatch_by_turn": found} if found else {}


def token_rows(step: int, credits: Sequence[Credit], batches: Sequence[TrainingBatch]) -> Iterator[dict[str, Any]]:
    """One row per trajectory of a step: its advantage or why it has none, and per span the trainer's logprobs.

    Args:
        step: from 0, as in the keys of episodes.
        credits: of the step.
        batches: that were trained; a batch that was never scored gives nothing.

    Yields:
        `key`, `step`, `advantage` (the mean over its ids), `reason`, `advantages` where ids differ: by the index of a span, one
        per id; and `logprobs`: likewise, null where an id carried no loss.
    """
    found = {id(trajectory): tokens for trajectory, tokens in scored_ids(batches)}
    for credit in credits:
        trajectory = credit.trajectory
        spans: dict[str, list[float | None]] = {}
        for span, offset, logprob, _ in found.get(id(trajectory), ()):
            if str(span) not in spans:
                spans[str(span)] = [None] * len(trajectory.spans[span].ids)
            spans[str(span)][offset] = float(f"{logprob:.7g}")
        row: dict[str, Any] = {"key": key_row(trajectory.key), "step": step}
        row |= {"advantage": credit.advantage, "reason": credit.reason}
        if credit.values is not None:
            row["advantages"] = {str(span): [float(f"{one:.7g}") for one in values] for span, values in credit.values.items()}
        yield row | {"logprobs": spans}


def mismatch_by_turn(batches: Sequence[TrainingBatch]) -> dict[str, float]:
    """Mean |logprob of trainer - of engine| of the ids of each turn, by its number from 1."""
    sums: dict[int, list[float]] = {}
    for trajectory, tokens in scored_ids(batches):
        turn_of = {span: number for number, turn in enumerate(trajectory.turns, 1) for span in turn.spans}
        for span, _, trainer, engine in tokens:
            number = turn_of.get(span, MOST_TURNS + 1)
            if number <= MOST_TURNS and math.isfinite(engine):
                total = sums.setdefault(number, [0.0, 0.0])
                total[0] += abs(trainer - engine)
                total[1] += 1
    return {str(number): total / count for number, (total, count) in sorted(sums.items())}


def scored_ids(batches: Iterable[TrainingBatch]) -> Iterator[tuple[Trajectory, _Found]]:
    """Each trajectory of batches with its ids that carried loss, scored before the first update.

    Which id a number belongs to is read from the batch (`trajectory_n`, `slots`), in whatever order it holds them.
    """
    for batch in batches:
        if batch.start_n is None:
            continue
        found: list[_Found] = [[] for _ in batch.trajectories]
        columns = batch.trajectory_n.tolist(), batch.slots, batch.start_n.tolist(), batch.engine_n.tolist()
        for index, (span, offset), trainer, engine in zip(*columns, strict=True):
            found[index].append((span, offset, trainer, engine))
        yield from zip(batch.trajectories, found, strict=True)
