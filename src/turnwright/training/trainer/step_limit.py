"""A bound on how far one step may move the policy away from what succeeds.

The evidence of `train.gradient_signal_steps` sets how long a step may be, from the agreement of
gradients over many steps. It cannot see that this one step goes wrong: seen once in a task that was
solved in 94%, where 4 of 16 groups had a signal, and one full step took success to 60%.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from turnwright.training.credit import Credit
from turnwright.training.forward.batch import TrainingBatch
from turnwright.training.loss import k3
from turnwright.training.untrained_reasons import NO_SIGNAL

MAX_GOOD_KL = 0.15
"""Largest mean KL divergence of the policy after a step from that before it, over good episodes, in
nats per episode. Success in the tasks of good episodes then stays above about exp(-0.15) = 86% of
what it was. Runs that learn stay below: the quickstart's largest of 80 steps is 0.10."""
SHORT = 0.25
"""Share of a full step below which it is not measured: it moves the policy a sixteenth as far."""
MOST = 16
"""Good episodes that are scored, at most: an eighth of a default step's episodes."""


def good_episodes(credits: Sequence[Credit]) -> list[Credit]:
    """Return up to `MOST` of a step's episodes whose reward is at least the mean, each with an
    advantage.

    Groups without a signal count too: nothing is trained on them, so they tell what a step breaks.
    """
    usable = [
        credit
        for credit in credits
        if credit.reason in (None, NO_SIGNAL) and credit.trajectory.reward is not None
    ]
    if not usable:
        return []

    rewards = [float(credit.trajectory.reward or 0.0) for credit in usable]
    mean = math.fsum(rewards) / len(rewards)
    good = [credit for credit, reward in zip(usable, rewards, strict=True) if reward >= mean]

    # Evenly spaced, so from as many groups as possible.
    count = min(len(good), MOST)
    chosen = [good[place * len(good) // count] for place in range(count)]
    return [replace(credit, advantage=1.0, reason=None, values=None) for credit in chosen]


class StepLimit:
    """Measures how far a step moved the policy on good episodes, and by how much to shorten it."""

    def __init__(
        self, batch: TrainingBatch, score: Callable[[TrainingBatch], Tensor], *, exact: bool
    ) -> None:
        """Prepare for a step; `exact`: the engine's logprobs are those of the policy before it."""
        self._batch = batch
        self._score = score
        self._before_n = batch.engine_n if exact else score(batch)

    def divergence(self) -> float:
        """Return KL(before || now), mean over the episodes, in nats.

        Estimated from the sampled ids by `k3`, which is never negative.
        """
        divergence_n = k3(self._before_n, self._score(self._batch))
        episodes = len(set(self._batch.trajectory_n.tolist()))
        return float(divergence_n.sum()) / episodes

    def share(self) -> tuple[float, float]:
        """Return the share of the step that keeps the bound, from 0 to 1, and the divergence of all
        of it.

        The divergence of a short step grows with the square of its length.
        """
        divergence = self.divergence()
        if math.isnan(divergence):
            return 0.0, divergence
        share = math.sqrt(MAX_GOOD_KL / max(divergence, MAX_GOOD_KL))
        return min(1.0, share), divergence
