"""What is done about a trainer and an engine that disagree: weights from ``r_t = trainer / engine`` at the old policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from turnwise.config import TrainConfig

Kind = Literal["none", "tis", "sequence_mis", "sequence_mis_mean", "icepop"]

BOUNDS: dict[str, tuple[float, float]] = {
    "tis": (0.0, 2.0),
    "sequence_mis": (0.0, 3.0),
    "sequence_mis_mean": (0.99, 1.01),
    "icepop": (0.2, 5.0),
}
"""Lower and upper bound of the ratio where a recipe has none: TIS as its authors, sequence MIS as TRL, IcePop as
INTELLECT-3."""


@dataclass(frozen=True, slots=True)
class Correction:
    """A correction by name, with its bounds."""

    kind: Kind
    low: float
    high: float

    @classmethod
    def of(cls, config: TrainConfig) -> Correction | None:
        """What a recipe asks for; None where it asks for none."""
        if config.correction == "none":
            return None
        low, high = BOUNDS[config.correction]
        low = low if config.correction_low is None else config.correction_low
        return cls(config.correction, low, high if config.correction_high is None else config.correction_high)

    def weights(self, trainer_n: Tensor, engine_n: Tensor, trajectory_n: Tensor) -> Tensor:
        """The weight of each token's policy loss, N.

        - `tis`: ``min(r_t, high)`` (truncated importance sampling; Yao et al., "Your efficient RL framework secretly brings you
          off-policy RL training", 2025);
        - `sequence_mis`: ``R = prod_t r_t`` over the trajectory where it is from low to high, else 0 (masked importance
          sampling; Liu et al., "When speed kills stability", 2025);
        - `sequence_mis_mean`: 1 where the geometric mean of r_t over the trajectory is from low to high, else 0 (same
          source): a filter, not a weight, for trajectories so long that the product says nothing;
        - `icepop`: ``r_t`` where it is from low to high, else 0 (IcePop; INTELLECT-3, arXiv 2512.16144, eq. 1).

        Args:
            trainer_n: logprobs before the step's first update.
            engine_n: logprobs of the engine, none missing.
            trajectory_n: index of each token's trajectory, from 0.
        """
        log_ratio_n = trainer_n - engine_n
        if self.kind == "tis":
            return log_ratio_n.exp().clamp(max=self.high)
        if self.kind == "icepop":
            ratio_n = log_ratio_n.exp()
            return torch.where((ratio_n >= self.low) & (ratio_n <= self.high), ratio_n, 0.0)
        if self.kind == "sequence_mis":
            ratio_n = per_trajectory(log_ratio_n, trajectory_n, mean=False).exp()
            return torch.where((ratio_n >= self.low) & (ratio_n <= self.high), ratio_n, 0.0)
        ratio_n = per_trajectory(log_ratio_n, trajectory_n, mean=True).exp()
        return ((ratio_n >= self.low) & (ratio_n <= self.high)).to(log_ratio_n.dtype)


def per_trajectory(values_n: Tensor, trajectory_n: Tensor, *, mean: bool) -> Tensor:
    """The sum (or mean) of a trajectory's values, at each of its tokens, in whatever rows they are."""
    size = int(trajectory_n.max()) + 1 if trajectory_n.numel() else 0
    total = values_n.new_zeros(size).index_add_(0, trajectory_n, values_n)
    if mean:
        total /= values_n.new_zeros(size).index_add_(0, trajectory_n, torch.ones_like(values_n)).clamp(min=1.0)
    return total[trajectory_n]
