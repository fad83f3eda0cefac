"""Training objective: the settings of `[train]` combined, from rewards to the loss of a forward pass."""

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
    """Objective that the keys of `[train]` define.

    Raises:
        ConfigError: for an algorithm, a loss scale or a combination of keys that cannot be used.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.settings: AlgorithmSettings = resolve_settings(config)
        self.correction = Correction.of(config)
        self._scale = loss_scale(config.loss_scale)

    @property
    def penalizes_reward(self) -> bool:
        """Whether KL is subtracted from the reward, so that trajectories must be scored before they are compared."""
        return bool(self.config.kl) and self.settings.kl_in == "reward"

    def step_credits(
        self, groups: Sequence[Group], penalty: Callable[[Trajectory], Penalties | None] | None = None
    ) -> StepCredits:
        """Compute the advantages of a step's groups and account for every sampled id.

        Args:
            penalty: weighted KL penalties to subtract from the reward.

        Raises:
            RewardError: for a reward that is NaN or infinite.
            UsageError: for a custom loss scale that returns invalid weights.
        """
        config = self.config
        max_tokens = config.overlong_tokens
        shape = None if max_tokens is None else partial(overlong_penalty, max_tokens=max_tokens, buffer=config.overlong_buffer)
        return advantages(
            groups,
            kind=self.settings.advantage,
            min_group=config.min_group,
            on_failure=config.on_failure,
            rules=CreditRules(config.credit, config.discount, self._scale, shape, penalty),
            no_signal=FILTERED if self.settings.refill else NO_SIGNAL,
        )

    def tied_groups(self, groups: Sequence[Group]) -> set[str]:
        """Return task ids of zero-variance groups (length penalty included), which dynamic sampling replaces.

        Raises:
            RewardError, UsageError: as `step_credits`.
        """
        return {
            credit.trajectory.task.id for credit in self.step_credits(groups).credits if credit.reason in (FILTERED, NO_SIGNAL)
        }

    def penalties(
        self,
        groups: Sequence[Group],
        batch: Callable[[Sequence[Credit], LossDenominator], TrainingBatch],
        score: Scores,
        reference: Scores,
    ) -> Callable[[Trajectory], Penalties | None]:
        """Compute ``kl * k1`` of every id that can carry loss, by trajectory and span.

        Args:
            batch: packs credits into forward passes.
            score: returns a batch's logprobs under the current policy.
            reference: returns a batch's logprobs under the reference policy.
        """
        usable = [t for group in groups for t in group.trajectories if exclusion_reason(t) is None]
        weights = [None if self._scale is None else self._scale(t) for t in usable]
        credits = [
            Credit(t, 0.0, None, trainable_tokens(t, w), None, w)
            for t, w in sorted(zip(usable, weights, strict=True), key=lambda pair: sort_key(pair[0]))
        ]
        made = batch(credits, LossDenominator("token", 1, 1))
        by_trajectory: dict[int, dict[int, list[float]]] = {}
        if made.size:
            values = (self.config.kl * k1(score(made), reference(made))).tolist()
            for value, index, (span, offset) in zip(values, made.trajectory_n.tolist(), made.slots, strict=True):
                trajectory = made.trajectories[index]
                by_span = by_trajectory.setdefault(id(trajectory), {})
                by_span.setdefault(span, [0.0] * len(trajectory.spans[span].ids))[offset] = value
        return lambda trajectory: by_trajectory.get(id(trajectory))

    @property
    def scores_first(self) -> bool:
        """Whether a batch must be scored before its first update, which a correction needs."""
        return self.correction is not None

    def correct(self, batch: TrainingBatch) -> None:
        """Set the correction of a scored batch.

        Raises:
            ConfigError: when the engine returned no logprob for an id.
        """
        if self.correction is not None and batch.correction_n is None:
            assert batch.start_n is not None
            check_logprobs(batch, f"train.correction = '{self.correction.kind}'", "none")
            batch.correction_n = self.correction.weights(batch.start_n, batch.engine_n, batch.trajectory_n)

    def sequence(self, batch: TrainingBatch, score: Scores, *, first: bool) -> Tensor | None:
        """Return the log of each trajectory's ratio per token, at each of its tokens, N; None if 0 or unused.

        A trajectory's tokens may be in several rows and passes. So the complete batch is scored under the current policy,
        unless it was scored already and nothing was updated since.

        Args:
            first: whether this step has made no update yet.
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
        """Compute the loss of one forward pass.

        Args:
            logp_m: log-probabilities of its targets, with gradient.
            sequence_n: result of `sequence`.
        """
        n, settings = micro.tokens_m, self.settings
        old_n = batch.engine_n if self.config.old_logprobs == "engine" else batch.start_n

        def select(values_n: Tensor) -> Tensor:
            return values_n[n].to(logp_m.dtype)

        tokens = TokenBatch(
            logp=logp_m,
            old=logp_m.detach() if old_n is None else select(old_n),
            advantage=select(batch.advantages_n),
            sequence=logp_m.new_zeros(logp_m.shape) if sequence_n is None else select(sequence_n),
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
        )
        return policy_terms(
            tokens,
            settings.algorithm.loss,
            select(batch.weights_n),
            correction_m=None if batch.correction_n is None else select(batch.correction_n),
            reference_m=None if batch.reference_n is None else select(batch.reference_n),
            kl=self.config.kl if settings.kl_in == "loss" else 0.0,
            estimator=ESTIMATORS[settings.kl_estimator],
        )
