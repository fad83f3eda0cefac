"""Log-probabilities of given ids and of the most likely ids, as `turnwright serve` answers them and
teachers in this process keep them."""

from __future__ import annotations

import torch
from torch import Tensor

from turnwright.engines.scoring import IdScores, ScoreRequest
from turnwright.renderers.vision import PixelCache
from turnwright.training.forward.forward import (
    ForwardPass,
    LogitDistribution,
    OutputHead,
    target_stats,
)
from turnwright.training.forward.passes import padded
from turnwright.training.forward.support import SamplingSupport
from turnwright.training.forward.training_rows import TrainingRow
from turnwright.types.media import placements_between

TOP_LOGITS = 1 << 24
"""Maximum logits of which the top ids are taken at once."""


def score_ids(forward: ForwardPass, request: ScoreRequest, pixels: PixelCache | None) -> IdScores:
    """Score the ids of a request; raise `UsageError` for images with a text-only model."""
    ids, law = list(request.ids), LogitDistribution(request.temperature, request.banned_ids)
    if len(ids) < 2:
        return IdScores([], [])
    ones = [1.0] * (len(ids) - 1)
    media = placements_between(request.media, 0, len(ids) - 1)
    row = TrainingRow(ids[:-1], list(range(1, len(ids))), ids[1:], ones, ones, 0, media)
    device = next(forward.model.parameters()).device
    (micro,) = padded([row], len(ids), device, None if pixels is None else pixels.vision)
    with torch.no_grad():
        features_md, head = forward.features(micro, pixels)
        found = target_stats(features_md, head, micro.targets_m, law, entropy=False)
        tops: list[dict[int, float]] = []
        if request.top:
            best = top_logprobs(features_md, head, micro.targets_m, law, None, request.top)
            tops = [
                dict(zip(*pair, strict=True))
                for pair in zip(*(part.tolist() for part in best), strict=True)
            ]
    return IdScores(found.logprobs_m.tolist(), tops)


def top_logprobs(
    features_md: Tensor,
    head: OutputHead,
    targets_m: Tensor,
    law: LogitDistribution,
    support: SamplingSupport | None,
    top: int,
) -> tuple[Tensor, Tensor]:
    """Return the most likely ids at each of M targets, (M, k), and their log-probabilities, from a
    few rows of logits at a time; k is `top` or all ids."""
    parts = []
    for index_k in torch.arange(len(targets_m), device=targets_m.device).split(
        max(1, TOP_LOGITS // head.vocabulary)
    ):
        logits = head.logits(features_md[index_k])
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        part = None if support is None else support.take(index_k)
        logp_kv = law.log_softmax(wide, law.excluded(wide, targets_m[index_k], part))
        parts.append(logp_kv.topk(min(top, logp_kv.shape[-1]), -1))
    return torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts])
