"""From ids to what a model says of its targets, for any Hugging Face causal or vision-language model."""

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
    LogitTransform,
    OutputHead,
    SamplingDistribution,
    SamplingSupport,
    shapes,
    target_stats,
    target_support,
)
from turnwise.training.forward.routing_replay import RoutingReplay
from turnwise.training.loss import BANNED_LOGIT, TokenStats
from turnwise.types import Media

FROZEN_BYTES = 2**28
"""Memory for features of a frozen tower."""


class ForwardPass:
    """Runs a causal model's body on whole rows and its head only on the positions asked for, some at a time.

    With a vocabulary of 151k the logits of every position would be the largest tensor of a step by far, and a multi-turn row is
    mostly observations. What a model does to its logits behind the head (a soft cap, a factor) is found by comparing one small
    forward pass bit by bit; for one that does something else the whole logits are computed.

    A model that sees is taken apart further: each image of a pass goes through its tower once, and all rows that show it are
    fed the same features.
    """

    def __init__(self, model: nn.Module, *, replay: bool = False) -> None:
        """
        Args:
            replay: whether passes bring the experts that the engine chose.

        Raises:
            ConfigError: when they do, and the model has no routers that can take them.
        """
        self.model = model
        self.replay = RoutingReplay(model) if replay else None
        self.tower, self.blind = split_vlm(model)
        self.sight = None if self.tower is None else VisionInputs(self.tower)
        self.body, module = _parts(model)
        self.positions = "position_ids" in inspect.signature((self.body or model).forward).parameters
        self.head: OutputHead | None = None
        """None where the whole logits must be computed."""
        if self.tower is not None:
            self.head = OutputHead(self.tower.head)
        elif self.body is not None and module is not None:
            shape = self._shape(module)
            self.head = None if shape is None else OutputHead(module, shape)

    def stats(
        self,
        micro: MicroBatch,
        pixels: PixelCache | None,
        law: SamplingDistribution,
        kept: SamplingSupport | None = None,
        *,
        entropy: bool,
    ) -> TokenStats:
        """What the model says of a pass's M targets.

        Args:
            pixels: where the pixel values of what is shown come from.
            law: how the engine samples from logits.
            kept: what top-k and top-p left before; none finds it where the law cuts.
            entropy: whether the entropy is wanted.

        Raises:
            UsageError: when images are shown to a model that sees none.
            MediaError: when they cannot be had.
        """
        if self.head is None:
            return law.stats(self._whole(micro), micro.targets_m, kept, entropy=entropy)
        return target_stats(self.hidden(micro, pixels), self.head, micro.targets_m, law, kept, entropy=entropy)

    def sampling_support(
        self, micro: MicroBatch, pixels: PixelCache | None, law: SamplingDistribution
    ) -> SamplingSupport | None:
        """What top-k and top-p leave for each of a pass's targets; None where nothing is cut."""
        if not law.truncates:
            return None
        with torch.no_grad():
            if self.head is None:
                return law.support(self._whole(micro), micro.targets_m)
            return target_support(self.hidden(micro, pixels), self.head, micro.targets_m, law)

    def _whole(self, micro: MicroBatch) -> Tensor:
        if micro.media:
            raise UsageError(f"trajectories show images, and {self.blind}")
        full_btv: Tensor = self._call(self.model, micro.ids_bt, micro.positions, **self._led(micro)).logits
        _see_led(micro)
        return full_btv.flatten(0, 1).index_select(0, micro.before_m)

    def distribution(self, micro: MicroBatch, pixels: PixelCache | None, law: SamplingDistribution) -> Tensor:
        """The log-probabilities (M, vocabulary) at a pass's M targets, in float32 or better; for a few of them, all at once.

        Raises:
            UsageError, MediaError: as `stats`.
        """
        if self.head is None:
            full_btv = self._call(self.model, micro.ids_bt, micro.positions, **self._led(micro)).logits
            logits = full_btv.flatten(0, 1).index_select(0, micro.before_m)
        else:
            logits = self.head.logits(self.hidden(micro, pixels))
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32)) / law.temperature
        shut_v = law.banned(wide)
        return torch.log_softmax(wide if shut_v is None else wide.masked_fill(shut_v, BANNED_LOGIT), -1)

    def hidden(self, micro: MicroBatch, pixels: PixelCache | None = None) -> Tensor:
        """The hidden states (M, width) that predict a pass's targets, behind the last norm.

        Raises:
            UsageError, MediaError: as `stats`.
        """
        if self.tower is not None and self.sight is not None:
            places_p, features = self.sight.features_for(micro, pixels)
            hidden_btd = self.tower.decode(micro.ids_bt, micro.positions, places_p, features, **self._led(micro))
        elif micro.media:
            raise UsageError(f"trajectories show images, and {self.blind}")
        else:
            assert self.body is not None
            hidden_btd = self._call(self.body, micro.ids_bt, micro.positions, **self._led(micro)).last_hidden_state
        _see_led(micro)
        return hidden_btd.flatten(0, 1).index_select(0, micro.before_m)

    @property
    def decoder(self) -> nn.Module | None:
        """The part whose layers attend; None where the model does not tell it apart."""
        return self.tower.text if self.tower is not None else self.body

    def _led(self, micro: MicroBatch) -> dict[str, Any]:
        """What leads a pass: routers take the experts that it brings, attention is told of its tree."""
        if self.replay is not None:
            self.replay.set_routes(micro.routes)
        if micro.tree is None:
            return {}
        micro.tree.kept["layers"] = 0
        return {"turnwise_tree": micro.tree}

    def _call(self, module: nn.Module, ids_bt: Tensor, positions_1t: Tensor, **more: Any) -> Any:
        # No mask: rows are padded on the right, where causal attention cannot look. No cache: with one, transformers would take
        # other paths through its masks.
        if self.positions:
            more["position_ids"] = positions_1t
        return module(input_ids=ids_bt, attention_mask=None, use_cache=False, **more)

    def _shape(self, head: nn.Module) -> LogitTransform | None:
        """What follows the head in the model, by its own logits to the last bit; None for what is not known."""
        assert self.body is not None
        device = next(self.model.parameters()).device
        ids_bt = torch.tensor([[0, 1, 2, 3]], device=device)
        positions_1t = torch.arange(4, device=device)[None]
        with torch.no_grad():
            whole = self._call(self.model, ids_bt, positions_1t).logits
            split = head(self._call(self.body, ids_bt, positions_1t).last_hidden_state)
            found = (shape for shape in shapes(getattr(self.model, "config", None)) if torch.equal(whole, shape(split)))
            return next(found, None)


