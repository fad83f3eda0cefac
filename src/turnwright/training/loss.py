"""The loss of a step, from logprobs and advantages to the number that is differentiated.

`Objective.terms` is the page to read: the loss of one forward pass, term by term. The algorithm
sets the first, the loss of each token, mostly by `clipped`. The others are the importance
correction (`Correction`), entropy, the KL estimators (`k1`, `k2`, `k3`) and teachers.

Advantages come from `advantages.advantages`, weights and denominators from
`forward.batch.make_batch`, logprobs from `forward.forward.ForwardPass.stats`. Which algorithm a
recipe names, and with which values, is in `algorithms.settings.resolve_settings`.

Suffixes of tensors are those of `forward/batch.py`: `_n` for the ids of the step, `_m` for those of
one pass, `_k` for some of them. The fields of `TokenBatch` and `TokenLoss`, which losses of users
read, have none: all are (M,).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from turnwright.config import TrainConfig
from turnwright.config.names import Advantage
from turnwright.config.schema import Aggregation, CreditUnit, KLEstimator, KLPlace
from turnwright.config.schema import Correction as CorrectionKind
from turnwright.errors import ConfigError
from turnwright.training.advantages import CreditChoice
from turnwright.training.forward.batch import TeacherScores, TrainingBatch
from turnwright.training.forward.forward import TokenStats
from turnwright.training.forward.passes import MicroBatch
from turnwright.training.group_member import Penalties
from turnwright.types import Trajectory


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """M sampled tokens of one forward pass, the input of an algorithm.

    Tensors have shape (M,), logprobs are in nats.
    """

    logp: Tensor
    """Log-probabilities under the trained policy; the only tensor with a gradient."""
    old: Tensor
    """Log-probabilities under the policy in the ratio's denominator."""
    advantage: Tensor
    sequence: Tensor
    """Mean of ``logp - old`` over all tokens of the token's trajectory, across rows and passes: the
    log of the trajectory's ratio, per token. Scored before this pass, without gradient."""
    turn: Tensor
    """Sum of ``logp - old`` over all tokens of the token's turn: the log of the turn's ratio, in
    the same way."""
    clip_low: float
    clip_high: float
    clip_cap: float | None = None
    """Bound of the ratio of tokens with a negative advantage (dual clip)."""

    @property
    def ratio(self) -> Tensor:
        """``exp(logp - old)``, with gradient."""
        return torch.exp(self.logp - self.old)


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Loss of M tokens, before their weights in the step."""

    loss: Tensor
    """(M,), with gradient."""
    ratio: Tensor
    """(M,): ratio in the loss."""
    clipped: Tensor
    """(M,), booleans: whether a bound changed the gradient."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """Loss per token, and default values of the keys that a recipe leaves open."""

    name: str
    loss: Callable[[TokenBatch], TokenLoss]
    advantage: Advantage = "std"
    credit: CreditUnit = "trajectory"
    discount: float = 1.0
    gae_lambda: float | None = None
    aggregation: Aggregation = "token"
    clip_low: float = 0.2
    clip_high: float = 0.28
    kl_estimator: KLEstimator = "k3"
    kl_in: KLPlace = "loss"
    sequence: bool = False
    """Whether it uses `TokenBatch.sequence`, which costs a scored pass before each update but the
    first."""
    turn: bool = False
    """Whether it uses `TokenBatch.turn`, which costs the same."""
    overlong: bool = False
    """Whether trajectories near the maximum length lose reward."""
    refill: int = 0
    """Maximum rounds per step that replace zero-variance groups by further tasks."""
    defining: tuple[str, ...] = ()
    """Keys whose values define the algorithm."""


@dataclass(frozen=True, slots=True)
class AlgorithmSettings:
    """Algorithm with every key resolved."""

    algorithm: Algorithm
    advantage: str
    credit: CreditUnit
    discount: float
    gae_lambda: float | None
    aggregation: Aggregation
    clip_low: float
    clip_high: float
    kl_estimator: KLEstimator
    kl_in: KLPlace
    refill: int = 0
    notes: tuple[str, ...] = ()
    """Warnings for the user: keys that undo what defines the algorithm."""

    @property
    def credit_choice(self) -> CreditChoice:
        """What they say of credit."""
        return CreditChoice(
            self.advantage, self.credit, self.discount, self.gae_lambda, self.refill
        )


def clipped(tokens: TokenBatch, ratio: Tensor | None = None) -> TokenLoss:
    """Compute PPO's clipped loss of each token, ``-min(r A, clip(r, 1 - low, 1 + high) A)``.

    PPO, arXiv 1707.06347, eq. 7, with separate bounds. With a cap c it is at most ``-c A`` where
    A < 0 (dual clip, arXiv 1912.09729, eq. 5). The ratio r is each token's own unless another is
    given.
    """
    if ratio is None:
        ratio = tokens.ratio

    unclipped = ratio * tokens.advantage
    bounded = ratio.clamp(1.0 - tokens.clip_low, 1.0 + tokens.clip_high) * tokens.advantage
    surrogate = torch.minimum(unclipped, bounded)
    stopped = bounded < unclipped

    if tokens.clip_cap is not None:
        capped = (tokens.advantage < 0) & (ratio > tokens.clip_cap)
        surrogate = torch.where(capped, tokens.clip_cap * tokens.advantage, surrogate)
        stopped = stopped | capped
    return TokenLoss(-surrogate, ratio.detach(), stopped.detach())


def by_turn(tokens: TokenBatch) -> TokenLoss:
    """Compute PPO's clipped loss with the ratio of the token's turn, that of the product of its
    tokens' probabilities: a turn is one action, of which no part is clipped alone.

    The gradient flows through each token's own logprob, so that of a turn is the ratio times the
    advantage times the gradient of the turn's log-probability.
    """
    return clipped(tokens, torch.exp(tokens.turn + (tokens.logp - tokens.logp.detach())))


BOUNDS: dict[str, tuple[float, float]] = {
    "tis": (0.0, 2.0),
    "sequence_mis": (0.0, 3.0),
    "sequence_mis_mean": (0.99, 1.01),
    "icepop": (0.2, 5.0),
}
"""Default bounds of the ratio: TIS as its authors, sequence MIS as TRL, IcePop as INTELLECT-3."""


@dataclass(frozen=True, slots=True)
class Correction:
    """Importance correction for the mismatch of engine and trainer, with its bounds."""

    kind: CorrectionKind
    low: float
    high: float

    @classmethod
    def of(cls, config: TrainConfig) -> Correction | None:
        """Return the recipe's correction; None if it has none."""
        if config.correction == "none":
            return None

        low, high = BOUNDS[config.correction]
        if config.correction_low is not None:
            low = config.correction_low
        if config.correction_high is not None:
            high = config.correction_high
        return cls(config.correction, low, high)

    def weights(self, trainer_n: Tensor, engine_n: Tensor, trajectory_n: Tensor) -> Tensor:
        """Compute the weight of each token's policy loss, (N,).

        It comes from the trainer's logprobs before the step's first update and the engine's, of
        which none is missing. r_t is the ratio of their probabilities, trainer / engine;
        `trajectory_n` are indices from 0.

        - `tis`: ``min(r_t, high)`` (truncated importance sampling; Yao et al., "Your efficient RL
          framework secretly brings you off-policy RL training", 2025). With
          `old_logprobs = "trainer"` the policy loss is then decoupled PPO of stale tokens (arXiv
          2505.24298; Hilton et al., arXiv 2110.00641) with a truncated weight:
          ``c_t * -min(u_t A, clip(u_t) A)``, where ``u_t = policy / proximal`` and
          ``c_t = min(proximal / behavior, high)``; the proximal policy is the trainer's before the
          step's first update, the behavior policy that of the engine when it sampled the token;
        - `sequence_mis`: ``R = prod_t r_t`` over the trajectory if in [low, high], else 0 (masked
          importance sampling; Liu et al., "When speed kills stability", 2025);
        - `sequence_mis_mean`: 1 if the geometric mean of r_t over the trajectory is in [low,
          high], else 0 (same source): a filter, not a weight, for trajectories too long for the
          product to be meaningful;
        - `icepop`: ``r_t`` if in [low, high], else 0 (IcePop; INTELLECT-3,
          arXiv 2512.16144, eq. 1).
        """
        by_mean = self.kind == "sequence_mis_mean"

        log_ratio_n = trainer_n - engine_n
        if by_mean or self.kind == "sequence_mis":
            log_ratio_n = per_trajectory(log_ratio_n, trajectory_n, mean=by_mean)
        ratio_n = log_ratio_n.exp()
        if self.kind == "tis":
            return ratio_n.clamp(max=self.high)

        weights_n = torch.ones_like(ratio_n) if by_mean else ratio_n
        within_n = (ratio_n >= self.low) & (ratio_n <= self.high)
        return torch.where(within_n, weights_n, 0.0)


