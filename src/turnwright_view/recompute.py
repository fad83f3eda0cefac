"""Recompute a run from its records, without model or environment: masks, metrics, rewards."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from turnwright.display.run_data import RunData, mapping, number, read_run
from turnwright.records.episode_metrics import flatten_row, rollout_metrics
from turnwright.records.serialization import read_trajectories, using
from turnwright.types import Trajectory

CLOSE = 1e-9  # relative tolerance of equal metrics
TIMES = ("seconds.", "tool_seconds.")
"""Prefixes of metrics of durations; the record contains them, but sums may round differently."""
Reward = Callable[[Trajectory], Any]


@dataclass(slots=True)
class RecomputeResult:
    """Result of recomputing a run."""

    trajectories: int = 0
    sampled: int = 0  # sampled ids, counted by spans
    # Ids of weight 1 over all paths; with those in `untrained`, they must equal `sampled`.
    trained: float = 0.0
    # Sampled ids of weight 0, by the reason in their span.
    untrained: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)  # differences, one sentence each
    rewards: int = 0  # number of recomputed rewards
    changed: int = 0  # number of recomputed rewards that differ from the record
    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether masks and metrics match the record."""
        return not self.wrong


def recompute(run: Path, reward: Reward | None = None) -> RecomputeResult:
    """Recompute a run, also every reward by `reward` (sync or async) plus the step rewards, and
    compare with its files."""
    found = RecomputeResult()
    written = read_run(run)
    success = number(mapping(written.config.get("eval")).get("success"))
    success = 1.0 if success is None else success
    for phase, step, played in steps_of(run):
        for trajectory in played:
            with using(run, trajectory):
                check_trajectory(trajectory, found)
            if reward is not None and trajectory.reward is not None:
                recompute_reward(trajectory, reward, found)
        if phase == "train":
            with using(run, played[0]):
                compare(written, step, played, success, found)
    return found


def steps_of(run: Path) -> Iterator[tuple[str, int, list[Trajectory]]]:
    """Yield (phase, step, trajectories); of an episode recorded twice (after a
    resume), the last record."""
    for (phase, step), played in groupby(
        read_trajectories(run), key=lambda one: (one.key.phase, one.key.step)
    ):
        yield phase, step, list({one.key: one for one in played}.values())


def check_trajectory(trajectory: Trajectory, found: RecomputeResult) -> None:
    """Check one trajectory: each sampled id has a weight or a reason, and
    no other id is trained."""
    found.trajectories += 1
    sampled = trajectory.sampled_tokens
    trained = 0.0
    for sample in trajectory.samples():
        trained += sum(sample.weights)
        if any(
            weight and not mask for weight, mask in zip(sample.weights, sample.mask, strict=True)
        ):
            found.wrong.append(f"{trajectory.key.label}: an unsampled id has a weight")
    left = 0
    for index, span in enumerate(trajectory.spans):
        if span.sampled and (span.logprobs is None or len(span.logprobs) != len(span.ids)):
            found.wrong.append(
                f"{trajectory.key.label}: span {index} has {len(span.ids)} ids and other logprobs"
            )
        if span.sampled and (out := len(span.ids) - span.trained):
            found.untrained[span.untrained or "?"] += out
            left += out
    if round(trained) + left != sampled:
        found.wrong.append(
            f"{trajectory.key.label}: {sampled} ids were sampled, {trained:g} trained and {left} "
            "excluded"
        )
    found.sampled += sampled
    found.trained += trained


def recompute_reward(trajectory: Trajectory, reward: Reward, found: RecomputeResult) -> None:
    """Recompute the reward of one trajectory."""
    own = reward(trajectory)
    if inspect.isawaitable(own):
        own = asyncio.run(asyncio.wait_for(own, None))  # an awaitable need not be a coroutine
    paid = math.fsum(turn.reward for turn in trajectory.turns if turn.reward is not None)
    value = None if own is None else float(own) + paid
    assert trajectory.reward is not None
    found.rewards += 1
    found.before.append(trajectory.reward)
    found.changed += value is None or not same(value, trajectory.reward)
    found.after += [] if value is None else [value]


def compare(
    written: RunData,
    step: int,
    played: Sequence[Trajectory],
    success: float,
    found: RecomputeResult,
) -> None:
    """Compare the metrics of a training step with its row of metrics.jsonl."""
    rows = [
        row for row in written.rows if row.get("phase") == "train" and row.get("step") == step + 1
    ]
    recorded = dict(flatten_row(rows[-1])) if rows else {}
    for name, value in flatten_row(rollout_metrics(played, success=success)):
        if name in recorded and not same(
            value, recorded[name], 1e-6 if name.startswith(TIMES) else CLOSE
        ):
            found.wrong.append(
                f"step {step + 1}: {name} is {value:g} recomputed, {recorded[name]:g} in "
                "metrics.jsonl"
            )


def same(one: float, other: float, tolerance: float = CLOSE) -> bool:
    """Return whether two metrics are equal up to rounding."""
    return math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)


def lines(found: RecomputeResult, limit: int = 10) -> list[str]:
    """Format the result for a terminal."""
    text = [
        f"{found.trajectories} trajectories, {found.sampled} sampled ids: {found.trained:g} "
        "trainable"
    ]
    text += [f"  {count} excluded: {reason}" for reason, count in found.untrained.most_common()]
    if found.rewards:
        means = f"mean {_mean(found.before)}, now {_mean(found.after)}"
        text.append(f"{found.rewards} rewards recomputed, {found.changed} differ; {means}")
    text += [f"differs: {one}" for one in found.wrong[:limit]]
    if len(found.wrong) > limit:
        text.append(f"... and {len(found.wrong) - limit} more")
    return text


def _mean(values: Sequence[float]) -> str:
    return f"{math.fsum(values) / len(values):.4g}" if values else "none"
