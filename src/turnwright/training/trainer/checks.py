"""Checks of a step: logprob mismatch, template identity, and a probe of weight updates.

The probe tests whether the engine samples with the last update. A fingerprint is the engine's own
report, and a bound on |dlogp| lets a small lost update pass. So the trainer records its
distribution at a few positions of the last step's trajectories, before and after the update, and
the engine reports its most likely id there. The missing share of the update at a position is
``(engine - after) / (before - after)`` of that id's logprob: 0 with the update, 1 with the old
weights, anything if rounding exceeds the update. Of 16 positions where rounding alone decides, 13
have a share from 0.5 to 1.5 once in 38 million steps: a ratio of two independent centered normals
is in there with a probability of at most 1/6, whatever their sizes.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from turnwright.config import TrainConfig
from turnwright.engines import Engine, Generation, Request, Sampling
from turnwright.errors import SyncError, TurnwrightError, UsageError
from turnwright.records.episode_metrics import top_counts
from turnwright.training.credit import Credit, StepCredits
from turnwright.training.forward.batch import TrainingBatch
from turnwright.training.forward.forward import BANNED_LOGIT, LogitDistribution
from turnwright.training.forward.passes import MicroBatch, padded
from turnwright.training.forward.ranks import Ranks
from turnwright.training.forward.rows import TrainingRow, rows_of
from turnwright.training.loss import PolicyTerms, effective_sample_share, k3, logprob_mismatch
from turnwright.training.trainer.optimizer import Agreement
from turnwright.training.untrained_reasons import MISMATCH, REJECTED, TRAINED
from turnwright.types import Trajectory


@dataclass(slots=True)
class StepMetrics:
    """Metrics of a step's forward passes; every mean is over tokens,
    independent of micro-batching."""

    ratio: list[Tensor] = field(default_factory=list)
    clipped: list[Tensor] = field(default_factory=list)
    entropy: list[Tensor] = field(default_factory=list)
    kl: list[Tensor] = field(default_factory=list)
    start: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Logprobs of the trainer, from before the first update, and of the engine, of tokens
    of the current version."""
    corrections: list[Tensor] = field(default_factory=list)
    """Correction weights of each batch."""
    updates: list[tuple[float, float]] = field(default_factory=list)
    """Loss and gradient norm (before clipping) of each optimizer step."""
    moved: bool = False
    """Whether most ids of a batch differ from the engine's by more than `mismatch_bound`."""
    agreement: Agreement | None = None
    """Agreement of the step's first gradient with the momentum of earlier steps."""

    good_kl: float | None = None
    """KL divergence of the policy after the step from that before it, over good
    episodes (`StepLimit`)."""
    step_share: float = 1.0
    """Share of the step that was made."""

    def add(
        self, terms: PolicyTerms, entropy_m: Tensor, reference: tuple[Tensor, Tensor] | None
    ) -> None:
        """Add one pass; `reference` is (policy logprobs, reference logprobs)."""
        self.ratio.append(terms.ratio_m)
        self.clipped.append(terms.clipped_m)
        self.entropy.append(entropy_m)
        if reference is not None:
            self.kl.append(k3(reference[0].double(), reference[1]))

    @property
    def masked(self) -> int:
        """Number of ids excluded by a correction."""
        return sum(int((weights_n == 0).sum()) for weights_n in self.corrections)

    def reduce(self, ranks: Ranks) -> None:
        """Add the passes of the other ranks."""
        for parts in (self.ratio, self.clipped, self.entropy, self.kl):
            parts[:] = ranks.gather(parts)

    def metrics(self) -> dict[str, float]:
        """Return means over the step; without an update, only `loss` and `grad_norm`, both 0."""
        if not self.updates:
            return {"loss": 0.0, "grad_norm": 0.0}
        losses, norms = zip(*self.updates, strict=True)
        metrics = {"loss": sum(losses) / len(losses), "grad_norm": sum(norms) / len(norms)}
        for name, parts in (
            ("ratio_mean", self.ratio),
            ("clip_fraction", self.clipped),
            ("entropy", self.entropy),
        ):
            metrics[name] = float(torch.cat(parts).double().mean())
        if self.agreement is not None:
            metrics["gradient_agreement"] = self.agreement.cosine
            metrics["gradient_agreement_scaled"] = self.agreement.scaled
        if self.good_kl is not None:
            metrics["step_kl"] = self.good_kl
            metrics["step_share"] = self.step_share
        if self.kl:
            metrics["kl"] = float(torch.cat(self.kl).double().mean())
        if self.corrections:
            weights_n = torch.cat(self.corrections)
            metrics["correction_mean"] = float(weights_n.mean())
            metrics["correction_ess"] = effective_sample_share(weights_n)
            metrics["correction_masked"] = self.masked / weights_n.numel()
        trainer, engine = zip(*self.start, strict=True)
        return metrics | logprob_mismatch(torch.cat(trainer), torch.cat(engine))