def per_trajectory(values_n: Tensor, trajectory_n: Tensor, *, mean: bool) -> Tensor:
    """Compute the sum (or mean) of each trajectory's values, at each of its tokens, across rows.

    By indices of turns instead, it is that of each turn's.
    """
    trajectories = int(trajectory_n.max()) + 1 if trajectory_n.numel() else 0
    totals = values_n.new_zeros(trajectories).index_add_(0, trajectory_n, values_n)
    if mean:
        ones_n = torch.ones_like(values_n)
        counts = values_n.new_zeros(trajectories).index_add_(0, trajectory_n, ones_n)
        totals /= counts.clamp(min=1.0)
    return totals[trajectory_n]


def k1(logp_m: Tensor, reference_m: Tensor) -> Tensor:
    """Estimate KL(policy || reference) by ``log(policy / reference)``: unbiased, may be negative.

    J. Schulman, "Approximating KL divergence", 2020. As a reward penalty, its policy gradient is
    that of the KL. In a loss, its gradient is ``grad logp``, whose mean is 0, so it constrains
    nothing.
    """
    return logp_m - reference_m


def k2(logp_m: Tensor, reference_m: Tensor) -> Tensor:
    """Estimate the KL by ``log(policy / reference)^2 / 2``: never negative, biased as a value.

    Same source. In a loss, its gradient is ``log(policy / reference) * grad logp``, whose mean over
    tokens of the policy is the gradient of KL(policy || reference).
    """
    return 0.5 * (logp_m - reference_m) ** 2


