"""Forward pass of any Hugging Face causal or vision-language model, up to statistics of its targets."""

from __future__ import annotations

import inspect
import itertools
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from turnwise.engines.local.vision import ImageFeatures, SplitVLM, is_video, split_vlm
from turnwise.errors import TurnwiseError, UsageError
from turnwise.renderers.vision import PixelCache
from turnwise.training.forward.batch import MicroBatch
from turnwise.training.forward.head import (
    LogitDistribution,
    LogitTransform,
    OutputHead,
    SamplingSupport,
    shapes,
    target_stats,
    target_support,
)
from turnwise.training.forward.routing_replay import RoutingReplay
from turnwise.training.loss import BANNED_LOGIT, TokenStats
from turnwise.types import Media

FROZEN_BYTES = 2**28
"""Cache size for features of a frozen vision tower."""


class ForwardPass:
    """Forward pass: the model's body on complete rows, its head only at the requested positions, in chunks.

    With a vocabulary of 151k, the logits of every position would be by far the largest tensor of a step, and a multi-turn row
    is mostly observations. The transform after the head (soft cap, factor) is identified by comparing one small pass bit by
    bit; with an unknown transform, all logits are computed.

    For a vision model, each image of a pass goes through its tower once, and all rows with the image share its features.
    """

    def __init__(self, model: nn.Module, *, replay: bool = False) -> None:
        """
        Args:
            replay: whether passes carry the engine's experts.

        Raises:
            ConfigError: when `replay` is set and the model has no routers that support it.
        """
        self.model = model
        self.replay = RoutingReplay(model) if replay else None
        self.tower, self.no_vision_reason = split_vlm(model)
        self.vision_inputs = None if self.tower is None else VisionInputs(self.tower)
        self.body, module = _parts(model)
        self.positions = "position_ids" in inspect.signature((self.body or model).forward).parameters
        self.head: OutputHead | None = None
        """None if all logits must be computed."""
        if self.tower is not None:
            self.head = OutputHead(self.tower.head)
        elif self.body is not None and module is not None:
            shape = self._shape(module)
            self.head = None if shape is None else OutputHead(module, shape)

    def stats(
        self,
        micro: MicroBatch,
        pixels: PixelCache | None,
        distribution: LogitDistribution,
        support: SamplingSupport | None = None,
        *,
        entropy: bool,
    ) -> TokenStats:
        """Compute statistics of a pass's M targets.

        Args:
            pixels: source of the images' pixel values.
            distribution: the distribution the engine samples from.
            support: top-k/top-p support found before; None computes it if the distribution truncates.
            entropy: whether to compute the entropy.

        Raises:
            UsageError: for images with a text-only model.
            MediaError: when images are missing.
        """
        if self.head is None:
            return distribution.stats(self._all_logits(micro), micro.targets_m, support, entropy=entropy)
        return target_stats(self.hidden(micro, pixels), self.head, micro.targets_m, distribution, support, entropy=entropy)

    def sampling_support(
        self, micro: MicroBatch, pixels: PixelCache | None, distribution: LogitDistribution
    ) -> SamplingSupport | None:
        """Compute the top-k/top-p support of a pass's targets; None without truncation."""
        if not distribution.truncates:
            return None
        with torch.no_grad():
            if self.head is None:
                return distribution.support(self._all_logits(micro), micro.targets_m)
            return target_support(self.hidden(micro, pixels), self.head, micro.targets_m, distribution)

    def _all_logits(self, micro: MicroBatch) -> Tensor:
        if micro.media:
            raise UsageError(f"trajectories contain images, but {self.no_vision_reason}")
        full_btv: Tensor = self._call(self.model, micro.ids_bt, micro.positions, **self._prepare(micro)).logits
        _check_tree_attention(micro)
        return full_btv.flatten(0, 1).index_select(0, micro.before_m)

    def full_logprobs(self, micro: MicroBatch, pixels: PixelCache | None, distribution: LogitDistribution) -> Tensor:
        """Compute log-probabilities (M, vocabulary) at a pass's M targets, in float32 or better; not chunked.

        Raises:
            UsageError, MediaError: as `stats`.
        """
        if self.head is None:
            full_btv = self._call(self.model, micro.ids_bt, micro.positions, **self._prepare(micro)).logits
            logits = full_btv.flatten(0, 1).index_select(0, micro.before_m)
        else:
            logits = self.head.logits(self.hidden(micro, pixels))
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32)) / distribution.temperature
        excluded_v = distribution.banned(wide)
        return torch.log_softmax(wide if excluded_v is None else wide.masked_fill(excluded_v, BANNED_LOGIT), -1)

    def hidden(self, micro: MicroBatch, pixels: PixelCache | None = None) -> Tensor:
        """Compute the hidden states (M, width) that predict a pass's targets, after the last norm.

        Raises:
            UsageError, MediaError: as `stats`.
        """
        if self.tower is not None and self.vision_inputs is not None:
            places_p, features = self.vision_inputs.features_for(micro, pixels)
            hidden_btd = self.tower.decode(micro.ids_bt, micro.positions, places_p, features, **self._prepare(micro))
        elif micro.media:
            raise UsageError(f"trajectories contain images, but {self.no_vision_reason}")
        else:
            assert self.body is not None
            hidden_btd = self._call(self.body, micro.ids_bt, micro.positions, **self._prepare(micro)).last_hidden_state
        _check_tree_attention(micro)
        return hidden_btd.flatten(0, 1).index_select(0, micro.before_m)

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
        return {"turnwise_tree": micro.tree}

    def _call(self, module: nn.Module, ids_bt: Tensor, positions_1t: Tensor, **more: Any) -> Any:
        # No mask: causal attention never reaches right padding. No cache: with one, transformers takes other mask paths.
        if self.positions:
            more["position_ids"] = positions_1t
        return module(input_ids=ids_bt, attention_mask=None, use_cache=False, **more)

    def _shape(self, head: nn.Module) -> LogitTransform | None:
        """Identify the transform after the head by exact comparison with the model's logits; None if unknown."""
        assert self.body is not None
        device = next(self.model.parameters()).device
        ids_bt = torch.tensor([[0, 1, 2, 3]], device=device)
        positions_1t = torch.arange(4, device=device)[None]
        with torch.no_grad():
            expected = self._call(self.model, ids_bt, positions_1t).logits
            split = head(self._call(self.body, ids_bt, positions_1t).last_hidden_state)
            found = (shape for shape in shapes(getattr(self.model, "config", None)) if torch.equal(expected, shape(split)))
            return next(found, None)


