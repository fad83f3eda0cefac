"""Dynamic sampling: groups that gave no signal are replaced by those of further tasks before anything is trained."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from turnwise.rollout import group_by_task
from turnwise.train.play.plan import TaskChoice, TaskPlan
from turnwise.train.step.objective import Objective
from turnwise.types import Trajectory


async def play_with_dynamic_sampling(
    plan: TaskPlan, objective: Objective, step: int, play: Callable[[Sequence[TaskChoice]], Awaitable[Sequence[Trajectory]]]
) -> tuple[list[Trajectory], int]:
    """The episodes of a step, and how many groups were played in place of others (DAPO, arXiv 2503.14476, section 3.2).

    At most `train.refill` times, and only while a world has tasks that the step has not used. Which tasks those are follows
    from the seed and from what was played, so a run that goes on comes to the same ones.

    Args:
        play: plays the groups of tasks.

    Raises:
        RewardError, UsageError: as `Objective.ledger`.
    """
    latest = plan.step(step)
    used = list(latest)
    found = list(await play(latest))
    for turn in range(1, objective.settings.refill + 1):
        flat = objective.tied_groups(group_by_task(found))
        latest = plan.refill(step, turn, used, [choice for choice in latest if choice.task.id in flat])
        if not latest:
            break
        used += latest
        found += await play(latest)
    return found, len(used) - len(plan.step(step))
