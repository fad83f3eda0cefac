"""A run computed anew from its record, without model or environment: masks, figures, rewards, advantages."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwise.records.metrics import flatten_row, rollout_metrics
from turnwise.records.serialization import read_trajectories
from turnwise.types import Trajectory
from turnwise.viewer.run_data import RunData, read_run

CLOSE = 1e-9
"""Relative difference up to which two figures are the same."""
TIMES = ("seconds.", "tool_seconds.")
"""Figures that tell of clocks: the record has them, so they are compared too, but rounding of sums may differ."""
Reward = Callable[[Trajectory], Any]


@dataclass(slots=True)
class RecomputeResult:
    """What computing a run anew came to."""

    trajectories: int = 0
    sampled: int = 0
    """Ids that were sampled, by the spans."""
    trained: float = 0.0
    """Ids of weight 1, over all paths; with those left out by name they have to be the same number."""
    untrained: Counter[str] = field(default_factory=Counter)
    """Sampled ids of weight 0 by the reason that their span gives."""
    wrong: list[str] = field(default_factory=list)
    """What does not fit, a sentence each."""
    rewards: int = 0
    """Rewards that were computed anew."""
    changed: int = 0
    """Of those, how many are not what the record says."""
    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether masks and figures are those of the record."""
        return not self.wrong


def recompute(run: Path, reward: Reward | None = None, *, success: float = 1.0) -> RecomputeResult:
    """Compute a run anew, and compare with what it wrote.

    Args:
        run: the run directory.
        reward: a reward function of a finished trajectory, sync or async, tried on every episode that has a reward; what the
            steps paid is added, as in a run.
        success: `eval.success` of the run.

    Raises:
        TraceError: when there is no record, or it cannot be read.
    """
    found = RecomputeResult()
    written = read_run(run)
    for phase, step, played in steps_of(run):
        for trajectory in played:
            check_trajectory(trajectory, found)
            if reward is not None and trajectory.reward is not None:
                recompute_reward(trajectory, reward, found)
        compare(written, phase, step, played, success, found)
    return found


def steps_of(run: Path) -> Iterator[tuple[str, int, list[Trajectory]]]:
    """The trajectories of each step; of an episode that stands there twice (after a resume) the last."""
    phase, step = "", -1
    held: dict[Any, Trajectory] = {}
    for trajectory in read_trajectories(run):
        key = trajectory.key
        if (key.phase, key.step) != (phase, step) and held:
            yield phase, step, list(held.values())
            held = {}
        phase, step = key.phase, key.step
        held[key] = trajectory
    if held:
        yield phase, step, list(held.values())


def check_trajectory(trajectory: Trajectory, found: RecomputeResult) -> None:
    """Masks and weights of one trajectory: every sampled id once, with a weight or a reason, and nothing else trained."""
    found.trajectories += 1
    sampled = trajectory.sampled_tokens
    trained = 0.0
    for sample in trajectory.samples():
        trained += sum(sample.weights)
        if any(weight and not mask for weight, mask in zip(sample.weights, sample.mask, strict=True)):
            found.wrong.append(f"{_name(trajectory)}: an id that was not sampled has a weight")
    left = 0
    for number, span in enumerate(trajectory.spans):
        if span.sampled and (span.logprobs is None or len(span.logprobs) != len(span.ids)):
            found.wrong.append(f"{_name(trajectory)}: span {number} has {len(span.ids)} ids and other logprobs")
        if span.sampled and (out := len(span.ids) - span.trained):
            found.untrained[span.untrained or "?"] += out
            left += out
    if round(trained) + left != sampled:
        found.wrong.append(
            f"{_name(trajectory)}: {sampled} ids were sampled, {trained:g} are trained and {left} left out by name"
        )
    found.sampled += sampled
    found.trained += trained


def recompute_reward(trajectory: Trajectory, reward: Reward, found: RecomputeResult) -> None:
    """Compute the reward of one trajectory anew."""
    own = reward(trajectory)
    if inspect.isawaitable(own):
        own = asyncio.run(_awaited(own))
    paid = math.fsum(turn.reward for turn in trajectory.turns if turn.reward is not None)
    value = None if own is None else float(own) + paid
    assert trajectory.reward is not None
    found.rewards += 1
    found.before.append(trajectory.reward)
    if value is None or not same(value, trajectory.reward):
        found.changed += 1
    if value is not None:
        found.after.append(value)


async def _awaited(value: Any) -> Any:
    return await value


def compare(
    written: RunData, phase: str, step: int, played: Sequence[Trajectory], success: float, found: RecomputeResult
) -> None:
    """Hold the figures of a training step to its row of metrics.jsonl."""
    if phase != "train":
        return
    rows = [row for row in written.rows if row.get("phase") == "train" and row.get("step") == step + 1]
    if not rows:
        return
    there = dict(flatten_row(rows[-1]))
    for name, value in flatten_row(rollout_metrics(played, success=success)):
        if name in there and not same(value, there[name], 1e-6 if name.startswith(TIMES) else CLOSE):
            found.wrong.append(f"step {step + 1}: {name} is {value:g} by the record, metrics.jsonl says {there[name]:g}")


def same(one: float, other: float, most: float = CLOSE) -> bool:
    """Whether two figures are the same but for rounding."""
    return math.isclose(one, other, rel_tol=most, abs_tol=most)


def _name(trajectory: Trajectory) -> str:
    key = trajectory.key
    return f"{key.phase} {key.step} / {key.task} / {key.sample}"


def lines(found: RecomputeResult, shown: int = 10) -> list[str]:
    """What was found, for a terminal."""
    told = [f"{found.trajectories} trajectories, {found.sampled} sampled ids: {found.trained:g} can be trained"]
    told += [f"  {count} left out: {reason}" for reason, count in found.untrained.most_common()]
    if found.rewards:
        means = f"mean {_mean(found.before)}, now {_mean(found.after)}"
        told.append(f"{found.rewards} rewards computed anew, {found.changed} differ; {means}")
    told += [f"differs: {one}" for one in found.wrong[:shown]]
    if len(found.wrong) > shown:
        told.append(f"... and {len(found.wrong) - shown} more")
    return told or ["nothing to compute"]


def _mean(values: Sequence[float]) -> str:
    return f"{math.fsum(values) / len(values):.4g}" if values else "none"


def success_of(config: Mapping[str, Any]) -> float:
    """`eval.success` of a run's config.json."""
    value = config.get("eval", {}).get("success", 1.0) if isinstance(config.get("eval"), Mapping) else 1.0
    return float(value)
