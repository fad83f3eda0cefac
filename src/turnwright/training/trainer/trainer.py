"""The trainer: credits, batches, loss and updates of one policy.

`simple.py` has the same step without options, on one page. Here a step reads from top to bottom:
`Trainer.step` compares the trajectories of each task (`training/advantages.py`), makes batches of
their sampled ids (`training/forward/batch.py`), and for each batch `_update` runs the model forward
and backward, pass after pass (`_backward`), before the optimizer moves the weights.
`training/loss.py` has the loss of a pass; its algorithm is a file of `training/algorithms`. An
algorithm with a critic (`critic.py`) asks it before credits are made, and trains it after.

By default a step is one batch and one update. `train.minibatches` and `train.epochs` make it
several. Only with `train.gradient_signal_steps` is a step measured and shortened
(`gradient_signal.py`, `step_limit.py`): its learning rate is then 0 until the gradients of several
steps agree.

What is checked on the way is beside this file: in `mismatch.py` whether the engine samples the
policy that is trained, in `weight_probe.py` whether it has the last update. How large a pass may be
is in `micro_batches.py`.

Which groups a step trains, and when the engine gets the weights, is for the run
(`training/run.py`). Suffixes of tensors are those of `forward/batch.py`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from turnwright.config import TrainConfig
from turnwright.engines import Sampling
from turnwright.engines.local.mixed_precision import is_mixed
from turnwright.errors import ConfigError, TurnwrightError
from turnwright.renderers.vision import PixelCache
from turnwright.training.advantages import CreditSettings, PerTrajectory, advantages
from turnwright.training.algorithms import resolve_settings
from turnwright.training.baselines import RunningBaselines
from turnwright.training.credit import Credit, StepCredits, exclusion_reason, sort_key
from turnwright.training.forward.batch import (
    LossDenominator,
    TrainingBatch,
    make_batch,
    split_minibatches,
)
from turnwright.training.forward.forward import ForwardPass, LogitDistribution
from turnwright.training.forward.packing import BatchPacker
from turnwright.training.forward.passes import MicroBatch, Pack
from turnwright.training.forward.ranks import Ranks
from turnwright.training.forward.support import SamplingSupport
from turnwright.training.loss import LogRatios, Objective, PolicyTerms, check_logprobs
from turnwright.training.loss_weights import trainable_tokens
from turnwright.training.model.lora import adapter_of
from turnwright.training.model.models import (
    CRITIC_FILE,
    OPTIMIZER_FILE,
    REFERENCE_FILE,
    freeze_vision,
    read_tensors,
)
from turnwright.training.model.quantize import OnGrid, plain_inputs, rounds_activations
from turnwright.training.model.reference import ReferencePolicy
from turnwright.training.model.weight_export import Transform, Weights, named_tensors, tied_names
from turnwright.training.teachers.teacher import MakeTeachers, TaughtPolicy, refuse_ranks
from turnwright.training.trainer.critic import AskedValues, Critic, body_of
from turnwright.training.trainer.gradient_signal import GradientSignal
from turnwright.training.trainer.heap import return_free_pages
from turnwright.training.trainer.micro_batches import (
    MicroBatchLimit,
    default_micro_tokens,
    is_large_on_cpu,
)
from turnwright.training.trainer.mismatch import check_fingerprints, check_finite, check_mismatch
from turnwright.training.trainer.optimizer import Agreement, Direction, Optimizer, schedule
from turnwright.training.trainer.step_limit import SHORT, StepLimit, good_episodes
from turnwright.training.trainer.step_metrics import (
    StepMetrics,
    accounting_metrics,
    teacher_figures,
)
from turnwright.training.trainer.weight_probe import WeightSyncProbe, needs_probe
from turnwright.types import Group, Trajectory
from turnwright.types.seeds import derive_seed

LOSS_CHANGE = 0.01
"""Change of the loss, at most and to first order, by the move that measures how the gradients of
tasks agree."""


@dataclass(frozen=True, slots=True)
class _Scored:
    """What credits need to know of a step's ids before rewards are compared."""

    penalty: PerTrajectory | None = None
    asked: AskedValues | None = None
    """What the critic expected."""


class StepResult(NamedTuple):
    """Result of one training step."""

    metrics: dict[str, float]
    token_records: tuple[Sequence[Credit], Sequence[TrainingBatch]]
    """Credits of the step and its trained batches, for `write_token_records`; they hold device
    tensors."""


@dataclass(frozen=True, slots=True)
class BackwardPass:
    """What a pass leaves beside gradients, of its M targets; detached."""

    micro: MicroBatch
    terms: PolicyTerms
    entropy_m: Tensor
    logprobs_m: Tensor
    slope_m: Tensor
    """Derivative of the loss by each logprob."""


