"""Held-out success of a run before, during and after training, with its intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from turnwright.display.run_data import Row, RunData, integer, number, pair
from turnwright.records.episode_metrics import wilson
from turnwright_view.web.texts import truncate

# Mode and name of an evaluation, and its key in summary.json.
_SUMMARIZED = (
    ("sampled", "before", "success_before"),
    ("greedy", "before", "greedy_before"),
    ("sampled", "after", "success_after"),
    ("greedy", "after", "greedy_after"),
    ("blind", "after", "success_blind"),
)
_MODES = {"sampled": 0, "greedy": 1, "blind": 2}
_NAMES = {"before": 0, "after": 2}


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Success on held-out tasks, with its Wilson interval (95%)."""

    name: str
    """`before`, `after`, or that of an evaluation during training."""
    mode: str
    """`sampled`, `greedy`, or `blind`: every image gray."""
    step: int
    """Training steps before it; -1 if that is not known."""
    success: float
    low: float
    high: float
    n: int | None
    """Number of episodes."""
    turns: float | None
    reward: float | None

    @property
    def as_json(self) -> dict[str, Any]:
        """The evaluation for the page."""
        return asdict(self)


def held_out(run: RunData) -> list[HeldOut]:
    """Return the evaluations of a run: sampled, greedy and blind, each from before to after."""
    rows: dict[tuple[str, str], Row] = {}
    for row in run.phase("eval"):
        if number(row.get("success")) is not None:
            rows[(str(row.get("mode", "sampled")), str(row.get("name", "")))] = row
    for mode, name, key in _SUMMARIZED:
        value = number(run.summary.get(key))
        if (mode, name) not in rows and value is not None:
            rows[(mode, name)] = _summarized(run.summary, mode, name, key)

    # The sort keeps the order of evaluations during training.
    ranked = sorted(rows, key=lambda key: (_MODES.get(key[0], 1), _NAMES.get(key[1], 1)))
    return [_evaluation(mode, name, rows[mode, name]) for mode, name in ranked]


def _summarized(summary: Row, mode: str, name: str, key: str) -> Row:
    """Return what the summary says of an evaluation that metrics.jsonl lacks."""
    row = {
        "success": summary.get(key),
        "ci": summary.get(f"{key}_ci"),
        "n": summary.get("n_eval"),
        "step": 0 if name == "before" else summary.get("rl_steps"),
    }
    if mode == "sampled":
        row["turns"] = summary.get(f"turns_{name}")
    return row


def _evaluation(mode: str, name: str, row: Row) -> HeldOut:
    success = min(1.0, max(0.0, number(row.get("success")) or 0.0))
    n = integer(row.get("n"))
    interval = pair(row.get("ci"))
    if interval is None:
        interval = wilson(round(success * n), n) if n > 0 else (success, success)
    return HeldOut(
        name=truncate(name, 80),
        mode=truncate(mode, 80),
        step=integer(row.get("step")),
        success=success,
        low=interval[0],
        high=interval[1],
        n=n if n > 0 else None,
        turns=number(row.get("turns")),
        reward=number(row.get("reward")),
    )


def find(evaluations: Sequence[HeldOut], name: str, mode: str = "sampled") -> HeldOut | None:
    """Return an evaluation by name and mode, or None."""
    for evaluation in evaluations:
        if (evaluation.name, evaluation.mode) == (name, mode):
            return evaluation
    return None
