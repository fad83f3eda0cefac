"""Parts of episodes that are compared and trained by themselves: those of a policy's agents."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from operator import eq

from turnwright.training.credit import exclusion_reason
from turnwright.training.untrained_reasons import FAILED
from turnwright.types import Group, RowReward, Trajectory

AgentFits = Callable[[str], bool]


@dataclass(slots=True)
class AgentView(Trajectory):
    """Part of a trajectory: the spans and turns of some of its agents, with their reward.

    Agents share no spans, so it is a trajectory of its own.
    """

    numbers: tuple[int, ...] = ()
    """Indices of its spans in the trajectory."""
    agent: str = ""
    """Its agent; empty if it has those of a policy."""


def view_of(trajectory: Trajectory, fits: AgentFits, agent: str = "") -> Trajectory | None:
    """Return the part of a trajectory that belongs to the fitting agents.

    That is the trajectory itself if all fit, and None if they sampled nothing in an episode that
    did not fail. With the name of one `agent`, the reward is that agent's.
    """
    span_numbers = [number for number, span in enumerate(trajectory.spans) if fits(span.agent)]
    if len(span_numbers) == len(trajectory.spans) and not agent:
        return trajectory
    has_samples = any(trajectory.spans[number].sampled for number in span_numbers)
    if not has_samples and exclusion_reason(trajectory) != FAILED:
        return None

    # Spans and turns refer to others by number; -1 is none.
    new_span = {old: new for new, old in enumerate(span_numbers)} | {-1: -1}
    spans = []
    for number in span_numbers:
        span = trajectory.spans[number]
        spans.append(replace(span, parent=new_span[span.parent]))

    turn_numbers = [number for number, turn in enumerate(trajectory.turns) if fits(turn.agent)]
    new_turn = {old: new for new, old in enumerate(turn_numbers)} | {-1: -1}
    turns = []
    for number in turn_numbers:
        turn = trajectory.turns[number]
        turns.append(
            replace(
                turn,
                prompt=new_span[turn.prompt],
                spans=tuple(new_span[span] for span in turn.spans),
                parent=new_turn[turn.parent],
            )
        )

    # A row without turns belongs to all.
    rows = []
    for row in trajectory.row_rewards:
        row_turns = tuple(new_turn[number] for number in row.turns if number in new_turn)
        if row_turns or not row.turns:
            rows.append(RowReward(row.reward, row_turns))

    reward = trajectory.reward
    if trajectory.row_rewards and reward is not None:
        reward += _mean_of(rows) - _mean_of(trajectory.row_rewards)
    if agent and reward is not None:
        reward = trajectory.agent_rewards.get(agent, reward)

    values = {field.name: getattr(trajectory, field.name) for field in fields(Trajectory)}
    values |= {
        "spans": spans,
        "turns": turns,
        "failed_turns": [],  # their spans are untrained roots, which need no turn
        "row_rewards": rows,
        "reward": reward,
    }
    return AgentView(**values, numbers=tuple(span_numbers), agent=agent)


def _mean_of(rows: Sequence[RowReward]) -> float:
    return math.fsum(row.reward for row in rows) / max(len(rows), 1)


def agents_of(trajectory: Trajectory) -> list[str]:
    """Return the agents that sampled something, by name."""
    return sorted({span.agent for span in trajectory.spans if span.sampled})


def comparable(groups: Sequence[Group], fits: AgentFits, *, by_agent: bool = False) -> list[Group]:
    """Return groups of what is compared of a policy's agents.

    An episode whose agents have rewards or groups of their own is compared agent by agent: with the
    same agent in the other episodes of the task, or within the episode with the agents of its group
    (`Model.generate(group=...)`); `by_agent` does so for all. Otherwise all agents of the policy
    are one trajectory, with the episode's reward.
    """
    compared: list[Group] = []
    for group in groups:
        has_own = any(
            trajectory.agent_rewards or trajectory.agent_groups for trajectory in group.trajectories
        )
        if by_agent or has_own:
            compared += _groups_by_agent(group, fits)
            continue

        views = []
        for trajectory in group.trajectories:
            view = view_of(trajectory, fits)
            if view is not None:
                views.append(view)
        if views:
            compared.append(Group(group.task, views))
    return compared


def _groups_by_agent(group: Group, fits: AgentFits) -> Iterator[Group]:
    """Yield the groups that the agents of a task's episodes are compared in."""
    agents = set()
    for trajectory in group.trajectories:
        agents |= {agent for agent in agents_of(trajectory) if fits(agent)}

    parts: dict[tuple[str, ...], list[Trajectory]] = defaultdict(list)
    for trajectory in group.trajectories:
        for agent in sorted(agents):
            view = view_of(trajectory, partial(eq, agent), agent)
            if view is None:
                continue
            own_group = trajectory.agent_groups.get(agent)
            if own_group is None:
                name: tuple[str, ...] = ("", agent)
            else:
                key = trajectory.key
                name = (own_group, str(key.sample), str(key.attempt))
            parts[name].append(view)
    for name in sorted(parts):
        yield Group(group.task, parts[name])
