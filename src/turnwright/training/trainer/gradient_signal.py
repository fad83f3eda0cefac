"""How long steps may be, by the evidence that gradients of different episodes agree.

Where the average agreement of a run's gradients is no more than noise, a step would move the policy
by chance alone, and its learning rate is 0. `Optimizer.agreement` measures one step,
`GradientSignal` keeps the average and its spread, and `Trainer` multiplies the learning rate by its
`share`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

STANDARD_ERRORS = 3.0
"""Standard errors by which the average must exceed 0 to count. With 2, noise did so in 8 of 20
controls of 180 steps, and one policy in 20 was broken."""


YOUNG = 4
"""Steps whose agreement is split by tasks, by one more forward pass each: their spread shows a
strong signal at once."""
STILL = 5
"""How many times longer what is known of the gradient lasts where the policy was not updated: its
gradient is then what it was."""


def standard_errors(average: float, variance: float, terms: float) -> float:
    """Return the standard errors that an average of noise around 0 is above it, from the sum of its
    squared terms.

    Few terms say little about their spread: the average over the root of `variance` follows
    Student's t. The result is the normal deviate of the same rarity (Wallace, Ann. Math. Stat. 30,
    1959), with a degree of freedom less than terms of equal size have, since older ones are
    smaller; 0 for fewer than five terms.
    """
    freedom = terms - 2.0
    if average <= 0 or freedom < 3.0:
        return 0.0
    if average**2 >= terms * variance:
        return math.inf
    rarity = -freedom * math.log1p(-(average**2) / (terms * variance))
    return (8.0 * freedom + 1.0) / (8.0 * freedom + 3.0) * math.sqrt(rarity)


def signal_share(agreement: float, beta: float) -> float:
    """Return the share of the momentum's squared length that is signal, from its cosine with a new
    gradient.

    A gradient g is the true one, G, plus noise; a momentum m averages k = (1 + beta) / (1 - beta)
    such gradients. With r the signal-to-noise ratio of one gradient::

        E<g, m> = |G|^2      |g|^2 = |G|^2 (1 + 1 / r)      |m|^2 = |G|^2 (1 + 1 / (k r))
        agreement^2 = <g, m>^2 / (|g|^2 |m|^2) = r / (1 + r) * k r / (1 + k r)

    Solved for r, the share is ``k r / (1 + k r)``. A step along m times that share is nearest to
    the one along G. It is the optimal step of McCandlish et al. (arXiv 1812.06162, eq. 2.7: 1 / (1
    + noise scale / batch)) with the episodes that m averages as the batch. With several updates by
    each gradient `beta` is what a weight falls to from one to the next.
    """
    square = min(max(agreement, 0.0), 1.0) ** 2
    if square >= 1.0:
        return 1.0
    k = (1.0 + beta) / (1.0 - beta)
    half = square * (1.0 + k) / 2.0
    r = (half + math.sqrt(half * half + k * (1.0 - square) * square)) / (k * (1.0 - square))
    return k * r / (1.0 + k * r)


class GradientSignal:
    """Moving average of a run's gradient agreements over `memory` steps, and the learning-rate
    share it implies (1 if `memory` is 0)."""

    def __init__(self, memory: int, beta: float) -> None:
        self.memory = memory
        self.beta = beta
        self.average = 0.0
        """Starts at 0: no evidence."""
        self.variance = 0.0
        """Variance of `average` if agreements were noise around 0: the sum of its squared terms."""
        self.weight = 0.0
        """Sum of the weights of the steps in `average`."""
        self.squares = 0.0
        """Sum of the squared weights of steps whose agreement is known."""
        self.fourths = 0.0
        """Sum of the fourth powers of those weights, each over the number of the step's parts."""

    @property
    def terms(self) -> float:
        """Number of terms of equal size that tell as much of the variance (Satterthwaite,
        Biometrics Bulletin 2, 1946)."""
        return self.squares**2 / self.fourths if self.fourths else 0.0

    @property
    def is_young(self) -> bool:
        """Whether the average has too few steps for their spread to say something: it needs their
        tasks' parts."""
        if not self.memory:
            return False
        weight_of_young = 1.0 - (1.0 - 1.0 / self.memory) ** YOUNG
        return self.weight < weight_of_young - 1e-9

    def update(
        self, agreement: float | None, parts: Sequence[float] = (), *, moved: bool = True
    ) -> None:
        """Add one step's agreement; None (unknown) counts as 0.

        `parts` are those of independent tasks in it. `moved`: whether the step before updated the
        policy.
        """
        if not self.memory:
            return

        weight = 1.0 / self.memory
        kept = 1.0 - weight / (1 if moved else STILL)
        value = agreement or 0.0
        self.average = kept * self.average + weight * value
        self.weight = kept * self.weight + weight

        # How far the average would be from 0 if all were noise.
        square = math.fsum(part * part for part in parts or (value,))
        self.variance = kept**2 * self.variance + weight**2 * square

        known = 0.0 if agreement is None else weight
        self.squares = kept**2 * self.squares + known**2
        self.fourths = kept**4 * self.fourths + known**4 / max(len(parts), 1)

    @property
    def share(self) -> float:
        """Factor on the learning rate, from 0 to 1.

        It is 0 unless the average exceeds three standard errors, as noise does one time in 700. An
        average that has just exceeded them may be noise: its square loses the share of it that the
        square of three standard errors is, so the factor rises from 0. It is corrected for its
        start, as Adam's are (arXiv 1412.6980, section 3).
        """
        if not self.memory:
            return 1.0
        errors = standard_errors(self.average, self.variance, self.terms)
        if errors <= STANDARD_ERRORS:
            return 0.0
        square = self.average**2 * (1.0 - (STANDARD_ERRORS / errors) ** 2)
        return signal_share(math.sqrt(square) / self.weight, self.beta)

    def state(self) -> tuple[float, ...]:
        """Return the arguments of `restore`."""
        return self.average, self.variance, self.weight, self.squares, self.fourths

    def restore(
        self, average: float, variance: float, weight: float, squares: float, fourths: float
    ) -> None:
        """Restore what `state` returned."""
        self.average = average
        self.variance = variance
        self.weight = weight
        self.squares = squares
        self.fourths = fourths
