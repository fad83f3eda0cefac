"""SmolVLM and Idefics3: an image is cut into tiles, and shown as a whole behind them."""

from __future__ import annotations

import math
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

_LARGEST = 4096
"""Pixels along a side that transformers' processors scale no image over."""


class TiledVisionProcessor(BaseVisionProcessor):
    """Images of SmolVLM and Idefics3; positions are counted in one dimension."""

    _axis = 1  # their models take [1, tiles, 3, height, width]

    def __init__(self, family: str, files: ModelFiles) -> None:
        image = files.token("<image>", "image_token_id", "image_token_index")
        files.token("<fake_token_around_image>")
        assert image is not None
        self._files = files
        self._name = processor_name(files, "SmolVLMImageProcessor" if family == "smolvlm" else "Idefics3ImageProcessor")
        given = files.image
        self._tile = int((given.get("max_image_size") or {"longest_edge": 364})["longest_edge"])
        self._size = given.get("size") or {"longest_edge": 4 * 364}
        self._splits = bool(given.get("do_image_splitting", True))
        self._resizes = bool(given.get("do_resize", True))
        patch = int(files.vision.get("patch_size", 14))
        scale = int(files.config.get("scale_factor", 2))
        self._side = self._tile // patch
        self._count = int(files.processor.get("image_seq_len") or (self._side // scale) ** 2)
        if self._count != (self._side // scale) ** 2 or self._tile != files.vision.get("image_size", self._tile):
            raise ModelError(
                f"{files.root}: image_seq_len = {self._count} ids for a tile of {self._tile} pixels; its vision tower makes "
                f"{(self._side // scale) ** 2} features of {files.vision.get('image_size', self._tile)} pixels"
            )
        control = files.codec.control
        marks = ("<fake_token_around_image>", "<global-img>")
        own = [i for text, i in control.items() if text in marks or (text.startswith("<row_") and "_col_" in text)]
        settings = {
            "image": given,
            "processor": self._name,
            "count": self._count,
            "patch": patch,
            "codec": files.codec.fingerprint,
        }
        super().__init__(family, settings, frozenset((image, *own)), image)

    def _image(self, width: int, height: int) -> MediaBlock:
        """Tiles row by row, each behind its place in words, and the whole image last."""
        rows, columns = self._tiles(width, height)
        around, pads = "<fake_token_around_image>", "<image>" * self._count
        text = ""
        for row in range(rows):
            text += "".join(f"{around}<row_{row + 1}_col_{column + 1}>{pads}" for column in range(columns)) + "\n"
        text += f"{chr(10) if rows else ''}{around}<global-img>{pads}{around}"
        ids = self._files.codec.encode_segment(text)
        return MediaBlock(tuple(ids), ((1, self._side, self._side),) * (rows * columns + 1), (self._image_id,))

    def _tiles(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of tiles; none where the image fits into one."""
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
        if height <= self._tile and width <= self._tile:
            return 0, 0
        return height // self._tile, width // self._tile

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        """Scaled so that the longer side is as the processor says, sides even, and no side over 4,096 pixels."""
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
        if width >= height and width > _LARGEST:
            width, height = _LARGEST, int(_LARGEST / ratio)
        elif height > width and height > _LARGEST:
            width, height = int(_LARGEST * ratio), _LARGEST
        return max(width, 1), max(height, 1)

    @cached_property
    def _processor(self) -> Any:
        return load_pillow_processor(self._files, self._name)

    def _process(self, media: Media, store: MediaStore) -> Mapping[str, Any]:
        found = self._processor([pil_images(media, store)], return_tensors="np")
        return {name: found[name] for name in ("pixel_values", "pixel_attention_mask") if name in found}
