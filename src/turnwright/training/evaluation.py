"""Evaluation: success on tasks, with confidence intervals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwright.engines import Sampling
from turnwright.records.episode_metrics import wilson
from turnwright.rollouts import EpisodeSpec, Rollout
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
        # A task whose episodes all failed counts as one of no episodes.
        task_rewards = by_task.setdefault(trajectory.task.id, [])
        if trajectory.reward is not None:
            task_rewards.append(trajectory.reward)
            n, won = by_env.get(trajectory.task.env, (0, 0))
            by_env[trajectory.task.env] = (n + 1, won + (trajectory.reward >= threshold))

    counts: list[tuple[int, int]] = []
    rewards: list[float] = []
    for task_rewards in by_task.values():
        counts.append((len(task_rewards), sum(reward >= threshold for reward in task_rewards)))
        rewards += task_rewards

    mean_reward = None
    differing = 0.0
    if rewards:
        mean_reward = sum(rewards) / len(rewards)
        differing = 1.0 - max(Counter(rewards).values()) / len(rewards)
    turns = sum(len(trajectory.turns) for trajectory in trajectories)
    return EvalResult(
        n=len(rewards),
        successes=sum(reward >= threshold for reward in rewards),
        turns=turns / max(len(trajectories), 1),
        reward=mean_reward,
        failed=len(trajectories) - len(rewards),
        counts=tuple(counts),
        stops=dict(Counter(str(trajectory.stop) for trajectory in trajectories)),
        by_env=by_env,
        differing=differing,
        images=sum(len(span.media) for trajectory in trajectories for span in trajectory.spans),
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
    """Play tasks for an evaluation.

    Its `name` is part of every episode's key, so of its seed. `blind` replaces images by uniform
    grey, the control for what the policy uses from the pixels. `play` plays episodes in place of
    the rollout.
    """
    episodes: list[EpisodeSpec] = []
    for choice in choices:
        episodes += choice.episodes(name, step, samples)
    return await (play or rollout.play)(episodes, sampling=sampling, blank=blind)
