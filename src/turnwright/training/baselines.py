"""Running averages of rewards as baselines (`train.advantage = "running"`). No tensors here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from turnwright.training.advantages import SetValues
from turnwright.training.credit import exclusion_reason, sort_key
from turnwright.training.group_member import GroupMember
from turnwright.types import Group, Trajectory

RUNNING_DECAY = 0.95
"""Weight of the earlier average at each episode (RAE, arXiv 2506.24119, section 3)."""

Role = tuple[str, str]
"""Environment of a trajectory, and its agent, "" if it has none."""


class RunningBaselines:
    """Averages of the rewards of each agent in each environment over the episodes trained on
    (RAE, arXiv 2506.24119).

    An advantage is the return less the average as it was when the step began; in the first step,
    less the mean of that step. So agents with unequal chances are not compared with each other, and
    no group of several episodes is needed.
    """

    def __init__(self) -> None:
        self._averages: dict[Role, float] = {}

    def of(self, groups: Sequence[Group]) -> SetValues:
        """Return what sets the values of members of these groups."""
        averages = self._means(groups) | self._averages

        def set_values(members: Sequence[GroupMember]) -> bool:
            for member in members:
                average = averages[_role(member.trajectory)]
                member.values = [value - average for value in member.returns]
            return any(value for member in members for value in member.values)

        return set_values

    def update(self, groups: Sequence[Group]) -> None:
        """Add the rewards of a step."""
        self._averages = self._means(groups) | self._averages

        # Each average depends on the order of its episodes, which must not be that of their ends.
        for trajectory in sorted(_compared(groups), key=sort_key):
            role = _role(trajectory)
            reward = trajectory.reward or 0.0
            earlier = self._averages[role]
            self._averages[role] = RUNNING_DECAY * earlier + (1 - RUNNING_DECAY) * reward

    def _means(self, groups: Sequence[Group]) -> dict[Role, float]:
        rewards: dict[Role, list[float]] = {}
        for trajectory in _compared(groups):
            rewards.setdefault(_role(trajectory), []).append(trajectory.reward or 0.0)
        return {role: math.fsum(values) / len(values) for role, values in rewards.items()}

    def state(self) -> list[list[Any]]:
        """Return the averages as rows of JSON: environment, agent, average."""
        return [[*role, average] for role, average in sorted(self._averages.items())]

    def restore(self, rows: Iterable[Sequence[Any]]) -> None:
        """Restore what `state` returned."""
        self._averages = {(str(env), str(agent)): float(average) for env, agent, average in rows}


def _compared(groups: Sequence[Group]) -> list[Trajectory]:
    """Return the trajectories that nothing excludes."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    return [trajectory for trajectory in trajectories if exclusion_reason(trajectory) is None]


def _role(trajectory: Trajectory) -> Role:
    agent = trajectory.turns[0].agent if trajectory.turns else ""
    return trajectory.task.env, agent
