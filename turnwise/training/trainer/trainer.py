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
from turnwise.training.distributed import Ranks, distribution_of, shard, stats_of
from turnwise.training.forward.batch import LossDenominator, MicroBatch, TrainingBatch, make_batch, split_minibatches
from turnwise.training.forward.forward import ForwardPass
from turnwise.training.forward.head import SamplingDistribution
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
    """Gathers what the passes of a step measured; every mean is over tokens, whatever pass they were in."""

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
        """Of the step's first gradient with the momentum of earlier steps."""

    @property
    def updates(self) -> int:
        """Optimizer steps taken."""
        return len(self._losses)

    def add(self, terms: PolicyTerms, entropy_m: Tensor, reference: tuple[Tensor, Tensor] | None) -> None:
        """Take one pass's figures; `reference` is (logprobs of the policy, of the reference)."""
        self._ratio.append(terms.ratio_m)
        self._clipped.append(terms.clipped_m)
        self._entropy.append(entropy_m)
        if reference is not None:
            self._kl.append(k3(reference[0].double(), reference[1]))

    def measured(self, trainer_n: Tensor, engine_n: Tensor) -> None:
        """Take logprobs of the trainer, from before the first update, and of the engine."""
        self._trainer.append(trainer_n)
        self._engine.append(engine_n)

    def corrected(self, weights_n: Tensor) -> None:
        """Take the weights that a correction gave a batch."""
        self._corrections.append(weights_n)

    @property
    def masked(self) -> int:
        """Ids that a correction left out."""
        return sum(int((weights_n == 0).sum()) for weights_n in self._corrections)

    def updated(self, loss: float, grad_norm: float) -> None:
        """Take an optimizer step's loss and gradient norm (before clipping)."""
        self._losses.append(loss)
        self._norms.append(grad_norm)

    def reduce(self, ranks: Ranks) -> None:
        """Take what the passes of other ranks measured too."""
        if ranks.size > 1:
            self._ratio, self._clipped, self._entropy, self._kl = (
                ranks.gather(parts) for parts in (self._ratio, self._clipped, self._entropy, self._kl)
            )

    def metrics(self) -> dict[str, float]:
        """Means over the step; with nothing to train on, `loss` and `grad_norm` are 0 and the rest is missing."""
        if not self._losses:
            return {"loss": 0.0, "grad_norm": 0.0}
        figures = {
            "loss": sum(self._losses) / len(self._losses),
            "grad_norm": sum(self._norms) / len(self._norms),
            "ratio_mean": _mean(self._ratio),
            "clip_fraction": _mean(self._clipped),
            "entropy": _mean(self._entropy),
        }
        if self.agreement is not None:
            figures["agreement"] = self.agreement
        if self._kl:
            figures["kl"] = _mean(self._kl)
        if self._corrections:
            weights_n = torch.cat(self._corrections)
            figures["correction_mean"] = float(weights_n.mean())
            figures["correction_ess"] = effective_sample_share(weights_n)
            figures["correction_masked"] = self.masked / weights_n.numel()
        return figures | logprob_mismatch(torch.cat(self._trainer), torch.cat(self._engine))


def accounting_metrics(ledger: StepCredits, masked: int = 0) -> dict[str, float]:
    """What became of a step's sampled ids and trajectories; the counts of ids sum to `tokens_sampled`.

    Args:
        masked: ids that carry no loss since a correction left them out.
    """
    counts = ledger.tokens - Counter({TRAINED: masked}) + Counter({MISMATCH: masked})
    figures = {f"tokens_{reason}": float(count) for reason, count in sorted(counts.items())}
    values = [credit.advantage for credit in ledger.credits if credit.advantage is not None]
    return (
        {"tokens_trained": 0.0, "tokens_sampled": float(ledger.sampled)}
        | figures
        | {
            "trajectories": float(len(ledger.credits)),
            "trajectories_trained": float(len(values)),
            "advantage_abs": math.fsum(map(abs, values)) / len(values) if values else 0.0,
        }
    )