def teacher_figures(batches: Sequence[TrainingBatch]) -> dict[str, float]:
    """Return each teacher's figures of a step: the share of trained ids that it answered
    for, the mean of log p_policy - log p_teacher there before the first update, and the
    share over its bound."""
    found: dict[str, float] = {}
    for number in range(len(batches[0].teachers) if batches else 0):
        teacher, name = (
            batches[0].teachers[number].teacher,
            f"teacher.{batches[0].teachers[number].name}",
        )
        scored = [
            (batch.teachers[number], batch.start_n)
            for batch in batches
            if batch.start_n is not None
        ]
        everything = slice(None)
        gap_n = -torch.cat([scores.gap(everything, start_n) for scores, start_n in scored])
        known_n = gap_n.isfinite()
        found[f"{name}.answered"] = float(known_n.double().mean())
        if scored[0][0].chunk_n is not None:
            found[f"{name}.unaligned"] = scored[0][0].unaligned
        if bool(known_n.any()):
            found[f"{name}.kl"] = float(gap_n[known_n].mean())
            if teacher.signal == "advantage":
                found[f"{name}.bounded"] = float(
                    (gap_n[known_n].abs() > teacher.bound).double().mean()
                )
    return found


def accounting_metrics(step_credits: StepCredits, masked: int = 0) -> dict[str, float]:
    """Account for a step's trajectories and sampled ids (sum: `tokens_sampled`), some
    `masked` by a correction."""
    counts = step_credits.tokens - Counter({TRAINED: masked}) + Counter({MISMATCH: masked})
    values = [credit.advantage for credit in step_credits.credits if credit.advantage is not None]
    return {
        "tokens_trained": 0.0,
        "tokens_sampled": float(step_credits.sampled),
        **{f"tokens_{reason}": float(count) for reason, count in sorted(counts.items())},
        "trajectories": float(len(step_credits.credits)),
        "trajectories_trained": float(len(values)),
        "advantage_abs": math.fsum(map(abs, values)) / len(values) if values else 0.0,
        **{
            f"{REJECTED}{reason}": float(n)
            for reason, n in top_counts(step_credits.rejected).items()
        },
    }


EXACT = 1e-3
"""Default of the maximum mismatch in float32, nats."""
PROBE_EVERY, PROBED = 20, 2
"""In float32, so many steps of each twenty have a `WeightSyncProbe`, which
takes three short passes."""


def mismatch_bound(config: TrainConfig, dtype: torch.dtype) -> float:
    """Return the maximum allowed |logprob of trainer - of engine|, nats. The default is 1e-3 in
    float32 (a correct engine is within 1e-4), also with a correction. There is none in lower
    precision, where rounding alone reaches 0.2."""
    if config.max_mismatch is not None:
        return config.max_mismatch
    return math.inf if dtype in (torch.bfloat16, torch.float16) else EXACT


def needs_probe(
    config: TrainConfig, dtype: torch.dtype, step: int, *, rounded_inputs: bool
) -> bool:
    """Whether to check that an engine has the update of a step: always where `check_mismatch`
    allows as much as an update changes, else in two steps of twenty, since updates that are lost in
    between add up to `EXACT` at most."""
    return rounded_inputs or mismatch_bound(config, dtype) > EXACT or step % PROBE_EVERY < PROBED


