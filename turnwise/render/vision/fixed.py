"""LLaVA: each image is cropped to one size, and takes the same number of ids."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from turnwise.errors import ModelError
from turnwise.media import MediaStore
from turnwise.render.vision.base import BaseVisionProcessor
from turnwise.render.vision.eyes import MediaBlock
from turnwise.render.vision.files import ModelFiles
from turnwise.render.vision.pillow import load_pillow_processor, pil_images, processor_name
from turnwise.types import Media


class LlavaVisionProcessor(BaseVisionProcessor):
    """Images of LLaVA; positions are counted in one dimension."""

    def __init__(self, family: str, files: ModelFiles) -> None:
        image = files.token("<image>", "image_token_index", "image_token_id")
        assert image is not None
        self._files = files
        self._name = processor_name(files, "CLIPImageProcessor")
        height, width = _size(files)
        processor, config = files.processor, files.config
        patch = processor.get("patch_size") or files.vision.get("patch_size") or 14
        strategy = processor.get("vision_feature_select_strategy") or config.get("vision_feature_select_strategy", "default")
        more = processor.get("num_additional_image_tokens", 0 if processor else int(strategy == "default"))
        self._grid = (1, height // patch, width // patch)
        self._count = self._grid[1] * self._grid[2] + more - (strategy == "default")
        settings = {"image": files.image, "processor": self._name, "count": self._count, "grid": self._grid}
        super().__init__(family, settings, frozenset((image,)), image)

    def _image(self, width: int, height: int) -> MediaBlock:
        return MediaBlock((self._image_id,) * self._count, (self._grid,), (self._image_id,))

    @cached_property
    def _processor(self) -> Any:
        return load_pillow_processor(self._files, self._name)

    def _process(self, media: Media, store: MediaStore) -> Mapping[str, Any]:
        return {"pixel_values": self._processor(pil_images(media, store), return_tensors="np")["pixel_values"]}


def _size(files: ModelFiles) -> tuple[int, int]:
    """Height and width of every image behind the processor.

    Raises:
        ModelError: where images keep shapes of their own.
    """
    if files.vision.get("model_type") == "pixtral":
        raise ModelError(f"{files.root}: a LLaVA with a Pixtral tower, which breaks images into rows; that is not known here")
    given = files.image
    crops = given.get("do_center_crop", not str(given.get("image_processor_type", "")).startswith("Siglip"))
    size = given.get("crop_size", 224) if crops else given.get("size", {"height": 224, "width": 224})
    if isinstance(size, int):
        return size, size
    if not isinstance(size, Mapping) or not {"height", "width"} <= set(size):
        raise ModelError(f"{files.root}: its image processor gives images of several sizes ({size}), which a LLaVA cannot take")
    return int(size["height"]), int(size["width"])