class VisionInputs:
    """Features of what a pass shows: each image or video once, with gradient where the tower is trained.

    Features of a frozen tower are the same at every step, so they are kept, while memory allows.
    """

    def __init__(self, tower: SplitVLM, most_bytes: int = FROZEN_BYTES) -> None:
        self.tower = tower
        self.encoded = 0
        """Images and videos that went through the tower."""
        self.frozen = not any(p.requires_grad for _, p in tower.vision_parameters())
        self._most = most_bytes
        self._held = 0
        self._kept: OrderedDict[str, ImageFeatures] = OrderedDict()

    def features_for(self, micro: MicroBatch, pixels: PixelCache | None) -> tuple[Tensor | None, ImageFeatures | None]:
        """Where features stand in the flattened (B, T) of a pass, rising, and those features; None where nothing is shown."""
        if not micro.media:
            return None, None
        if pixels is None:
            raise UsageError(
                "trajectories show images, and nothing is known of them: give pixels=Rollout(...).pixels to Trainer"
            )
        shown = {media.key: (media, len(at)) for media, at in micro.media}
        features, first = self._features(shown, pixels)
        device = micro.ids_bt.device
        places_p = torch.tensor([place for _, at in micro.media for place in at], device=device)
        chosen_p = torch.tensor([first[media.key] + n for media, at in micro.media for n in range(len(at))], device=device)
        return places_p, features.take(chosen_p)

    def _features(self, shown: dict[str, tuple[Media, int]], pixels: PixelCache) -> tuple[ImageFeatures, dict[str, int]]:
        """The features of what is shown, one behind another, and the first row of each."""
        known = [key for key in shown if key in self._kept]
        keys, parts = list(known), [self._kept[key] for key in known]
        for video in (False, True):
            wanted = [key for key in shown if key not in self._kept and is_video(pixels.get(shown[key][0])) is video]
            if not wanted:
                continue
            arrays = pixels.merged([shown[key][0] for key in wanted])
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
                parts.append(self.tower.encode_together(arrays, [shown[key][1] for key in wanted]))
            self.encoded += len(wanted)
            keys += wanted
        starts = dict(zip(keys, itertools.accumulate([0, *(shown[key][1] for key in keys)]), strict=False))
        features = ImageFeatures.join(parts)
        if self.frozen:
            self._keep({key: features.take(slice(starts[key], starts[key] + shown[key][1])) for key in keys})
        return features, starts

    def _keep(self, found: dict[str, ImageFeatures]) -> None:
        for key, features in found.items():
            if key not in self._kept:
                self._kept[key] = features = features.clone()
                self._held += features.nbytes
            self._kept.move_to_end(key)
        while self._held > self._most and len(self._kept) > 1:
            self._held -= self._kept.popitem(last=False)[1].nbytes


def _see_led(micro: MicroBatch) -> None:
    """See that attention followed the pass's tree: another one would take the whole pass for one long row."""
    if micro.tree is not None and not micro.tree.kept["layers"]:
        raise TurnwiseError(
            "the model's attention was changed after its trainer began (set_attn_implementation?) and no longer follows token "
            'trees; change it before, or set train.batching = "rows"'
        )


def _parts(model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """A model's body and head, or (None, None) where it does not tell."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    body = getattr(model, getattr(model, "base_model_prefix", "") or "model", None)
    if not isinstance(head, nn.Module) or not isinstance(body, nn.Module) or body is model:
        return None, None
    return body, head