ROUNDED_SHARE, ROUNDED_BOUND, ROUNDED_K3, ROUNDED_PART = 0.01, 0.5, 1e-5, 0.25
"""With activations in fp8: allowed share of ids over `mismatch_bound`, maximum of one id in
nats, and mean k3. With more such ids or a larger k3, the mean difference may be `ROUNDED_PART`
of what rounding changes."""
ROUNDED_STEPS = 2
"""Steps in a row in which most ids may be over `mismatch_bound`. A crossing in a prompt that all
episodes share ends with the next update. A fault of the engine remains, and one in the last layer
changes less than rounding does."""


def check_mismatch(
    batch: TrainingBatch,
    config: TrainConfig,
    dtype: torch.dtype,
    distribution: LogitDistribution,
    *,
    rounding_effect: Callable[[], float] | None = None,
    moved_steps: int = 0,
) -> bool:
    """Compare the trainer's logprobs before the first update with the engine's; raise
    `TurnwrightError` for an id without probability. Raise `SyncError` when a token of the current
    version differs by more than `mismatch_bound`, or the mean KL of those exceeds the allowed
    divergence. Tokens of older versions differ by training; they are for `train.correction`.

    With activations in fp8, sums in another order can cross a rounding boundary and move an id by
    1e-2, or all ids after a prompt that every episode shares. `rounding_effect` then returns the
    mean |change of logprobs| by rounding activations; an engine that rounds them differently
    differs by about that. Return whether most ids were over the bound; `moved_steps` is the number
    of steps in a row before this one in which they were.
    """
    bound = mismatch_bound(config, dtype)
    # Rounding stays far below 0.1 nats in any precision, and a diverging run reaches it;
    # `max_mismatch` declares a difference intended.
    divergence = 0.1 if config.max_mismatch is None else math.inf
    divergence = divergence if config.max_mismatch_kl is None else config.max_mismatch_kl
    assert batch.start_n is not None
    odd_n = ~(batch.start_n > 0.5 * BANNED_LOGIT)
    if bool(odd_n.any()):
        raise TurnwrightError(
            "the trainer gives no probability to an id that was sampled in "
            f"{_where(batch, int(odd_n.nonzero()[0]))}: it is a banned id, or the model's weights "
            "are not finite; check that the engine gets the same banned_ids"
        )
    current_n = batch.current_n
    if not bool(current_n.any()):
        return False
    gap_n = (batch.start_n - batch.engine_n).abs().nan_to_num(0.0).masked_fill(~current_n, 0.0)
    worst = int(gap_n.argmax())
    mismatch = logprob_mismatch(batch.start_n[current_n], batch.engine_n[current_n])
    check = (
        f"weights (version and fingerprint), samples at temperature {distribution.temperature:g} "
        f"with top_p {distribution.top_p:g}, top_k {distribution.top_k} and min_p "
        f"{distribution.min_p:g}, bans the same {len(distribution.banned_ids)} ids, and computes "
        f"in {str(dtype).removeprefix('torch.')}; if the difference is intended,"
    )
    most = 2 * int((gap_n > bound).sum()) > int(current_n.sum())
    if rounding_effect is not None and config.max_mismatch is None and gap_n[worst] > bound:
        remains = most and moved_steps >= ROUNDED_STEPS
        few = int((gap_n > bound).sum()) <= max(1.0, ROUNDED_SHARE * int(current_n.sum()))
        few = few and mismatch["mismatch_kl"] <= ROUNDED_K3
        if few or (not remains and mismatch["mismatch_mean"] <= ROUNDED_PART * rounding_effect()):
            bound = ROUNDED_BOUND
    if gap_n[worst] <= bound:
        if not mismatch.get("mismatch_kl", 0.0) > divergence:
            return most
        raise SyncError(
            "engine and trainer sample from different policies: KL(engine || trainer) is "
            f"{mismatch['mismatch_kl']:.3g} nats per token, over train.max_mismatch_kl = "
            f"{divergence:g}, effective sample size {100 * mismatch['importance_ess']:.0f}%. The "
            f"weights are unchanged. Check that the engine has the newest {check} raise "
            "train.max_mismatch_kl"
        )
    raise SyncError(
        "engine and trainer disagree on sampled ids: |logprob of trainer - of engine| is "
        f"{gap_n[worst]:.3g} at most, {mismatch['mismatch_mean']:.3g} on average, and over "
        f"train.max_mismatch = {bound:g} for {int((gap_n > bound).sum())} of "
        f"{int(current_n.sum())} ids (worst in {_where(batch, worst)}: {batch.engine_n[worst]:.4f} "
        f"in the engine, {batch.start_n[worst]:.4f} in the trainer). "
        f"{_cache_suspicion(batch, gap_n > bound)}The weights are unchanged. Check that the engine "
        f"has the newest {check} raise train.max_mismatch; train.correction then weighs the "
        "difference"
    )


