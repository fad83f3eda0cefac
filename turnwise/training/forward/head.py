"""Output head and sampling distribution: from hidden states to statistics of the targets, in chunks.

The logits of all targets would be the largest tensor of a step: 8192 targets over a vocabulary of 151,936 are 5 GB in float32,
and a softmax with its gradient holds several of that size. So the head is applied to a few hundred targets at a time, and
recomputed in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from turnwise.engines import Sampling
from turnwise.engines.distribution import masked_scores
from turnwise.training.loss import BANNED_LOGIT, TokenStats, banned_mask, token_stats


@dataclass(frozen=True, slots=True)
class SamplingSupport:
    """Ids that may be sampled at each of M targets under top-k and top-p."""

    ends: Tensor
    """(M + 1,): the ids of target m are ``ids[ends[m] : ends[m + 1]]``."""
    ids: Tensor

    @classmethod
    def of(cls, excluded_mv: Tensor) -> SamplingSupport:
        """Build it from a mask (M, V), true for excluded ids."""
        allowed_mv = ~excluded_mv
        ends = torch.nn.functional.pad(allowed_mv.sum(1).cumsum(0), (1, 0))
        return cls(ends, allowed_mv.nonzero()[:, 1])

    @classmethod
    def join(cls, parts: Sequence[SamplingSupport]) -> SamplingSupport:
        """Concatenate several supports."""
        counts = torch.cat([part.counts for part in parts])
        return cls(torch.nn.functional.pad(counts.cumsum(0), (1, 0)), torch.cat([part.ids for part in parts]))

    @property
    def counts(self) -> Tensor:
        """(M,): number of ids per target."""
        return self.ends.diff()

    def take(self, index_k: Tensor) -> SamplingSupport:
        """Select targets."""
        counts = self.counts[index_k]
        ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        at = torch.arange(int(ends[-1]), device=self.ids.device) - torch.repeat_interleave(ends[:-1], counts)
        return SamplingSupport(ends, self.ids[at + torch.repeat_interleave(self.ends[:-1][index_k], counts)])

    def excluded(self, width: int) -> Tensor:
        """Return a mask (M, width), true for ids that cannot be sampled."""
        counts = self.counts
        excluded_mv = torch.ones((len(counts), width), dtype=torch.bool, device=self.ids.device)
        rows = torch.repeat_interleave(torch.arange(len(counts), device=self.ids.device), counts)
        excluded_mv[rows, self.ids] = False
        return excluded_mv


@dataclass(slots=True)
class LogitDistribution:
    """Distribution the engine samples from: logits / temperature, banned ids masked, renormalized over the top-k/top-p support.

    The support comes from the trainer's logits before a step's first update and is kept for all its updates (sampling-mask
    replay). Otherwise a sampled id could leave it, and the ratio would compare different supports. The sampled id is always in
    the support.
    """

    temperature: float = 1.0
    banned_ids: Iterable[int] = ()
    top_p: float = 1.0
    top_k: int = 0
    _masks: dict[tuple[int, torch.device], Tensor | None] = field(default_factory=dict)

    @property
    def truncates(self) -> bool:
        """Whether top-k or top-p exclude ids."""
        return self.top_p < 1.0 or self.top_k > 0

    def banned(self, logits: Tensor) -> Tensor | None:
        """Return a mask (V,), true for banned ids; None if there are none."""
        key = (logits.shape[-1], logits.device)
        if key not in self._masks:
            self._masks[key] = banned_mask(self.banned_ids, *key)
        return self._masks[key]

    def excluded(self, wide_mv: Tensor, targets_m: Tensor, support: SamplingSupport | None = None) -> Tensor | None:
        """Return a mask (V,) or (M, V), true for ids that cannot be sampled; None if all can.

        Args:
            wide_mv: logits in float32 or better, not yet divided by the temperature.
            support: support found before; None computes it.
        """
        banned_v = self.banned(wide_mv)
        if not self.truncates:
            return banned_v
        if support is not None:
            return support.excluded(wide_mv.shape[-1])
        with torch.no_grad():
            sampling = Sampling(self.temperature, self.top_p, self.top_k)
            excluded_mv: Tensor = masked_scores(wide_mv.detach(), sampling, frozenset(self.banned_ids)).isneginf()
            return excluded_mv.scatter_(1, targets_m[:, None], False)

    def stats(
        self, logits_mv: Tensor, targets_m: Tensor, support: SamplingSupport | None = None, *, entropy: bool
    ) -> TokenStats:
        """Compute statistics of the targets in float32 or better, from logits of any precision."""
        wide_mv = logits_mv.to(torch.promote_types(logits_mv.dtype, torch.float32))
        excluded = self.excluded(wide_mv, targets_m, support)
        return token_stats(wide_mv, targets_m, temperature=self.temperature, banned_v=excluded, entropy=entropy)

    def support(self, logits_mv: Tensor, targets_m: Tensor) -> SamplingSupport | None:
        """Compute the support of each target; None without truncation."""
        if not self.truncates:
            return None
        excluded_mv = self.excluded(logits_mv.to(torch.promote_types(logits_mv.dtype, torch.float32)), targets_m)
        return None if excluded_mv is None else SamplingSupport.of(excluded_mv)


CHUNK_NUMBERS = {"cpu": 1 << 24, "cuda": 1 << 26}
"""Maximum logits at once: 64 MB in float32 on a CPU, 256 MB on a GPU, whose products need more rows. Fewer are not chunked and
are kept for the backward pass. On a CPU, 2^22 took 9.0 s, 2^24 7.0 s, all at once 6.1 s (768 targets, width 512, vocabulary
151,936)."""


def chunk_numbers(device: torch.device) -> int:
    """Return the maximum number of logits at once on a device."""
    return CHUNK_NUMBERS.get(device.type, CHUNK_NUMBERS["cuda"])


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
        return logits / self.number if self.kind == "over" else logits

    def backward_(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """Compute the gradient of the input in place, from the gradient and the value of the output."""
        if self.kind == "cap":
            return gradient.mul_(1.0 - (logits / self.number) ** 2)
        if self.kind == "times":
            return gradient.mul_(self.number)
        return gradient.div_(self.number) if self.kind == "over" else gradient


KEYS = {"final_logit_softcapping": "cap", "logit_scale": "times", "logits_scaling": "over"}
"""Keys of a model's config that transform its logits: Gemma's, Cohere's, Granite's."""


def shapes(config: Any) -> Iterator[LogitTransform]:
    """Yield the transforms that a model of this config may apply; the caller tests which one it does."""
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
        return int(weight.shape[0]) if isinstance(weight, Tensor) else int(cast(Any, self.module).out_features)

    @property
    def is_linear(self) -> bool:
        """Whether it is a plain matrix product, whose gradient can be computed here."""
        module = self.module
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        return type(module) is nn.Linear and type(module.weight) is nn.Parameter and not any(hooks)


def target_stats(
    hidden_md: Tensor,
    head: OutputHead,
    targets_m: Tensor,
    distribution: LogitDistribution,
    support: SamplingSupport | None = None,
    *,
    entropy: bool,
    max_logits: int | None = None,
) -> TokenStats:
    """Compute statistics of M targets; only the logprobs carry a gradient.

    Args:
        hidden_md: hidden states that predict the targets.
        support: top-k/top-p support; None computes it if the distribution truncates.
        entropy: whether to compute the entropy; else that field is empty.
        max_logits: maximum logits at once; None is `CHUNK_NUMBERS`.
    """
    rows = max(1, (chunk_numbers(hidden_md.device) if max_logits is None else max_logits) // head.vocabulary)
    count = len(targets_m)
    if count <= rows:
        return distribution.stats(head.logits(hidden_md), targets_m, support, entropy=entropy)
    if torch.is_grad_enabled() and head.is_linear:
        linear = cast(nn.Linear, head.module)
        logp_m, entropy_m = _Chunks.apply(
            hidden_md, linear.weight, linear.bias, head, targets_m, distribution, support, entropy, rows
        )
        return TokenStats(logp_m, entropy_m)

    def chunk_stats(hidden_cd: Tensor, targets_c: Tensor, support_c: SamplingSupport | None) -> tuple[Tensor, Tensor]:
        found = distribution.stats(head.logits(hidden_cd), targets_c, support_c, entropy=entropy)
        return found.logprobs_m, found.entropy_m

    pairs = [
        checkpoint(chunk_stats, hidden_md[at], targets_m[at], _part(support, at, targets_m), use_reentrant=False)
        if torch.is_grad_enabled()
        else chunk_stats(hidden_md[at], targets_m[at], _part(support, at, targets_m))
        for at in _slices(count, rows)
    ]
    return TokenStats(torch.cat([logp for logp, _ in pairs]), torch.cat([h for _, h in pairs]))


def target_support(
    hidden_md: Tensor, head: OutputHead, targets_m: Tensor, distribution: LogitDistribution
) -> SamplingSupport | None:
    """Compute the top-k/top-p support of M targets; None without truncation."""
    if not distribution.truncates:
        return None
    rows = max(1, chunk_numbers(hidden_md.device) // head.vocabulary)
    with torch.no_grad():
        found = [distribution.support(head.logits(hidden_md[at]), targets_m[at]) for at in _slices(len(targets_m), rows)]
    return SamplingSupport.join([part for part in found if part is not None])


def _slices(count: int, rows: int) -> list[slice]:
    return [slice(start, min(start + rows, count)) for start in range(0, count, rows)]


def _part(support: SamplingSupport | None, at: slice, like: Tensor) -> SamplingSupport | None:
    return None if support is None else support.take(torch.arange(at.start, at.stop, device=like.device))


class _Chunks(torch.autograd.Function):  # type: ignore[misc]
    """`target_stats` for a linear head, with z the logits, T the temperature and p their softmax::

    d logp_m / d z_mv = ([v = target_m] - p_mv) / T
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
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        found = target_stats(
            hidden_md, head, targets_m, distribution, support, entropy=entropy, max_logits=rows * head.vocabulary
        )
        ctx.save_for_backward(hidden_md, weight_vd, targets_m)
        ctx.head, ctx.distribution, ctx.support, ctx.rows = head, distribution, support, rows
        ctx.mark_non_differentiable(found.entropy_m)
        return found.logprobs_m, found.entropy_m

    @staticmethod
    def backward(ctx: Any, slope_m: Tensor, _: Any) -> tuple[Any, ...]:
        hidden_md, weight_vd, targets_m = ctx.saved_tensors
        shape, distribution = ctx.head.shape, ctx.distribution
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        # Chunks are summed in the precision of the loss: bfloat16 would round each sum.
        hidden_grad = torch.empty_like(hidden_md) if to_hidden else None
        weight_grad = torch.zeros_like(weight_vd, dtype=slope_m.dtype) if to_weight else None
        bias_grad = weight_grad.new_zeros(len(weight_vd)) if to_bias and weight_grad is not None else None
        for at in _slices(len(targets_m), ctx.rows):
            logits_cv = ctx.head.logits(hidden_md[at])
            grad_cv = _slope(logits_cv, targets_m[at], slope_m[at], distribution, _part(ctx.support, at, targets_m))
            grad_cv = shape.backward_(grad_cv, logits_cv).to(weight_vd.dtype)
            if hidden_grad is not None:
                torch.mm(grad_cv, weight_vd, out=hidden_grad[at])
            if weight_grad is not None:
                if weight_grad.dtype == weight_vd.dtype:
                    weight_grad.addmm_(grad_cv.T, hidden_md[at])
                else:
                    weight_grad += grad_cv.T @ hidden_md[at]
            if bias_grad is not None:
                bias_grad += grad_cv.sum(0, dtype=bias_grad.dtype)
        back = None if weight_grad is None else weight_grad.to(weight_vd.dtype)
        return hidden_grad, back, None if bias_grad is None else bias_grad.to(weight_vd.dtype), *[None] * 6


def _slope(
    logits_cv: Tensor, targets_c: Tensor, slope_c: Tensor, distribution: LogitDistribution, support: SamplingSupport | None
) -> Tensor:
    """Compute the gradient of ``sum_c slope_c * logp_c`` with respect to the logits."""
    wide = logits_cv.to(torch.promote_types(logits_cv.dtype, torch.float32), copy=True)
    excluded = distribution.excluded(wide, targets_c, support)
    if distribution.temperature != 1.0:
        wide /= distribution.temperature
    if excluded is not None:
        wide.masked_fill_(excluded, BANNED_LOGIT)
    grad_cv = torch.softmax(wide, -1)
    grad_cv *= -slope_c[:, None]
    grad_cv[torch.arange(len(targets_c), device=targets_c.device), targets_c] += slope_c
    return grad_cv.div_(distribution.temperature) if distribution.temperature != 1.0 else grad_cv
