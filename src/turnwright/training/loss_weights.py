"""How much each sampled id of a trajectory counts in the loss: `train.loss_scale`, and the weights
that agent functions give their replies (`Model.weigh`).

`trained_ids` counts the ids of a span that carry loss; `credit.py` uses it for the account of a
step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwright.config.names import loss_scale_error
from turnwright.envs.resolve import call_error, load_object
from turnwright.errors import ConfigError, UsageError
from turnwright.training.untrained_reasons import EARLIER_ROUND, LOSS_SCALE, WEIGHED
from turnwright.types import Trajectory


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """Weight of each id in a trajectory's sampled spans."""

    by_span: Mapping[int, Sequence[float]]
    """Span index -> weight per id; missing spans have weight 1."""
    reason: str
    """Reason under which ids of weight 0 are counted."""
    no_teacher: Mapping[int, int] = field(default_factory=dict)
    """Span index -> how many of them are `NO_TEACHER` instead."""

    def of(self, span: int, offset: int) -> float:
        """Return the weight of one id."""
        weights = self.by_span.get(span)
        return 1.0 if weights is None else weights[offset]


LossScale = Callable[[Trajectory], TokenWeights | None]
"""Returns the weights of a trajectory's ids; None where all are 1."""


def loss_scale(spec: str) -> LossScale | None:
    """Resolve `train.loss_scale`, None if all sampled ids count alike.

    Raises:
        ConfigError: for no function of a trajectory.
    """
    if wrong := loss_scale_error(spec):
        raise ConfigError(f"train.loss_scale = {spec!r}: {wrong}")
    if spec == "default":
        return None
    if spec == "last_round":
        return last_round

    function = load_object(spec)
    if not callable(function):
        raise ConfigError(
            f"train.loss_scale = {spec!r}: is {type(function).__name__}, not a function of a "
            "trajectory"
        )
    if wrong := call_error(function, None):
        raise ConfigError(
            f"train.loss_scale = {spec!r}: must take one argument, the trajectory ({wrong})"
        )
    return lambda trajectory: custom_weights(function, spec, trajectory)


def last_round(trajectory: Trajectory) -> TokenWeights:
    """Return weight 1 for each agent's replies after the last user message, 0 for earlier ones.

    A message that the environment writes as the user counts; a tool result does not.
    """
    last_turns = {turn.agent: index for index, turn in enumerate(trajectory.turns)}
    last_replies: set[int] = set()
    for last_turn in last_turns.values():
        for number in reversed(trajectory.turn_chain(last_turn)):
            turn = trajectory.turns[number]
            last_replies.update(turn.spans)
            if any(message.role == "user" for message in turn.messages):
                break
    if not trajectory.turns:
        return TokenWeights({}, EARLIER_ROUND)

    earlier = {
        index: (0.0,) * len(span.ids)
        for index, span in enumerate(trajectory.spans)
        if span.sampled and index not in last_replies
    }
    return TokenWeights(earlier, EARLIER_ROUND)


def custom_weights(
    function: Callable[[Trajectory], Any], spec: str, trajectory: Trajectory
) -> TokenWeights:
    """Call a custom loss scale, which returns a weight for each turn, or one for each of its ids.

    Raises:
        UsageError: for another result, and for weights that are negative or not finite.
    """

    def refuse(why: str) -> UsageError:
        key = trajectory.key
        return UsageError(
            f"train.loss_scale = {spec!r}, task {key.task!r}, sample {key.sample}: {why}"
        )

    try:
        entries = list(function(trajectory))
    except Exception as error:
        raise refuse(f"raised {type(error).__name__}: {error}") from error
    if len(entries) != len(trajectory.turns):
        raise refuse(f"returned {len(entries)} entries for {len(trajectory.turns)} turns")

    by_span: dict[int, Sequence[float]] = {}
    for number, (entry, turn) in enumerate(zip(entries, trajectory.turns, strict=True)):
        lengths = {span: len(trajectory.spans[span].ids) for span in turn.spans}
        size = sum(lengths.values())
        try:
            if isinstance(entry, int | float):
                weights = [float(entry)] * size
            else:
                weights = [float(weight) for weight in entry]
        except (TypeError, ValueError):
            raise refuse(
                f"turn {number + 1}: {entry!r:.60} is neither a number nor numbers"
            ) from None
        if len(weights) != size:
            raise refuse(f"turn {number + 1}: {len(weights)} weights for {size} sampled ids")
        if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
            raise refuse(f"turn {number + 1}: weights must be finite and at least 0")

        begin = 0
        for span, length in lengths.items():
            by_span[span] = tuple(weights[begin : begin + length])
            begin += length
    return TokenWeights(by_span, LOSS_SCALE)


def with_turn_weights(scale: LossScale | None) -> LossScale:
    """Return a loss scale times the weights that agent functions gave their replies."""

    def scaled(trajectory: Trajectory) -> TokenWeights | None:
        scales = None if scale is None else scale(trajectory)
        turn_weights = trajectory.turn_weights()
        if not turn_weights:
            return scales
        if scales is None:
            return TokenWeights(turn_weights, WEIGHED)

        by_span = dict(scales.by_span)
        for span, weights in turn_weights.items():
            by_span[span] = tuple(
                scales.of(span, offset) * weight for offset, weight in enumerate(weights)
            )
        return TokenWeights(by_span, scales.reason)

    return scaled


TURN_WEIGHTS = with_turn_weights(None)
"""The weights that agent functions gave their replies, and no other."""


def trained_offsets(
    trajectory: Trajectory, index: int, weights: TokenWeights | None = None
) -> Sequence[int]:
    """Return the offsets of a span's ids that can carry loss.

    The first id of a path cannot, since no position predicts it.
    """
    span = trajectory.spans[index]
    first = 1 if span.start == 0 else 0
    offsets = range(first, max(first, span.trained))
    span_weights = None if weights is None else weights.by_span.get(index)
    if span_weights is None:
        return offsets
    return [offset for offset in offsets if span_weights[offset]]


def trained_ids(trajectory: Trajectory, index: int, weights: TokenWeights | None = None) -> int:
    """Count the ids of a span that can carry loss."""
    return len(trained_offsets(trajectory, index, weights))


def trainable_tokens(trajectory: Trajectory, weights: TokenWeights | None = None) -> int:
    """Count a trajectory's sampled ids that can carry loss."""
    return sum(trained_ids(trajectory, index, weights) for index in range(len(trajectory.spans)))
