"""Which weights a server has, told by what it says of known ids and not only by what it calls them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from turnwise.engine.remote.base import RemoteEngine, WeightsLabel
from turnwise.errors import StaleWeights, SyncError

_proof_log = logging.getLogger(__name__)

Expect = Callable[[Sequence[int]], Sequence[float]]
"""Given ids, the trainer's own log p(ids[i] | ids[:i]) for i from 1 on, at temperature 1."""


@dataclass(frozen=True, slots=True)
class WeightsProof:
    """What a server said of its weights when they were known to be right."""

    label: WeightsLabel
    noise: float
    """Largest difference between two askings of the same weights, nats."""

    def max_difference(self, other: WeightsLabel) -> float:
        """Largest difference of the scores, nats; infinite where they cannot be compared."""
        mine, theirs = self.label.scores, other.scores
        if len(mine) != len(theirs):
            return float("inf")
        return max((abs(a - b) for a, b in zip(mine, theirs, strict=True)), default=0.0)

    def check(self, now: WeightsLabel, who: str) -> None:
        """See that the server still has these weights.

        Raises:
            StaleWeights: when it has others.
        """
        if now.name != self.label.name:
            raise StaleWeights(f"{who} calls its weights {now.name!r}, and they were {self.label.name!r}")
        far = self.max_difference(now)
        if far > max(10 * self.noise, 1e-6):
            raise StaleWeights(
                f"{who} has other weights than before under the same name: its logprobs of known ids moved by up to {far:.3g} "
                f"nats, and between two askings by {self.noise:.1g}"
            )


async def score_canary(engine: RemoteEngine) -> WeightsProof:
    """Ask a server twice for what its weights say.

    Raises:
        EngineError: when it does not say.
    """
    first, second = await engine.weights_label(), await engine.weights_label()
    return WeightsProof(second, WeightsProof(first, 0.0).max_difference(second))


@dataclass(frozen=True, slots=True)
class ExpectedScores:
    """What the trainer itself says of `CANARY` with its new weights."""

    scores: tuple[float, ...]
    moved: float
    """Largest difference to what it said of the weights before, nats; 0 for the first."""


async def verify_weights_arrived(
    engine: RemoteEngine, before: WeightsProof | None, *, changed: bool, wanted: ExpectedScores | None, tolerance: float
) -> WeightsProof:
    """See that weights that a server was told to read are the ones that answer.

    Args:
        before: of the weights that it had.
        changed: whether the new ones differ from those.
        wanted: what the trainer itself says; without it, only that the server's answers changed is shown.
        tolerance: most difference to what the trainer says, nats.

    Raises:
        SyncError: when they did not arrive, or only in part.
    """
    now = await score_canary(engine)
    if wanted is not None:
        far = WeightsProof(WeightsLabel(None, wanted.scores), 0.0).max_difference(now.label)
        if not far <= tolerance:
            raise SyncError(
                f"{engine.display_name} says yes to the weights of policy {engine.version} and samples from others: its "
                f"logprobs of "
                f"known ids are up to {far:.3g} nats off the trainer's (at most {tolerance:g} is rounding)"
            )
        if before is not None and wanted.moved > tolerance / 10 and before.max_difference(now.label) == 0.0:
            raise SyncError(
                f"{engine.display_name} says yes to the weights of policy {engine.version} and answers to the last bit as "
                f"before, while "
                f"the trainer's logprobs of known ids moved by {wanted.moved:.3g} nats: they did not arrive"
            )
        return now
    if not changed or before is None:
        return now
    far = before.max_difference(now.label)
    if far == 0.0:
        raise SyncError(
            f"{engine.display_name} says yes to the weights of policy {engine.version} and answers to the last bit as "
            f"before: they did "
            "not arrive (or the change is too small for the type that it computes in; then give expected_logprobs=)"
        )
    if far <= before.noise:
        _proof_log.warning(
            "%s: new weights change its logprobs by %.2g nats, which is within its noise", engine.display_name, far
        )
        engine.counts["updates_unproven"] += 1
    return now
