"""The objective of a run: its settings put together, from rewards to the loss of a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from turnwise.config import TrainConfig
from turnwise.training.advantages import FILTERED, NO_SIGNAL, Credit, StepCredits, advantages, exclusion_reason, sort_key
from turnwise.training.algorithms import AlgorithmSettings, TokenBatch, resolve_settings
from turnwise.training.credit import CreditRules, Penalties, loss_scale, overlong_penalty, trainable_tokens
from turnwise.training.forward.batch import LossDenominator, MicroBatch, TrainingBatch
from turnwise.training.loss import ESTIMATORS, Correction, PolicyTerms, k1, per_trajectory, policy_terms
from turnwise.training.trainer.checks import check_logprobs
from turnwise.types import Group, Trajectory

Scores = Callable[[TrainingBatch], Tensor]


class Objective:
    """What is maximised, by the keys of `[train]`.

    Raises:
        ConfigError: for an algorithm, a loss scale or a combination of keys that cannot be used.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.settings: AlgorithmSettings = resolve_settings(config)
        self.correction = Correction.of(config)
        self._scale = loss_scale(config.loss_scale)

    @property
    def penalises(self) -> bool:
        """Whether KL is taken off the reward, so that trajectories must be scored before they are compared."""
        return bool(self.config.kl) and self.settings.kl_in == "reward"

    def ledger(self, groups: Sequence[Group], penalty: Callable[[Trajectory], Penalties | None] | None = None) -> StepCredits:
        """The advantages of a step's groups, and where every sampled id went.

        Args:
            penalty: KL to take off the reward, weighted already.

        Raises:
            RewardError: for a reward that is NaN or infinite.
            UsageError: for a loss scale of one's own that gives something else than weights.
        """
        config = self.config
        most = config.overlong_tokens
        shape = None if most is None else partial(overlong_penalty, most=most, buffer=config.overlong_buffer)
        return advantages(
            groups,
            kind=self.settings.advantage,
            min_group=config.min_group,
            on_failure=config.on_failure,
            rules=CreditRules(config.credit, config.discount, self._scale, shape, penalty),
            no_signal=FILTERED if self.settings.refill else NO_SIGNAL,
        )

    def tied_groups(self, groups: Sequence[Group]) -> set[str]:
        """The ids of the tasks whose trajectories are worth the same, length included, so that others may take their place.

        Raises:
            RewardError, UsageError: as `ledger`.
        """
        return {credit.trajectory.task.id for credit in self.ledger(groups).credits if credit.reason in (FILTERED, NO_SIGNAL)}

    def penalties(
        self,
        groups: Sequence[Group],
        batch: Callable[[Sequence[Credit], LossDenominator], TrainingBatch],
        score: Scores,
        reference: Scores,
    ) -> Callable[[Trajectory], Penalties | None]:
        """``kl * k1`` of every id that can carry loss, by trajectory and span.

        Args:
            batch: puts credits into forward passes.
            score: the logprobs of a batch under the policy as it is now.
            reference: the same under the reference.
        """
        usable = [t for group in groups for t in group.trajectories if exclusion_reason(t) is None]
        weights = [None if self._scale is None else self._scale(t) for t in usable]
        credits = [
            Credit(t, 0.0, None, trainable_tokens(t, w), None, w)
            for t, w in sorted(zip(usable, weights, strict=True), key=lambda pair: sort_key(pair[0]))
        ]
        made = batch(credits, LossDenominator("token", 1, 1))
        owed: dict[int, dict[int, list[float]]] = {}
        if made.size:
            due = (self.config.kl * k1(score(made), reference(made))).tolist()
            for value, trajectory, (span, offset) in zip(due, made.trajectory_n.tolist(), made.slots, strict=True):
                mine = made.trajectories[trajectory]
                by_span = owed.setdefault(id(mine), {})
                by_span.setdefault(span, [0.0] * len(mine.spans[span].ids))[offset] = value
        return lambda trajectory: owed.get(id(trajectory))

    @property
    def scores_first(self) -> bool:
        """Whether a batch is scored before its first update: a correction is taken from it."""
        return self.correction is not None

    def correct(self, batch: TrainingBatch) -> None:
        """Set the correction of a batch that was scored.

        Raises:
            ConfigError: when the engine gave no logprob for an id.
        """
        if self.correction is not None and batch.correction_n is None:
            assert batch.start_n is not None
            check_logprobs(batch, f"train.correction = '{self.correction.kind}'", "none")
            batch.correction_n = self.correction.weights(batch.start_n, batch.engine_n, batch.trajectory_n)

    def sequence(self, batch: TrainingBatch, score: Scores, *, first: bool) -> Tensor | None:
        """The log of each trajectory's ratio per token, at each of its tokens, N; None where that is 0 or nobody asks.

        A trajectory's tokens may lie in several rows and passes, so the whole batch is scored anew under the policy as it is,
        unless nothing was updated since it was scored.

        Args:
            first: whether this step has updated nothing yet.
        """
        if not self.settings.algorithm.sequence:
            return None
        engine = self.config.old_logprobs == "engine"
        if first and not engine:
            return None
        now_n = batch.start_n if first and batch.start_n is not None else score(batch)
        old_n = batch.engine_n if engine else batch.start_n
        assert old_n is not None
        return per_trajectory(now_n - old_n, batch.trajectory_n, mean=True)

    def terms(self, batch: TrainingBatch, micro: MicroBatch, logp_m: Tensor, sequence_n: Tensor | None) -> PolicyTerms:
        """The loss of one forward pass.

        Args:
            logp_m: log-probabilities of its targets, with gradient.
            sequence_n: as `sequence` gave it.
        """
        n, settings = micro.tokens_m, self.settings
        old_n = batch.engine_n if self.config.old_logprobs == "engine" else batch.start_n

        def mine(values_n: Tensor) -> Tensor:
            return values_n[n].to(logp_m.dtype)

        tokens = TokenBatch(
            logp=logp_m,
            old=logp_m.detach() if old_n is None else mine(old_n),
            advantage=mine(batch.advantages_n),
            sequence=logp_m.new_zeros(logp_m.shape) if sequence_n is None else mine(sequence_n),
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
        )
        return policy_terms(
            tokens,
            settings.algorithm.loss,
            mine(batch.weights_n),
            correction_m=None if batch.correction_n is None else mine(batch.correction_n),
            reference_m=None if batch.reference_n is None else mine(batch.reference_n),
            kl=self.config.kl if settings.kl_in == "loss" else 0.0,
            estimator=ESTIMATORS[settings.kl_estimator],
        )