def k3(logp_m: Tensor, reference_m: Tensor) -> Tensor:
    """Estimate KL(policy || reference) by ``r - 1 - log r``: unbiased and never negative.

    r is reference / policy. Same source; DeepSeekMath, arXiv 2402.03300, eq. 4. In a loss, its
    gradient is ``(1 - r) * grad logp``, whose mean over tokens of the policy is the gradient of
    KL(reference || policy).
    """
    log_ratio = reference_m - logp_m
    return torch.expm1(log_ratio) - log_ratio


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


@dataclass(frozen=True, slots=True)
class LogRatios:
    """Change of log-probabilities since they are old, of what each of N tokens belongs to."""

    sequence_n: Tensor | None
    """Of its trajectory, per token of it; None where it is not used."""
    turn_n: Tensor | None
    """Of its turn, likewise."""


@dataclass(frozen=True, slots=True)
class PolicyTerms:
    """Terms of a policy loss over M tokens; differentiate `loss`, the rest is for metrics."""

    loss: Tensor
    """Scalar: the weighted sum of token losses."""
    ratio_m: Tensor
    clipped_m: Tensor
    """Whether a bound changed the gradient."""


def effective_sample_share(weights_n: Tensor) -> float:
    """Compute the effective sample size of importance weights, as a share of the tokens.

    It is ``(sum w)^2 / (n sum w^2)`` (Kong 1992), and 0 where every weight is.
    """
    squares = (weights_n**2).sum()
    return float(weights_n.sum() ** 2 / (weights_n.numel() * squares)) if squares > 0 else 0.0