def _cache_suspicion(batch: TrainingBatch, over_n: Tensor) -> str:
    """Return a sentence if all ids over the bound are of calls whose context came from the
    engine's cache, else nothing."""
    cached = [
        {span for turn in t.turns if turn.cached for span in turn.spans} for t in batch.trajectories
    ]
    from_cache_n = torch.tensor(
        [
            span in cached[index]
            for index, (span, _) in zip(batch.trajectory_n.tolist(), batch.slots, strict=True)
        ],
        device=over_n.device,
    )
    if bool((over_n & ~from_cache_n).any()):
        return ""
    if bool((batch.current_n & ~from_cache_n).any()):
        only = (
            "All of them, and none of the ids of other calls, are in calls whose context came "
            "from the engine's prefix cache"
        )
        return f"{only}: the prefix cache outlived a weight update. "
    return (
        "Every call had a part of its context from the engine's prefix cache, which may have "
        "outlived a weight update. "
    )


def check_finite(loss: float, norm: float, where: str) -> None:
    """Raise `TurnwrightError` when the loss or its gradient is not finite, so that an update
    would destroy the weights."""
    if not math.isfinite(norm) or not math.isfinite(loss):
        raise TurnwrightError(
            f"in {where} the loss is {loss} and its gradient norm {norm}; the weights are "
            "unchanged: lower the learning rate, and check this step's trajectories for extreme "
            "rewards or logprobs"
        )


def _where(batch: TrainingBatch, token: int) -> str:
    key = batch.trajectories[int(batch.trajectory_n[token])].key
    return f"task {key.task!r}, sample {key.sample}, step {key.metrics_step}"


def check_fingerprints(fingerprint: str, trajectories: Iterable[Trajectory], where: str) -> None:
    """Raise `UsageError` for ids from another template, tokenizer or settings; an empty
    fingerprint accepts any."""
    for trajectory in trajectories:
        if fingerprint and trajectory.template and trajectory.template != fingerprint:
            key = trajectory.key
            name = f"{key.phase}/{key.step}/{key.task}/{key.sample}"
            raise UsageError(
                f"{where} has an episode ({name}) of another chat template, tokenizer or settings "
                f"(hash {trajectory.template}, here {fingerprint}), whose ids mean something else "
                "to this model: remove it, or train with the settings it was sampled with"
            )


TRAJECTORIES, POSITIONS = 4, 4
"""Trajectories of a step that are probed, and positions in each."""
NEAR = (0.5, 1.5)
"""Missing share that counts as the full update."""
MIN_POSITIONS, MAX_SHARE = 12, 0.8
"""The check fails only with at least so many positions, if this share of them lacks
about the full update."""


