"""Log-probabilities of given ids and of the most likely ids, as `turnwright serve` answers them and
teachers in this process keep them.

`score_ids` computes one forward pass of one row of ids, as `ForwardPass` computes it in training.
"""

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
    ids = list(request.ids)
    law = LogitDistribution(request.temperature, request.banned_ids)
    if len(ids) < 2:
        return IdScores([], [])

    # A row of training in which each id but the first is a target.
    ones = [1.0] * (len(ids) - 1)
    media = placements_between(request.media, 0, len(ids) - 1)
    row = TrainingRow(ids[:-1], list(range(1, len(ids))), ids[1:], ones, ones, 0, media)
    device = next(forward.model.parameters()).device
    (micro,) = padded([row], len(ids), device, None if pixels is None else pixels.vision)

    tops: list[dict[int, float]] = []
    with torch.no_grad():
        features_md, head = forward.features(micro, pixels)
        stats = target_stats(features_md, head, micro.targets_m, law, entropy=False)
        if request.top:
            top_mk, top_logp_mk = top_logprobs(
                features_md, head, micro.targets_m, law, None, request.top
            )
            for top_ids, logprobs in zip(top_mk.tolist(), top_logp_mk.tolist(), strict=True):
                tops.append(dict(zip(top_ids, logprobs, strict=True)))
    return IdScores(stats.logprobs_m.tolist(), tops)


def top_logprobs(
    features_md: Tensor,
    head: OutputHead,
    targets_m: Tensor,
    law: LogitDistribution,
    support: SamplingSupport | None,
    top: int,
) -> tuple[Tensor, Tensor]:
    """Return the most likely ids at each of M targets and their log-probabilities, both (M, top);
    of all ids where they are fewer than `top`.

    Logits are computed for a few targets at a time, `_k` in names.
    """
    every_m = torch.arange(len(targets_m), device=targets_m.device)
    ids: list[Tensor] = []
    logprobs: list[Tensor] = []
    for index_k in every_m.split(max(1, TOP_LOGITS // head.vocabulary)):
        logits_kv = head.logits(features_md[index_k])
        wide_kv = logits_kv.to(torch.promote_types(logits_kv.dtype, torch.float32))
        part = None if support is None else support.take(index_k)
        logp_kv = law.log_softmax(wide_kv, law.excluded(wide_kv, targets_m[index_k], part))
        best = logp_kv.topk(min(top, logp_kv.shape[-1]), -1)
        ids.append(best.indices)
        logprobs.append(best.values)
    return torch.cat(ids), torch.cat(logprobs)
