"""Evaluation: success on tasks, with confidence intervals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwright.engines import Sampling
from turnwright.records.episode_metrics import wilson
from turnwright.rollouts import Rollout
from turnwright.training.task_plan import TaskChoice
from turnwright.types import Trajectory


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Result of an evaluation."""

    n: int
    """Episodes with a reward."""
    successes: int
    turns: float
    """Mean turns."""
    reward: float | None
    """Mean reward; None if no episode has one."""
    failed: int
    """Episodes without a reward; not in `n`."""
    counts: tuple[tuple[int, int], ...]
    """Per task: (episodes with a reward, successes), for pass@k."""
    stops: dict[str, int] = field(default_factory=dict)
    by_env: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Per environment: (episodes with a reward, successes)."""
    differing: float = 0.0
    """Share of rewarded episodes whose reward is not the most common one."""
    images: int = 0
    """Images and videos in the trajectories."""

    @property
    def success(self) -> float | None:
        """Share of successes; None if no episode has a reward."""
        return self.successes / self.n if self.n else None

    @property
    def ci(self) -> tuple[float, float]:
        """Wilson's 95% interval of `success`, with all episodes taken as independent."""
        return wilson(self.successes, self.n)

    def row(self) -> dict[str, Any]:
        """Return the result as a row for metrics.jsonl and tables."""
        row: dict[str, Any] = {
            "n": self.n,
            "success": self.success,
            "ci": list(self.ci) if self.n else None,
            "turns": self.turns,
            "reward": self.reward,
            "failed": self.failed,
            "stops": self.stops,
        }
        if self.images:
            row["images"] = self.images
        if len(self.by_env) > 1:
            row["by_env"] = {
                name: {"n": n, "success": won / n} for name, (n, won) in self.by_env.items()
            }
        return row


def summarize(trajectories: Sequence[Trajectory], threshold: float = 1.0) -> EvalResult:
    """Summarize played episodes; a reward of at least `threshold` is a success."""
    by_task: dict[str, list[float]] = {}
    by_env: dict[str, tuple[int, int]] = {}
    for trajectory in trajectories:
        rewards = by_task.setdefault(trajectory.task.id, [])
        if trajectory.reward is not None:
            rewards.append(trajectory.reward)
            n, won = by_env.get(trajectory.task.env, (0, 0))
            by_env[trajectory.task.env] = (n + 1, won + (trajectory.reward >= threshold))
    rewards = [reward for row in by_task.values() for reward in row]
    return EvalResult(
        n=len(rewards),
        successes=sum(reward >= threshold for reward in rewards),
        turns=sum(len(t.turns) for t in trajectories) / max(len(trajectories), 1),
        reward=sum(rewards) / len(rewards) if rewards else None,
        failed=len(trajectories) - len(rewards),
        counts=tuple(
            (len(row), sum(reward >= threshold for reward in row)) for row in by_task.values()
        ),
        stops=dict(Counter(str(t.stop) for t in trajectories)),
        by_env=by_env,
        differing=1.0 - max(Counter(rewards).values()) / len(rewards) if rewards else 0.0,
        images=sum(len(span.media) for t in trajectories for span in t.spans),
    )


async def play_evaluation(
    rollout: Rollout,
    choices: Sequence[TaskChoice],
    *,
    name: str,
    step: int,
    samples: int,
    sampling: Sampling,
    blind: bool = False,
    play: Callable[..., Awaitable[list[Trajectory]]] | None = None,
) -> list[Trajectory]:
    """Play tasks for an evaluation. Its `name` is part of every episode's key, so of
    its seed; `blind` replaces images by uniform grey, the control for what the policy
    uses from the pixels."""
    episodes = [episode for choice in choices for episode in choice.episodes(name, step, samples)]
    return await (play or rollout.play)(episodes, sampling=sampling, blank=blind)
