"""Which sampled ids carry loss, and how much: loss scales. No tensors here."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.config.schema import loss_scale_error
from turnwise.env.resolve import load_object
from turnwise.errors import ConfigError, UsageError
from turnwise.types import Trajectory

EARLIER_ROUND = "earlier_round"
"""It is not of the last round, which alone is trained (`loss_scale = "last_round"`)."""
LOSS_SCALE = "loss_scale"
"""A loss scale of one's own gave it weight 0."""


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """The weight of each id of the sampled spans of a trajectory."""

    by_span: Mapping[int, Sequence[float]]
    """Span index -> a weight per id; spans that are missing have weight 1."""
    reason: str
    """What a weight of 0 is counted under."""

    def of(self, span: int, offset: int) -> float:
        """The weight of one id."""
        found = self.by_span.get(span)
        return 1.0 if found is None else found[offset]


LossScale = Callable[[Trajectory], TokenWeights | None]


def loss_scale(said: str) -> LossScale | None:
    """The loss scale that a recipe names; None where all sampled ids count alike.

    Raises:
        ConfigError: for a name that is not known, or a function that does not take one trajectory.
    """
    if wrong := loss_scale_error(said):
        raise ConfigError(f"train.loss_scale = {said!r}: {wrong}")
    if said == "default":
        return None
    if said == "last_round":
        return last_round
    function = load_object(said)
    if not callable(function):
        raise ConfigError(f"train.loss_scale = {said!r}: is {type(function).__name__}, not a function of a trajectory")
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise ConfigError(f"train.loss_scale = {said!r}: must take one argument, the trajectory ({error})") from None
    except ValueError:
        pass
    return lambda trajectory: custom_weights(function, said, trajectory)


def last_round(trajectory: Trajectory) -> TokenWeights:
    """Weight 1 for the replies behind the last word of a user, 0 for those before it; of each agent its own last round.

    What a tool says does not begin a round, what a user (or an environment that speaks as one) says does.
    """
    kept: set[int] = set()
    last = {turn.agent: index for index, turn in enumerate(trajectory.turns)}
    for index in last.values():
        for number in reversed(trajectory.turn_chain(index)):
            turn = trajectory.turns[number]
            kept.update(turn.spans)
            if any(message.role == "user" for message in turn.messages):
                break
    if not trajectory.turns:
        return TokenWeights({}, EARLIER_ROUND)
    earlier = [i for i, span in enumerate(trajectory.spans) if span.sampled and i not in kept]
    return TokenWeights({i: (0.0,) * len(trajectory.spans[i].ids) for i in earlier}, EARLIER_ROUND)


def custom_weights(function: Callable[[Trajectory], Any], spec: str, trajectory: Trajectory) -> TokenWeights:
    """What a function of one's own says of a trajectory, checked.

    It returns one entry per turn: a number, or a number for each id that was sampled in that turn. Weights are finite and not
    negative.

    Raises:
        UsageError: when it raises, or returns something else.
    """

    def refuse(why: str) -> UsageError:
        key = trajectory.key
        return UsageError(f"train.loss_scale = {spec!r}, task {key.task!r}, sample {key.sample}: {why}")

    try:
        found = list(function(trajectory))
    except Exception as error:
        raise refuse(f"raised {type(error).__name__}: {error}") from error
    if len(found) != len(trajectory.turns):
        raise refuse(f"returned {len(found)} entries for {len(trajectory.turns)} turns")
    by_span: dict[int, Sequence[float]] = {}
    for number, (given, turn) in enumerate(zip(found, trajectory.turns, strict=True)):
        spans = [(index, len(trajectory.spans[index].ids)) for index in turn.spans]
        size = sum(length for _, length in spans)
        try:
            numbers = [float(given)] * size if isinstance(given, int | float) else [float(value) for value in given]
        except (TypeError, ValueError):
            raise refuse(f"turn {number + 1}: {given!r:.60} is neither a number nor numbers") from None
        if len(numbers) != size:
            raise refuse(f"turn {number + 1}: {len(numbers)} weights for {size} sampled ids")
        if not all(math.isfinite(value) and value >= 0 for value in numbers):
            raise refuse(f"turn {number + 1}: weights must be finite and at least 0")
        for index, length in spans:
            by_span[index] = tuple(numbers[:length])
            numbers = numbers[length:]
    return TokenWeights(by_span, LOSS_SCALE)
