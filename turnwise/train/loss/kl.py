"""Estimates of the divergence from a reference policy, per sampled token."""

from __future__ import annotations

import torch
from torch import Tensor


def k1(logp_m: Tensor, reference_m: Tensor) -> Tensor:
    """``log(policy / reference)``: its mean over tokens of the policy is KL(policy || reference); single values may be
    negative.

    J. Schulman, "Approximating KL divergence", 2020. As a penalty on the reward its policy gradient is that of the KL. In a
    loss its gradient is ``grad logp``, whose mean is 0: it holds nothing back.
    """
    return logp_m - reference_m


def k2(logp_m: Tensor, reference_m: Tensor) -> Tensor:
    """``log(policy / reference)^2 / 2``: never negative, biased as a value.

    Same source. In a loss its gradient is ``log(policy / reference) * grad logp``, whose mean over tokens of the policy is the
    gradient of KL(policy || reference).
    """
    return 0.5 * (logp_m - reference_m) ** 2


def k3(logp_m: Tensor, reference_m: Tensor) -> Tensor:
    """``r - 1 - log r``, r = reference / policy: its mean over tokens of the policy is KL(policy || reference); never negative.

    Same source; DeepSeekMath, arXiv 2402.03300, eq. 4. In a loss its gradient is ``(1 - r) * grad logp``, whose mean over
    tokens of the policy is the gradient of KL(reference || policy).
    """
    log_ratio = reference_m - logp_m
    return torch.expm1(log_ratio) - log_ratio


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
