"""Trainer and the metrics of a step."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from turnwise.config import TrainConfig
from turnwise.errors import ConfigError, TurnwiseError
from turnwise.renderers.vision import PixelCache
from turnwise.training.advantages import MISMATCH, TRAINED, Credit, StepCredits, sort_key
from turnwise.training.credit import trainable_tokens
from turnwise.training.distributed import Ranks, full_logprobs_of, shard, stats_of
from turnwise.training.forward.batch import LossDenominator, MicroBatch, TrainingBatch, make_batch, split_minibatches
from turnwise.training.forward.forward import ForwardPass
from turnwise.training.forward.head import LogitDistribution
from turnwise.training.forward.tree_batching import BatchPacker
from turnwise.training.loss import PolicyTerms, effective_sample_share, k3, logprob_mismatch
from turnwise.training.model.lora import adapter_of
from turnwise.training.model.models import OPTIMIZER_FILE, REFERENCE_FILE, enable_gradient_checkpointing, freeze, read_tensors
from turnwise.training.model.reference import ReferencePolicy
from turnwise.training.model.weights import Transform, Weights, apply_transforms, clone_tensors, tied_names
from turnwise.training.trainer.checks import (
    WeightSyncProbe,
    check_fingerprints,
    check_finite,
    check_logprobs,
    check_mismatch,
    divergence_bound,
    mismatch_bound,
)
from turnwise.training.trainer.micro_batching import (
    MicroBatchLimit,
    policy_backward,
    sampling_support,
    score_batch,
    supervised_backward,
)
from turnwise.training.trainer.objective import Objective
from turnwise.training.trainer.optimizer import GradientSignal, Optimizer, schedule
from turnwise.types import Group, Trajectory


class StepMetrics:
    """Metrics of a step's forward passes; every mean is over tokens, independent of micro-batching."""

    def __init__(self) -> None:
        self._ratio: list[Tensor] = []
        self._clipped: list[Tensor] = []
        self._entropy: list[Tensor] = []
        self._kl: list[Tensor] = []
        self._trainer: list[Tensor] = []
        self._engine: list[Tensor] = []
        self._corrections: list[Tensor] = []
        self._losses: list[float] = []
        self._norms: list[float] = []
        self.agreement: float | None = None
        """Cosine of the step's first gradient with the momentum of earlier steps."""

    @property
    def updates(self) -> int:
        """Optimizer steps taken."""
        return len(self._losses)

    def add(self, terms: PolicyTerms, entropy_m: Tensor, reference: tuple[Tensor, Tensor] | None) -> None:
        """Add one pass; `reference` is (policy logprobs, reference logprobs)."""
        self._ratio.append(terms.ratio_m)
        self._clipped.append(terms.clipped_m)
        self._entropy.append(entropy_m)
        if reference is not None:
            self._kl.append(k3(reference[0].double(), reference[1]))

    def measured(self, trainer_n: Tensor, engine_n: Tensor) -> None:
        """Add logprobs of the trainer, from before the first update, and of the engine."""
        self._trainer.append(trainer_n)
        self._engine.append(engine_n)

    def corrected(self, weights_n: Tensor) -> None:
        """Add a batch's correction weights."""
        self._corrections.append(weights_n)

    @property
    def masked(self) -> int:
        """Number of ids excluded by a correction."""
        return sum(int((weights_n == 0).sum()) for weights_n in self._corrections)

    def updated(self, loss: float, grad_norm: float) -> None:
        """Add an optimizer step's loss and gradient norm (before clipping)."""
        self._losses.append(loss)
        self._norms.append(grad_norm)

    def reduce(self, ranks: Ranks) -> None:
        """Add the passes of the other ranks."""
        if ranks.size > 1:
            self._ratio, self._clipped, self._entropy, self._kl = (
                ranks.gather(parts) for parts in (self._ratio, self._clipped, self._entropy, self._kl)
            )

    def metrics(self) -> dict[str, float]:
        """Return means over the step; without an update, only `loss` and `grad_norm`, both 0."""
        if not self._losses:
            return {"loss": 0.0, "grad_norm": 0.0}
        metrics = {
            "loss": sum(self._losses) / len(self._losses),
            "grad_norm": sum(self._norms) / len(self._norms),
            "ratio_mean": _mean(self._ratio),
            "clip_fraction": _mean(self._clipped),
            "entropy": _mean(self._entropy),
        }
        if self.agreement is not None:
            metrics["gradient_agreement"] = self.agreement
        if self._kl:
            metrics["kl"] = _mean(self._kl)
        if self._corrections:
            weights_n = torch.cat(self._corrections)
            metrics["correction_mean"] = float(weights_n.mean())
            metrics["correction_ess"] = effective_sample_share(weights_n)
            metrics["correction_masked"] = self.masked / weights_n.numel()
        return metrics | logprob_mismatch(torch.cat(self._trainer), torch.cat(self._engine))