class Trainer:
    """Trainer of one causal language model, on groups of trajectories (`step`) or demonstrations
    (`supervised`).

    An engine receives copies of the weights through `weights()`, so a lost update shows as a
    logprob mismatch.

    Args:
        model: Hugging Face causal model, or a module of its shape: `get_output_embeddings`, a body
            under `base_model_prefix`, a `forward` that takes `input_ids`, `position_ids`,
            `attention_mask` and `use_cache`.
        sampling: the engine's; logprobs of both are of the distribution after temperature and
            truncation.
        banned_ids: ids that the engine never samples; excluded from the trainer's softmax too.
        seed: seed of the minibatch shuffles.
        template: fingerprint of the engine's renderer; trajectories with another one raise. Empty
            accepts any.
        ranks: processes that train together. With several, the model is sharded and all must make
            the same calls (`RankZeroTrainer` ensures that).
        pixels: source of images' pixel values, as in `Rollout.pixels`.
        teachers: makes the policy's teachers, as `make_teachers` returns it.
        on_note: receives a line when micro-batches are halved; a warning is logged by default.

    Raises:
        ConfigError: for a temperature that is not positive, an unusable algorithm or key, or
            `train.routing_replay = "replay"` for a model whose routers cannot replay experts.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        *,
        sampling: Sampling | None = None,
        banned_ids: Iterable[int] = frozenset(),
        seed: int = 0,
        template: str = "",
        ranks: Ranks | None = None,
        pixels: PixelCache | None = None,
        teachers: MakeTeachers | None = None,
        on_note: Callable[[str], None] | None = None,
    ) -> None:
        sampling = sampling or Sampling()
        ranks = ranks or Ranks()
        if not sampling.temperature > 0:
            raise ConfigError(
                f"rollout.temperature is {sampling.temperature}, but training needs samples that "
                "differ; set it over 0, such as 1.0"
            )
        self.config = config
        self.seed = seed
        self.template = template
        self.ranks = ranks
        self.pixels = pixels
        """Source of pixel values; None without images."""

        # The algorithm.
        settings = resolve_settings(config)
        self.objective = Objective(config, settings)
        self.baselines = RunningBaselines()
        """State of `advantage = "running"`."""
        self.credit_settings = CreditSettings.of(
            config, settings.credit_choice, running=self.baselines.of
        )

        # The model. Dropout is off, since the trained policy must equal the sampled one; gradients
        # flow all the same.
        self.model = model.eval()
        first_parameter = next(model.parameters())
        self.device = first_parameter.device
        self.dtype = first_parameter.dtype
        self.adapter = adapter_of(model)
        """The model's LoRA adapter; None if its own weights are trained."""
        self._tied = tied_names(model)
        self._rounded_inputs = rounds_activations(model)
        if config.vision == "frozen":
            freeze_vision(model)
        # A critic's own body is copied before anything follows or hooks the modules.
        body = None
        if self.credit_settings.has_critic and config.critic.body == "own":
            body = body_of(model, shared=ranks.size == 1)
        self.transforms: list[Transform] = []
        """Stages between the parameters (adapters merged) and `weights()`, such as casting."""

        # Forward passes.
        self.forward = ForwardPass(model, replay=config.routing_replay == "replay")
        rounds = is_mixed(model) and self.forward.mixed is None
        self.precision = torch.bfloat16 if rounds else self.dtype
        """Type whose rounding bounds the difference of logprobs from a correct engine's."""
        self.layout = BatchPacker(config.batching, self.forward.decoder)
        if config.gradient_checkpointing:
            self.forward.enable_checkpointing()
        self.micro_batch_limit = MicroBatchLimit(
            config.micro_tokens or default_micro_tokens(model),
            alone=ranks.size == 1,
            on_note=on_note,
        )

        # The distribution that the engine samples from.
        self.temperature = sampling.temperature
        self.banned_ids = frozenset(banned_ids)
        self.distribution = LogitDistribution(
            sampling.temperature, self.banned_ids, sampling.top_p, sampling.top_k, sampling.min_p
        )
        if self.distribution.truncates and ranks.size > 1:
            raise ConfigError(
                "rollout.top_p, top_k and min_p need a trainer of one process; sampling-mask "
                "replay is not distributed"
            )

        # From here on the model may be sharded, and parameters are replaced.
        self._stats, self._full_logprobs = ranks.shard(model, self.forward)
        self.critic: Critic | None = None
        self.reset_optimizer()
        if self.credit_settings.has_critic:
            self.critic = Critic(
                config,
                self.forward,
                body,
                ranks,
                limit=self.micro_batch_limit,
                pixels=pixels,
                seed=seed,
                trees=self.layout.cost_model is not None,
            )
        self.teachers = None if teachers is None else teachers(self._as_policy())
        self._reference: ReferencePolicy | None = None
        self._probe: WeightSyncProbe | None = None
        self._differing_steps = 0
        """Steps in a row in which most ids differed from the engine's by more than the bound."""

    def expect_rounding(self) -> None:
        """Let logprobs differ from the engine's by the rounding of bfloat16."""
        self.precision = torch.bfloat16

    def _as_policy(self) -> TaughtPolicy:
        refuse_ranks(self.ranks.size)
        if self.forward.head is not None:
            vocabulary = self.forward.head.vocabulary
        else:
            vocabulary = self.model.get_input_embeddings().weight.shape[0]
        return TaughtPolicy(
            forward=self.forward,
            distribution=self.distribution,
            vocabulary=vocabulary,
            micro_tokens=self.micro_batch_limit.tokens,
            pixels=self.pixels,
            run=self.micro_batch_limit.run,
            as_reference=self._as_reference,
        )

    # Steps.

    def step(
        self,
        groups: Sequence[Group],
        *,
        step: int,
        steps: int,
        version: int | None = None,
    ) -> StepResult:
        """Train on the groups of `step` (from 0) of `steps`; both numbers are for the learning-rate
        schedule.

        `version` is the policy version of the weights before the step; None counts every token as
        sampled by them. On a CPU with one thread, equal groups, weights and optimizer state give
        equal bits in any order of the groups.

        Returns:
            Metrics by name, and the step's credits and batches. Metrics: loss, KL, gradient norm,
            agreement with earlier gradients, learning rate, ratio, clip fraction, entropy, mismatch
            with the engine, tokens by outcome (`tokens_trained` and `tokens_<reason>` sum to
            `tokens_sampled`) and tokens trained per second.

        Raises:
            RewardError: for a reward that is NaN or infinite.
            UsageError: for a trajectory of another chat template, tokenizer or settings, or invalid
                loss-scale weights.
            RoutesMissing: with `train.routing_replay = "replay"`, when the engine did not report
                its experts.
            SyncError: before an update, which is not made, when the mismatch of tokens of
                `version` exceeds `max_mismatch` or `max_mismatch_kl`, or a token is of a newer
                policy.
            TurnwrightError: before an update, which is not made, when the loss or its gradient is
                not finite; earlier updates of the step stay.
        """
        with self._own_draws():
            return self._step(groups, step=step, steps=steps, version=version)

    def _step(
        self,
        groups: Sequence[Group],
        *,
        step: int,
        steps: int,
        version: int | None,
    ) -> StepResult:
        began = time.perf_counter()
        config = self.config
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        check_fingerprints(self.template, trajectories, "the training data")
        self.layout.start_step()

        # Credit: how much better each trajectory did than the others of its task, or than the
        # critic expected.
        scored = self._scored(groups)
        step_credits = self._credits(groups, scored)
        credits = step_credits.credits

        # Batches: one per minibatch, each with the passes that cover it.
        # Trained trajectories and those without signal count in the loss; others do not.
        parts = split_minibatches(credits, config.minibatches, f"{self.seed}:{step}")
        denominator = LossDenominator.of(
            credits,
            self.objective.settings.aggregation,
            config.fixed_length,
            len(parts),
        )
        batches = [self._batch(part, denominator, version=version) for part in parts]

        step_metrics = StepMetrics()
        self._score_before_updates(batches, step_metrics)

        # A few positions whose probabilities tell later whether the engine has this update.
        probe = None
        rounded = self._rounded_inputs
        if batches and needs_probe(config, self.precision, step, rounded_inputs=rounded):
            probe = WeightSyncProbe.before(credits, self._at_temperature_one, self.device)

        # The critic learns what came of it. In its first steps it does so alone, and the policy is
        # only compared with the engine's.
        critic_metrics: dict[str, float] = {}
        if self.critic is not None and scored.asked is not None:
            critic_metrics = self.critic.learn(scored.asked, credits)
        critic_alone = self.critic is not None and step < config.critic.warmup_steps
        if critic_alone:
            for batch in batches:
                if batch.start_n is None:
                    self._score_start(batch, step_metrics)

        # Updates.
        lr = config.lr * schedule(config.schedule, step, steps, config.lr_warmup_steps)
        codes = self._codes()
        limited = self._limited(credits, step_metrics, version) if batches else nullcontext()
        with limited:
            for epoch in range(0 if critic_alone else config.epochs):
                # The first update adds to the evidence, which may lower the number of epochs.
                if epoch == self.epochs_made:
                    break
                for batch in batches:
                    self._update(batch, lr, step_metrics, step)

        if probe is not None:
            probe = probe.after(self._at_temperature_one)
        self._probe = probe
        self._differing_steps = self._differing_steps + 1 if step_metrics.most_differ else 0
        if self.credit_settings.has_running_baseline:
            self.baselines.update(groups)

        # Metrics.
        step_metrics.reduce(self.ranks)
        metrics = (
            step_metrics.metrics()
            | accounting_metrics(step_credits, step_metrics.masked)
            | self.layout.figures()
            | teacher_figures(batches)
            | critic_metrics
            | {"lr": lr * self.lr_share, "optimizer_steps": float(len(step_metrics.updates))}
        )
        if codes:
            changed = [int((codes[name] != code).sum()) for name, code in self._codes().items()]
            metrics["codes_changed"] = float(sum(changed))
        seconds = time.perf_counter() - began
        updates = len(step_metrics.updates) / max(len(batches), 1)
        metrics["train_s"] = seconds
        metrics["tokens_per_s"] = metrics["tokens_trained"] * updates / seconds
        return StepResult(metrics, (credits, batches))

    def _score_before_updates(
        self, batches: Sequence[TrainingBatch], step_metrics: StepMetrics
    ) -> None:
        """Score batches with the policy before the first update, with the reference policy and with
        teachers.

        Ratios are to the first of these, unless `train.old_logprobs` is the engine's.
        """
        # The first batch needs no pass of its own: that of its update gives the same numbers, but
        # for a correction, which `_update` needs before it.
        later = batches if self.distribution.truncates else batches[1:]
        for batch in later:
            self._score_start(batch, step_metrics)

        if self.config.kl:
            for batch in batches:
                batch.reference_n = self._score_reference(batch)
        if self.teachers is not None:
            for batch in batches:
                batch.teachers = self.teachers.score(batch)

    @contextmanager
    def _own_draws(self) -> Iterator[None]:
        """Let what draws by torch's global generator (a user's loss, the dropout of an adapter in
        supervised steps) draw by a seed of this update.

        The process shares that generator with the code of environments, so its state tells nothing
        about a run: a resumed one draws the same without restoring it.
        """
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(derive_seed(self.seed, "update", self.updates, self.ranks.rank))
            yield

    @contextmanager
    def _limited(
        self, credits: Sequence[Credit], step_metrics: StepMetrics, version: int | None
    ) -> Iterator[None]:
        """Shorten the step that is made inside, where it would move good episodes too far."""
        good = good_episodes(credits) if self.config.gradient_signal_steps else []
        if not good:
            yield
            return

        denominator = LossDenominator.of(
            good, self.objective.settings.aggregation, self.config.fixed_length, 1
        )
        batch = self._batch(good, denominator, pack=self.layout.pack_plainly, version=version)
        # The policy before the step need not be scored where the engine's logprobs are its own:
        # they are not if they are of an older policy, of rounded numbers or of a cut vocabulary.
        exact = (
            self.precision == torch.float32
            and not self._rounded_inputs
            and not self.distribution.truncates
            and bool(batch.current_n.all())
        )
        limit = StepLimit(batch, self._score, exact=exact)
        before = self.optimizer.parameters()
        yield
        if self.signal_share < SHORT:
            return  # so short a step is not measured

        step_metrics.step_share, step_metrics.good_kl = limit.share()
        if step_metrics.step_share < 1.0:
            self.optimizer.shorten(before, step_metrics.step_share)

    def _codes(self) -> dict[str, Tensor]:
        """Return the codes of quantized weights by name; empty without `[quant]`."""
        stage = next((stage for stage in self.transforms if isinstance(stage, OnGrid)), None)
        if stage is None:
            return {}
        return stage.codes(named_tensors(self.model, self._tied, copy=True))

    def step_credits(self, groups: Sequence[Group]) -> StepCredits:
        """Return the credits that `step` would train groups with, and the account of every sampled
        id."""
        return self._credits(groups, self._scored(groups))

    def _credits(self, groups: Sequence[Group], scored: _Scored) -> StepCredits:
        def by_rewards(groups: Sequence[Group]) -> StepCredits:
            asked = scored.asked
            values = None if asked is None else asked.batch.by_trajectory(asked.values_n, 0.0)
            return advantages(groups, self.credit_settings, scored.penalty, values)

        if self.teachers is not None:
            return self.teachers.credits(groups, self.credit_settings, by_rewards)
        return by_rewards(groups)

    def _scored(self, groups: Sequence[Group]) -> _Scored:
        """Score every id that can carry loss, where its KL is part of the reward or a critic is
        asked."""
        if self.critic is None and not self.objective.penalizes_reward:
            return _Scored()

        usable = [
            trajectory
            for group in groups
            for trajectory in group.trajectories
            if exclusion_reason(trajectory) is None
        ]
        to_score = []
        for trajectory in sorted(usable, key=sort_key):
            weights = self.credit_settings.scale(trajectory)
            tokens = trainable_tokens(trajectory, weights)
            to_score.append(Credit(trajectory, 0.0, None, tokens, weights=weights))
        batch = self._batch(to_score, LossDenominator("token", 1, 1))

        penalty = None
        if self.objective.penalizes_reward:
            penalty = self.objective.penalties(batch, self._score, self._score_reference)
        return _Scored(penalty, None if self.critic is None else self.critic.values(batch))

    def _batch(
        self,
        credits: Sequence[Credit],
        scale: LossDenominator,
        *,
        routes: bool = True,
        version: int | None = None,
        pack: Pack | None = None,
    ) -> TrainingBatch:
        vision = None if self.pixels is None else self.pixels.vision
        positions = sum(len(span.ids) for credit in credits for span in credit.trajectory.spans)
        limit = self.ranks.limit(self.micro_batch_limit.tokens, positions)
        routes = routes and self.forward.replay is not None  # demonstrations have no routes
        return make_batch(
            credits,
            scale,
            micro_tokens=limit,
            device=self.device,
            vision=vision,
            pack=pack or self.layout.pack,
            routes=routes,
            version=version,
        )

    def _update(
        self,
        batch: TrainingBatch,
        lr: float,
        step_metrics: StepMetrics,
        step: int,
    ) -> None:
        """Make one optimizer step."""
        is_first = not step_metrics.updates
        if self.config.old_logprobs == "engine":
            check_logprobs(batch)
        if batch.start_n is None and self.objective.correction is not None:
            self._score_start(batch, step_metrics)
        log_ratios = self.objective.log_ratios(batch, self._score, first=is_first)

        # With `gradient_signal_steps`: what the gradient is compared with, the average of earlier
        # steps'. A first step has none, and compares two halves of its tasks. How far each task
        # agrees is measured by a small move, which would be lost in bfloat16's rounding.
        by_task = is_first and self.signals[0].is_young and self.dtype == torch.float32
        past = self.optimizer.momentum()
        halved = set[str]()
        if by_task and not past:
            past, halved = self._half_gradient(batch, log_ratios)

        # Forward and backward.
        self.optimizer.zero_grad()
        passes = self.micro_batch_limit.run(
            batch,
            lambda: self._backward(batch, log_ratios),
            undo=self.optimizer.zero_grad,
        )

        # What the passes found, in the order of the batch's targets.
        loss = 0.0
        logp_n = torch.zeros_like(batch.weights_n)
        slope_n = torch.zeros_like(batch.weights_n)
        for done in passes:
            tokens_m = done.micro.tokens_m
            logp_n[tokens_m] = done.logprobs_m.double()
            slope_n[tokens_m] = done.slope_m.double()
            loss += done.terms.loss.item()
            kl_terms = None
            if batch.reference_n is not None:
                kl_terms = done.logprobs_m, batch.reference_n[tokens_m]
            step_metrics.add(done.terms, done.entropy_m, kl_terms)
        loss = float(self.ranks.sum_(torch.tensor(loss, dtype=torch.float64, device=self.device)))
        if batch.start_n is None:
            self._keep_start(batch, self.ranks.sum_(logp_n), step_metrics)

        # Only the first update of a step is compared, before it is clipped: later ones see episodes
        # that are in the average already, so their noise would agree with itself.
        agreement = None
        if is_first:
            gradient = self.optimizer.gradient()
            agreement = self.optimizer.agreement(gradient, past, without=bool(halved))
        norm = self.optimizer.clip_gradient()
        check_finite(loss, norm, f"step {step + 1}")
        if is_first:
            parts = []
            if agreement is not None and by_task:
                gradient_norm = agreement.norm
                parts = self._agreement_by_task(batch, past, halved, logp_n, slope_n, gradient_norm)
            self._add_evidence(agreement, parts)
            step_metrics.agreement = agreement

        self.optimizer.step(lr * self.lr_share)
        self.updates += 1
        step_metrics.updates.append((loss, norm))

    def _add_evidence(self, agreement: Agreement | None, parts: list[float]) -> None:
        """Add a step to the evidence that gradients agree, which decides how long steps may be."""
        plain, scaled = self.signals
        moved = self.signal_share > 0.0
        if agreement is None:
            plain.update(None, parts, moved=moved)
            scaled.update(None, moved=moved)
        else:
            plain.update(agreement.cosine, parts, moved=moved)
            scaled.update(agreement.scaled, moved=moved)

    def _half_gradient(
        self, batch: TrainingBatch, log_ratios: LogRatios | None
    ) -> tuple[Direction, set[str]]:
        """Return the gradient of every second task of a batch, and the ids of those tasks.

        Both are empty for a single task. A first step compares it with the gradient of the others,
        since it has no momentum.
        """
        tasks_n = [batch.trajectories[index].task.id for index in batch.trajectory_n.tolist()]
        tasks = sorted(set(tasks_n))
        if len(tasks) < 2:
            return {}, set()

        halved = set(tasks[::2])
        inside_n = torch.tensor([task in halved for task in tasks_n], device=self.device)
        half = replace(batch, weights_n=batch.weights_n * inside_n)
        self.optimizer.zero_grad()
        self.micro_batch_limit.run(
            half,
            lambda: self._backward(half, log_ratios),
            undo=self.optimizer.zero_grad,
        )
        return self.optimizer.gradient(), halved

    def _agreement_by_task(
        self,
        batch: TrainingBatch,
        past: Direction,
        halved: set[str],
        logp_n: Tensor,
        slope_n: Tensor,
        norm: float,
    ) -> list[float]:
        """Return, for each task, how well its gradient agrees with the average of the others.

        That is how far a small move against the average lowers the task's loss, to first order:
        `slope_n` is the loss's derivative by each logprob, `logp_n` the logprobs before the move.
        Tasks in `halved` are left out, whose gradients the average `past` consists of.
        """
        size = LOSS_CHANGE / norm
        with self.optimizer.moved(past, size):
            change_n = self.ranks.sum_(slope_n) * (self._score(batch) - self.ranks.sum_(logp_n))

        parts: dict[str, float] = {}
        for index, change in zip(batch.trajectory_n.tolist(), change_n.tolist(), strict=True):
            task = batch.trajectories[index].task.id
            parts[task] = parts.get(task, 0.0) - change / (size * norm)
        return [part for task, part in parts.items() if task not in halved]

    def _passes(self, batch: TrainingBatch) -> Iterator[tuple[MicroBatch, bool]]:
        """Yield this rank's passes of an update, each with whether it counts.

        The tensors of one pass have other sizes than those of the next, which find no room between
        the gradients that stay: without the trim a step of a model of 135 million weights grew by
        0.3 GB over its passes.
        """
        is_large = is_large_on_cpu(self.model)
        for number, (micro, counts) in enumerate(self.ranks.passes(batch.micros)):
            if number and is_large:
                return_free_pages()
            yield micro, counts

    def _backward(self, batch: TrainingBatch, log_ratios: LogRatios | None) -> list[BackwardPass]:
        """Run forward and backward of this rank's passes; gradients add up in the parameters."""
        done = []
        for micro, counts in self._passes(batch):
            options: dict[str, Any] = {}
            if batch.teachers:
                options["teachers"] = batch.targets_of(micro)
            stats = self._stats(
                micro,
                self.pixels,
                self.distribution,
                batch.support_of(micro),
                entropy=True,
                entropy_grad=bool(self.config.entropy),
                **options,
            )
            stats.logprobs_m.retain_grad()
            terms = self.objective.terms(batch, micro, stats, log_ratios)

            # A pass that other ranks have and this one has not is run as well, since sharded layers
            # wait for all ranks; it adds nothing.
            loss = terms.loss if counts else 0.0 * terms.loss
            loss.backward()
            if not counts:
                continue

            slope_m = stats.logprobs_m.grad
            assert slope_m is not None
            done.append(
                BackwardPass(
                    micro=micro,
                    terms=replace(terms, loss=terms.loss.detach()),
                    entropy_m=stats.entropy_m.detach(),
                    logprobs_m=stats.logprobs_m.detach(),
                    slope_m=slope_m,
                )
            )
        return done

    def _score_start(self, batch: TrainingBatch, step_metrics: StepMetrics) -> None:
        """Score a batch before its first update, and set its correction."""
        start_n = self._score(batch)
        self._keep_start(batch, start_n, step_metrics)

        correction = self.objective.correction
        if correction is not None:
            check_logprobs(batch, f"train.correction = '{correction.kind}'", "none")
            batch.correction_n = correction.weights(start_n, batch.engine_n, batch.trajectory_n)
            step_metrics.corrections.append(batch.correction_n)

    def _keep_start(
        self,
        batch: TrainingBatch,
        start_n: Tensor,
        step_metrics: StepMetrics,
    ) -> None:
        """Keep a batch's logprobs before its first update, and compare them with the engine's."""
        batch.start_n = start_n

        def rounding_effect() -> float:
            with plain_inputs(self.model):
                changed_n = self._score(batch) - start_n
            return float(changed_n[batch.current_n].abs().mean())

        step_metrics.most_differ |= check_mismatch(
            batch,
            self.config,
            self.precision,
            self.distribution,
            rounding_effect=rounding_effect if self._rounded_inputs else None,
            differing_steps=self._differing_steps,
        )
        current_n = batch.current_n
        step_metrics.start.append((start_n[current_n], batch.engine_n[current_n]))

    def _score(self, batch: TrainingBatch) -> Tensor:
        """Return logprobs of a batch's targets, float64, N; the first call finds the top-k/top-p
        support."""
        if self.distribution.truncates and batch.support is None and batch.micros:
            batch.support = self.micro_batch_limit.run(batch, lambda: self._support(batch))
        return self.micro_batch_limit.run(batch, lambda: self._logprobs(batch))

    def _support(self, batch: TrainingBatch) -> SamplingSupport:
        """Return the ids that the engine could have sampled at each target, in the order of N."""
        supports = [
            self.forward.sampling_support(micro, self.pixels, self.distribution)
            for micro in batch.micros
        ]
        order_n = torch.cat([micro.tokens_m for micro in batch.micros])
        return SamplingSupport.join(supports).take(order_n.argsort())

    def _logprobs(self, batch: TrainingBatch) -> Tensor:
        logp_n = torch.zeros_like(batch.weights_n)
        with torch.no_grad():
            for micro, counts in self.ranks.passes(batch.micros):
                support = batch.support_of(micro)
                stats = self._stats(micro, self.pixels, self.distribution, support, entropy=False)
                if counts:
                    logp_n[micro.tokens_m] = stats.logprobs_m.double()
        return self.ranks.sum_(logp_n)

    def _score_reference(self, batch: TrainingBatch) -> Tensor:
        """Return the reference policy's logprobs of a batch's targets, float64, N."""
        with self._as_reference():
            return self._score(batch)

    @property
    def keeps_reference(self) -> bool:
        """Whether steps need a reference policy."""
        return bool(self.config.kl) or (self.teachers is not None and self.teachers.include_self)

    def _as_reference(self) -> AbstractContextManager[None]:
        if self._reference is None:
            why = "train.kl is over 0, or the policy is its own teacher"
            raise TurnwrightError(
                f"{why}, but there is no reference policy; call reference() before the first step"
            )
        return self._reference.active()

    def _at_temperature_one(self, micro: MicroBatch) -> Tensor:  # log-probabilities (M, vocabulary)
        with torch.no_grad():
            return self._full_logprobs(micro, self.pixels, LogitDistribution(1.0, self.banned_ids))

    def take_probe(self) -> WeightSyncProbe | None:
        """Return and clear the last step's probe, which checks whether an engine has the updates;
        None if there is none."""
        probe, self._probe = self._probe, None
        return probe

    # Other uses of the forward pass.

    def supervised(self, trajectories: Sequence[Trajectory], *, lr: float) -> dict[str, float]:
        """Train one step on demonstrations: cross entropy of their sampled ids in nats, mean over
        the step's tokens.

        Returns:
            `loss`, `grad_norm`, `lr`, `tokens_trained`, `tokens_per_s` and `train_s`.

        Raises:
            UsageError: as `step`.
            TurnwrightError: when no id carries loss, or the loss or its gradient is not finite.
        """
        began = time.perf_counter()
        check_fingerprints(self.template, trajectories, "the training data")
        self.layout.start_step()

        # Each id has the advantage 1, so that its loss is its cross entropy.
        credits = [
            Credit(trajectory, 1.0, None, trainable_tokens(trajectory))
            for trajectory in sorted(trajectories, key=sort_key)
        ]
        scale = LossDenominator.of(credits, "token")
        if not scale.tokens:
            raise TurnwrightError(
                f"none of {len(trajectories)} demonstrations has an id to train; a solver's "
                "replies must be sampled spans"
            )
        batch = self._batch(credits, scale, routes=False)

        self.optimizer.zero_grad()
        dropout = nullcontext() if self.adapter is None else self.adapter.dropout()
        with self._own_draws(), dropout:
            loss = self.micro_batch_limit.run(
                batch,
                lambda: self._supervised_backward(batch),
                undo=self.optimizer.zero_grad,
            )
        norm = self.optimizer.clip_gradient()
        check_finite(loss, norm, "a supervised step")
        self.optimizer.step(lr)
        self.updates += 1

        seconds = time.perf_counter() - began
        return {
            "loss": loss,
            "grad_norm": norm,
            "lr": lr,
            "tokens_trained": float(batch.size),
            "tokens_per_s": batch.size / seconds,
            "train_s": seconds,
        }

    def _supervised_backward(self, batch: TrainingBatch) -> float:
        """Run forward and backward of the passes of demonstrations; return the loss over all
        ranks."""
        distribution = LogitDistribution(1.0, self.banned_ids)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for micro, counts in self._passes(batch):
            logp_m = self._stats(micro, self.pixels, distribution, entropy=False).logprobs_m
            loss = -(logp_m * batch.weights_n[micro.tokens_m].to(logp_m.dtype)).sum()
            if counts:
                loss.backward()
                total += loss.detach()
            else:
                (0.0 * loss).backward()
        return float(self.ranks.sum_(total))

    def logprobs(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        """Return log-probabilities in nats of each trajectory's ids that can carry loss, path by
        path in order; raise `UsageError` as `step`."""
        check_fingerprints(self.template, trajectories, "the training data")
        credits = [
            Credit(trajectory, 1.0, None, trainable_tokens(trajectory))
            for trajectory in trajectories
        ]
        batch = self._batch(credits, LossDenominator.of(credits, "token"))

        rows: list[list[float]] = [[] for _ in trajectories]
        with_tokens = [number for number, credit in enumerate(credits) if credit.tokens]
        values = self._score(batch).tolist()
        for index, value in zip(batch.trajectory_n.tolist(), values, strict=True):
            rows[with_tokens[int(index)]].append(value)
        return rows

    # Weights and state.

    def weights(self, *, copy: bool = True) -> Weights:
        """Yield copies of the model's tensors by Hugging Face name: adapters merged, `transforms`
        applied, tied ones once.

        Without `copy` tensors may be the model's own, for a receiver that copies them before the
        next step.
        """
        weights = named_tensors(self.model, self._tied, copy=copy)
        if self.adapter is not None:
            weights = self.adapter.merge(weights)
        for transform in self.transforms:
            weights = transform(weights)
        return weights

    def release_gradients(self) -> None:
        """Free the gradients of the last step."""
        self.optimizer.zero_grad()

    def adapter_weights(self) -> Weights:
        """Yield copies of the LoRA matrices A and B by peft's file names, for engines that take
        adapters; raise `TurnwrightError` without an adapter."""
        if self.adapter is None:
            raise TurnwrightError("the model has no LoRA adapter; use weights()")
        return self.adapter.in_layout(named_tensors(self.model, self._tied, copy=True))

    def reference(self) -> None:
        """Keep the current policy as the reference of the KL term and of a `self` teacher, if there
        is one. Raises `ConfigError` when `train.reference` needs an adapter and there is none."""
        if self.keeps_reference:
            untouched = self.adapter is not None and not self.ranks.any(not self.adapter.is_initial)
            self._reference = ReferencePolicy.of(
                self.model, self.adapter, self.config, untouched=untouched
            )

    @property
    def signal_share(self) -> float:
        """Share of `train.epochs` full updates that a step makes: the larger share of signal of
        both measures of agreement."""
        return max(signal.share for signal in self.signals)

    @property
    def epochs_made(self) -> int:
        """Epochs that a step makes: as few as may make that share of updates, none larger than a
        full one. One more would cost as much as the first, and move the policy no further."""
        return max(1, math.ceil(self.config.epochs * self.signal_share))

    @property
    def lr_share(self) -> float:
        """Factor on the learning rate of each epoch."""
        return self.config.epochs * self.signal_share / self.epochs_made

    def reset_optimizer(self) -> None:
        """Reset the optimizer's moments for a new phase, in which a critic begins anew too."""
        self.optimizer = Optimizer(self.model, self.config, self.ranks)
        if self.critic is not None:
            self.critic.reset(self.model)
        # Updates by the same episodes have the same noise: the momentum forgets one step's in as
        # many as there are.
        memory = self.config.gradient_signal_steps
        beta = self.config.betas[0] ** self.config.epochs
        self.signals = GradientSignal(memory, beta), GradientSignal(memory, beta)
        """Evidence of the gradients' agreement, and of their agreement in units of each
        coordinate's size."""
        self.updates = 0
        """Optimizer steps since the last reset."""

    def save_weights(self, directory: str | Path, base: Path) -> None:
        """Write the model as a Hugging Face directory, or only its LoRA in peft's layout with
        `base` as its base model."""
        if self.adapter is not None:
            adapter = dict(self.adapter_weights())
            if self.ranks.rank == 0:
                self.adapter.save(adapter, Path(directory), base)
        elif self.ranks.size == 1:
            self.model.save_pretrained(directory)
        else:
            gathered = dict(named_tensors(self.model, self._tied, copy=True))
            if self.ranks.rank == 0:
                self.model.save_pretrained(directory, state_dict=gathered)

    def save(self, directory: str | Path) -> None:
        """Write the state for an exact resume, except the weights: optimizer, reference, critic,
        update count."""
        directory = Path(directory)
        tensors = {name: tensor.contiguous() for name, tensor in self.optimizer.tensors()}
        tensors["updates"] = torch.tensor([self.updates])
        signals = [signal.state() for signal in self.signals]
        tensors["signal"] = torch.tensor(signals, dtype=torch.float64)
        reference = None if self._reference is None else self._reference.tensors()
        critic = None
        if self.critic is not None:
            critic = {name: tensor.contiguous() for name, tensor in self.critic.tensors()}

        # All ranks have gathered their parts above; one writes.
        if self.ranks.rank:
            return
        save_file(tensors, directory / OPTIMIZER_FILE)
        if critic is not None:
            save_file(critic, directory / CRITIC_FILE)
        if reference is not None:
            whole = {name: tensor.contiguous() for name, tensor in reference.items()}
            save_file(whole, directory / REFERENCE_FILE)

    def load(self, directory: str | Path) -> None:
        """Restore what `save` wrote, not the weights; raise `ModelError` when it is unreadable or
        of another model."""
        directory = Path(directory)
        tensors = read_tensors(directory / OPTIMIZER_FILE)
        self.updates = int(tensors.pop("updates"))
        for signal, state in zip(self.signals, tensors.pop("signal").tolist(), strict=True):
            signal.restore(*state)
        self.optimizer.restore(tensors)
        if self.critic is not None:
            self.critic.restore(read_tensors(directory / CRITIC_FILE))
        self._reference = None
        if self.keeps_reference and (directory / REFERENCE_FILE).exists():
            self._reference = ReferencePolicy(self.model, self.adapter, None)
            self._reference.restore(read_tensors(directory / REFERENCE_FILE))
        elif self.keeps_reference and self.adapter is not None:
            self._reference = ReferencePolicy(self.model, self.adapter, None)
