"""Log-probabilities of given ids by a model, as `turnwise serve` answers them."""

from __future__ import annotations

import torch

from turnwise.engines.scoring import IdScores, ScoreRequest
from turnwise.renderers.vision import PixelCache
from turnwise.training.forward.batch import TrainingRow, padded
from turnwise.training.forward.forward import ForwardPass, LogitDistribution, target_stats
from turnwise.types.media import placements_between

ROWS = 256
"""Positions of which the most likely ids are found at once."""


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
        for part in features_md.split(ROWS) if request.top else ():
            logits = head.logits(part)
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            best = law.log_softmax(wide, law.banned(wide)).topk(min(request.top, wide.shape[-1]), -1)
            tops += [dict(zip(*pair, strict=True)) for pair in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
    return IdScores(found.logprobs_m.tolist(), tops)