def _mean(parts: list[Tensor]) -> float:
    return float(torch.cat(parts).double().mean())


class StepResult(NamedTuple):
    """Result of one training step."""

    metrics: dict[str, float]
    token_records: tuple[Sequence[Credit], Sequence[TrainingBatch]]
    """Credits of the step and the batches that were trained, for `write_tokens`. They hold tensors of the device."""


class Trainer:
    """Trains one causal language model on groups of trajectories (`step`) or on demonstrations (`supervised`).

    Its module is its own: an engine gets copies of the weights through `weights()` and nothing else, so that a lost update
    shows as a mismatch of logprobs instead of hiding.

    Args:
        model: a Hugging Face causal model, or a module of its shape (`get_output_embeddings`, a body under
            `base_model_prefix`, a `forward` that takes `input_ids`, `position_ids`, `attention_mask` and `use_cache`).
        temperature: the one that the engine samples at; its logprobs are of the tempered distribution, so are the trainer's.
        banned_ids: ids that the engine never samples; they are left out of the trainer's softmax too.
        seed: names the shuffles into minibatches.
        template: the fingerprint of the engine's renderer; trajectories of another one are refused. Empty takes any.
        top_p, top_k: as the engine's; its logprobs are renormalised over what they leave, so are the trainer's.
        ranks: the processes that train together. The model is cut into shards where there are several, all of which then make
            the same calls with the same arguments (`RankZeroTrainer` sees to that).
        pixels: where the pixel values of images come from, as `Rollout.pixels` has them.
        on_note: receives a line when micro-batches are halved; a warning is logged by default.

    Raises:
        ConfigError: for a temperature that is not positive, an algorithm or keys that cannot be used, or `train.routes =
            "replay"` for a model whose routers cannot take experts.
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
                f"rollout.temperature is {temperature}; reinforcement needs samples that differ: give one over 0, such as 1.0"
            )
        # Dropout off: the policy that is trained must be the one that was sampled. Gradients flow all the same.
        self.model = model.eval()
        self.config = config
        self.objective = Objective(config)
        self.temperature = temperature
        self.seed = seed
        self.template = template
        first = next(model.parameters())
        self.device, self.dtype = first.device, first.dtype
        self.adapter = adapter_of(model)
        """The model's LoRA, None where its own weights are trained."""
        freeze(model, config.vision == "frozen")
        self.forward = ForwardPass(model, replay=config.routes == "replay")
        self.layout = BatchPacker(config.batching, self.forward.decoder)
        if config.gradient_checkpointing:
            enable_gradient_checkpointing(self.forward.model)
        self.banned_ids = frozenset(banned_ids)
        self.law = SamplingDistribution(temperature, self.banned_ids, top_p, top_k)
        """How the engine samples."""
        self.pixels = pixels
        """Where the pixel values of images come from; None while nothing is shown."""
        self._tied = tied_names(model)
        self.ranks = ranks or Ranks()
        self._stats, self._distribution = self.forward.stats, self.forward.distribution
        if self.law.truncates and self.ranks.size > 1:
            raise ConfigError("rollout.top_p and top_k are for a trainer of one process; several cannot keep what they leave")
        self.room = MicroBatchLimit(config.micro_tokens, alone=self.ranks.size == 1, on_note=on_note)
        if self.ranks.size > 1:
            shard(model, self.ranks)
            self._stats = stats_of(model, self.forward)
            self._distribution = distribution_of(model, self.forward)
        self.reset_optimizer()
        self.transforms: list[Transform] = []
        """Stages between the parameters and `weights()`, adapters merged already: casting, quantising."""
        self._reference: ReferencePolicy | None = None
        self._probe: WeightSyncProbe | None = None

    # Steps.

    def step(self, groups: Sequence[Group], *, step: int, steps: int) -> StepResult:
        """Train on one step's groups.

        The same groups, weights and optimizer give the same bits on a CPU with one thread, in whatever order the groups come.

        Args:
            step: this step, from 0.
            steps: all steps of the run, for the learning rate's schedule.

        Returns:
            Metrics by name: loss, KL, gradient norm, agreement with earlier gradients, learning rate, ratio, clip fraction,
            entropy, mismatch with the engine, tokens by what became of them (`tokens_trained` and `tokens_<reason>` sum to
            `tokens_sampled`), and tokens trained per second; and what the step was made of, token by token.

        Raises:
            RewardError: for a reward that is NaN or infinite.
            UsageError: for a trajectory of another chat template, tokenizer or settings, or a loss scale without weights.
            RoutesMissing: with `train.routes = "replay"`, when the engine did not tell which experts it chose.
            SyncError: when the engine's logprobs are further from the trainer's than `max_mismatch` or `max_mismatch_kl`;
                nothing was updated then.
            TurnwiseError: when the loss or its gradient is not finite; nothing was updated then.
        """
        began = time.perf_counter()
        config = self.config
        self._only_own(t for group in groups for t in group.trajectories)
        self.layout.start_step()
        ledger = self.ledger(groups)
        lr = config.lr * schedule(config.schedule, step, steps)
        parts = split_minibatches(ledger.credits, config.minibatches, f"{self.seed}:{step}")
        scale = LossDenominator.of(ledger.credits, self.objective.settings.aggregation, config.fixed_length, len(parts))
        batches = [self._batch(part, scale) for part in parts]
        tally = StepMetrics()
        # The ratio's denominator is the policy before the first update, so what is trained later must be scored now.
        for batch in batches if self.law.truncates else batches[1:]:
            self._start(batch, tally)
        if config.kl and batches:
            for batch in batches:
                batch.reference_n = self._score_reference(batch)
        probe = WeightSyncProbe.before(ledger.credits, self._at_one, self.device) if batches else None
        for _ in range(config.epochs):
            for batch in batches:
                self._update(batch, lr, tally, step)
        self._probe = None if probe is None else probe.after(self._at_one)
        tally.reduce(self.ranks)
        metrics = (
            tally.metrics()
            | accounting_metrics(ledger, tally.masked)
            | self.layout.figures()
            | {"lr": lr * self.signal.share, "updates": float(tally.updates)}
        )
        seconds = time.perf_counter() - began
        metrics |= {"train_s": seconds, "tokens_per_s": metrics["tokens_trained"] * config.epochs / seconds}
        return StepResult(metrics, (ledger.credits, batches))

    def take_probe(self) -> WeightSyncProbe | None:
        """Return the probe of the last step, once: it asks an engine whether it has the updates. None where there is none."""
        probe, self._probe = self._probe, None
        return probe

    def ledger(self, groups: Sequence[Group]) -> StepCredits:
        """The advantages of groups as `step` would train them, and where every sampled id goes."""
        if not self.objective.penalises:
            return self.objective.ledger(groups)
        owed = self.objective.penalties(groups, self._batch, self._score, self._score_reference)
        return self.objective.ledger(groups, owed)

    def supervised(self, trajectories: Sequence[Trajectory], *, lr: float) -> dict[str, float]:
        """One step on demonstrations: cross entropy of their sampled ids, mean over the tokens of the step.

        Returns:
            `loss` (nats per token), `grad_norm`, `lr`, `tokens_trained`, `tokens_per_s`, `train_s`.

        Raises:
            UsageError: as `step`.
            TurnwiseError: when no id carries loss, or the loss or its gradient is not finite.
        """
        began = time.perf_counter()
        self._only_own(trajectories)
        self.layout.start_step()
        credits = [Credit(t, 1.0, None, trainable_tokens(t)) for t in sorted(trajectories, key=sort_key)]
        scale = LossDenominator.of(credits, "token")
        if not scale.tokens:
            raise TurnwiseError(
                f"none of {len(trajectories)} demonstrations has an id to learn; a solver's replies must be sampled spans"
            )
        batch, law = self._batch(credits, scale, routes=False), SamplingDistribution(1.0, self.banned_ids)
        self.optimizer.zero_grad()
        with nullcontext() if self.adapter is None else self.adapter.dropout():
            work = partial(supervised_backward, self._stats, self.ranks, batch, self.pixels, law)
            total = self.room.run(batch, work, undo=self.optimizer.zero_grad)
        norm = self.optimizer.grad_norm()
        check_finite(total, norm, "a supervised step")
        self.optimizer.step(lr)
        self.updates += 1
        seconds = time.perf_counter() - began
        figures = {"loss": float(total), "grad_norm": norm, "lr": lr, "tokens_trained": float(batch.size)}
        return figures | {"tokens_per_s": batch.size / seconds, "train_s": seconds}

    def logprobs(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        """The policy's log-probabilities of each trajectory's ids that can carry loss, in nats, path by path in their order.

        Raises:
            UsageError: as `step`.
        """
        self._only_own(trajectories)
        credits = [Credit(t, 1.0, None, trainable_tokens(t)) for t in trajectories]
        batch = self._batch(credits, LossDenominator.of(credits, "token"))
        rows: list[list[float]] = [[] for _ in trajectories]
        places = [number for number, credit in enumerate(credits) if credit.tokens]
        for index, value in zip(batch.trajectory_n.tolist(), self._score(batch).tolist(), strict=True):
            rows[places[int(index)]].append(value)
        return rows

    def _only_own(self, trajectories: Iterable[Trajectory]) -> None:
        if self.template:
            check_fingerprints(self.template, trajectories, "what is to be trained on")

    def _batch(self, credits: Sequence[Credit], scale: LossDenominator, *, routes: bool = True) -> TrainingBatch:
        eyes, pack = None if self.pixels is None else self.pixels.vision, self.layout.pack
        positions = sum(len(span.ids) for credit in credits for span in credit.trajectory.spans)
        most = self.ranks.limit(self.room.tokens, positions)
        routes = routes and self.forward.replay is not None  # demonstrations went through no router
        return make_batch(credits, scale, micro_tokens=most, device=self.device, eyes=eyes, pack=pack, routes=routes)

    def _score(self, batch: TrainingBatch) -> Tensor:
        """The logprobs of a batch's targets, float64, N; what top-k and top-p leave for them is found by the first to ask."""
        if self.law.truncates and batch.kept is None:
            batch.kept = self.room.run(batch, partial(sampling_support, self.forward, batch, self.pixels, self.law))
        return self.room.run(batch, partial(score_batch, self._stats, self.ranks, batch, self.pixels, self.law))

    def _update(self, batch: TrainingBatch, lr: float, tally: StepMetrics, step: int) -> None:
        if self.config.old_logprobs == "engine":
            check_logprobs(batch)
        if batch.start_n is None and self.objective.scores_first:
            self._start(batch, tally)
        fresh = batch.start_n is None
        sequence_n = self.objective.sequence(batch, self._score, first=not tally.updates)
        self.optimizer.zero_grad()
        work = partial(policy_backward, self._stats, self.ranks, batch, self.pixels, self.law, self.objective, sequence_n)
        passes = self.room.run(batch, work, undo=self.optimizer.zero_grad)
        logp_n = torch.zeros_like(batch.weights_n)
        loss = 0.0
        for micro, terms, entropy_m, logp_m in passes:
            logp_n[micro.tokens_m] = logp_m.double()
            loss += terms.loss.item()
            reference_n = batch.reference_n
            tally.add(terms, entropy_m, None if reference_n is None else (logp_m, reference_n[micro.tokens_m]))
        loss = float(self.ranks.sum_(torch.tensor(loss, dtype=torch.float64, device=self.device)))
        if fresh:
            batch.start_n = self.ranks.sum_(logp_n)
            self._check_start(batch, tally)
        norm = self.optimizer.grad_norm()
        check_finite(loss, norm, f"step {step}")
        if not tally.updates:
            # Later updates of a step see episodes that the momentum has seen, whose noise would agree with itself.
            tally.agreement = self.optimizer.agreement()
            self.signal.update(tally.agreement)
        tally.updated(loss, norm)
        self.optimizer.step(lr * self.signal.share)
        self.updates += 1

    def _start(self, batch: TrainingBatch, tally: StepMetrics) -> None:
        """Score a batch before its first update, and correct it."""
        batch.start_n = self._score(batch)
        self._check_start(batch, tally)
        self.objective.correct(batch)
        if batch.correction_n is not None:
            tally.corrected(batch.correction_n)

    def _check_start(self, batch: TrainingBatch, tally: StepMetrics) -> None:
        assert batch.start_n is not None
        check_mismatch(
            batch,
            mismatch_bound(self.config, self.dtype),
            law=self.law,
            banned=len(self.banned_ids),
            dtype=self.dtype,
            divergence=divergence_bound(self.config),
        )
        tally.measured(batch.start_n, batch.engine_n)

    def _at_one(self, micro: MicroBatch) -> Tensor:  # log-probabilities (M, vocabulary) at a temperature of 1
        with torch.no_grad():
            return self._distribution(micro, self.pixels, SamplingDistribution(1.0, self.banned_ids))

    def _score_reference(self, batch: TrainingBatch) -> Tensor:
        """The reference policy's logprobs of a batch's targets, float64, N."""
        with self._require_reference().active():
            return self._score(batch)

    def _require_reference(self) -> ReferencePolicy:
        if self._reference is None:
            raise TurnwiseError(
                "train.kl is over 0 but no reference policy was kept; call reference() where reinforcement begins"
            )
        return self._reference

    # Weights and state.

    def weights(self) -> Weights:
        """Copies of the model's tensors by Hugging Face name, as an engine takes them: adapters merged, then through
        `transforms`; tied ones once, as in a safetensors file."""
        stages = self.transforms if self.adapter is None else [self.adapter.merge, *self.transforms]
        return apply_transforms(clone_tensors(self.model, self._tied), stages)

    def adapter_weights(self) -> Weights:
        """Copies of the LoRA's A and B by the names that peft's files have, for engines that take adapters.

        Raises:
            TurnwiseError: when the model has no adapter.
        """
        if self.adapter is None:
            raise TurnwiseError("the model has no LoRA adapter; weights() gives all of it")
        return self.adapter.in_layout(clone_tensors(self.model, self._tied))

    def reference(self) -> None:
        """Keep the policy as it is now for the KL term; without one (`kl = 0`) this does nothing.

        Raises:
            ConfigError: when `train.reference` asks for an adapter that is not there.
        """
        if self.config.kl:
            untouched = self.adapter is not None and not self.ranks.any(not self.adapter.is_initial)
            self._reference = ReferencePolicy.of(self.model, self.adapter, self.config, untouched=untouched)

    def reset_optimizer(self) -> None:
        """Forget the optimizer's moments: another phase begins."""
        self.optimizer = Optimizer(self.model, self.config, self.ranks)
        self.signal = GradientSignal(self.config.signal_memory, self.config.betas[0])
        self.updates = 0
        """Optimizer steps since the optimizer was new."""

    def save_weights(self, directory: str | Path, base: Path) -> None:
        """Write the model as a Hugging Face directory, or its LoRA alone in peft's layout, naming `base` as its model."""
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
        """Write what is needed to go on exactly beside the model's weights: optimizer, reference, random state, updates."""
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
        """Take back what `save` wrote. The model's weights are loaded with the model, not here.

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
