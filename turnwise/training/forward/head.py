"""LM head and the sampling distribution.

From hidden states to what the model says of its targets, a chunk of targets at a time.

The logits of all targets at once would be the largest tensor of a step: 8192 targets over a vocabulary of 151,936 are 5 GB in
float32, and a softmax with its gradient holds several of that size. So the head is applied to a few hundred targets, of which
one number each is kept, and in the backward pass it is applied again.
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
    """The ids that may be sampled in place of each of M targets, where top-k or top-p left the others out."""

    ends: Tensor
    """(M + 1,): those of target m are ``ids[ends[m] : ends[m + 1]]``."""
    ids: Tensor

    @classmethod
    def of(cls, shut_mv: Tensor) -> SamplingSupport:
        """All that is not shut."""
        open_mv = ~shut_mv
        ends = torch.nn.functional.pad(open_mv.sum(1).cumsum(0), (1, 0))
        return cls(ends, open_mv.nonzero()[:, 1])

    @classmethod
    def join(cls, parts: Sequence[SamplingSupport]) -> SamplingSupport:
        """Those of several, one behind another."""
        counts = torch.cat([part.counts for part in parts])
        return cls(torch.nn.functional.pad(counts.cumsum(0), (1, 0)), torch.cat([part.ids for part in parts]))

    @property
    def counts(self) -> Tensor:
        """(M,): how many each target has."""
        return self.ends.diff()

    def take(self, index_k: Tensor) -> SamplingSupport:
        """Those of some targets."""
        counts = self.counts[index_k]
        ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        at = torch.arange(int(ends[-1]), device=self.ids.device) - torch.repeat_interleave(ends[:-1], counts)
        return SamplingSupport(ends, self.ids[at + torch.repeat_interleave(self.ends[:-1][index_k], counts)])

    def excluded(self, width: int) -> Tensor:
        """(M, width): true for what may not be sampled."""
        counts = self.counts
        shut_mv = torch.ones((len(counts), width), dtype=torch.bool, device=self.ids.device)
        rows = torch.repeat_interleave(torch.arange(len(counts), device=self.ids.device), counts)
        shut_mv[rows, self.ids] = False
        return shut_mv


@dataclass(slots=True)
class SamplingDistribution:
    """The distribution that an engine samples from, made of logits: divided by the temperature, without banned ids, and
    renormalised over what top-k and top-p leave (sampling-mask replay).

    What is left is found from the trainer's logits before a step's first update, and stays the same for all of its updates:
    else an id that was sampled could fall out of it, and its ratio would compare two sets. What was sampled is always in it.
    """

    temperature: float = 1.0
    banned_ids: Iterable[int] = ()
    top_p: float = 1.0
    top_k: int = 0
    _masks: dict[tuple[int, torch.device], Tensor | None] = field(default_factory=dict)

    @property
    def truncates(self) -> bool:
        """Whether ids are left out beside the banned ones."""
        return self.top_p < 1.0 or self.top_k > 0

    def banned(self, logits: Tensor) -> Tensor | None:
        """(V,), true for the banned ids; None where there are none."""
        place = (logits.shape[-1], logits.device)
        if place not in self._masks:
            self._masks[place] = banned_mask(self.banned_ids, *place)
        return self._masks[place]

    def excluded(self, wide_mv: Tensor, targets_m: Tensor, kept: SamplingSupport | None = None) -> Tensor | None:
        """Booleans (V,) or (M, V), true for what is not sampled; None where all may be.

        Args:
            wide_mv: logits in float32 or better, not yet divided by the temperature.
            kept: what was left before; none finds it here.
        """
        banned_v = self.banned(wide_mv)
        if not self.truncates:
            return banned_v
        if kept is not None:
            return kept.excluded(wide_mv.shape[-1])
        with torch.no_grad():
            sampling = Sampling(self.temperature, self.top_p, self.top_k)
            shut_mv: Tensor = masked_scores(wide_mv.detach(), sampling, frozenset(self.banned_ids)).isneginf()
            return shut_mv.scatter_(1, targets_m[:, None], False)

    def stats(self, logits_mv: Tensor, targets_m: Tensor, kept: SamplingSupport | None = None, *, entropy: bool) -> TokenStats:
        """Of logits in whatever precision: float32 or better from here on."""
        wide_mv = logits_mv.to(torch.promote_types(logits_mv.dtype, torch.float32))
        shut = self.excluded(wide_mv, targets_m, kept)
        return token_stats(wide_mv, targets_m, temperature=self.temperature, banned_v=shut, entropy=entropy)

    def support(self, logits_mv: Tensor, targets_m: Tensor) -> SamplingSupport | None:
        """What is left of logits; None where nothing is cut."""
        if not self.truncates:
            return None
        shut_mv = self.excluded(logits_mv.to(torch.promote_types(logits_mv.dtype, torch.float32)), targets_m)
        return None if shut_mv is None else SamplingSupport.of(shut_mv)


CHUNK_NUMBERS = {"cpu": 1 << 24, "cuda": 1 << 26}
"""Most logits at once: 64 MB in float32 on a CPU, 256 MB on a GPU, whose products want more rows. Fewer than that are not cut,
and kept for the backward pass. On a CPU 2^22 numbers took 9.0 s of it, 2^24 7.0 s, all at once 6.1 s (768 targets, width 512,
vocabulary 151,936)."""


def chunk_numbers(device: torch.device) -> int:
    """Most logits at once on a device."""
    return CHUNK_NUMBERS.get(device.type, CHUNK_NUMBERS["cuda"])


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """What a model does to the logits behind its head's matrix product."""

    kind: str = "plain"
    """`plain`: nothing; `cap`: ``number * tanh(logits / number)``; `times`; `over`."""
    number: float = 1.0

    def __call__(self, logits: Tensor) -> Tensor:
        """The model's own logits."""
        if self.kind == "cap":
            return torch.tanh(logits / self.number) * self.number
        if self.kind == "times":
            return logits * self.number
        return logits / self.number if self.kind == "over" else logits

    def backward_(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """The gradient before the shape, in place, from that behind it and the logits behind it."""
        if self.kind == "cap":
            return gradient.mul_(1.0 - (logits / self.number) ** 2)
        if self.kind == "times":
            return gradient.mul_(self.number)
        return gradient.div_(self.number) if self.kind == "over" else gradient


KEYS = {"final_logit_softcapping": "cap", "logit_scale": "times", "logits_scaling": "over"}
"""Keys of a model's config that change its logits: Gemma's, Cohere's, Granite's."""


def shapes(config: Any) -> Iterator[LogitTransform]:
    """What a model of this config may do to its logits; whether it does is to be tried."""
    yield LogitTransform()
    for key, kind in KEYS.items():
        number = getattr(config, key, None)
        if isinstance(number, int | float) and number:
            yield LogitTransform(kind, float(number))


@dataclass(slots=True)
class OutputHead:
    """A model's head, and what follows it up to the logits."""

    module: nn.Module
    shape: LogitTransform = LogitTransform()

    def logits(self, hidden: Tensor) -> Tensor:
        """The model's logits, in its own precision."""
        return self.shape(cast(Tensor, self.module(hidden)))

    @property
    def vocabulary(self) -> int:
        """Logits per position."""
        weight = getattr(self.module, "weight", None)
        return int(weight.shape[0]) if isinstance(weight, Tensor) else int(cast(Any, self.module).out_features)

    @property
    def is_linear(self) -> bool:
        """Whether it is a matrix product and nothing else, so that its gradient can be written down here."""
        module = self.module
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        return type(module) is nn.Linear and type(module.weight) is nn.Parameter and not any(hooks)


def target_stats(
    hidden_md: Tensor,
    head: OutputHead,
    targets_m: Tensor,
    law: SamplingDistribution,
    kept: SamplingSupport | None = None,
    *,
    entropy: bool,
    most: int | None = None,
) -> TokenStats:
    """What the model says of M targets; only the logprobs carry a gradient.

    Args:
        hidden_md: the hidden states that predict them.
        kept: what top-k and top-p left; none finds it where the law cuts.
        entropy: whether the entropy is wanted; else that field is empty.
        most: logits at once; none is `CHUNK_NUMBERS`.
    """
    rows = max(1, (chunk_numbers(hidden_md.device) if most is None else most) // head.vocabulary)
    count = len(targets_m)
    if count <= rows:
        return law.stats(head.logits(hidden_md), targets_m, kept, entropy=entropy)
    if torch.is_grad_enabled() and head.is_linear:
        linear = cast(nn.Linear, head.module)
        logp_m, entropy_m = _Chunks.apply(hidden_md, linear.weight, linear.bias, head, targets_m, law, kept, entropy, rows)
        return TokenStats(logp_m, entropy_m)

    def part(hidden_cd: Tensor, targets_c: Tensor, kept_c: SamplingSupport | None) -> tuple[Tensor, Tensor]:
        found = law.stats(head.logits(hidden_cd), targets_c, kept_c, entropy=entropy)
        return found.logprobs_m, found.entropy_m

    pairs = [
        checkpoint(part, hidden_md[at], targets_m[at], _part(kept, at, targets_m), use_reentrant=False)
        if torch.is_grad_enabled()
        else part(hidden_md[at], targets_m[at], _part(kept, at, targets_m))
        for at in _slices(count, rows)
    ]
    return TokenStats(torch.cat([logp for logp, _ in pairs]), torch.cat([h for _, h in pairs]))


def target_support(hidden_md: Tensor, head: OutputHead, targets_m: Tensor, law: SamplingDistribution) -> SamplingSupport | None:
    """What top-k and top-p leave of each of M targets; None where nothing is cut."""
    if not law.truncates:
        return None
    rows = max(1, chunk_numbers(hidden_md.device) // head.vocabulary)
    with torch.no_grad():
        found = [law.support(head.logits(hidden_md[at]), targets_m[at]) for at in _slices(len(targets_m), rows)]
    return SamplingSupport.join([part for part in found if part is not None])


def _slices(count: int, rows: int) -> list[slice]:
    return [slice(start, min(start + rows, count)) for start in range(0, count, rows)]


def _part(kept: SamplingSupport | None, at: slice, like: Tensor) -> SamplingSupport | None:
    return None if kept is None else kept.take(torch.arange(at.start, at.stop, device=like.device))


class _Chunks(torch.autograd.Function):  # type: ignore[misc]
    """`target_stats` for a head that is a matrix product, with z the logits, T the temperature and p their softmax::

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
        law: SamplingDistribution,
        kept: SamplingSupport | None,
        entropy: bool,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        found = target_stats(hidden_md, head, targets_m, law, kept, entropy=entropy, most=rows * head.vocabulary)
        ctx.save_for_backward(hidden_md, weight_vd, targets_m)
        ctx.head, ctx.law, ctx.kept, ctx.rows = head, law, kept, rows
        ctx.mark_non_differentiable(found.entropy_m)
        return found.logprobs_m, found.entropy_m

    @staticmethod
    def backward(ctx: Any, slope_m: Tensor, _: Any) -> tuple[Any, ...]:
        hidden_md, weight_vd, targets_m = ctx.saved_tensors
        shape, law = ctx.head.shape, ctx.law
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        # Sums over chunks are taken in the precision of the loss: bfloat16 would round each of them.
        hidden_grad = torch.empty_like(hidden_md) if to_hidden else None
        weight_grad = torch.zeros_like(weight_vd, dtype=slope_m.dtype) if to_weight else None
        bias_grad = weight_grad.new_zeros(len(weight_vd)) if to_bias and weight_grad is not None else None
        for at in _slices(len(targets_m), ctx.rows):
            logits_cv = ctx.head.logits(hidden_md[at])
            grad_cv = _slope(logits_cv, targets_m[at], slope_m[at], law, _part(ctx.kept, at, targets_m))
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
    logits_cv: Tensor, targets_c: Tensor, slope_c: Tensor, law: SamplingDistribution, kept: SamplingSupport | None
) -> Tensor:
    """The gradient of ``sum_c slope_c * logp_c`` by the logits."""
    wide = logits_cv.to(torch.promote_types(logits_cv.dtype, torch.float32), copy=True)
    shut = law.excluded(wide, targets_c, kept)
    if law.temperature != 1.0:
        wide /= law.temperature
    if shut is not None:
        wide.masked_fill_(shut, BANNED_LOGIT)
    grad_cv = torch.softmax(wide, -1)
    grad_cv *= -slope_c[:, None]
    grad_cv[torch.arange(len(targets_c), device=targets_c.device), targets_c] += slope_c
    return grad_cv.div_(law.temperature) if law.temperature != 1.0 else grad_cv
