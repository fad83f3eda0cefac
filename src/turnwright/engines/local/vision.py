"""Split a VLM into tower and decoder; cache of image features.

Models are recognized by structure, not by name: a body with `get_image_features`, and below
it a decoder that takes embeddings. The steps in between (features replace placeholder
embeddings, or are added after layers) are done here. So an image is encoded once and its
features are used wherever needed.
"""

from __future__ import annotations

import inspect
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from turnwright.engines.local.attention import use_run_attention
from turnwright.errors import EngineError, MediaError, ModelError, TurnwrightError
from turnwright.types import Media, MediaPlacement

PROBE_IDS = (0, 1, 2, 3, 5)
"""Ids for comparing the split model's logits with the model's own."""


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """Tower output for images or videos: one row per placeholder, in order."""

    rows: Tensor
    """[placeholders, width], replacing embeddings."""
    deep: tuple[Tensor, ...] = ()
    """[placeholders, width] each, added after the first layers (DeepStack, arXiv 2406.04334)."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        """Total bytes."""
        return sum(part.nbytes for part in (self.rows, *self.deep))

    def take(self, index: slice | Tensor) -> ImageFeatures:
        """Return some rows."""
        return ImageFeatures(self.rows[index], tuple(part[index] for part in self.deep))

    def same(self, other: ImageFeatures) -> bool:
        """Return whether all values are bit-identical."""
        pairs = zip((self.rows, *self.deep), (other.rows, *other.deep), strict=True)
        return all(torch.equal(mine, theirs) for mine, theirs in pairs)

    def clone(self) -> ImageFeatures:
        """Return a copy."""
        return ImageFeatures(self.rows.clone(), tuple(part.clone() for part in self.deep))

    @classmethod
    def join(cls, parts: Sequence[ImageFeatures]) -> ImageFeatures:
        """Concatenate features."""
        if len(parts) == 1:
            return parts[0]
        rows = torch.cat([part.rows for part in parts])
        deep_layers = zip(*(part.deep for part in parts), strict=True)
        return cls(rows, tuple(torch.cat(layer) for layer in deep_layers))


class SplitVLM:
    """Vision-language model split into tower, decoder and head.

    A `ModelError` has the reason where that is impossible.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.body, self.text, self.head = _find_parts(module)
        use_run_attention(self.body)
        self.embed: nn.Module = module.get_input_embeddings()
        accepted = inspect.signature(self.text.forward).parameters
        self.deep = "deepstack_visual_embeds" in accepted
        rope = getattr(self.text.config, "rope_parameters", None) or {}
        self.uses_mrope = "mrope_section" in rope
        """Whether positions count time, height and width."""
        self._check_logits()

    def vision_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters of the tower: those in neither decoder nor head."""
        others: set[int] = set()
        for part in (self.text, self.head, self.embed):
            others |= {id(parameter) for parameter in part.parameters()}
        named = self.module.named_parameters()
        return [(name, parameter) for name, parameter in named if id(parameter) not in others]

    def encode(self, arrays: Mapping[str, Any], sizes: Sequence[int]) -> list[ImageFeatures]:
        """Encode as `encode_together`; return one item per image."""
        merged = self.encode_together(arrays, sizes)
        edges = np.cumsum([0, *sizes]).tolist()
        return [merged.take(slice(start, end)) for start, end in pairwise(edges)]

    def encode_together(self, arrays: Mapping[str, Any], sizes: Sequence[int]) -> ImageFeatures:
        """Encode merged pixel values of images, or of videos, into concatenated features.

        Each image or video has as many rows as `sizes` says.
        """
        video = is_video(arrays)
        encode = getattr(self.body, "get_video_features" if video else "get_image_features", None)
        if encode is None:
            raise ModelError(f"{type(self.module).__name__} does not support videos")

        # Processors return more than a tower takes.
        first = next(self.module.parameters())
        accepted = inspect.signature(encode).parameters
        inputs: dict[str, Tensor] = {}
        for name, value in arrays.items():
            if name in accepted:
                inputs[name] = _tensor(value, first)
        output = encode(**inputs, return_dict=True)

        rows = _flatten(output.pooler_output)
        deep: tuple[Tensor, ...] = ()
        if self.deep:
            layers = getattr(output, "deepstack_features", None) or ()
            deep = tuple(_flatten(layer) for layer in layers)
        if len(rows) != sum(sizes):
            raise ModelError(
                f"{type(self.module).__name__} returns {len(rows)} features for {len(sizes)} "
                f"{'videos' if video else 'images'} with {sum(sizes)} placeholders; the "
                "processor's settings do not match the model"
            )
        return ImageFeatures(rows, deep)

    def decode(
        self,
        ids_bt: Tensor,
        positions: Tensor,
        places: Tensor | None = None,
        features: ImageFeatures | None = None,
        **more: Any,
    ) -> Tensor:
        """Return the decoder's last hidden state, [B, T, width].

        `positions` are [1 or B, T], or [3, B, T] for time, height and width; always passed, since a
        model would otherwise continue from those of its last images. `places` are the [n] ascending
        indices of `features` in the flattened [B, T].
        """
        embeds_btd = self.embed(ids_bt)
        if features is not None and places is not None:
            flat = embeds_btd.flatten(0, 1).index_put((places,), features.rows.to(embeds_btd.dtype))
            embeds_btd = flat.view_as(embeds_btd)
            if features.deep:
                media_bt = torch.zeros(ids_bt.numel(), dtype=torch.bool, device=ids_bt.device)
                media_bt[places] = True
                more["visual_pos_masks"] = media_bt.view_as(ids_bt)
                more["deepstack_visual_embeds"] = list(features.deep)

        # No mask: padding is on the right, outside causal attention. No cache, and three position
        # rows instead of four: otherwise transformers would search for packed rows.
        output = self.text(
            inputs_embeds=embeds_btd,
            position_ids=positions,
            attention_mask=None,
            use_cache=False,
            **more,
        )
        hidden: Tensor = output.last_hidden_state
        return hidden

    def _check_logits(self) -> None:
        """Check that decoder and head reproduce the model's own logits on text, to the last bit."""
        device = next(self.module.parameters()).device
        ids_bt = torch.tensor([PROBE_IDS], device=device)
        positions = torch.arange(len(PROBE_IDS), device=device)[None]
        with torch.no_grad():
            expected = self.module(input_ids=ids_bt, position_ids=positions, use_cache=False).logits
            logits = self.head(self.decode(ids_bt, positions))
        if not torch.equal(expected, logits):
            gap = float((expected - logits).abs().max())
            raise ModelError(
                f"{type(self.module).__name__} computes more than its decoder and head: logits "
                f"differ by {gap:.3g}; its images are not supported"
            )


