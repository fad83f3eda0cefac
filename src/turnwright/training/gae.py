"""Generalized advantage estimation (GAE, Schulman et al., arXiv 1506.02438, eq. 16) from a critic's
values: by token, by turn, or by both. No tensors here.

The value of an id is what the critic expects of the rest of the episode before the id is sampled;
after the end of an episode, also of one that a limit ended, nothing is expected. Every function
sets the advantage of each id that carries loss, and the target of each value that it used: value
plus advantage, which is the lambda-return.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from turnwright.training.group_member import GroupMember, PerId
from turnwright.types.trajectory import Slot


@dataclass(frozen=True, slots=True)
class GaeSettings:
    """Discounts of GAE; that of a turn is the member's."""

    gae_lambda: float = 1.0
    """Per turn: 0 trusts the value of the next state, 1 the rewards that came."""
    token_discount: float = 1.0
    token_lambda: float = 1.0


def set_gae(member: GroupMember, kind: str, values: PerId, settings: GaeSettings) -> None:
    """Set a member's advantages and targets per id, of the formula `kind`.

    `values` has a number for each id that carries loss.
    """
    member.token_values = member.per_id(0.0)
    member.targets = member.per_id(math.nan)
    if kind == "gae":
        _by_token(member, values, settings)
    elif kind == "gae_turn":
        _by_turn(member, values, settings)
    else:
        _by_both(member, values, settings)


def _by_token(member: GroupMember, values: PerId, settings: GaeSettings) -> None:
    """Each id is an action; a unit's reward comes with its last one."""
    trace = settings.token_discount * settings.token_lambda
    later_value = later_advantage = reward = 0.0
    for unit in reversed(range(len(member.units))):
        if member.trajectory.row_rewards:  # rows have nothing to do with each other
            later_value = later_advantage = reward = 0.0
        reward += member.rewards[unit]
        for span, offset in reversed(member.slots_of(unit)):
            value = values[span][offset]
            reward -= _penalty(member, (span, offset))
            error = reward + settings.token_discount * later_value - value
            later_advantage = error + trace * later_advantage
            _set(member, (span, offset), value, later_advantage)
            later_value = value
            reward = 0.0


def _by_turn(member: GroupMember, values: PerId, settings: GaeSettings) -> None:
    """Each unit is an action; the critic is asked before its first id (Turn-PPO)."""
    slots_by_unit = [member.slots_of(unit) for unit in range(len(member.units))]
    firsts = [slots[0] if slots else None for slots in slots_by_unit]
    advantages = _unit_advantages(member, firsts, values, settings)

    assert member.token_values is not None
    for slots, advantage in zip(slots_by_unit, advantages, strict=True):
        for span, offset in slots:
            member.token_values[span][offset] = advantage
        if slots:
            _set(member, slots[0], values[slots[0][0]][slots[0][1]], advantage)


def _by_both(member: GroupMember, values: PerId, settings: GaeSettings) -> None:
    """Units first, by the values of their last ids; then each id of a unit, towards that advantage
    (VAGEN)."""
    slots_by_unit = [member.slots_of(unit) for unit in range(len(member.units))]
    lasts = [slots[-1] if slots else None for slots in slots_by_unit]
    advantages = _unit_advantages(member, lasts, values, settings)

    trace = settings.token_discount * settings.token_lambda
    for slots, unit_advantage in zip(slots_by_unit, advantages, strict=True):
        later_value: float | None = None
        advantage = unit_advantage
        for span, offset in reversed(slots):
            value = values[span][offset]
            if later_value is not None:
                error = settings.token_discount * later_value - value
                advantage = error + trace * advantage
            _set(member, (span, offset), value, advantage)
            later_value = value


def _unit_advantages(
    member: GroupMember, asked: Sequence[Slot | None], values: PerId, settings: GaeSettings
) -> list[float]:
    """Compute GAE over units, from the value at one id of each.

    A unit without an id that carries loss chose nothing: what it was rewarded with, discounted,
    belongs to the unit before it.
    """
    backwards = []
    later_value = later_advantage = 0.0
    reward = 0.0  # of the units since the last that chose
    discount = 1.0  # to that unit
    for unit in reversed(range(len(member.units))):
        slot = asked[unit]
        reward = member.rewards[unit] + member.discount * reward
        discount *= member.discount
        if slot is None:
            backwards.append(0.0)
            continue

        value = values[slot[0]][slot[1]]
        error = reward + discount * later_value - value
        later_advantage = error + discount * settings.gae_lambda * later_advantage
        later_value = value
        reward, discount = 0.0, 1.0
        backwards.append(later_advantage)
    return backwards[::-1]


def _penalty(member: GroupMember, slot: Slot) -> float:
    span, offset = slot
    penalties = None if member.penalties is None else member.penalties.get(span)
    return 0.0 if penalties is None else penalties[offset]


def _set(member: GroupMember, slot: Slot, value: float, advantage: float) -> None:
    span, offset = slot
    assert member.token_values is not None
    assert member.targets is not None
    member.token_values[span][offset] = advantage
    member.targets[span][offset] = value + advantage
