"""Split a VLM into tower and decoder; cache of image features.

The two halves of a vision-language model: a tower that makes features of images, and the decoder that reads them.

Models are taken by their structure, never by their name: a body with `get_image_features`, and a decoder under it that takes
embeddings. What the body does in between (features in place of the embeddings of placeholders, features added behind layers)
is done here, since only so can an image be encoded once and its features be fed wherever they are needed.
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

from turnwise.engines.local.attention import use_run_attention
from turnwise.errors import EngineError, MediaError, ModelError, TurnwiseError
from turnwise.types import Media, MediaPlacement

PROOF = (0, 1, 2, 3, 5)
"""Ids on which the way through the halves is held against the model's own."""


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """What the tower makes of images or videos: a row per placeholder, in order."""

    rows: Tensor
    """[placeholders, width]: they stand in place of embeddings."""
    deep: tuple[Tensor, ...] = ()
    """[placeholders, width] each: what is added behind the first layers (DeepStack, arXiv 2406.04334)."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(part.nbytes for part in (self.rows, *self.deep))

    def take(self, index: slice | Tensor) -> ImageFeatures:
        """Some rows of them."""
        return ImageFeatures(self.rows[index], tuple(part[index] for part in self.deep))

    def same(self, other: ImageFeatures) -> bool:
        """Whether they are equal to the last bit."""
        pairs = zip((self.rows, *self.deep), (other.rows, *other.deep), strict=True)
        return all(torch.equal(mine, theirs) for mine, theirs in pairs)

    def clone(self) -> ImageFeatures:
        """The same in memory of its own."""
        return ImageFeatures(self.rows.clone(), tuple(part.clone() for part in self.deep))

    @classmethod
    def join(cls, parts: Sequence[ImageFeatures]) -> ImageFeatures:
        """Several, one after another."""
        if len(parts) == 1:
            return parts[0]
        deep = zip(*(part.deep for part in parts), strict=True)
        return cls(torch.cat([part.rows for part in parts]), tuple(torch.cat(layer) for layer in deep))


class SplitVLM:
    """A vision-language model, taken apart.

    Args:
        module: of transformers; it stays whole, and what is done here is done with its parts.

    Raises:
        ModelError: when it cannot be taken apart; the message says why.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.body, self.text, self.head = _halves(module)
        use_run_attention(self.body)
        self.embed: nn.Module = module.get_input_embeddings()
        accepted = inspect.signature(self.text.forward).parameters
        self.deep = "deepstack_visual_embeds" in accepted
        rope = getattr(self.text.config, "rope_parameters", None) or {}
        self.turns = "mrope_section" in rope
        """Whether positions count in time, height and width."""
        self._prove()

    def vision_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """What makes the features: all that is in neither the decoder nor the head."""
        others = {id(p) for part in (self.text, self.head, self.embed) for p in part.parameters()}
        return [(name, p) for name, p in self.module.named_parameters() if id(p) not in others]

    def encode(self, arrays: Mapping[str, Any], sizes: Sequence[int]) -> list[ImageFeatures]:
        """As `encode_together`, an item per image."""
        whole, ends = self.encode_together(arrays, sizes), np.cumsum([0, *sizes]).tolist()
        return [whole.take(slice(start, end)) for start, end in pairwise(ends)]

    def encode_together(self, arrays: Mapping[str, Any], sizes: Sequence[int]) -> ImageFeatures:
        """Features of images, or of videos, one behind another, from pixel values that were merged.

        Args:
            arrays: by the processor's names, all of one kind.
            sizes: rows that belong to each.

        Raises:
            ModelError: when the tower makes another number of rows.
        """
        video = is_video(arrays)
        make = getattr(self.body, "get_video_features" if video else "get_image_features", None)
        if make is None:
            raise ModelError(f"{type(self.module).__name__} sees no videos")
        first = next(self.module.parameters())
        taken = inspect.signature(make).parameters
        given = {name: _tensor(value, first) for name, value in arrays.items() if name in taken}
        made = make(**given, return_dict=True)
        rows = _joined(made.pooler_output)
        deep = tuple(_joined(layer) for layer in getattr(made, "deepstack_features", None) or ()) if self.deep else ()
        if len(rows) != sum(sizes):
            raise ModelError(
                f"{type(self.module).__name__} makes {len(rows)} features of {len(sizes)} {'videos' if video else 'images'} "
                f"that have {sum(sizes)} placeholders; its processor's settings are not those of the model"
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
        """The decoder's last hidden state, [B, T, width].

        Args:
            positions: [1 or B, T]; or [3, B, T] where they count in time, height and width. They are always given, since a
                model keeps those of its last images and would go on from them.
            places: [n] indices into the flattened [B, T], rising, at which features stand.
            features: n rows.
        """
        embeds_btd = self.embed(ids_bt)
        if features is not None and places is not None:
            flat = embeds_btd.flatten(0, 1).index_put((places,), features.rows.to(embeds_btd.dtype))
            embeds_btd = flat.view_as(embeds_btd)
            if features.deep:
                seen_bt = torch.zeros(ids_bt.numel(), dtype=torch.bool, device=ids_bt.device)
                seen_bt[places] = True
                more["visual_pos_masks"] = seen_bt.view_as(ids_bt)
                more["deepstack_visual_embeds"] = list(features.deep)
        # No mask: rows are padded on the right, where causal attention cannot look. No cache, and three rows of positions
        # rather than four: with either, transformers would look for packed rows in them.
        output = self.text(inputs_embeds=embeds_btd, position_ids=positions, attention_mask=None, use_cache=False, **more)
        hidden: Tensor = output.last_hidden_state
        return hidden

    def _prove(self) -> None:
        """See that the decoder and the head come to the model's own logits on text, to the last bit."""
        device = next(self.module.parameters()).device
        ids_bt = torch.tensor([PROOF], device=device)
        positions = torch.arange(len(PROOF), device=device)[None]
        with torch.no_grad():
            own = self.module(input_ids=ids_bt, position_ids=positions, use_cache=False).logits
            got = self.head(self.decode(ids_bt, positions))
        if not torch.equal(own, got):
            raise ModelError(
                f"{type(self.module).__name__} does more than its decoder and its head: logits differ by "
                f"{float((own - got).abs().max()):.3g}; its images cannot be fed here"
            )


def is_video(arrays: Mapping[str, Any]) -> bool:
    """Whether pixel values are of videos, by their names."""
    return any("video" in name for name in arrays)


def auto_class(config: Any) -> Any:
    """Which of transformers' classes loads a model of this config: one that sees, where it has a vision tower."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForCausalLM if getattr(config, "vision_config", None) is None else AutoModelForImageTextToText


def split_vlm(module: Any) -> tuple[SplitVLM | None, str]:
    """A module's halves, or None and why there are none."""
    if getattr(getattr(module, "config", None), "vision_config", None) is None:
        return None, "the model has no vision tower"
    try:
        return SplitVLM(module), ""
    except ModelError as error:
        return None, str(error)


def _halves(module: Any) -> tuple[Any, Any, nn.Module]:
    """Body, decoder and head."""
    name = type(module).__name__
    body = getattr(module, getattr(module, "base_model_prefix", "") or "model", None)
    head = module.get_output_embeddings()
    if not isinstance(body, nn.Module) or not isinstance(head, nn.Module) or not hasattr(body, "get_image_features"):
        raise ModelError(f"{name} has no body with get_image_features and a head behind it, so its images cannot be fed here")
    if "token_type_ids" in inspect.signature(body.forward).parameters:
        raise ModelError(f"{name} lets the placeholders of an image attend to later ones, which is not computed here")
    for part in ("language_model", "text_model"):
        text = getattr(body, part, None)
        if isinstance(text, nn.Module) and "inputs_embeds" in inspect.signature(text.forward).parameters:
            return body, text, head
    raise ModelError(f"{name} has no decoder that takes embeddings under its body, so its images cannot be fed here")


def _tensor(value: Any, like: Tensor) -> Tensor:
    array = np.asarray(value)
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor.to(like.device, like.dtype if tensor.is_floating_point() else None)


def _joined(parts: Any) -> Tensor:
    """Rows of features that came as one tensor or as one per image."""
    if isinstance(parts, Tensor):
        return parts.flatten(0, -2)
    return torch.cat([part.flatten(0, -2) for part in parts])


CACHE_BYTES = 2**28
"""Memory for features that are kept."""
TOGETHER = 32
"""Features that are made at a time where an image has fewer."""
Shape = tuple[int, tuple[tuple[str, tuple[int, ...]], ...]]
"""How many features an image has, and the shapes of its pixel values."""


class ImageFeatureCache:
    """Features by what is seen. They are forgotten with the weights that made them.

    The bits of an image's features do not depend on what else is looked at: small images of one shape are encoded so many at a
    time, always the same number (where some are missing, one is repeated), and only if that was seen to change nothing.

    Args:
        tower: of the model.
        most_bytes: memory for features; the longest unused go first, and are made again when needed.
    """

    def __init__(self, tower: SplitVLM, most_bytes: int = CACHE_BYTES) -> None:
        self.tower = tower
        self.encoded = 0
        """Images and videos that went through the tower."""
        self._most = most_bytes
        self._held = 0
        self._known: OrderedDict[str, ImageFeatures] = OrderedDict()
        self._together: dict[Shape, int] = {}
        self._last: Any = None
        self._earlier: list[weakref.ref[Any]] = []

    def add_pixel_source(self, pixels: Any) -> None:
        """Pixel values come from here too; a rollout that is gone is forgotten, the last one is asked first."""
        known = [found for found in self._sources() if found is not pixels]
        self._last, self._earlier = pixels, [weakref.ref(found) for found in known]

    @property
    def has_pixel_source(self) -> bool:
        """Whether anybody said what images are."""
        return self._last is not None

    @property
    def vision(self) -> Any:
        """The renderer's side of the model's sight.

        Raises:
            EngineError: when nobody gave any.
        """
        if self._last is None:
            raise EngineError("a request with images, and nothing is known of them: call engine.add_pixel_source(pixels) first")
        return self._last.vision

    def features(self, media: Media, size: int) -> ImageFeatures:
        """The features of one image or video, `size` rows.

        Raises:
            EngineError, MediaError, ModelError: when there are none to be had.
        """
        if media.key not in self._known:
            arrays = self._pixels(media)
            self._encode(_shape(arrays, size), {media.key: arrays})
        self._known.move_to_end(media.key)
        return self._known[media.key]

    def prepare(self, wanted: Sequence[tuple[Media, int]]) -> None:
        """Encode together what `features` will be asked for next. What cannot be had is left to it, which says why."""
        fresh: dict[Shape, dict[str, Any]] = {}
        for media, size in wanted:
            if media.key not in self._known:
                with suppress(TurnwiseError, OSError):
                    arrays = self._pixels(media)
                    fresh.setdefault(_shape(arrays, size), {})[media.key] = arrays
        for shape, some in fresh.items():
            with suppress(TurnwiseError):
                count = self._count(shape, next(iter(some.values())))
                keys = list(some)
                for first in range(0, len(keys), count):
                    self._encode(shape, {key: some[key] for key in keys[first : first + count]})

    def clear(self) -> None:
        """The weights are others now."""
        self._known.clear()
        self._held = 0

    def _encode(self, shape: Shape, some: Mapping[str, Any]) -> None:
        chunks = list(some.values())
        chunks += chunks[:1] * (self._count(shape, chunks[0]) - len(chunks))
        made = self.tower.encode(self.vision.merge(chunks), [shape[0]] * len(chunks))
        self.encoded += len(some)
        for key, features in zip(some, made, strict=False):
            self._known[key] = kept = features.clone()
            self._held += kept.nbytes
        while self._held > self._most and len(self._known) > len(some):
            self._held -= self._known.popitem(last=False)[1].nbytes

    def _count(self, shape: Shape, chunk: Mapping[str, Any]) -> int:
        """How many images of a shape go through the tower at a time."""
        count = self._together.get(shape)
        if count is None:
            count = max(1, TOGETHER // max(1, shape[0]))
            if count > 1 and not self._same_bits(shape[0], chunk, count):
                count = 1
            self._together[shape] = count
        return count

    def _same_bits(self, size: int, chunk: Mapping[str, Any], count: int) -> bool:
        """Whether the features of an image are the same at every place, and in other company."""
        other = {name: -array if array.dtype.kind == "f" else array for name, array in chunk.items()}
        copies = self.tower.encode(self.vision.merge([chunk] * count), [size] * count)
        mixed = self.tower.encode(self.vision.merge([*[other] * (count - 1), chunk]), [size] * count)
        return all(copies[0].same(features) for features in (*copies[1:], mixed[-1]))

    def _pixels(self, media: Media) -> Any:
        missing: MediaError | None = None
        for pixels in self._sources():
            if pixels.vision.fingerprint == self.vision.fingerprint:
                try:
                    return pixels.get(media)
                except MediaError as error:
                    missing = missing or error
        raise missing or MediaError(f"nobody knows {media.key[:12]}")

    def _sources(self) -> list[Any]:
        """Where pixel values may come from, the last one given first."""
        found = [self._last, *(ref() for ref in self._earlier)]
        return [pixels for pixels in found if pixels is not None]


def _shape(arrays: Mapping[str, Any], size: int) -> Shape:
    return size, tuple((name, tuple(array.shape)) for name, array in sorted(arrays.items()))


class ContextMedia:
    """What one call sees: where features stand in its context, and the positions that it counts.

    Args:
        ids: the context.
        placed: its blocks.
        eyes: of the model.
    """

    def __init__(self, ids: Sequence[int], placed: Sequence[MediaPlacement], eyes: Any) -> None:
        self._ids, self._placed, self._eyes = ids, tuple(placed), eyes
        behind = eyes.positions(len(ids) + 1, placed, start=len(ids))
        self.shift = 0 if behind is None else int(behind[0, 0]) - len(ids)
        """How far the positions of what is sampled are from their places."""

    def rotary_positions(self, start: int, end: int) -> Any:
        """Rotary positions of the places from `start` to `end`, [3, end - start]; None where they are the places."""
        found = self._eyes.positions(len(self._ids), self._placed, start=start)
        return None if found is None else found[:, : end - start]

    def features_between(self, start: int, end: int) -> list[tuple[Media, int, list[int], slice]]:
        """Which features stand from `start` to `end`: the medium, its rows in all, their places, and which of the rows."""
        found = []
        for block in self._placed:
            if block.end <= start or block.start >= end:
                continue
            pads = [at for at in range(block.start, block.end) if self._ids[at] in self._eyes.pad_ids]
            inside = [number for number, at in enumerate(pads) if start <= at < end]
            if inside:
                part = slice(inside[0], inside[-1] + 1)
                found.append((block.media, len(pads), pads[part], part))
        return found
