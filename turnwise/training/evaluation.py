"""Success on tasks, with intervals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.engines import Sampling
from turnwise.records.metrics import wilson
from turnwise.rollouts import Rollout
from turnwise.training.task_plan import TaskChoice
from turnwise.types import Trajectory


@dataclass(frozen=True, slots=True)
class EvalResult:
    """What an evaluation came to."""

    n: int
    """Episodes with a reward."""
    successes: int
    turns: float
    """Mean turns."""
    reward: float
    """Mean reward."""
    failed: int
    """Episodes without a reward, which count neither way."""
    counts: tuple[tuple[int, int], ...]
    """Per task: episodes with a reward, and successes among them; for pass@k."""
    stops: dict[str, int] = field(default_factory=dict)
    by_env: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Per environment: episodes with a reward, and successes among them."""
    images: int = 0
    """Images and videos that the model was shown."""

    @property
    def success(self) -> float:
        """Share of successes."""
        return self.successes / self.n if self.n else 0.0

    @property
    def ci(self) -> tuple[float, float]:
        """Wilson's 95% interval of `success`, all episodes taken as independent."""
        return wilson(self.successes, self.n)

    def row(self) -> dict[str, Any]:
        """For metrics.jsonl and tables."""
        row = {
            "n": self.n,
            "success": self.success,
            "ci": list(self.ci),
            "turns": self.turns,
            "reward": self.reward,
            "failed": self.failed,
            "stops": self.stops,
        }
        if self.images:
            row["images"] = self.images
        if len(self.by_env) > 1:
            row["by_env"] = {name: {"n": n, "success": won / max(n, 1)} for name, (n, won) in self.by_env.items()}
        return row


def summarize(trajectories: Sequence[Trajectory], threshold: float = 1.0) -> EvalResult:
    """The figures of episodes that were played; a reward of at least `threshold` is a success."""
    by_task: dict[str, list[float]] = {}
    for trajectory in trajectories:
        rewards = by_task.setdefault(trajectory.task.id, [])
        if trajectory.reward is not None:
            rewards.append(trajectory.reward)
    rewards = [reward for row in by_task.values() for reward in row]
    by_env: dict[str, tuple[int, int]] = {}
    for trajectory in trajectories:
        if trajectory.reward is not None:
            n, won = by_env.get(trajectory.task.env, (0, 0))
            by_env[trajectory.task.env] = (n + 1, won + (trajectory.reward >= threshold))
    return EvalResult(
        n=len(rewards),
        successes=sum(reward >= threshold for reward in rewards),
        turns=sum(len(t.turns) for t in trajectories) / max(len(trajectories), 1),
        reward=sum(rewards) / max(len(rewards), 1),
        failed=len(trajectories) - len(rewards),
        counts=tuple((len(row), sum(reward >= threshold for reward in row)) for row in by_task.values()),
        stops=dict(Counter(str(t.stop) for t in trajectories)),
        by_env=by_env,
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
    through: Callable[..., Awaitable[list[Trajectory]]] | None = None,
) -> list[Trajectory]:
    """Play tasks for an evaluation.

    Args:
        rollout: plays them.
        name: of the evaluation; part of every episode's key, so of its noise.
        samples: episodes per task (one is enough when greedy).
        blind: whether every image is shown in one grey: the control that tells what the policy has from the pixels.
        sampling: the distribution to sample from.
        through: plays the episodes, as `Rollout.play`; that method when not given.
    """
    with rollout.sight.store.blanked(blind):
        episodes = [episode for choice in choices for episode in choice.episodes(name, step, samples)]
        return await (through or rollout.play)(episodes, sampling=sampling)