class VisionInputs:
    """Image and video features of a pass: each encoded once, with gradient if the tower is trained.

    Features of a frozen tower are the same at every step, so they are cached within a memory limit.
    """

    def __init__(self, tower: SplitVLM, max_bytes: int = FROZEN_BYTES) -> None:
        self.tower = tower
        self.encoded = 0
        """Images and videos that went through the tower."""
        self.frozen = not any(p.requires_grad for _, p in tower.vision_parameters())
        self._max_bytes = max_bytes
        self._cached_bytes = 0
        self._cache: OrderedDict[str, ImageFeatures] = OrderedDict()

    def features_for(self, micro: MicroBatch, pixels: PixelCache | None) -> tuple[Tensor | None, ImageFeatures | None]:
        """Return the features' positions in the flattened (B, T), ascending, and the features; None without media."""
        if not micro.media:
            return None, None
        if pixels is None:
            raise UsageError(
                "trajectories contain images, but the trainer has no pixels; pass pixels=Rollout(...).pixels to Trainer"
            )
        sizes = {media.key: (media, len(at)) for media, at in micro.media}
        features, first = self._features(sizes, pixels)
        device = micro.ids_bt.device
        places_p = torch.tensor([place for _, at in micro.media for place in at], device=device)
        chosen_p = torch.tensor([first[media.key] + n for media, at in micro.media for n in range(len(at))], device=device)
        return places_p, features.take(chosen_p)

    def _features(self, sizes: dict[str, tuple[Media, int]], pixels: PixelCache) -> tuple[ImageFeatures, dict[str, int]]:
        """Return the concatenated features of all media and the first row of each."""
        cached = [key for key in sizes if key in self._cache]
        keys, parts = list(cached), [self._cache[key] for key in cached]
        for video in (False, True):
            missing = [key for key in sizes if key not in self._cache and is_video(pixels.get(sizes[key][0])) is video]
            if not missing:
                continue
            arrays = pixels.merged([sizes[key][0] for key in missing])
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
                parts.append(self.tower.encode_together(arrays, [sizes[key][1] for key in missing]))
            self.encoded += len(missing)
            keys += missing
        starts = dict(zip(keys, itertools.accumulate([0, *(sizes[key][1] for key in keys)]), strict=False))
        features = ImageFeatures.join(parts)
        if self.frozen:
            self._store({key: features.take(slice(starts[key], starts[key] + sizes[key][1])) for key in keys})
        return features, starts

    def _store(self, found: dict[str, ImageFeatures]) -> None:
        for key, features in found.items():
            if key not in self._cache:
                self._cache[key] = features = features.clone()
                self._cached_bytes += features.nbytes
            self._cache.move_to_end(key)
        while self._cached_bytes > self._max_bytes and len(self._cache) > 1:
            self._cached_bytes -= self._cache.popitem(last=False)[1].nbytes


def _check_tree_attention(micro: MicroBatch) -> None:
    """Check that attention followed the pass's tree; another implementation would treat the pass as one long row."""
    if micro.tree is not None and not micro.tree.cache["layers"]:
        raise TurnwiseError(
            "the model's attention was changed after its trainer was created (set_attn_implementation?) and no longer follows "
            'prefix trees; change it earlier, or set train.batching = "rows"'
        )


def _parts(model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """Return a model's body and head, or (None, None) if it does not expose them."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    body = getattr(model, getattr(model, "base_model_prefix", "") or "model", None)
    if not isinstance(head, nn.Module) or not isinstance(body, nn.Module) or body is model:
        return None, None
    return body, head