def accounting_metrics(step_credits: StepCredits, masked: int = 0) -> dict[str, float]:
    """Account for a step's sampled ids and trajectories; the counts of ids sum to `tokens_sampled`.

    Args:
        masked: ids without loss because a correction excluded them.
    """
    counts = step_credits.tokens - Counter({TRAINED: masked}) + Counter({MISMATCH: masked})
    values = [credit.advantage for credit in step_credits.credits if credit.advantage is not None]
    return {
        "tokens_trained": 0.0,
        "tokens_sampled": float(step_credits.sampled),
        **{f"tokens_{reason}": float(count) for reason, count in sorted(counts.items())},
        "trajectories": float(len(step_credits.credits)),
        "trajectories_trained": float(len(values)),
        "advantage_abs": math.fsum(map(abs, values)) / len(values) if values else 0.0,
    }


def _mean(parts: list[Tensor]) -> float:
    return float(torch.cat(parts).double().mean())


class StepResult(NamedTuple):
    """Result of one training step."""

    metrics: dict[str, float]
    token_records: tuple[Sequence[Credit], Sequence[TrainingBatch]]
    """Credits of the step and its trained batches, for `write_token_records`; they hold device tensors."""


class Trainer:
    """Trainer of one causal language model, on groups of trajectories (`step`) or demonstrations (`supervised`).

    An engine receives copies of the weights through `weights()`, so a lost update shows as a logprob mismatch.

    Args:
        model: Hugging Face causal model, or a module of its shape: `get_output_embeddings`, a body under
            `base_model_prefix`, a `forward` that takes `input_ids`, `position_ids`, `attention_mask` and `use_cache`.
        temperature: the engine's; logprobs of both are of the tempered distribution.
        banned_ids: ids that the engine never samples; excluded from the trainer's softmax too.
        seed: seed of the minibatch shuffles.
        template: fingerprint of the engine's renderer; trajectories with another one raise. Empty accepts any.
        top_p, top_k: the engine's; logprobs of both are renormalized over the support.
        ranks: processes that train together. With several, the model is sharded and all must make the same calls
            (`RankZeroTrainer` ensures that).
        pixels: source of images' pixel values, as in `Rollout.pixels`.
        on_note: receives a line when micro-batches are halved; a warning is logged by default.

    Raises:
        ConfigError: for a temperature that is not positive, an unusable algorithm or key, or `train.routing_replay = "replay"`
            for a model whose routers cannot replay experts.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        *,
        temperature: float = 1.0,
        banned_ids: Iterable[int] = frozenset(),
        seed: int = 0,
        template: str = "",
        top_p: float = 1.0,
        top_k: int = 0,
        ranks: Ranks | None = None,
        pixels: PixelCache | None = None,
        on_note: Callable[[str], None] | None = None,
    ) -> None:
        if not temperature > 0:
            raise ConfigError(
                f"rollout.temperature is {temperature}, but training needs samples that differ; set it over 0, such as 1.0"
            )
        # Dropout off: the trained policy must equal the sampled one. Gradients flow all the same.
        self.model = model.eval()
        self.config = config
        self.objective = Objective(config)
        self.temperature = temperature
        self.seed = seed
        self.template = template
        first = next(model.parameters())
        self.device, self.dtype = first.device, first.dtype
        self.adapter = adapter_of(model)
        """The model's LoRA adapter; None if its own weights are trained."""
        freeze(model, config.vision == "frozen")
        self.forward = ForwardPass(model, replay=config.routing_replay == "replay")
        self.layout = BatchPacker(config.batching, self.forward.decoder)
        if config.gradient_checkpointing:
            enable_gradient_checkpointing(self.forward.model)
        self.banned_ids = frozenset(banned_ids)
        self.distribution = LogitDistribution(temperature, self.banned_ids, top_p, top_k)
        """Distribution the engine samples from."""
        self.pixels = pixels
        """Source of pixel values; None without images."""
        self._tied = tied_names(model)
        self.ranks = ranks or Ranks()
        self._stats, self._full_logprobs = self.forward.stats, self.forward.full_logprobs
        if self.distribution.truncates and self.ranks.size > 1:
            raise ConfigError("rollout.top_p and top_k need a trainer of one process; sampling-mask replay is not distributed")
        self.micro_batch_limit = MicroBatchLimit(config.micro_tokens, alone=self.ranks.size == 1, on_note=on_note)
        if self.ranks.size > 1:
            shard(model, self.ranks)
            self._stats = stats_of(model, self.forward)
            self._full_logprobs = full_logprobs_of(model, self.forward)
        self.reset_optimizer()
        self.transforms: list[Transform] = []
        """Stages between the parameters (adapters merged) and `weights()`, such as casting."""
        self._reference: ReferencePolicy | None = None
        self._probe: WeightSyncProbe | None = None

    # Steps.

    def step(self, groups: Sequence[Group], *, step: int, steps: int) -> StepResult:
        """Train on one step's groups.

        On a CPU with one thread, equal groups, weights and optimizer state give equal bits in any order of the groups.

        Args:
            step: this step, from 0.
            steps: number of steps of the run, for the learning-rate schedule.

        Returns:
            Metrics by name, and the step's credits and batches. Metrics: loss, KL, gradient norm, agreement with earlier
            gradients, learning rate, ratio, clip fraction, entropy, mismatch with the engine, tokens by outcome
            (`tokens_trained` and `tokens_<reason>` sum to `tokens_sampled`) and tokens trained per second.

        Raises:
            RewardError: for a reward that is NaN or infinite.
            UsageError: for a trajectory of another chat template, tokenizer or settings, or invalid loss-scale weights.
            RoutesMissing: with `train.routing_replay = "replay"`, when the engine did not report its experts.
            SyncError: when the mismatch exceeds `max_mismatch` or `max_mismatch_kl`; nothing was updated.
            TurnwiseError: when the loss or its gradient is not finite; nothing was updated.
        """
        began = time.perf_counter()
        config = self.config
        self._check_fingerprints(t for group in groups for t in group.trajectories)
        self.layout.start_step()
        step_credits = self.step_credits(groups)
        lr = config.lr * schedule(config.schedule, step, steps)
        parts = split_minibatches(step_credits.credits, config.minibatches, f"{self.seed}:{step}")
        scale = LossDenominator.of(step_credits.credits, self.objective.settings.aggregation, config.fixed_length, len(parts))
        batches = [self._batch(part, scale) for part in parts]
        step_metrics = StepMetrics()
        # The ratio's denominator is the policy before the first update: score later batches now.
        for batch in batches if self.distribution.truncates else batches[1:]:
            self._start(batch, step_metrics)
        if config.kl and batches:
            for batch in batches:
                batch.reference_n = self._score_reference(batch)
        probe = WeightSyncProbe.before(step_credits.credits, self._at_temperature_one, self.device) if batches else None
        for _ in range(config.epochs):
            for batch in batches:
                self._update(batch, lr, step_metrics, step)
        self._probe = None if probe is None else probe.after(self._at_temperature_one)
        step_metrics.reduce(self.ranks)
        metrics = (
            step_metrics.metrics()
            | accounting_metrics(step_credits, step_metrics.masked)
            | self.layout.figures()
            | {"lr": lr * self.signal.share, "optimizer_steps": float(step_metrics.updates)}
        )
        seconds = time.perf_counter() - began
        metrics |= {"train_s": seconds, "tokens_per_s": metrics["tokens_trained"] * config.epochs / seconds}
        return StepResult(metrics, (step_credits.credits, batches))

    def take_probe(self) -> WeightSyncProbe | None:
        """Return and clear the last step's probe, which checks whether an engine has the updates; None if there is none."""
        probe, self._probe = self._probe, None
        return probe

    def step_credits(self, groups: Sequence[Group]) -> StepCredits:
        """Return the credits that `step` would train groups with, and the account of every sampled id."""
        if not self.objective.penalizes_reward:
            return self.objective.step_credits(groups)
        penalty = self.objective.penalties(groups, self._batch, self._score, self._score_reference)
        return self.objective.step_credits(groups, penalty)

    def supervised(self, trajectories: Sequence[Trajectory], *, lr: float) -> dict[str, float]:
        """Train one step on demonstrations: cross entropy of their sampled ids, mean over the step's tokens.

        Returns:
            `loss` (nats per token), `grad_norm`, `lr`, `tokens_trained`, `tokens_per_s`, `train_s`.

        Raises:
            UsageError: as `step`.
            TurnwiseError: when no id carries loss, or the loss or its gradient is not finite.
        """
        began = time.perf_counter()
        self._check_fingerprints(trajectories)
        self.layout.start_step()
        credits = [Credit(t, 1.0, None, trainable_tokens(t)) for t in sorted(trajectories, key=sort_key)]
        scale = LossDenominator.of(credits, "token")
        if not scale.tokens:
            raise TurnwiseError(
                f"none of {len(trajectories)} demonstrations has an id to train; a solver's replies must be sampled spans"
            )
        batch, distribution = self._batch(credits, scale, routes=False), LogitDistribution(1.0, self.banned_ids)
        self.optimizer.zero_grad()
        with nullcontext() if self.adapter is None else self.adapter.dropout():
            work = partial(supervised_backward, self._stats, self.ranks, batch, self.pixels, distribution)
            total = self.micro_batch_limit.run(batch, work, undo=self.optimizer.zero_grad)
        norm = self.optimizer.grad_norm()
        check_finite(total, norm, "a supervised step")
        self.optimizer.step(lr)
        self.updates += 1
        seconds = time.perf_counter() - began
        metrics = {"loss": float(total), "grad_norm": norm, "lr": lr, "tokens_trained": float(batch.size)}
        return metrics | {"tokens_per_s": batch.size / seconds, "train_s": seconds}

    def logprobs(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        """Return log-probabilities in nats of each trajectory's ids that can carry loss, path by path in order.

        Raises:
            UsageError: as `step`.
        """
        self._check_fingerprints(trajectories)
        credits = [Credit(t, 1.0, None, trainable_tokens(t)) for t in trajectories]
        batch = self._batch(credits, LossDenominator.of(credits, "token"))
        rows: list[list[float]] = [[] for _ in trajectories]
        used = [number for number, credit in enumerate(credits) if credit.tokens]
        for index, value in zip(batch.trajectory_n.tolist(), self._score(batch).tolist(), strict=True):
            rows[used[int(index)]].append(value)
        return rows

    def _check_fingerprints(self, trajectories: Iterable[Trajectory]) -> None:
        if self.template:
            check_fingerprints(self.template, trajectories, "the training data")

    def _batch(self, credits: Sequence[Credit], scale: LossDenominator, *, routes: bool = True) -> TrainingBatch:
        vision, pack = None if self.pixels is None else self.pixels.vision, self.layout.pack
        positions = sum(len(span.ids) for credit in credits for span in credit.trajectory.spans)
        limit = self.ranks.limit(self.micro_batch_limit.tokens, positions)
        routes = routes and self.forward.replay is not None  # demonstrations have no routes
        return make_batch(credits, scale, micro_tokens=limit, device=self.device, vision=vision, pack=pack, routes=routes)

    def _score(self, batch: TrainingBatch) -> Tensor:
        """Return logprobs of a batch's targets, float64, N; the first call finds the top-k/top-p support."""
        if self.distribution.truncates and batch.support is None:
            batch.support = self.micro_batch_limit.run(
                batch, partial(sampling_support, self.forward, batch, self.pixels, self.distribution)
            )
        return self.micro_batch_limit.run(
            batch, partial(score_batch, self._stats, self.ranks, batch, self.pixels, self.distribution)
        )

    def _update(self, batch: TrainingBatch, lr: float, step_metrics: StepMetrics, step: int) -> None:
        if self.config.old_logprobs == "engine":
            check_logprobs(batch)
        if batch.start_n is None and self.objective.scores_first:
            self._start(batch, step_metrics)
        fresh = batch.start_n is None
        sequence_n = self.objective.sequence(batch, self._score, first=not step_metrics.updates)
        self.optimizer.zero_grad()
        work = partial(
            policy_backward, self._stats, self.ranks, batch, self.pixels, self.distribution, self.objective, sequence_n
        )
        passes = self.micro_batch_limit.run(batch, work, undo=self.optimizer.zero_grad)
        logp_n = torch.zeros_like(batch.weights_n)
        loss = 0.0
        for micro, terms, entropy_m, logp_m in passes:
            logp_n[micro.tokens_m] = logp_m.double()
            loss += terms.loss.item()
            reference_n = batch.reference_n
            step_metrics.add(terms, entropy_m, None if reference_n is None else (logp_m, reference_n[micro.tokens_m]))
        loss = float(self.ranks.sum_(torch.tensor(loss, dtype=torch.float64, device=self.device)))
        if fresh:
            batch.start_n = self.ranks.sum_(logp_n)
            self._check_start(batch, step_metrics)
        norm = self.optimizer.grad_norm()
        check_finite(loss, norm, f"step {step}")
        if not step_metrics.updates:
            # Later updates of a step see episodes that are in the momentum already, so their noise would agree with itself.
            step_metrics.agreement = self.optimizer.agreement()
            self.signal.update(step_metrics.agreement)
        step_metrics.updated(loss, norm)
        self.optimizer.step(lr * self.signal.share)
        self.updates += 1

    def _start(self, batch: TrainingBatch, step_metrics: StepMetrics) -> None:
        """Score a batch before its first update, and set its correction."""
        batch.start_n = self._score(batch)
        self._check_start(batch, step_metrics)
        self.objective.correct(batch)
        if batch.correction_n is not None:
            step_metrics.corrected(batch.correction_n)

    def _check_start(self, batch: TrainingBatch, step_metrics: StepMetrics) -> None:
        assert batch.start_n is not None
        check_mismatch(
            batch,
            mismatch_bound(self.config, self.dtype),
            distribution=self.distribution,
            banned=len(self.banned_ids),
            dtype=self.dtype,
            divergence=divergence_bound(self.config),
        )
        step_metrics.measured(batch.start_n, batch.engine_n)

    def _at_temperature_one(self, micro: MicroBatch) -> Tensor:  # log-probabilities (M, vocabulary)
        with torch.no_grad():
            return self._full_logprobs(micro, self.pixels, LogitDistribution(1.0, self.banned_ids))

    def _score_reference(self, batch: TrainingBatch) -> Tensor:
        """Return the reference policy's logprobs of a batch's targets, float64, N."""
        with self._require_reference().active():
            return self._score(batch)

    def _require_reference(self) -> ReferencePolicy:
        if self._reference is None:
            raise TurnwiseError("train.kl is over 0 but there is no reference policy; call reference() before the first step")
        return self._reference

    # Weights and state.

    def weights(self) -> Weights:
        """Yield copies of the model's tensors by Hugging Face name: adapters merged, `transforms` applied, tied ones once."""
        stages = self.transforms if self.adapter is None else [self.adapter.merge, *self.transforms]
        return apply_transforms(clone_tensors(self.model, self._tied), stages)

    def adapter_weights(self) -> Weights:
        """Yield copies of the LoRA matrices A and B by peft's file names, for engines that take adapters.

        Raises:
            TurnwiseError: when the model has no adapter.
        """
        if self.adapter is None:
            raise TurnwiseError("the model has no LoRA adapter; use weights()")
        return self.adapter.in_layout(clone_tensors(self.model, self._tied))

    def reference(self) -> None:
        """Keep the current policy as the reference of the KL term; do nothing if `kl = 0`.

        Raises:
            ConfigError: when `train.reference` needs an adapter and there is none.
        """
        if self.config.kl:
            untouched = self.adapter is not None and not self.ranks.any(not self.adapter.is_initial)
            self._reference = ReferencePolicy.of(self.model, self.adapter, self.config, untouched=untouched)

    def reset_optimizer(self) -> None:
        """Reset the optimizer's moments for a new phase."""
        self.optimizer = Optimizer(self.model, self.config, self.ranks)
        self.signal = GradientSignal(self.config.gradient_signal_steps, self.config.betas[0])
        self.updates = 0
        """Optimizer steps since the last reset."""

    def save_weights(self, directory: str | Path, base: Path) -> None:
        """Write the model as a Hugging Face directory, or only its LoRA in peft's layout with `base` as its base model."""
        if self.adapter is not None:
            adapter = dict(self.adapter_weights())
            if self.ranks.rank == 0:
                self.adapter.save(adapter, Path(directory), base)
        elif self.ranks.size == 1:
            self.model.save_pretrained(directory)
        else:
            gathered = dict(clone_tensors(self.model, self._tied))
            if self.ranks.rank == 0:
                self.model.save_pretrained(directory, state_dict=gathered)

    def save(self, directory: str | Path) -> None:
        """Write the state for an exact resume, except the weights: optimizer, reference, random state, update count."""
        directory = Path(directory)
        tensors = {name: tensor.contiguous() for name, tensor in self.optimizer.tensors()}
        tensors["rng.cpu"] = torch.get_rng_state()
        tensors["updates"] = torch.tensor([self.updates])
        tensors["signal"] = torch.tensor([self.signal.average, self.signal.variance], dtype=torch.float64)
        reference = None if self._reference is None else self._reference.tensors()
        if self.ranks.rank:
            return
        save_file(tensors, directory / OPTIMIZER_FILE)
        if reference is not None:
            save_file({name: tensor.contiguous() for name, tensor in reference.items()}, directory / REFERENCE_FILE)

    def load(self, directory: str | Path) -> None:
        """Restore what `save` wrote. The model's weights are loaded with the model.

        Raises:
            ModelError: when the state is missing, unreadable or of another model.
        """
        directory = Path(directory)
        tensors = read_tensors(directory / OPTIMIZER_FILE)
        torch.set_rng_state(tensors.pop("rng.cpu"))
        self.updates = int(tensors.pop("updates"))
        if "signal" in tensors:  # older checkpoints have none
            self.signal.average, self.signal.variance = tensors.pop("signal").tolist()
        self.optimizer.restore(tensors)
        self._reference = None
        if self.config.kl and (directory / REFERENCE_FILE).exists():
            self._reference = ReferencePolicy(self.model, self.adapter, None)
            self._reference.restore(read_tensors(directory / REFERENCE_FILE))
        elif self.config.kl and self.adapter is not None:
            self._reference = ReferencePolicy(self.model, self.adapter, None)