def logprob_mismatch(trainer_n: Tensor, engine_n: Tensor) -> dict[str, float]:
    """Measure the difference of engine and trainer logprobs, over tokens that have both.

    Returns:
        `mismatch_mean`, `mismatch_p95` and `mismatch_max` of the absolute difference in nats;
        `mismatch_kl`, an estimate of KL(engine || trainer) per token; `importance_ess`, the
        effective sample share of importance weights trainer / engine. Empty if the engine returned
        no logprobs.
    """
    have_both_n = torch.isfinite(engine_n)
    if not bool(have_both_n.any()):
        return {}

    log_ratio_k = trainer_n[have_both_n].double() - engine_n[have_both_n].double()
    gaps_k = log_ratio_k.abs().sort().values
    p95 = int(0.95 * (gaps_k.numel() - 1))
    return {
        "mismatch_mean": gaps_k.mean().item(),
        "mismatch_p95": gaps_k[p95].item(),
        "mismatch_max": gaps_k[-1].item(),
        "mismatch_kl": (torch.expm1(log_ratio_k) - log_ratio_k).mean().item(),
        "importance_ess": effective_sample_share(log_ratio_k.exp()),
    }


Scores = Callable[[TrainingBatch], Tensor]
"""Logprobs of a batch's ids, (N,), under some policy."""


class Objective:
    """Loss of an optimizer step, as the keys of `[train]` define it."""

    def __init__(self, config: TrainConfig, settings: AlgorithmSettings) -> None:
        self.config = config
        self.settings = settings
        self.correction = Correction.of(config)

    @property
    def penalizes_reward(self) -> bool:
        """Whether KL is subtracted from the reward, so that trajectories must be scored
        before they are compared."""
        return bool(self.config.kl) and self.settings.kl_in == "reward"

    def penalties(
        self,
        batch: TrainingBatch,
        score: Scores,
        reference: Scores,
    ) -> Callable[[Trajectory], Penalties | None]:
        """Compute ``kl * k1`` of the batch's ids, by trajectory and span, from logprobs under both
        policies."""
        if not batch.size:
            return lambda trajectory: None
        penalties_n = self.config.kl * k1(score(batch), reference(batch))
        return batch.by_trajectory(penalties_n, 0.0)

    def log_ratios(self, batch: TrainingBatch, score: Scores, *, first: bool) -> LogRatios | None:
        """Return the log of the ratios of each token's trajectory and turn.

        None where the algorithm has no use for them, and where they are 0: before the `first`
        update, if the ratio is that to the trainer's own logprobs.

        A trajectory's tokens may be in several rows and passes. So the complete batch is scored
        under the current policy, unless it was scored already and nothing was updated since.
        """
        algorithm = self.settings.algorithm
        if not (algorithm.sequence or algorithm.turn):
            return None
        by_engine = self.config.old_logprobs == "engine"
        if first and not by_engine:
            return None

        if first and batch.start_n is not None:
            now_n = batch.start_n
        else:
            now_n = score(batch)
        old_n = batch.engine_n if by_engine else batch.start_n
        assert old_n is not None
        change_n = now_n - old_n
        sequence_n = turn_n = None
        if algorithm.sequence:
            sequence_n = per_trajectory(change_n, batch.trajectory_n, mean=True)
        if algorithm.turn:
            turn_n = per_trajectory(change_n, batch.turn_n, mean=False)
        return LogRatios(sequence_n, turn_n)

    def terms(
        self,
        batch: TrainingBatch,
        micro: MicroBatch,
        stats: TokenStats,
        log_ratios: LogRatios | None,
    ) -> PolicyTerms:
        """Compute the loss of one forward pass from the statistics of its M targets, with gradient.

        It is::

            sum_t w_t * (c_t * loss_t
                         + [c_t > 0] * (kl * estimator(logp_t, ref_t) - entropy * H_t + D_t))

        The weights ``w_t`` include denominators and loss scale. Without a correction ``c_t`` is 1;
        without a reference, the KL term is omitted; ``D_t`` is the weighted divergence from
        teachers.
        """
        config = self.config
        settings = self.settings
        logp_m = stats.logprobs_m

        def select(values_n: Tensor) -> Tensor:
            return values_n[micro.tokens_m].to(logp_m.dtype)

        # The algorithm's loss per token, of a ratio and an advantage.
        old_n = batch.engine_n if config.old_logprobs == "engine" else batch.start_n
        no_change_m = logp_m.new_zeros(logp_m.shape)
        ratios = log_ratios or LogRatios(None, None)
        tokens = TokenBatch(
            logp=logp_m,
            old=logp_m.detach() if old_n is None else select(old_n),
            advantage=_with_teachers(select(batch.advantages_n), batch, micro, logp_m),
            sequence=no_change_m if ratios.sequence_n is None else select(ratios.sequence_n),
            turn=no_change_m if ratios.turn_n is None else select(ratios.turn_n),
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            clip_cap=config.clip_cap,
        )
        token_loss = settings.algorithm.loss(tokens)

        # Tokens of an older policy weigh by the correction; one that it excludes has no penalty.
        weights_m = select(batch.weights_n)
        loss_m = token_loss.loss
        penalty_weights_m = weights_m
        if batch.correction_n is not None:
            correction_m = select(batch.correction_n)
            loss_m = loss_m * correction_m
            penalty_weights_m = weights_m * (correction_m > 0)
        loss = (loss_m * weights_m).sum()

        # Entropy, distance from the reference, and distance from teachers.
        if stats.entropy_m is not None and config.entropy:
            loss = loss - config.entropy * (stats.entropy_m * penalty_weights_m).sum()
        if batch.reference_n is not None and config.kl and settings.kl_in == "loss":
            estimate = ESTIMATORS[settings.kl_estimator]
            kl_m = estimate(logp_m, select(batch.reference_n))
            loss = loss + config.kl * (kl_m * penalty_weights_m).sum()
        divergence_m = _weighted_divergence(batch, stats)
        if divergence_m is not None:
            loss = loss + (divergence_m * penalty_weights_m).sum()
        return PolicyTerms(loss, token_loss.ratio, token_loss.clipped)


