"""What training made of the ids of a span: trained, left out with a reason, or never for
training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from turnwright.display.run_data import Row, integer, mapping, number
from turnwright_view.web.episode_rows import NO_TRAINING
from turnwright_view.web.texts import truncate

TRAINED = "trained"
UNTRAINED = "untrained"
NEVER = "never"

FROZEN = "frozen"
"""Why ids of a policy that is not trained are left out."""

NO_RECORD = "no record of training"
"""Why ids are not known to be trained: the step was not trained yet, or keeps no record."""

NO_LOSS = "no loss"
"""Why an id that training looked at has no loss."""

NO_WEIGHT = "weight 0"
"""Why an id is left out that an agent function gave the weight 0."""

State = tuple[str, str]
"""A state, and its reason where there is one."""


@dataclass(frozen=True, slots=True)
class Training:
    """What training made of an episode."""

    is_training: bool
    """Whether the episode is one of a training step."""
    is_recorded: bool
    reason: str
    """Why nothing of it was trained; empty if something was."""
    advantage: float | None
    advantages: Mapping[str, Any] = field(default_factory=dict)
    """Those of ids, by span, where they differ."""
    logprobs: Mapping[str, Any] = field(default_factory=dict)
    """The trainer's, by span; None for ids without loss."""

    @classmethod
    def of(cls, phase: str, row: Row) -> Training:
        """Read a line of training.jsonl, or an empty one."""
        return cls(
            is_training=phase == "train",
            is_recorded=bool(row),
            reason=truncate(str(row.get("reason") or ""), 400),
            advantage=number(row.get("advantage")),
            advantages=mapping(row.get("advantages")),
            logprobs=mapping(row.get("logprobs")),
        )


def states_of(
    span: Row,
    index: int,
    count: int,
    training: Training,
    weights: Sequence[float | None] | None,
    is_frozen: bool,
) -> list[list[Any]]:
    """Return [from, to, state, reason] over the first `count` ids of the span at an index."""
    if not count:
        return []
    whole = _state_of_span(span, training, is_frozen)
    if whole is not None:
        return [[0, count, *whole]]
    states = _states_of_ids(span, index, count, training, weights)

    runs: list[list[Any]] = []
    start = 0
    for state, same in groupby(states):
        end = start + sum(1 for _ in same)
        runs.append([start, end, *state])
        start = end
    return runs


def _state_of_span(span: Row, training: Training, is_frozen: bool) -> State | None:
    """Return the state that all ids of a span have; None where they may differ."""
    if span.get("origin") != "model":
        return NEVER, ""
    if not training.is_training:
        return NEVER, NO_TRAINING
    if is_frozen:
        return UNTRAINED, FROZEN
    if training.reason:
        return UNTRAINED, training.reason
    return None


def _states_of_ids(
    span: Row,
    index: int,
    count: int,
    training: Training,
    weights: Sequence[float | None] | None,
) -> list[State]:
    """Return the state of each sampled id of a trained episode."""
    excluded = truncate(str(span.get("untrained") or ""), 80)
    excluded_from = max(0, integer(span.get("untrained_from", 0)))
    scored = training.logprobs.get(str(index))
    was_scored = bool(training.logprobs)

    states: list[State] = []
    for offset in range(count):
        if excluded and offset >= excluded_from:
            states.append((UNTRAINED, excluded))
        elif not training.is_recorded:
            states.append((UNTRAINED, NO_RECORD))
        elif weights is not None and offset < len(weights) and weights[offset] == 0:
            states.append((UNTRAINED, NO_WEIGHT))
        elif was_scored and _is_left_out(scored, offset):
            states.append((UNTRAINED, NO_LOSS))
        else:
            states.append((TRAINED, ""))
    return states


def _is_left_out(scored: Any, offset: int) -> bool:
    """Return whether the trainer scored other ids, but not this one."""
    if not isinstance(scored, list) or offset >= len(scored):
        return True
    return scored[offset] is None
