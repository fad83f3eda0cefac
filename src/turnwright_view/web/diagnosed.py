"""Diagnoses of a run for its page: each with the list of the episodes that it is about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from turnwright.display.diagnosis import FLAT_STEPS, LAST, Diagnosis, diagnose
from turnwright.display.run_data import Row, RunData, integer, sum_tables
from turnwright_view.web.texts import truncate

Filter = dict[str, str]
_EpisodesOf = Callable[[Sequence[Row]], Filter | None]

NOTES = ("few held-out tasks", "few held-out episodes", "evaluated on trained tasks")
"""Diagnoses of what the figures are worth, not of a fault of the training."""


def diagnoses_of(run: RunData) -> list[dict[str, Any]]:
    """Return the diagnoses of a run, the most informative first."""
    train = run.phase("train")
    diagnoses = []
    for diagnosis in diagnose(run.rows, run.summary):
        diagnoses.append(
            {
                "name": diagnosis.name,
                "fault": truncate(diagnosis.fault),
                "remedy": truncate(diagnosis.remedy),
                "filter": episodes_of(diagnosis, train),
                "level": "note" if diagnosis.name in NOTES else "warn",
            }
        )
    return diagnoses


def episodes_of(diagnosis: Diagnosis, train: Sequence[Row]) -> Filter | None:
    """Return the filter of the episodes that a diagnosis is about; None if it is about no
    episodes."""
    episodes = EPISODES.get(diagnosis.name)
    return None if episodes is None else episodes(train)


def _last_steps(count: int = LAST, **more: str) -> _EpisodesOf:
    def episodes(train: Sequence[Row]) -> Filter | None:
        steps = [integer(row.get("step")) for row in train[-count:]]
        if not steps:
            return None
        return {"phase": "train", "step_min": str(min(steps)), **more}

    return episodes


def _cut_off(train: Sequence[Row]) -> Filter | None:
    """Return the episodes that the commonest limit cut off."""
    filter_ = _last_steps()(train)
    causes = sum_tables(train[-LAST:], "truncations").most_common(1)
    if filter_ is None or not causes:
        return filter_
    return filter_ | {"stop": causes[0][0]}


def _phase(phase: str, **more: str) -> _EpisodesOf:
    return lambda train: {"phase": phase, **more}


_HELD_OUT = "eval-after-sampled"
EPISODES: dict[str, _EpisodesOf] = {
    "no episode had a reward": _last_steps(),
    "all groups tie": _last_steps(tie="yes"),
    "everything truncated": _cut_off,
    "episodes fail": _last_steps(error="*"),
    "the tool is never called": _last_steps(),
    "the model is blind": _phase("eval-after-blind"),
    "mismatch rises": _last_steps(),
    "entropy collapsed": _last_steps(),
    "one part of the reward dominates": _last_steps(),
    "no episode of the warmup gate had a reward": _phase("gate"),
    "the warmup gate is not met": _phase("gate"),
    "reinforcement made it worse": _phase(_HELD_OUT, sort="worst"),
    "what is learned does not carry over": _phase(_HELD_OUT, sort="worst"),
    "few held-out tasks": _phase(_HELD_OUT),
    "few held-out episodes": _phase(_HELD_OUT),
    "evaluated on trained tasks": _phase(_HELD_OUT),
    "no better than one reply": _phase(_HELD_OUT, turns_max="1"),
    "calls fail": _last_steps(),
    "nothing changes": _last_steps(FLAT_STEPS),
}
"""Episodes of each diagnosis, by its name."""
