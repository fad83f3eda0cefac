"""Forward pass of any Hugging Face causal or vision-language model, to statistics of its targets.

`ForwardPass.stats` is the way in: the model's body on complete rows (`ForwardPass.hidden`), then
its head on the targets alone (`target_stats`), with the distribution that the engine samples from
(`LogitDistribution`). Which rows share a pass is decided in `passes.py` and `packing.py`, and what
the statistics are used for in `turnwright.training.loss`.

The logits of all targets would be the largest tensor of a step: 8192 targets over a vocabulary of
151,936 are 5 GB in float32, and a softmax with its gradient holds several of that size. So the head
is applied to a few hundred targets at a time, and recomputed in the backward pass.

Suffixes of tensors beside those of `batch.py`: `_c` the targets of one chunk, `_v` the vocabulary,
`_d` the width of hidden states, `_p` the positions that hold features of images.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from turnwright.engines import Sampling
from turnwright.engines.distribution import masked_scores
from turnwright.engines.local.mixed_precision import (
    TILE,
    MixedLinear,
    packed_once,
    round_weights,
    times_inputs,
    times_weight,
)
from turnwright.engines.local.vision import ImageFeatures, SplitVLM, is_video, split_vlm
from turnwright.errors import TurnwrightError, UsageError
from turnwright.renderers.vision import PixelCache
from turnwright.training.forward.checkpointing import enable_gradient_checkpointing
from turnwright.training.forward.divergence import TeacherTargets
from turnwright.training.forward.mixed_decoder import MixedDecoder, mixed_decoder
from turnwright.training.forward.passes import MicroBatch
from turnwright.training.forward.routing_replay import RoutingReplay
from turnwright.training.forward.support import SamplingSupport
from turnwright.types import Media

ENTROPY_CHUNK = 1 << 22
"""Maximum elements of the copy that the entropy is computed on: 16 MB in float32."""
BANNED_LOGIT = -1e30
"""Replacement for minus infinity: probability exactly 0, and 0 times its log-probability is 0
instead of NaN."""


@dataclass(frozen=True, slots=True)
class TokenStats:
    """Log-probabilities and entropy at M targets; the entropy carries a gradient only if that was
    asked for."""

    logprobs_m: Tensor
    entropy_m: Tensor
    """Of the full distribution, in nats."""
    divergences: tuple[Tensor, ...] = ()
    """Divergence from each teacher, (M,), in nats, with a gradient."""


@dataclass(slots=True)
class LogitDistribution:
    """Distribution the engine samples from: logits / temperature, banned ids masked, renormalized
    over the min-p/top-k/top-p support.

    The support comes from the trainer's logits before a step's first update and is kept for all its
    updates (sampling-mask replay). Otherwise a sampled id could leave it, and the ratio would
    compare different supports. The sampled id is always in the support.
    """

    temperature: float = 1.0
    banned_ids: Collection[int] = ()
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    _masks: dict[tuple[int, torch.device], Tensor | None] = field(default_factory=dict)

    @property
    def truncates(self) -> bool:
        """Whether min-p, top-k or top-p exclude ids."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0

    def banned(self, logits: Tensor) -> Tensor | None:
        """Return a mask (V,), true for banned ids; None if there are none.

        Ids beyond the vocabulary are ignored.
        """
        vocabulary, device = key = (logits.shape[-1], logits.device)
        if key not in self._masks:
            ids = [token_id for token_id in self.banned_ids if 0 <= token_id < vocabulary]
            mask_v = torch.zeros(vocabulary, dtype=torch.bool)
            mask_v[ids] = True
            self._masks[key] = mask_v.to(device) if ids else None
        return self._masks[key]

    def excluded(
        self, wide_mv: Tensor, targets_m: Tensor, support: SamplingSupport | None = None
    ) -> Tensor | None:
        """Return a mask (V,) or (M, V), true for ids that cannot be sampled, or None; `wide_mv` are
        logits at temperature 1."""
        banned_v = self.banned(wide_mv)
        if not self.truncates:
            return banned_v
        if support is not None:
            return support.excluded(wide_mv.shape[-1])

        with torch.no_grad():
            sampling = Sampling(self.temperature, self.top_p, self.top_k, min_p=self.min_p)
            scores_mv = masked_scores(wide_mv.detach(), sampling, frozenset(self.banned_ids))
            excluded_mv: Tensor = scores_mv.isneginf()
            return excluded_mv.scatter_(1, targets_m[:, None], False)

    def stats(
        self,
        logits_mv: Tensor,
        targets_m: Tensor,
        support: SamplingSupport | None = None,
        *,
        entropy: bool,
        entropy_grad: bool = False,
        teachers: Sequence[TeacherTargets] = (),
    ) -> TokenStats:
        """Compute statistics in float32 or better: any difference from the sampler's distribution
        biases the ratio."""
        wide_mv = logits_mv.to(torch.promote_types(logits_mv.dtype, torch.float32))
        excluded = self.excluded(wide_mv, targets_m, support)
        logp_mv = self.log_softmax(wide_mv, excluded)
        chosen_m = logp_mv.gather(1, targets_m[:, None]).squeeze(1)
        divergences = tuple(
            teacher.divergence(logp_mv, excluded, self.log_softmax) for teacher in teachers
        )
        if not entropy:
            return TokenStats(chosen_m, chosen_m.new_zeros(0), divergences)

        # A few rows at a time: with a large vocabulary another copy of the log-probabilities would
        # be the peak of memory.
        rows = max(1, ENTROPY_CHUNK // logp_mv.shape[-1])
        parts = (logp_mv if entropy_grad else logp_mv.detach()).split(rows)
        entropy_m = torch.cat([-(part.exp() * part).sum(-1) for part in parts])
        return TokenStats(chosen_m, entropy_m, divergences)

    def log_softmax(self, wide_mv: Tensor, excluded: Tensor | None) -> Tensor:
        """Return log-probabilities from logits at temperature 1, without the excluded ids."""
        if self.temperature != 1.0:
            wide_mv = wide_mv / self.temperature
        if excluded is not None:
            wide_mv = wide_mv.masked_fill(excluded, BANNED_LOGIT)
        return torch.log_softmax(wide_mv, dim=-1)

    def support(self, logits_mv: Tensor, targets_m: Tensor) -> SamplingSupport:
        """Compute the support of each target of a distribution that truncates."""
        wide_mv = logits_mv.to(torch.promote_types(logits_mv.dtype, torch.float32))
        excluded_mv = self.excluded(wide_mv, targets_m)
        assert excluded_mv is not None
        return SamplingSupport.of(excluded_mv)


CHUNK_NUMBERS = {"cpu": 1 << 24, "cuda": 1 << 26}
"""Maximum logits at once: 64 MB in float32 on a CPU, 256 MB on a GPU, whose products need more
rows. Fewer are not chunked and are kept for the backward pass. On a CPU, 2^22 took 9.0 s, 2^24 7.0
s, all at once 6.1 s (768 targets, width 512, vocabulary 151,936)."""


MIXED_CHUNK = 10_000_000
"""The same in mixed precision, whose products are fast with few rows: 40 MB for each of the four
copies of a chunk."""


def chunk_rows(device: torch.device, head: OutputHead) -> int:
    """Return how many targets a head is applied to at once."""
    if isinstance(head.module, MixedLinear):
        rows = MIXED_CHUNK // head.vocabulary
        return max(TILE, rows // TILE * TILE)

    numbers = CHUNK_NUMBERS.get(device.type, CHUNK_NUMBERS["cuda"])
    return max(1, numbers // head.vocabulary)


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """Transform that a model applies to the logits after the head's matrix product."""

    kind: str = "plain"
    """`plain`: nothing; `cap`: ``number * tanh(logits / number)``; `times`; `over`."""
    number: float = 1.0

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the model's own logits."""
        if self.kind == "cap":
            return torch.tanh(logits / self.number) * self.number
        if self.kind == "times":
            return logits * self.number
        if self.kind == "over":
            return logits / self.number
        return logits

    def backward_(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """Compute the gradient of the input in place, from the gradient and the value of the
        output."""
        if self.kind == "cap":
            return gradient.mul_(1.0 - (logits / self.number) ** 2)
        if self.kind == "times":
            return gradient.mul_(self.number)
        if self.kind == "over":
            return gradient.div_(self.number)
        return gradient


KEYS = {"final_logit_softcapping": "cap", "logit_scale": "times", "logits_scaling": "over"}
"""Keys of a model's config that transform its logits: Gemma's, Cohere's, Granite's."""


def shapes(config: Any) -> Iterator[LogitTransform]:
    """Yield the transforms that a model of this config may apply; the caller tests which one it
    does."""
    yield LogitTransform()
    for key, kind in KEYS.items():
        number = getattr(config, key, None)
        if isinstance(number, int | float) and number:
            yield LogitTransform(kind, float(number))


@dataclass(slots=True)
class OutputHead:
    """Output head of a model and the transform of its logits."""

    module: nn.Module
    shape: LogitTransform = LogitTransform()

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the model's logits, in its own precision."""
        return self.shape(cast(Tensor, self.module(hidden)))

    @property
    def vocabulary(self) -> int:
        """Logits per position."""
        weight = getattr(self.module, "weight", None)
        if isinstance(weight, Tensor):
            return int(weight.shape[0])
        return int(cast(Any, self.module).out_features)

    @property
    def is_linear(self) -> bool:
        """Whether it is a plain matrix product, whose gradient can be computed here."""
        module = self.module
        hooks = (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
        return (
            type(module) in (nn.Linear, MixedLinear)
            and type(module.weight) is nn.Parameter
            and not any(hooks)
        )


@dataclass(slots=True)
class FittedHead(OutputHead):
    """Output head with a given number of logits: models of one tokenizer may be padded
    differently."""

    width: int = 0

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits (M, width); ids that the model lacks have no probability."""
        logits = self.shape(cast(Tensor, self.module(hidden)))
        missing = self.width - logits.shape[-1]
        if missing > 0:
            return nn.functional.pad(logits, (0, missing), value=BANNED_LOGIT)
        return logits[..., : self.width]

    @property
    def vocabulary(self) -> int:
        """Logits per position."""
        return self.width


def target_stats(
    hidden_md: Tensor,
    head: OutputHead,
    targets_m: Tensor,
    distribution: LogitDistribution,
    support: SamplingSupport | None = None,
    *,
    entropy: bool,
    entropy_grad: bool = False,
    teachers: Sequence[TeacherTargets] = (),
    max_logits: int | None = None,
) -> TokenStats:
    """Compute statistics of M targets from the hidden states that predict them.

    The logprobs carry a gradient, the entropy only with `entropy_grad`. Without `support`, it is
    computed if the distribution truncates; without `entropy`, that is empty. `max_logits` is how
    many are computed at once.
    """
    if max_logits is None:
        rows = chunk_rows(hidden_md.device, head)
    else:
        rows = max(1, max_logits // head.vocabulary)
    count = len(targets_m)
    if count <= rows:
        return distribution.stats(
            head.logits(hidden_md),
            targets_m,
            support,
            entropy=entropy,
            entropy_grad=entropy_grad,
            teachers=teachers,
        )

    if torch.is_grad_enabled() and head.is_linear and not teachers:
        linear = cast(nn.Linear, head.module)
        logp_m, entropy_m = _Chunks.apply(
            hidden_md,
            linear.weight,
            linear.bias,
            head,
            targets_m,
            distribution,
            support,
            entropy,
            entropy_grad,
            rows,
        )
        return TokenStats(logp_m, entropy_m)

    def chunk_stats(chunk: slice) -> tuple[Tensor, ...]:
        stats = distribution.stats(
            head.logits(hidden_md[chunk]),
            targets_m[chunk],
            _part(support, chunk, targets_m),
            entropy=entropy,
            entropy_grad=entropy_grad,
            teachers=[teacher.take(chunk) for teacher in teachers],
        )
        return stats.logprobs_m, stats.entropy_m, *stats.divergences

    chunks = _slices(count, rows)
    if torch.is_grad_enabled():
        parts = [checkpoint(chunk_stats, chunk, use_reentrant=False) for chunk in chunks]
    else:
        with packed_once(head.module):
            parts = [chunk_stats(chunk) for chunk in chunks]
    logp_m, entropy_m, *divergences = (torch.cat(column) for column in zip(*parts, strict=True))
    return TokenStats(logp_m, entropy_m, tuple(divergences))


def _slices(count: int, rows: int) -> list[slice]:
    return [slice(start, min(start + rows, count)) for start in range(0, count, rows)]


def _part(support: SamplingSupport | None, chunk: slice, like: Tensor) -> SamplingSupport | None:
    if support is None:
        return None
    return support.take(torch.arange(chunk.start, chunk.stop, device=like.device))


class _Chunks(torch.autograd.Function):  # type: ignore[misc]
    """`target_stats` for a linear head, with z the logits, T the temperature, p their softmax and H
    its entropy::

        d logp_m / d z_mv = ([v = target_m] - p_mv) / T
        d H_m / d z_mv    = -p_mv (log p_mv + H_m) / T
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_md: Tensor,
        weight_vd: Tensor,
        bias_v: Tensor | None,
        head: OutputHead,
        targets_m: Tensor,
        distribution: LogitDistribution,
        support: SamplingSupport | None,
        entropy: bool,
        entropy_grad: bool,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        stats = target_stats(
            hidden_md,
            head,
            targets_m,
            distribution,
            support,
            entropy=entropy,
            max_logits=rows * head.vocabulary,
        )
        ctx.save_for_backward(hidden_md, weight_vd, targets_m)
        ctx.head = head
        ctx.distribution = distribution
        ctx.support = support
        ctx.rows = rows
        ctx.entropy_m = stats.entropy_m if entropy_grad else None
        if not entropy_grad:
            ctx.mark_non_differentiable(stats.entropy_m)
        return stats.logprobs_m, stats.entropy_m

    @staticmethod
    def backward(ctx: Any, slope_m: Tensor, entropy_slope_m: Tensor) -> tuple[Any, ...]:
        hidden_md, weight_vd, targets_m = ctx.saved_tensors
        head: OutputHead = ctx.head
        to_hidden, to_weight, to_bias, *_ = ctx.needs_input_grad

        # Chunks are summed in the precision of the loss: bfloat16 would round each sum.
        hidden_grad = torch.empty_like(hidden_md) if to_hidden else None
        weight_grad = torch.zeros_like(weight_vd, dtype=slope_m.dtype) if to_weight else None
        bias_grad = None
        if to_bias and weight_grad is not None:
            bias_grad = weight_grad.new_zeros(len(weight_vd))

        mixed = isinstance(head.module, MixedLinear)
        matrix_vd = round_weights(weight_vd) if mixed else weight_vd
        with packed_once(head.module, matrix_vd):
            for chunk in _slices(len(targets_m), ctx.rows):
                logits_cv = head.logits(hidden_md[chunk])
                entropy = None
                if ctx.entropy_m is not None:
                    entropy = (ctx.entropy_m[chunk], entropy_slope_m[chunk])
                grad_cv = _slope(
                    logits_cv,
                    targets_m[chunk],
                    slope_m[chunk],
                    ctx.distribution,
                    _part(ctx.support, chunk, targets_m),
                    entropy,
                )
                grad_cv = head.shape.backward_(grad_cv, logits_cv).to(matrix_vd.dtype)

                if bias_grad is not None:
                    bias_grad += grad_cv.sum(0, dtype=bias_grad.dtype)
                if hidden_grad is not None:
                    if mixed:
                        hidden_grad[chunk] = times_weight(grad_cv, matrix_vd)
                    else:
                        torch.mm(grad_cv, matrix_vd, out=hidden_grad[chunk])
                if weight_grad is not None:
                    inputs_cd = hidden_md[chunk].to(matrix_vd.dtype)
                    if weight_grad.dtype == matrix_vd.dtype:
                        weight_grad.addmm_(grad_cv.T, inputs_cd)
                    elif mixed:
                        weight_grad += times_inputs(grad_cv, inputs_cd)
                    else:
                        weight_grad += grad_cv.T @ inputs_cd

        if weight_grad is not None:
            weight_grad = weight_grad.to(weight_vd.dtype)
        if bias_grad is not None:
            bias_grad = bias_grad.to(weight_vd.dtype)
        # The other seven arguments have no gradient.
        return (hidden_grad, weight_grad, bias_grad, *[None] * 7)


def _slope(
    logits_cv: Tensor,
    targets_c: Tensor,
    slope_c: Tensor,
    distribution: LogitDistribution,
    support: SamplingSupport | None,
    entropy: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Compute the gradient of ``sum_c slope_c * logp_c`` with respect to the logits; `entropy` adds
    (H_c, slope of H_c)."""
    wide = logits_cv.to(torch.promote_types(logits_cv.dtype, torch.float32), copy=True)
    excluded = distribution.excluded(wide, targets_c, support)
    if distribution.temperature != 1.0:
        wide /= distribution.temperature
    if excluded is not None:
        wide.masked_fill_(excluded, BANNED_LOGIT)

    grad_cv = torch.softmax(wide, -1)
    if entropy is None:
        grad_cv *= -slope_c[:, None]
    else:
        value_c, entropy_slope_c = entropy
        # slope_c + entropy_slope_c (log p_cv + H_c), in the memory of one tensor.
        per_id_cv = torch.log_softmax(wide, -1)
        per_id_cv.add_(value_c[:, None])
        per_id_cv.mul_(entropy_slope_c[:, None])
        per_id_cv.add_(slope_c[:, None])
        grad_cv *= per_id_cv.neg_()

    grad_cv[torch.arange(len(targets_c), device=targets_c.device), targets_c] += slope_c
    if distribution.temperature != 1.0:
        grad_cv.div_(distribution.temperature)
    return grad_cv


FROZEN_BYTES = 2**28
"""Cache size for features of a frozen vision tower."""


class ForwardPass:
    """Forward pass: the model's body on complete rows, its head only at the requested positions, in
    chunks.

    With a vocabulary of 151k, the logits of every position would be by far the largest tensor of a
    step, and a multi-turn row is mostly observations. The transform after the head (soft cap,
    factor) is identified by comparing one small pass bit by bit; with an unknown transform, all
    logits are computed.

    For a vision model, each image of a pass goes through its tower once, and all rows with the
    image share its features.
    """

    def __init__(self, model: nn.Module, *, replay: bool = False) -> None:
        """Hook the model's routers if passes carry the engine's experts; raise `ConfigError` when
        none of them supports it."""
        self.model = model
        self.replay = RoutingReplay(model) if replay else None
        self.tower, self.no_vision_reason = split_vlm(model)
        self.vision_inputs = None if self.tower is None else VisionInputs(self.tower)

        # The body and the head of a text model, where it exposes both.
        module = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        body = getattr(model, getattr(model, "base_model_prefix", "") or "model", None)
        is_exposed = (
            isinstance(module, nn.Module) and isinstance(body, nn.Module) and body is not model
        )
        self.body: nn.Module | None = body if is_exposed else None
        self.head: OutputHead | None = None
        """None if all logits must be computed."""
        parameters = inspect.signature((self.body or model).forward).parameters
        self.positions = "position_ids" in parameters

        if self.tower is not None:
            self.head = OutputHead(self.tower.head)
        elif self.body is not None:
            shape = self._shape(module)
            self.head = None if shape is None else OutputHead(module, shape)
        self.mixed = mixed_decoder(model, self.tower) if self.head is not None else None
        """Pass in mixed precision with the engine's arithmetic; None where the modules compute."""

    def enable_checkpointing(self) -> None:
        """Compute activations again in the backward pass; raise `ConfigError` where no layer
        supports it."""
        if self.mixed is not None:
            self.mixed.keep_inputs_only()
        else:
            enable_gradient_checkpointing(self.model)

    def stats(
        self,
        micro: MicroBatch,
        pixels: PixelCache | None,
        distribution: LogitDistribution,
        support: SamplingSupport | None = None,
        *,
        entropy: bool,
        entropy_grad: bool = False,
        teachers: Sequence[TeacherTargets] = (),
    ) -> TokenStats:
        """Compute statistics of a pass's M targets, see `target_stats`.

        Raises:
            UsageError: for images with a text-only model.
            MediaError: when images are missing.
        """
        if self.head is None:
            return distribution.stats(
                self.all_logits(micro),
                micro.targets_m,
                support,
                entropy=entropy,
                entropy_grad=entropy_grad,
                teachers=teachers,
            )
        return target_stats(
            self.hidden(micro, pixels),
            self.head,
            micro.targets_m,
            distribution,
            support,
            entropy=entropy,
            entropy_grad=entropy_grad,
            teachers=teachers,
        )

    def features(self, micro: MicroBatch, pixels: PixelCache | None) -> tuple[Tensor, OutputHead]:
        """Compute what a head takes at a pass's targets, and that head: hidden states and the
        model's, or all logits and the identity."""
        if self.head is not None:
            return self.hidden(micro, pixels), self.head
        logits_mv = self.all_logits(micro)
        return logits_mv, FittedHead(nn.Identity(), width=logits_mv.shape[-1])

    def sampling_support(
        self, micro: MicroBatch, pixels: PixelCache | None, distribution: LogitDistribution
    ) -> SamplingSupport:
        """Compute the top-k/top-p support of a pass's targets, for a distribution that
        truncates."""
        targets_m = micro.targets_m
        with torch.no_grad():
            if self.head is None:
                return distribution.support(self.all_logits(micro), targets_m)

            hidden_md = self.hidden(micro, pixels)
            supports: list[SamplingSupport] = []
            for chunk in _slices(len(targets_m), chunk_rows(hidden_md.device, self.head)):
                # The logits have no name, which would keep them while the next ones are computed.
                supports.append(
                    distribution.support(self.head.logits(hidden_md[chunk]), targets_m[chunk])
                )
            return SamplingSupport.join(supports)

    def all_logits(self, micro: MicroBatch) -> Tensor:
        """Compute the logits (M, vocabulary) at a pass's targets with the model's own head."""
        if micro.media:
            raise UsageError(f"trajectories contain images, but {self.no_vision_reason}")
        output = self._call(self.model, micro.ids_bt, micro.positions, **self._prepare(micro))
        full_btv: Tensor = output.logits
        return _predicting(full_btv, micro)

    def full_logprobs(
        self, micro: MicroBatch, pixels: PixelCache | None, distribution: LogitDistribution
    ) -> Tensor:
        """Compute log-probabilities (M, vocabulary) at a pass's M targets, in float32 or better;
        not chunked."""
        if self.head is None:
            logits_mv = self.all_logits(micro)
        else:
            logits_mv = self.head.logits(self.hidden(micro, pixels))
        wide_mv = logits_mv.to(torch.promote_types(logits_mv.dtype, torch.float32))
        wide_mv = wide_mv / distribution.temperature

        banned_v = distribution.banned(wide_mv)
        if banned_v is not None:
            wide_mv = wide_mv.masked_fill(banned_v, BANNED_LOGIT)
        return torch.log_softmax(wide_mv, -1)

    def hidden(self, micro: MicroBatch, pixels: PixelCache | None = None) -> Tensor:
        """Compute the hidden states (M, width) that predict a pass's targets, after the last
        norm."""
        if self.mixed is not None:
            return self._mixed_hidden(self.mixed, micro, pixels)
        if self.tower is not None and self.vision_inputs is not None:
            places_p, features = self.vision_inputs.features_for(micro, pixels)
            hidden_btd = self.tower.decode(
                micro.ids_bt, micro.positions, places_p, features, **self._prepare(micro)
            )
        elif micro.media:
            raise UsageError(f"trajectories contain images, but {self.no_vision_reason}")
        else:
            assert self.body is not None
            output = self._call(self.body, micro.ids_bt, micro.positions, **self._prepare(micro))
            hidden_btd = output.last_hidden_state
        return _predicting(hidden_btd, micro)

    def _mixed_hidden(
        self, decoder: MixedDecoder, micro: MicroBatch, pixels: PixelCache | None
    ) -> Tensor:
        if micro.media and self.vision_inputs is None:
            raise UsageError(f"trajectories contain images, but {self.no_vision_reason}")

        batch, length = micro.ids_bt.shape
        embeds_td = decoder.embed(micro.ids_bt).flatten(0, 1)
        extras: list[Tensor] = []
        if self.vision_inputs is not None:
            places_p, features = self.vision_inputs.features_for(micro, pixels)
            if places_p is not None and features is not None:
                embeds_td = embeds_td.index_put((places_p,), features.rows)
                nothing_td = torch.zeros_like(embeds_td)
                extras = [nothing_td.index_put((places_p,), layer) for layer in features.deep]

        stream_td = decoder.stream(embeds_td, (batch, length), micro.positions, micro.tree, extras)
        return decoder.last_norm(stream_td.index_select(0, micro.before_m))

    @property
    def feature_width(self) -> int:
        """Width of what `features` returns first."""
        weight = None if self.head is None else getattr(self.head.module, "weight", None)
        if isinstance(weight, Tensor):
            return int(weight.shape[1])

        ids_bt = torch.zeros(1, 1, dtype=torch.long, device=next(self.model.parameters()).device)
        with torch.no_grad():
            output = self._call(self.model, ids_bt, torch.zeros_like(ids_bt))
        return int(output.logits.shape[-1])

    @property
    def decoder(self) -> nn.Module | None:
        """Module whose layers attend; None if the model does not expose it."""
        return self.tower.text if self.tower is not None else self.body

    def _prepare(self, micro: MicroBatch) -> dict[str, Any]:
        """Set the experts to replay and return the model arguments of the pass's prefix tree."""
        if self.replay is not None:
            self.replay.set_routes(micro.routes)
        if micro.tree is None:
            return {}
        micro.tree.cache["layers"] = 0
        return {"turnwright_tree": micro.tree}

    def _call(self, module: nn.Module, ids_bt: Tensor, positions_1t: Tensor, **more: Any) -> Any:
        # No mask: causal attention never reaches right padding. No cache: with one, transformers
        # takes other mask paths.
        if self.positions:
            more["position_ids"] = positions_1t
        return module(input_ids=ids_bt, attention_mask=None, use_cache=False, **more)

    def _shape(self, head: nn.Module) -> LogitTransform | None:
        """Identify the transform after the head by exact comparison with the model's logits; None
        if unknown."""
        assert self.body is not None
        device = next(self.model.parameters()).device
        ids_bt = torch.tensor([[0, 1, 2, 3]], device=device)
        positions_1t = torch.arange(4, device=device)[None]
        with torch.no_grad():
            expected_btv = self._call(self.model, ids_bt, positions_1t).logits
            head_btv = head(self._call(self.body, ids_bt, positions_1t).last_hidden_state)
            for shape in shapes(getattr(self.model, "config", None)):
                if torch.equal(expected_btv, shape(head_btv)):
                    return shape
        return None


class VisionInputs:
    """Image and video features of a pass: each encoded once, with gradient if the tower is trained.

    Those of a frozen tower are the same at every step, so they are cached within a memory limit.
    """

    def __init__(self, tower: SplitVLM) -> None:
        self.tower = tower
        self.encoded = 0
        """Images and videos that went through the tower."""
        self.frozen = not any(p.requires_grad for _, p in tower.vision_parameters())
        self._cached_bytes = 0
        self._cache: OrderedDict[str, ImageFeatures] = OrderedDict()

    def features_for(
        self, micro: MicroBatch, pixels: PixelCache | None
    ) -> tuple[Tensor | None, ImageFeatures | None]:
        """Return the features' positions in the flattened (B, T), ascending, and the features; None
        without media."""
        if not micro.media:
            return None, None
        if pixels is None:
            raise UsageError(
                "trajectories contain images, but the trainer has no pixels; pass "
                "pixels=Rollout(...).pixels to Trainer"
            )

        # Features are those of each picture once; `micro.media` says where each is shown.
        sizes = {media.key: (media, len(positions)) for media, positions in micro.media}
        features, first_rows = self._features(sizes, pixels)
        places: list[int] = []
        rows: list[int] = []
        for media, positions in micro.media:
            places += positions
            first_row = first_rows[media.key]
            rows += range(first_row, first_row + len(positions))

        device = micro.ids_bt.device
        places_p = torch.tensor(places, device=device)
        rows_p = torch.tensor(rows, device=device)
        return places_p, features.take(rows_p)

    def _features(
        self, sizes: dict[str, tuple[Media, int]], pixels: PixelCache
    ) -> tuple[ImageFeatures, dict[str, int]]:
        """Return the concatenated features of all media and the first row of each."""
        keys = [key for key in sizes if key in self._cache]
        parts = [self._cache[key] for key in keys]

        # What is not cached goes through the tower, images and videos apart.
        for video in (False, True):
            missing = [
                key
                for key in sizes
                if key not in self._cache and is_video(pixels.get(sizes[key][0])) is video
            ]
            if not missing:
                continue
            arrays = pixels.merged([sizes[key][0] for key in missing])
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
                parts.append(self.tower.encode_together(arrays, [sizes[key][1] for key in missing]))
            self.encoded += len(missing)
            keys += missing

        features = ImageFeatures.join(parts)
        first_rows: dict[str, int] = {}
        row = 0
        for key in keys:
            first_rows[key] = row
            row += sizes[key][1]

        if self.frozen:
            for key in keys:
                if key not in self._cache:
                    own_rows = slice(first_rows[key], first_rows[key] + sizes[key][1])
                    self._cache[key] = features.take(own_rows).clone()
                    self._cached_bytes += self._cache[key].nbytes
                self._cache.move_to_end(key)
            while self._cached_bytes > FROZEN_BYTES and len(self._cache) > 1:
                _, oldest = self._cache.popitem(last=False)
                self._cached_bytes -= oldest.nbytes
        return features, first_rows


def _predicting(output_bt: Tensor, micro: MicroBatch) -> Tensor:
    """Select the positions that predict a pass's targets; check that attention followed its tree,
    not one long row."""
    if micro.tree is not None and not micro.tree.cache["layers"]:
        raise TurnwrightError(
            "the model's attention was changed after its trainer was created "
            "(set_attn_implementation?) and no longer follows prefix trees; change it earlier, or "
            'set train.batching = "rows"'
        )
    return output_bt.flatten(0, 1).index_select(0, micro.before_m)
