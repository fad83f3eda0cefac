"""The two halves of a vision-language model: a tower that makes features of images, and the decoder that reads them.

Models are taken by their structure, never by their name: a body with `get_image_features`, and a decoder under it that takes
embeddings. What the body does in between (features in place of the embeddings of placeholders, features added behind layers)
is done here, since only so can an image be encoded once and its features be fed wherever they are needed.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from turnwise.engine.local.runs import use_run_attention
from turnwise.errors import ModelError

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
