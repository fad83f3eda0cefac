"""How much of a step is signal: the learning rate follows what gradients of different episodes agree on. No tensors here."""

from __future__ import annotations

import math

STANDARD_ERRORS = 2.0
"""What the average must be over 0 by before it counts. With 0, one control of the quickstart in ten drifted out of its
interval; with 1 still the same one."""


def signal_share(agreement: float, beta: float) -> float:
    """The share of the momentum's squared length that is signal, from its agreement with a gradient that it has not seen.

    A gradient g is the true one, G, and noise; a momentum m averages k = (1 + beta) / (1 - beta) such gradients, so with r the
    signal in one gradient over its noise::

        E<g, m> = |G|^2      |g|^2 = |G|^2 (1 + 1 / r)      |m|^2 = |G|^2 (1 + 1 / (k r))
        agreement^2 = <g, m>^2 / (|g|^2 |m|^2) = r / (1 + r) * k r / (1 + k r)

    Solved for r, the share is ``k r / (1 + k r)``. A step along m times that share is nearest to the one along G, and is the
    best step of McCandlish et al. (arXiv 1812.06162, eq. 2.7: 1 / (1 + noise scale / batch)) with the episodes that m averages
    over as the batch.

    Args:
        agreement: the cosine of a gradient and the momentum before it; at most 0 is no signal.
        beta: decay of the momentum.
    """
    square = min(max(agreement, 0.0), 1.0) ** 2
    if square >= 1.0:
        return 1.0
    k = (1.0 + beta) / (1.0 - beta)
    half = square * (1.0 + k) / 2.0
    r = (half + math.sqrt(half * half + k * (1.0 - square) * square)) / (k * (1.0 - square))
    return k * r / (1.0 + k * r)


class GradientSignal:
    """The agreement of the gradients of a run's steps, averaged, and the share of the learning rate that it is worth.

    Args:
        memory: steps that the average reaches back; 0 leaves the learning rate alone.
        beta: decay of the optimizer's momentum.
    """

    def __init__(self, memory: int, beta: float) -> None:
        self.memory = memory
        self.beta = beta
        self.average = 0.0
        """From 0: there is no evidence until some was seen."""
        self.variance = 0.0
        """Of `average`, if what was taken were noise around 0: the sum of the squares of its terms."""

    def update(self, agreement: float | None) -> None:
        """Count one step's agreement in; None where there is no momentum yet, which is no evidence either."""
        if self.memory:
            weight = 1.0 / self.memory
            value = agreement or 0.0
            self.average = (1.0 - weight) * self.average + weight * value
            self.variance = (1.0 - weight) ** 2 * self.variance + (weight * value) ** 2

    @property
    def share(self) -> float:
        """What the learning rate is multiplied with, from 0 to 1.

        It is that of the average's lower bound: the average of noise alone is over 0 half of the time, and over two standard
        errors one time in forty.
        """
        if not self.memory:
            return 1.0
        return signal_share(self.average - STANDARD_ERRORS * math.sqrt(self.variance), self.beta)
