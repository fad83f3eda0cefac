"""Advantages by turn from equal states: turns of a task's episodes that began in the same state are
compared with each other, without a critic. No tensors here.

`states_of` says in which state each turn began. An environment may name it; otherwise it is all
that the policy had read. `gigpo`, `gagpo`, `state_rloo` and `state_std` are the formulas; units of
all are turns.

For any of them, equal states must promise the same: where a limit of turns ends episodes, a state
that leaves out how many remain is worth less in a late turn than in an early one.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import orjson

from turnwright.config.schema import StateKey
from turnwright.records.run_dir import to_json
from turnwright.training.group_member import STD_FLOOR, GroupMember, differ
from turnwright.types import Trajectory, Turn, ids_with_media_keys

STATE = "state"
"""Key of `Step.info` (or of `Model.note`) under which an environment names the state that the next
turn begins in."""

State = tuple[str, str, bytes]
"""Agent, source of the name, digest."""
WHOLE: State = ("", "whole", b"")
"""State of an episode that is not divided into turns."""


@dataclass(frozen=True, slots=True)
class StepGroupSettings:
    """How turns are compared."""

    state: StateKey = "history"
    """Name of a state where the environment gives none: all ids that the policy read, or the last
    messages alone."""
    gae_lambda: float | None = 1.0
    """Weight of a trajectory's own rewards beyond the next state; None weighs each return from
    there alike."""
    step_weight: float = 1.0
    """Weight of the comparison by state beside that of whole episodes, in `gigpo`."""


def states_of(trajectory: Trajectory, key: StateKey) -> list[State]:
    """Return the state in which each turn began."""
    states = []
    for number, turn in enumerate(trajectory.turns):
        named = _name_after(trajectory, turn.parent)
        if named is not None:
            states.append((turn.agent, "named", _digest(named)))
        elif key == "observation":
            messages = [message.to_dict() for message in turn.messages]
            states.append((turn.agent, "observation", _digest(messages)))
        else:
            states.append((turn.agent, "history", _history_digest(trajectory, number, turn)))
    return states


def _name_after(trajectory: Trajectory, turn: int) -> object:
    """Return the environment's name of the state after a turn, None if it gave none. An action that
    it refused left the state as it was."""
    while turn >= 0:
        info = trajectory.turns[turn].info
        if STATE in info or "invalid_action" not in info:
            return info.get(STATE)
        turn = trajectory.turns[turn].parent
    return None


def _history_digest(trajectory: Trajectory, number: int, turn: Turn) -> bytes:
    """Return a digest of what the policy read before a turn: ids, and the content of pictures."""
    placed = trajectory.media_placements(turn.prompt) if turn.prompt >= 0 else []
    ids = trajectory.prompt_ids(number)
    keys = ids_with_media_keys(ids, placed) if placed else ids
    return blake2b(array("q", keys).tobytes(), digest_size=16).digest()


def _digest(value: object) -> bytes:
    """Return a digest of a value in the form in which records keep it, whatever the order of its
    keys."""
    recorded = orjson.loads(to_json(value))
    return blake2b(orjson.dumps(recorded, option=orjson.OPT_SORT_KEYS), digest_size=16).digest()


@dataclass(slots=True)
class _Visits:
    """The turns of a group's members that began in one state."""

    units: list[tuple[int, int]] = field(default_factory=list)
    """Member and turn of each."""
    first_returns: dict[int, float] = field(default_factory=dict)
    """Return of each member from its first of them on."""

    def returns(self, members: Sequence[GroupMember]) -> list[float]:
        """Return the returns from each of them on."""
        return [members[member].returns[unit] for member, unit in self.units]

    def mean_of_others(self, member: int) -> float | None:
        """Return the mean return of the other members; None if there is none.

        Each counts once, by its first visit: that return is an unbiased estimate of the state's
        value, and the mean over all visits is not.
        """
        others = [value for other, value in self.first_returns.items() if other != member]
        return math.fsum(others) / len(others) if others else None


class StepGroups:
    """The states that the members of a group met, and who met each."""

    def __init__(self, members: Sequence[GroupMember], key: StateKey) -> None:
        self.states: list[list[State]] = []
        self._visits: dict[State, _Visits] = defaultdict(_Visits)

        for index, member in enumerate(members):
            states = [WHOLE]
            if member.units_are_turns:
                states = states_of(member.trajectory, key)
            elif len(member.units) > 1:
                states = []
            self.states.append(states)
            for unit, state in enumerate(states):
                visits = self._visits[state]
                visits.units.append((index, unit))
                visits.first_returns.setdefault(index, member.returns[unit])

    def groups(self) -> list[_Visits]:
        """Return the turns that began in the same state, for each state."""
        return list(self._visits.values())

    def visits(self, member: int, unit: int) -> _Visits | None:
        """Return who met the state of a unit; None for a unit that is no turn."""
        states = self.states[member]
        return self._visits[states[unit]] if unit < len(states) else None


