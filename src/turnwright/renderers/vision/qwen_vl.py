"""Qwen-VL family: grids of patches, merged two by two, and three-dimensional rotary positions.

Sizes, patches and positions are those of transformers' processors (`smart_resize`,
`patchify`, `get_rope_index`), implemented in numpy; `tests/renderers/test_vision_parity.py`
compares them with transformers' own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from turnwright.errors import MediaError, ModelError
from turnwright.media import MediaStore
from turnwright.renderers.model_files import remember
from turnwright.renderers.tokenizer import Tokenizer
from turnwright.renderers.vision.processor import BaseVisionProcessor, pixels_of
from turnwright.renderers.vision.processors import ModelFiles
from turnwright.renderers.vision_protocol import MediaBlock
from turnwright.types import Media, MediaPlacement, VideoRef

_MAX_RATIO = 200
"""Longer side to shorter side; transformers' processors reject larger ratios."""
_CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
_HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


class QwenVariant(NamedTuple):
    """Differences between members of the family; defaults for missing settings
    are transformers' own."""

    patch: int
    video_total: bool
    """Whether pixel limits apply to all frames of a video together; else to each frame."""
    timestamps: bool
    """Whether each temporal patch of a video is a separate run after its time as text."""
    seconds: bool
    """Whether temporal positions count seconds (`tokens_per_second`)."""
    normal: tuple[tuple[float, ...], tuple[float, ...]]
    video_pixels: tuple[int, int]


QWEN2 = QwenVariant(14, False, False, False, _CLIP, (128 * 28 * 28, 28 * 28 * 768))
QWEN2_5 = QWEN2._replace(seconds=True)
QWEN3 = QwenVariant(16, True, True, False, _HALF, (128 * 32 * 32, 32 * 32 * 768))