def is_video(arrays: Mapping[str, Any]) -> bool:
    """Return whether pixel values are of videos, by their names."""
    return any("video" in name for name in arrays)


def auto_class(config: Any) -> Any:
    """Return the transformers auto class for a config: with images if it has a vision tower."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    if getattr(config, "vision_config", None) is None:
        return AutoModelForCausalLM
    return AutoModelForImageTextToText


def split_vlm(module: Any) -> tuple[SplitVLM | None, str]:
    """Return the split module, or None and the reason."""
    if getattr(getattr(module, "config", None), "vision_config", None) is None:
        return None, "the model has no vision tower"
    try:
        return SplitVLM(module), ""
    except ModelError as error:
        return None, str(error)


def _find_parts(module: Any) -> tuple[Any, Any, nn.Module]:
    """Return body, decoder and head of a vision-language model."""
    name = type(module).__name__
    body = getattr(module, getattr(module, "base_model_prefix", "") or "model", None)
    head = module.get_output_embeddings()
    if (
        not isinstance(body, nn.Module)
        or not isinstance(head, nn.Module)
        or not hasattr(body, "get_image_features")
    ):
        raise ModelError(
            f"{name} lacks a body with get_image_features and a head; its images are not supported"
        )
    if "token_type_ids" in inspect.signature(body.forward).parameters:
        raise ModelError(
            f"{name} lets image placeholders attend to later ones, which is not supported"
        )

    for part in ("language_model", "text_model"):
        text = getattr(body, part, None)
        if not isinstance(text, nn.Module):
            continue
        if "inputs_embeds" in inspect.signature(text.forward).parameters:
            return body, text, head
    raise ModelError(f"{name} lacks a decoder that takes embeddings; its images are not supported")


def _tensor(value: Any, like: Tensor) -> Tensor:
    array = np.asarray(value)
    if not array.flags.writeable:
        array = array.copy()
    tensor = torch.from_numpy(array)
    return tensor.to(like.device, like.dtype if tensor.is_floating_point() else None)


def _flatten(parts: Any) -> Tensor:
    """Flatten features that are one tensor, or one for each image."""
    if isinstance(parts, Tensor):
        return parts.flatten(0, -2)
    return torch.cat([part.flatten(0, -2) for part in parts])


CACHE_BYTES = 2**28
"""Maximum memory for cached features."""
MIN_FEATURES_PER_PASS = 32
"""Minimum number of features encoded in one tower pass."""
Shape = tuple[int, tuple[tuple[str, tuple[int, ...]], ...]]
"""Number of features of an image, and the shapes of its pixel values."""


class ImageFeatureCache:
    """Image features by media key, cleared with the weights that made them.

    Features do not depend on other images to the bit. Small images of one shape are encoded in
    batches of a fixed size, filled by repetition, and only after a check that batching changes no
    bit. Above `CACHE_BYTES` the least recently used are evicted, and recomputed when needed.
    """

    def __init__(self, tower: SplitVLM) -> None:
        self.tower = tower
        self.encoded = 0
        """Number of images and videos encoded."""
        self._max_bytes = CACHE_BYTES
        self._bytes = 0
        self._cached: OrderedDict[str, ImageFeatures] = OrderedDict()
        self._batch_sizes: dict[Shape, int] = {}
        self._last: Any = None
        self._earlier: list[weakref.ref[Any]] = []

    def add_pixel_source(self, pixels: Any) -> None:
        """Add a source of pixel values.

        The latest is tried first, and sources are held weakly except the latest.
        """
        self._earlier = [weakref.ref(other) for other in self._sources() if other is not pixels]
        self._last = pixels

    @property
    def has_pixel_source(self) -> bool:
        """Whether any source was added."""
        return self._last is not None

    @property
    def vision(self) -> Any:
        """Vision processor of the latest source."""
        if self._last is None:
            raise EngineError(
                "a request has images, but no pixel source; call engine.add_pixel_source(pixels)"
            )
        return self._last.vision

    def features(self, media: Media, size: int) -> ImageFeatures:
        """Return the features of one image or video, `size` rows."""
        if media.key not in self._cached:
            arrays = self._pixels(media)
            self._encode(_shape(arrays, size), {media.key: arrays})
        self._cached.move_to_end(media.key)
        return self._cached[media.key]

    def prepare(self, wanted: Sequence[tuple[Media, int]]) -> None:
        """Encode images together before `features` is called.

        Failures are left to `features`, which reports them.
        """
        by_shape: dict[Shape, dict[str, Any]] = {}
        for media, size in wanted:
            if media.key not in self._cached:
                with suppress(TurnwrightError, OSError):
                    arrays = self._pixels(media)
                    by_shape.setdefault(_shape(arrays, size), {})[media.key] = arrays

        for shape, pixels in by_shape.items():
            with suppress(TurnwrightError):
                count = self._batch_size(shape, next(iter(pixels.values())))
                keys = list(pixels)
                for first in range(0, len(keys), count):
                    batch = {key: pixels[key] for key in keys[first : first + count]}
                    self._encode(shape, batch)

    def clear(self) -> None:
        """Clear the cache, for new weights."""
        self._cached.clear()
        self._bytes = 0

    def _encode(self, shape: Shape, batch: Mapping[str, Any]) -> None:
        """Encode images of one shape, by media key, and keep their features."""
        size, _ = shape
        chunks = list(batch.values())
        chunks += chunks[:1] * (self._batch_size(shape, chunks[0]) - len(chunks))
        encoded = self.tower.encode(self.vision.merge(chunks), [size] * len(chunks))
        self.encoded += len(batch)

        # A copy, since the features of one image are a view of those of all.
        for key, features in zip(batch, encoded, strict=False):
            kept = features.clone()
            self._cached[key] = kept
            self._bytes += kept.nbytes
        while self._bytes > self._max_bytes and len(self._cached) > len(batch):
            _, evicted = self._cached.popitem(last=False)
            self._bytes -= evicted.nbytes

    def _batch_size(self, shape: Shape, chunk: Mapping[str, Any]) -> int:
        """Return how many images of a shape are encoded per tower pass."""
        if shape not in self._batch_sizes:
            size, _ = shape
            count = max(1, MIN_FEATURES_PER_PASS // max(1, size))
            if count > 1 and not self._same_bits(size, chunk, count):
                count = 1
            self._batch_sizes[shape] = count
        return self._batch_sizes[shape]

    def _same_bits(self, size: int, chunk: Mapping[str, Any], count: int) -> bool:
        """Return whether an image's features are identical at every batch index and beside other
        images."""
        negative: dict[str, Any] = {}
        for name, array in chunk.items():
            negative[name] = -array if array.dtype.kind == "f" else array
        sizes = [size] * count
        copies = self.tower.encode(self.vision.merge([chunk] * count), sizes)
        beside_others = [*[negative] * (count - 1), chunk]
        mixed = self.tower.encode(self.vision.merge(beside_others), sizes)
        return all(copies[0].same(features) for features in (*copies[1:], mixed[-1]))

    def _pixels(self, media: Media) -> Any:
        """Return the pixel values of an image or video from the first source that has them.

        Sources with other settings of the processor are left out.
        """
        missing: MediaError | None = None
        for pixels in self._sources():
            if pixels.vision.fingerprint == self.vision.fingerprint:
                try:
                    return pixels.get(media)
                except MediaError as error:
                    missing = missing or error
        raise missing or MediaError(f"no source has the image {media.key[:12]}")

    def _sources(self) -> list[Any]:
        """Return the live sources, latest first."""
        sources = [self._last, *(reference() for reference in self._earlier)]
        return [pixels for pixels in sources if pixels is not None]


def _shape(arrays: Mapping[str, Any], size: int) -> Shape:
    return size, tuple((name, tuple(array.shape)) for name, array in sorted(arrays.items()))


class ContextMedia:
    """Media of one call's context: feature positions and rotary positions."""

    def __init__(self, ids: Sequence[int], placed: Sequence[MediaPlacement], vision: Any) -> None:
        self._ids = ids
        self._placed = tuple(placed)
        self._vision = vision
        after = vision.positions(len(ids) + 1, placed, start=len(ids))
        self.shift = 0 if after is None else int(after[0, 0]) - len(ids)
        """Offset of rotary positions after the context from plain positions."""

    def rotary_positions(self, start: int, end: int) -> Any:
        """Return rotary positions from `start` to `end`, [3, end - start].

        None where they equal plain positions.
        """
        positions = self._vision.positions(len(self._ids), self._placed, start=start)
        return None if positions is None else positions[:, : end - start]

    def features_between(self, start: int, end: int) -> list[tuple[Media, int, list[int], slice]]:
        """Return features between two positions: medium, its number of rows, positions, and the
        slice of rows."""
        features: list[tuple[Media, int, list[int], slice]] = []
        pad_ids = self._vision.pad_ids
        for block in self._placed:
            if block.end <= start or block.start >= end:
                continue
            span = range(block.start, block.end)
            pads = [position for position in span if self._ids[position] in pad_ids]
            inside = [number for number, pad in enumerate(pads) if start <= pad < end]
            if inside:
                part = slice(inside[0], inside[-1] + 1)
                features.append((block.media, len(pads), pads[part], part))
        return features
