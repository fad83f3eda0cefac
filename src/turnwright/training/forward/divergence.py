"""Divergences between the policy and a teacher, from log-probabilities over the vocabulary or over
the teacher's top ids.

With p the policy and q the teacher, both of the distribution that the engine samples from::

    reverse   KL(p || q) = sum_v p_v (log p_v - log q_v)
    forward   KL(q || p) = sum_v q_v (log q_v - log p_v)
    js        KL(p || m) / 2 + KL(q || m) / 2,  m = (p + q) / 2

With `top` ids, v runs over the k ids that the teacher finds most likely, and all others together as
one more outcome. That is never more than the divergence over the vocabulary (data processing
inequality), and equal to it with all ids.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from turnwright.config.schema import Divergence

FLOOR = -1e30
"""Log-probability of an id that cannot be sampled; finite, since 0 times minus infinity is NaN."""


class HasLogits(Protocol):
    """Output head of a teacher."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits (M, vocabulary of the policy)."""


class DistributionOf(Protocol):
    """`LogitDistribution.log_softmax` of the policy."""

    def __call__(self, wide_mv: Tensor, excluded: Tensor | None) -> Tensor:
        """Return log-probabilities of the distribution that the engine samples from."""


@dataclass(frozen=True, slots=True)
class TeacherTargets:
    """A teacher's distribution at M sampled ids: all of it, as hidden states before the teacher's
    head, or the top ids."""

    kind: Divergence
    known_m: Tensor
    """Whether the teacher answered, booleans; the divergence of others is 0."""
    hidden_md: Tensor | None = None
    """None, as `top_mk`, where the teacher answered for none."""
    head: HasLogits | None = None
    top_mk: Tensor | None = None
    """Ids that the teacher finds most likely."""
    top_logp_mk: Tensor | None = None
    """Their log-probabilities."""

    def take(self, index_k: Tensor | slice) -> TeacherTargets:
        """Select targets."""

        def part(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[index_k]

        return replace(
            self,
            known_m=self.known_m[index_k],
            hidden_md=part(self.hidden_md),
            top_mk=part(self.top_mk),
            top_logp_mk=part(self.top_logp_mk),
        )

    def divergence(
        self, logp_mv: Tensor, excluded: Tensor | None, distribution: DistributionOf
    ) -> Tensor:
        """Compute the divergence at each target, (M,), with a gradient for `logp_mv`, the policy's
        log-probabilities; those of `excluded` ids are `FLOOR`."""
        if self.top_mk is not None and self.top_logp_mk is not None:
            # Over the teacher's top ids and the rest as one more.
            rest_m = logp_mv.scatter(1, self.top_mk, FLOOR).logsumexp(1)
            policy = torch.cat([logp_mv.gather(1, self.top_mk), rest_m[:, None]], 1)
            teacher = with_rest(self.top_logp_mk).to(policy.dtype)
        elif self.hidden_md is not None and self.head is not None:
            with torch.no_grad():
                logits_mv = self.head.logits(self.hidden_md)
                teacher = distribution(
                    logits_mv.to(torch.promote_types(logits_mv.dtype, torch.float32)), excluded
                )
            policy = logp_mv
            teacher = teacher.to(logp_mv.dtype)
        else:
            return logp_mv.new_zeros(len(logp_mv))
        return torch.where(self.known_m, divergence(self.kind, policy, teacher), 0.0)


def with_rest(logp_mk: Tensor) -> Tensor:
    """Append the log-probability of all other ids together."""
    total_m = logp_mk.double().exp().sum(1).clamp(max=1.0)
    rest_m = torch.log1p(-total_m).clamp(min=FLOOR)
    return torch.cat([logp_mk.double(), rest_m[:, None]], 1)


def divergence(kind: Divergence, policy_mv: Tensor, teacher_mv: Tensor) -> Tensor:
    """Compute a divergence of rows of log-probabilities, (M,)."""
    if kind == "reverse":
        return _kl(policy_mv, teacher_mv)
    if kind == "forward":
        return _kl(teacher_mv, policy_mv)
    middle_mv = torch.logaddexp(policy_mv, teacher_mv) - math.log(2.0)
    return 0.5 * (_kl(policy_mv, middle_mv) + _kl(teacher_mv, middle_mv))


def _kl(a_mv: Tensor, b_mv: Tensor) -> Tensor:
    return (a_mv.exp() * (a_mv - b_mv)).sum(1)