def gigpo(members: Sequence[GroupMember], settings: StepGroupSettings) -> bool:
    """Set advantages of whole episodes plus those of turns from equal states; return whether one is
    not 0.

    GiGPO (arXiv 2505.10978, eqs. 3, 7 and 8), see `algorithms/gigpo.py`.
    """
    totals = [math.fsum(member.rewards) for member in members]
    of_episode = _standardized(totals)
    for member, value in zip(members, of_episode, strict=True):
        member.values = [value] * len(member.units)
    has_signal = differ(totals)

    for visits in StepGroups(members, settings.state).groups():
        returns = visits.returns(members)
        if not differ(returns):
            continue
        has_signal = True
        of_step = _standardized(returns)
        for (member_index, unit), value in zip(visits.units, of_step, strict=True):
            members[member_index].values[unit] += settings.step_weight * value
    return has_signal


def _standardized(values: Sequence[float]) -> list[float]:
    """Return values less their mean, in sample standard deviations; zeros where they are equal."""
    n = len(values)
    if n < 2 or not differ(values):
        return [0.0] * n
    mean = math.fsum(values) / n
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    return [(value - mean) / (deviation + STD_FLOOR) for value in values]


def gagpo(members: Sequence[GroupMember], settings: StepGroupSettings) -> bool:
    """Set generalized advantages whose values are the mean returns from equal states, standardized
    over the turns of the group; return whether they differ.

    GAGPO (arXiv 2605.13217), see `algorithms/gagpo.py`.
    """
    groups = StepGroups(members, settings.state)
    value_of: dict[tuple[int, int], float] = {}
    for visits in groups.groups():
        returns = visits.returns(members)
        for turn in visits.units:
            value_of[turn] = math.fsum(returns) / len(returns)

    trace = 1.0 if settings.gae_lambda is None else settings.gae_lambda
    advantages = []
    for index, member in enumerate(members):
        later_value = later_advantage = 0.0
        backwards = []
        for unit in reversed(range(len(member.units))):
            value = value_of.get((index, unit), member.returns[unit])
            error = member.rewards[unit] + member.discount * later_value - value
            later_advantage = error + member.discount * trace * later_advantage
            later_value = value
            backwards.append(later_advantage)
        member.values = backwards[::-1]
        advantages += member.values

    standardized = iter(_standardized(advantages))
    for member in members:
        member.values = [next(standardized) for _ in member.values]
    return differ(advantages)


def state_rloo(members: Sequence[GroupMember], settings: StepGroupSettings) -> bool:
    """Set advantages whose baseline is the mean return of the other episodes from the same state;
    return whether one is not 0.

    See `algorithms/state_rloo.py`.
    """
    groups = StepGroups(members, settings.state)
    totals = []  # of all returns from each turn on
    for unit in range(max(len(member.units) for member in members)):
        totals.append(math.fsum(member.return_from(unit) for member in members))

    has_signal = False
    for index, member in enumerate(members):
        backwards = []
        continuation = 0.0  # what follows the unit, as its own return and those of others say
        for unit in reversed(range(len(member.units))):
            expected = member.rewards[unit] + member.discount * continuation

            visits = groups.visits(index, unit)
            others = None if visits is None else visits.mean_of_others(index)
            if others is None:
                # Nobody else was here: the others' returns from the same turn on.
                baseline = (totals[unit] - member.returns[unit]) / max(len(members) - 1, 1)
                continuation = expected
            else:
                assert visits is not None
                own_weight = settings.gae_lambda
                if own_weight is None:
                    own_weight = 1.0 / len(visits.first_returns)
                baseline = others
                continuation = own_weight * expected + (1.0 - own_weight) * others

            has_signal = has_signal or differ([expected, baseline])
            backwards.append(expected - baseline)
        member.values = backwards[::-1]
    return has_signal


def state_std(members: Sequence[GroupMember], settings: StepGroupSettings) -> bool:
    """Set the advantages of `state_rloo`, divided by their deviation over the turns of the group;
    return whether one is not 0.

    See `algorithms/state_grpo.py`.
    """
    has_signal = state_rloo(members, settings)
    squares = [value**2 for member in members for value in member.values]
    deviation = math.sqrt(math.fsum(squares) / max(len(squares) - 1, 1))
    for member in members:
        member.values = [value / (deviation + STD_FLOOR) for value in member.values]
    return has_signal