def _with_teachers(
    advantage_m: Tensor,
    batch: TrainingBatch,
    micro: MicroBatch,
    logp_m: Tensor,
) -> Tensor:
    """Return advantages with what the teachers that score sampled ids add to them."""
    index_m = micro.tokens_m
    for scores in batch.teachers:
        if scores.targets is not None:
            continue  # its divergence is a term of its own

        policy_m = logp_m.detach().double() if batch.start_n is None else batch.start_n[index_m]
        added_m = teacher_advantage(scores, index_m, policy_m)
        advantage_m = advantage_m + added_m.to(logp_m.dtype)
    return advantage_m


def _weighted_divergence(batch: TrainingBatch, stats: TokenStats) -> Tensor | None:
    """Return the weighted sum of the divergences from teachers that give distributions."""
    weights = [scores.teacher.weight for scores in batch.teachers if scores.targets is not None]
    total_m: Tensor | None = None
    for weight, divergence_m in zip(weights, stats.divergences, strict=True):
        term_m = weight * divergence_m
        total_m = term_m if total_m is None else total_m + term_m
    return total_m


def teacher_advantage(scores: TeacherScores, index_k: Tensor, policy_k: Tensor) -> Tensor:
    """Compute ``weight * (log p_teacher - log p_policy)`` of some tokens, in float64.

    The difference is bounded, and 0 without an answer. Its mean over ids of the policy, times
    ``grad log p_policy``, is the gradient of -weight * KL(policy || teacher) per id (on-policy
    distillation: Agarwal et al., arXiv 2306.13649; as a reward per id: Thinking Machines, 2025).
    """
    teacher = scores.teacher
    gap_k = scores.gap(index_k, policy_k).clamp(-teacher.bound, teacher.bound)
    return teacher.weight * gap_k.nan_to_num(0.0)


def check_logprobs(
    batch: TrainingBatch,
    key: str = "train.old_logprobs = 'engine'",
    other: str = "trainer",
) -> None:
    """Raise `ConfigError` unless the engine returned every logprob, which recipe key `key`
    needs if not set to `other`."""
    missing = int(torch.isnan(batch.engine_n).sum())
    if missing:
        raise ConfigError(
            f"{key} needs a logprob for every sampled id; {missing} of {batch.size} have none: set "
            f"it to {other!r}"
        )