class ImageScaler(NamedTuple):
    """Settings by which one of the two processors turns pixels into patches."""

    patch: int
    merge: int
    temporal: int
    min_pixels: int
    max_pixels: int
    """Pixels to which larger images are scaled down; smaller ones are scaled up to `min_pixels`."""
    resize: bool
    resample: int
    """Pillow's number of the filter."""
    factor: float
    """Multiplier of 8-bit values; 0 for none."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Empty if values are not normalized."""
    cap: int = 0
    """Maximum tokens of a frame, or of a video (see `QwenVariant.video_total`); 0 for no limit."""

    @classmethod
    def of(cls, files: ModelFiles, kind: QwenVariant, *, video: bool) -> ImageScaler:
        """Read the model's settings; raise `ModelError` if they are invalid or
        contradict the vision tower's."""
        given = files.video if video else files.image
        size: Mapping[str, Any] = given.get("size") or {}
        # All of the family use Qwen2-VL's image processor in transformers, with its defaults.
        lowest, highest = kind.video_pixels if video else (56 * 56, 28 * 28 * 1280)
        own = kind if video else QWEN2
        merge = files.vision.get("spatial_merge_size", 2)
        capped = video and bool(given.get("cap_pixels_per_frame"))
        try:
            found = cls(
                patch=int(given.get("patch_size", own.patch)),
                merge=int(given.get("merge_size", 2)),
                temporal=int(given.get("temporal_patch_size", 2)),
                min_pixels=int(
                    _first(
                        given.get("min_pixels"),
                        size.get("shortest_edge"),
                        size.get("min_pixels"),
                        lowest,
                    )
                ),
                max_pixels=int(
                    _first(
                        given.get("max_pixels"),
                        size.get("longest_edge"),
                        size.get("max_pixels"),
                        highest,
                    )
                ),
                resize=bool(given.get("do_resize", True)),
                resample=int(given.get("resample", 3)),
                factor=float(given.get("rescale_factor", 1 / 255))
                if given.get("do_rescale", True)
                else 0.0,
                mean=_three(given.get("image_mean", own.normal[0])),
                std=_three(given.get("image_std", own.normal[1]))
                if given.get("do_normalize", True)
                else (),
                cap=int(given.get("max_video_tokens", 768 if kind.video_total else 128_000))
                if capped
                else 0,
            )
        except (TypeError, ValueError) as error:
            raise ModelError(
                f"{files.root}: invalid settings of its image processor ({error})"
            ) from error
        for name, value, other in (
            ("patch_size", found.patch, files.vision.get("patch_size")),
            ("temporal_patch_size", found.temporal, files.vision.get("temporal_patch_size")),
            ("merge_size", found.merge, merge),
        ):
            if value < 1 or (other is not None and other != value):
                raise ModelError(
                    f"{files.root}: its {'video' if video else 'image'} processor has {name} = "
                    f"{value}, but config.json's vision_config has {other}; the vision tower "
                    "cannot take its patches"
                )
        return found

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height an image is scaled to: multiples of a merged patch,
        within the pixel limits.

        Raises `MediaError` for an unsupported shape.
        """
        side = self.patch * self.merge
        if not self.resize:
            if width % side or height % side:
                raise MediaError(
                    f"an image of {width} x {height} pixels; this model takes multiples of {side} "
                    "unscaled"
                )
            return width, height
        _check_ratio(width, height)
        w, h = round(width / side) * side, round(height / side) * side
        return _bounded(
            w, h, w * h, width, height, width * height, side, self.min_pixels, self.max_pixels
        )

    def resized_video(
        self, width: int, height: int, frames: int, *, together: bool
    ) -> tuple[int, int]:
        """Return the width and height the frames of a video are scaled to, see `resized`."""
        side = self.patch * self.merge
        limit = self.max_pixels
        if not together:
            if self.cap:
                per_frame = int(self.cap * side * side * 0.9) * self.temporal // frames
                limit = max(min(limit, per_frame), int(self.min_pixels * 1.05))
            return self._replace(max_pixels=limit).resized(width, height)
        if not self.resize:
            return self.resized(width, height)
        if width < side or height < side:
            share = max(side / height, side / width)
            width, height = int(width * share), int(height * share)
        _check_ratio(width, height)
        if self.cap:
            limit = frames * max(
                min(self.cap * side * side, limit // frames), int(self.min_pixels * 1.05)
            )
        w, h = round(width / side) * side, round(height / side) * side
        rounded = round(frames / self.temporal) * self.temporal
        return _bounded(
            w,
            h,
            rounded * w * h,
            width,
            height,
            frames * width * height,
            side,
            self.min_pixels,
            limit,
        )

    def patches(self, frames: Sequence[Any], width: int, height: int) -> Any:
        """Return the patches of scaled frames, float32 [patches, 3 * temporal * patch * patch].

        Frames are 8-bit RGB, [height, width, 3]; the last is repeated to fill a temporal patch.
        Patches are ordered by time, then merged patches by row, then patches inside one. A patch is
        (channel, time, row, column).
        """
        import numpy as np
        from PIL import Image as Pillow

        filter_ = Pillow.Resampling(self.resample)
        rows = []
        for pixels in frames:
            if self.resize and pixels.shape[:2] != (height, width):
                pixels = np.asarray(Pillow.fromarray(pixels).resize((width, height), filter_))
            rows.append(pixels)
        rows += [rows[-1]] * (-len(rows) % self.temporal)
        p, m, t = self.patch, self.merge, self.temporal
        cube = np.stack(rows).reshape(
            len(rows) // t, t, height // (p * m), m, p, width // (p * m), m, p, 3
        )
        # Time, rows, columns, row and column in one; then channel, time, row, column.
        cube = cube.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
        out = np.empty((*cube.shape[:5], 3, t, p, p), np.float32)
        for channel, values in enumerate(self._values()):
            out[:, :, :, :, :, channel] = values[cube[:, :, :, :, :, channel]]
        return out.reshape(-1, 3 * t * p * p)

    def unscaled(self, patches: Any) -> Any:
        """Restore the 8-bit values of patches, uint8 of the same shape."""
        import numpy as np

        values = patches.reshape(len(patches), 3, -1).astype(np.float64)
        if self.std:
            values = values * np.array(self.std)[:, None] + np.array(self.mean)[:, None]
        if self.factor:
            values /= self.factor
        return np.rint(values).astype(np.uint8).reshape(patches.shape)

    def _values(self) -> Any:
        """Return the value of each 8-bit level per channel, float32 [3, 256].

        Scaled in double precision and normalized in single precision, as in transformers.
        """
        import numpy as np

        values = np.arange(256, dtype=np.uint8)
        scaled = (
            (values.astype(np.float64) * self.factor).astype(np.float32)
            if self.factor
            else values.astype(np.float32)
        )
        if not self.std:
            return np.stack([scaled] * 3)
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        return (scaled - mean[:, None]) / std[:, None]


class QwenVisionProcessor(BaseVisionProcessor):
    """Images and videos of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and compatible models."""

    def __init__(self, family: str, files: ModelFiles, kind: QwenVariant) -> None:
        image = files.token("<|image_pad|>", "image_token_id")
        video = files.token("<|video_pad|>", "video_token_id", needed=False)
        self._around = (
            files.token("<|vision_start|>", "vision_start_token_id", needed=False),
            files.token("<|vision_end|>", "vision_end_token_id", needed=False),
        )
        self._scale = ImageScaler.of(files, kind, video=False)
        self._video_scale = ImageScaler.of(files, kind, video=True)
        self._rate = float(files.vision.get("tokens_per_second", 4)) if kind.seconds else 0.0
        self._kind = kind
        self._codec: Tokenizer = files.codec
        self._offsets: dict[Any, tuple[Any, int]] = {}
        assert image is not None
        settings = {
            "image": self._scale,
            "video": self._video_scale,
            "rate": self._rate,
            "kind": kind,
            "around": self._around,
        }
        ids = frozenset(i for i in (image, video, *self._around) if i is not None)
        super().__init__(family, settings, ids, image, video)

    def _image(self, width: int, height: int) -> MediaBlock:
        w, h = self._scale.resized(width, height)
        grid = (1, h // self._scale.patch, w // self._scale.patch)
        return MediaBlock(
            (self._image_id,) * (math.prod(grid) // self._scale.merge**2),
            (grid,),
            (self._image_id,),
        )

    def _video(self, media: VideoRef, width: int, height: int) -> MediaBlock:
        """Return runs of placeholders, one per temporal patch; in Qwen3-VL each after its
        time and between marks."""
        scale, video = self._video_scale, self._video_id
        if video is None:
            return super()._video(media, width, height)
        if len(media.frames) < scale.temporal:
            least = f"this model takes at least {scale.temporal}: give an image instead"
            raise MediaError(f"a video of {len(media.frames)} frames; {least}")
        w, h = scale.resized_video(
            width, height, len(media.frames), together=self._kind.video_total
        )
        grid = (-(-len(media.frames) // scale.temporal), h // scale.patch, w // scale.patch)
        run = (video,) * (grid[1] * grid[2] // scale.merge**2)
        if not self._kind.timestamps:
            return MediaBlock(run * grid[0], (grid,), (video,))
        start, end = self._around
        if start is None or end is None:
            raise MediaError(
                "this model has no <|vision_start|> and <|vision_end|>, which enclose the frames "
                "of a video"
            )
        times = [*media.times, *[media.times[-1]] * (grid[0] * scale.temporal - len(media.times))]
        ids: list[int] = []
        for at in range(0, len(times), scale.temporal):
            time = f"<{(times[at] + times[at + scale.temporal - 1]) / 2:.1f} seconds>"
            ids += (*self._codec.encode_segment(time), start, *run, end)
        return MediaBlock(tuple(ids), (grid,), (video,))

    def _process(self, media: Media, store: MediaStore) -> Mapping[str, Any]:
        import numpy as np

        (grid,) = self.block(media).grid
        video = isinstance(media, VideoRef)
        scale = self._video_scale if video else self._scale
        values = scale.patches(
            pixels_of(media, store), grid[2] * scale.patch, grid[1] * scale.patch
        )
        names = (
            ("pixel_values_videos", "video_grid_thw")
            if video
            else ("pixel_values", "image_grid_thw")
        )
        return dict(zip(names, (values, np.array([grid], np.int64)), strict=True))

    def unscaled(self, patches: Any) -> Any:
        """Restore the 8-bit values of an image's patches, uint8 of the same shape, for servers that
        normalize themselves."""
        return self._scale.unscaled(patches)

    # Positions

    def positions(self, length: int, placed: Sequence[MediaPlacement], start: int = 0) -> Any:
        """See `VisionProcessor.positions`; equal to the family's `get_rope_index`.

        Text advances all three dimensions. Rows and columns of a run of placeholders count from its
        start; the text after it continues after the longer side.
        """
        import numpy as np

        out = np.empty((3, max(0, length - start)), np.int64)
        at = position = 0
        for block in (*placed, None):
            until = length if block is None else min(block.start, length)
            low = max(at, start)
            if until > low:
                out[:, low - start : until - start] = np.arange(
                    position + low - at, position + until - at
                )
            position, at = position + max(0, until - at), until
            if block is None or at >= length:
                break
            shift, advance = self._inside(block)
            low, high = max(block.start, start), min(block.end, length)
            if high > low:
                out[:, low - start : high - start] = (
                    shift[:, low - block.start : high - block.start] + position
                )
            position, at = position + advance, block.end
        return out

    def _inside(self, block: MediaPlacement) -> tuple[Any, int]:
        """Return positions in a block from its start, int64 [3, length], and how far it
        advances the ids after it."""
        media, interval = block.media, 1.0
        if isinstance(media, VideoRef) and self._rate:
            passed = media.times[-1] - media.times[0]
            # An unknown rate has transformers' value.
            rate = round((len(media.times) - 1) / passed, 6) if passed > 0 else 24.0
            interval = self._rate * (self._video_scale.temporal / rate)
        key = (
            block.grid,
            interval,
            media.times if isinstance(media, VideoRef) and self._kind.timestamps else None,
        )
        found = self._offsets.get(key)
        if found is None:
            found = self._count(block, interval)
            remember(self._offsets, key, found)
        return found

    def _count(self, block: MediaPlacement, interval: float) -> tuple[Any, int]:
        """Count positions in a block; `interval` is the number of temporal positions
        between temporal patches."""
        import numpy as np

        time, rows, columns = block.grid[0]
        rows, columns = rows // self._scale.merge, columns // self._scale.merge
        row, column = np.divmod(np.arange(rows * columns, dtype=np.int64), columns)
        advance = max(rows, columns)
        if not (isinstance(block.media, VideoRef) and self._kind.timestamps):
            steps = (
                (np.arange(time, dtype=np.int64) * np.float32(interval))
                .astype(np.float32)
                .astype(np.int64)
            )
            return np.stack(
                [np.repeat(steps, rows * columns), np.tile(row, time), np.tile(column, time)]
            ), advance
        parts = []
        at = position = 0
        ids = self.block(block.media).ids
        while at < len(ids):
            if ids[at] != self._video_id:
                parts.append(np.full((3, 1), position, np.int64))
                position, at = position + 1, at + 1
                continue
            parts.append(np.stack([np.zeros_like(row), row, column]) + position)
            position, at = position + advance, at + rows * columns
        return np.concatenate(parts, axis=1), position


def _bounded(
    w: int,
    h: int,
    size: int,
    width: int,
    height: int,
    true_size: int,
    side: int,
    min_pixels: int,
    max_pixels: int,
) -> tuple[int, int]:
    """Return sides within the pixel limits (`smart_resize` of transformers' Qwen-VL processors)."""
    if size > max_pixels:
        share = math.sqrt(true_size / max_pixels)
        return max(side, math.floor(width / share / side) * side), max(
            side, math.floor(height / share / side) * side
        )
    if size < min_pixels:
        share = math.sqrt(min_pixels / true_size)
        return math.ceil(width * share / side) * side, math.ceil(height * share / side) * side
    return w, h


def _check_ratio(width: int, height: int) -> None:
    if max(width, height) / min(width, height) > _MAX_RATIO:
        ratio = f"this model accepts a ratio of sides up to {_MAX_RATIO}; crop it"
        raise MediaError(f"an image of {width} x {height} pixels: {ratio}")


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _three(value: Any) -> tuple[float, ...]:
    if isinstance(value, (int, float)):
        return (float(value),) * 3
    found = tuple(map(float, value))
    if len(found) != 3:
        raise ValueError(f"{value!r} is not one number per channel")
    return found
