"""LLaVA, SmolVLM and Idefics3."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from turnwright.errors import ModelError
from turnwright.media import MediaStore
from turnwright.renderers.vision.processor import BaseVisionProcessor
from turnwright.renderers.vision.processors import (
    ModelFiles,
    load_pillow_processor,
    pil_images,
    processor_name,
)
from turnwright.renderers.vision_protocol import MediaBlock
from turnwright.types import Media


class LlavaVisionProcessor(BaseVisionProcessor):
    """Images of LLaVA; one-dimensional positions."""

    def __init__(self, family: str, files: ModelFiles) -> None:
        image = files.token("<image>", "image_token_index", "image_token_id")
        assert image is not None
        self._files = files
        self._name = processor_name(files, "CLIPImageProcessor")
        height, width = _size(files)
        processor, config = files.processor, files.config
        patch = processor.get("patch_size") or files.vision.get("patch_size") or 14
        strategy = processor.get("vision_feature_select_strategy") or config.get(
            "vision_feature_select_strategy", "default"
        )
        more = processor.get(
            "num_additional_image_tokens", 0 if processor else int(strategy == "default")
        )
        self._grid = (1, height // patch, width // patch)
        self._count = self._grid[1] * self._grid[2] + more - (strategy == "default")
        settings = {
            "image": files.image,
            "processor": self._name,
            "count": self._count,
            "grid": self._grid,
        }
        super().__init__(family, settings, frozenset((image,)), image)

    def _image(self, width: int, height: int) -> MediaBlock:
        return MediaBlock((self._image_id,) * self._count, (self._grid,), (self._image_id,))

    @cached_property
    def _processor(self) -> Any:
        return load_pillow_processor(self._files, self._name)

    def _process(self, media: Media, store: MediaStore) -> Mapping[str, Any]:
        return {
            "pixel_values": self._processor(pil_images(media, store), return_tensors="np")[
                "pixel_values"
            ]
        }


def _size(files: ModelFiles) -> tuple[int, int]:
    """Return the height and width of every processed image.

    Raises `ModelError` if image sizes differ.
    """
    if files.vision.get("model_type") == "pixtral":
        raise ModelError(
            f"{files.root}: a LLaVA with a Pixtral tower, which splits images into rows; it is not "
            "supported"
        )
    given = files.image
    crops = given.get(
        "do_center_crop", not str(given.get("image_processor_type", "")).startswith("Siglip")
    )
    size = (
        given.get("crop_size", 224) if crops else given.get("size", {"height": 224, "width": 224})
    )
    if isinstance(size, int):
        return size, size
    if not isinstance(size, Mapping) or not {"height", "width"} <= set(size):
        raise ModelError(
            f"{files.root}: its image processor returns several sizes ({size}), but a LLaVA needs "
            "one size"
        )
    return int(size["height"]), int(size["width"])


_MAX_SIDE = 4096
"""Maximum pixels of a side after scaling by transformers' processors."""


class TiledVisionProcessor(BaseVisionProcessor):
    """Images of SmolVLM and Idefics3; one-dimensional positions."""

    _axis = 1  # their models take [1, tiles, 3, height, width]

    def __init__(self, family: str, files: ModelFiles) -> None:
        image = files.token("<image>", "image_token_id", "image_token_index")
        files.token("<fake_token_around_image>")
        assert image is not None
        self._files = files
        self._name = processor_name(
            files, "SmolVLMImageProcessor" if family == "smolvlm" else "Idefics3ImageProcessor"
        )
        given = files.image
        self._tile = int((given.get("max_image_size") or {"longest_edge": 364})["longest_edge"])
        self._size = given.get("size") or {"longest_edge": 4 * 364}
        self._splits = bool(given.get("do_image_splitting", True))
        self._resizes = bool(given.get("do_resize", True))
        patch = int(files.vision.get("patch_size", 14))
        scale = int(files.config.get("scale_factor", 2))
        self._side = self._tile // patch
        self._count = int(files.processor.get("image_seq_len") or (self._side // scale) ** 2)
        if self._count != (self._side // scale) ** 2 or self._tile != files.vision.get(
            "image_size", self._tile
        ):
            raise ModelError(
                f"{files.root}: image_seq_len = {self._count} ids for a tile of {self._tile} "
                f"pixels; its vision tower makes {(self._side // scale) ** 2} features of "
                f"{files.vision.get('image_size', self._tile)} pixels"
            )
        control = files.codec.control
        marks = ("<fake_token_around_image>", "<global-img>")
        own = [
            i
            for text, i in control.items()
            if text in marks or (text.startswith("<row_") and "_col_" in text)
        ]
        settings = {"image": given, "processor": self._name, "count": self._count, "patch": patch}
        settings["codec"] = files.codec.fingerprint
        super().__init__(family, settings, frozenset((image, *own)), image)

    def _image(self, width: int, height: int) -> MediaBlock:
        """Return tiles row by row, each after its position as text, then the complete image."""
        rows, columns = self._tiles(width, height)
        around, pads = "<fake_token_around_image>", "<image>" * self._count
        text = ""
        for row in range(rows):
            text += (
                "".join(
                    f"{around}<row_{row + 1}_col_{column + 1}>{pads}" for column in range(columns)
                )
                + "\n"
            )
        text += f"{chr(10) if rows else ''}{around}<global-img>{pads}{around}"
        ids = self._files.codec.encode_segment(text)
        return MediaBlock(
            tuple(ids), ((1, self._side, self._side),) * (rows * columns + 1), (self._image_id,)
        )

    def _tiles(self, width: int, height: int) -> tuple[int, int]:
        """Return the rows and columns of tiles; (0, 0) if the image fits into one."""
        if not self._splits:
            return 0, 0
        if self._resizes:
            width, height = self._resized(width, height)
        ratio = width / height
        if width >= height:
            width = math.ceil(width / self._tile) * self._tile
            height = math.ceil(int(width / ratio) / self._tile) * self._tile
        else:
            height = math.ceil(height / self._tile) * self._tile
            width = math.ceil(int(height * ratio) / self._tile) * self._tile
        single = height <= self._tile and width <= self._tile
        return (0, 0) if single else (height // self._tile, width // self._tile)

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        """Return the size with the longer side as the processor sets it, even sides, and at most
        4,096 pixels per side."""
        longest = self._size.get("longest_edge")
        if not longest:
            return int(self._size["width"]), int(self._size["height"])
        ratio = width / height
        if width >= height:
            width, height = longest, int(longest / ratio)
            height += height % 2
        else:
            width, height = int(longest * ratio), longest
            width += width % 2
        width, height = max(width, 1), max(height, 1)
        ratio = width / height
        if width >= height and width > _MAX_SIDE:
            width, height = _MAX_SIDE, int(_MAX_SIDE / ratio)
        elif height > width and height > _MAX_SIDE:
            width, height = int(_MAX_SIDE * ratio), _MAX_SIDE
        return max(width, 1), max(height, 1)

    @cached_property
    def _processor(self) -> Any:
        return load_pillow_processor(self._files, self._name)

    def _process(self, media: Media, store: MediaStore) -> Mapping[str, Any]:
        found = self._processor([pil_images(media, store)], return_tensors="np")
        return {
            name: found[name] for name in ("pixel_values", "pixel_attention_mask") if name in found
        }