@dataclass(slots=True)
class WeightSyncProbe:
    """Change of the trainer's distribution by an update, at K positions."""

    contexts: list[list[int]]
    micros: list[MicroBatch]
    before_kv: Tensor
    """Log-probabilities, on the CPU."""
    after_kv: Tensor | None = None

    @classmethod
    def before(
        cls, credits: Sequence[Credit], score: Callable[[MicroBatch], Tensor], device: torch.device
    ) -> WeightSyncProbe | None:
        """Record the distribution (M, vocabulary) before an update; None if no text-only
        trajectory is trained."""
        usable = [
            c
            for c in credits
            if c.reason is None and c.tokens and not any(s.media for s in c.trajectory.spans)
        ]
        chosen = usable[:: max(1, len(usable) // TRAJECTORIES)][:TRAJECTORIES]
        rows = [_thinned(rows_of(credit.trajectory, 0, credit.weights)[0]) for credit in chosen]
        if not rows:
            return None
        micros = padded(rows, max(len(row.ids) for row in rows) * len(rows), device)
        contexts = [row.ids[:place] for row in rows for place in row.places]
        return cls(contexts, micros, _scored(micros, score, len(contexts)))

    def after(self, score: Callable[[MicroBatch], Tensor]) -> WeightSyncProbe:
        """Record the distribution after the update."""
        self.after_kv = _scored(self.micros, score, len(self.contexts))
        return self

    async def ask(
        self, engine: Engine, version: int, banned_ids: Collection[int], seconds: float
    ) -> None:
        """Raise `SyncError` when the engine lacks a part of the update, `EngineError`
        when it does not answer."""
        requests = [
            Request(
                context,
                1,
                frozenset(),
                seed=0,
                session=f"probe/{version}/{number}",
                sampling=Sampling(temperature=0.0),
                banned_ids=frozenset(banned_ids),
                min_version=version,
            )
            for number, context in enumerate(self.contexts)
        ]
        try:
            pending = asyncio.gather(*(engine.generate(request) for request in requests))
            replies: list[Generation] = await asyncio.wait_for(pending, seconds)
        finally:
            for request in requests:
                engine.release(request.session)
        assert self.after_kv is not None
        found = []
        for number, reply in enumerate(replies):
            logprob = reply.logprobs[0] if reply.ids else None
            # A cache kept on purpose lacks a part of the update.
            own_cache = reply.cache_version is None or reply.cache_version >= version
            if logprob is not None and own_cache:
                after = float(self.after_kv[number, reply.ids[0]])
                found.append((logprob - after, float(self.before_kv[number, reply.ids[0]]) - after))
        lost, positions = count_missing(found)
        if positions >= MIN_POSITIONS and lost >= MAX_SHARE * positions:
            cached = sum(reply.cached_tokens > 0 for reply in replies)
            cache = (
                f", or its prefix cache ({cached} of {len(replies)} answers used it) outlived the "
                "update"
                if cached
                else ""
            )
            gap, moved = (sum(abs(pair[side]) for pair in found) / len(found) for side in (0, 1))
            raise SyncError(
                f"the engine reports policy {version}, but at {lost} of {positions} positions of "
                "the last step's trajectories its logprobs lack the last update: |logprob of "
                f"engine - of trainer| is {gap:.3g} on average, and the update changed them by "
                f"{moved:.3g}. It has the old weights, ignores the LoRA it received{cache}: check "
                "how it loads weights; nothing was trained on its episodes"
            )


def count_missing(found: Sequence[tuple[float, float]]) -> tuple[int, int]:
    """Count the positions where an engine lacks about the full update, and those where the update
    changed anything, from (engine - after, before - after) of each in nats."""
    shares = [d / s for d, s in found if s and math.isfinite(d) and math.isfinite(s)]
    return sum(NEAR[0] < share < NEAR[1] for share in shares), len(shares)


def _scored(
    micros: Sequence[MicroBatch], score: Callable[[MicroBatch], Tensor], positions: int
) -> Tensor:
    parts = [(micro.tokens_m.cpu(), score(micro).cpu()) for micro in micros]
    found = parts[0][1].new_empty((positions, parts[0][1].shape[-1]))
    for tokens_m, logp_mv in parts:
        found[tokens_m] = logp_mv
    return found


def _thinned(row: TrainingRow) -> TrainingRow:
    """Reduce a row to a few of its targets, spread over it."""
    chosen = range(0, len(row.places), max(1, len(row.places) // POSITIONS))[:POSITIONS]
    places = [row.places[k] for k in chosen]
    return TrainingRow(
        ids=row.ids[: places[-1]],
        places=places,
        targets=[row.targets[k] for k in chosen],
        weights=[row.weights[k] for k in chosen],
        logprobs=[row.logprobs[k] for k in chosen],
        trajectory=0,
    )
