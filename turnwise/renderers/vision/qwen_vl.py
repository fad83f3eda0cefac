"""The Qwen-VL family: grids of patches, merged two by two, and rotary positions in three dimensions.

Sizes, patches and positions are those of transformers' processors (`smart_resize`, `patchify`, `get_rope_index`), written
anew in numpy; `tests/renderers/test_vision_qwen.py` holds them to transformers' own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from turnwise.errors import MediaError, ModelError
from turnwise.media import MediaStore
from turnwise.renderers.tokenizer import Tokenizer
from turnwise.renderers.vision.base import BaseVisionProcessor, MediaBlock, pixels_of
from turnwise.renderers.vision.processors import ModelFiles
from turnwise.types import Media, MediaPlacement, VideoRef

_MOST_RATIO = 200
"""Longer side to shorter one; transformers' processors refuse more."""
_CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
_HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


class QwenVariant(NamedTuple):
    """What members of the family differ in; defaults where a model's files are silent are transformers' own."""

    patch: int
    video_total: bool
    """Whether limits on pixels count a video's frames together, and else each frame."""
    timestamps: bool
    """Whether each temporal patch of a video is a run of its own behind its time in words."""
    seconds: bool
    """Whether temporal positions count seconds (`tokens_per_second`)."""
    normal: tuple[tuple[float, ...], tuple[float, ...]]
    video_pixels: tuple[int, int]


QWEN2 = QwenVariant(14, False, False, False, _CLIP, (128 * 28 * 28, 28 * 28 * 768))
QWEN2_5 = QWEN2._replace(seconds=True)
QWEN3 = QwenVariant(16, True, True, False, _HALF, (128 * 32 * 32, 32 * 32 * 768))


class ImageScaler(NamedTuple):
    """How one of the two processors turns pixels into patches."""

    patch: int
    merge: int
    temporal: int
    fewest: int
    most: int
    """Pixels that an image is scaled up or down to."""
    resize: bool
    resample: int
    """Pillow's number of the filter."""
    factor: float
    """That 8-bit values are multiplied with; 0 for none."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Empty where nothing is normalised."""
    cap: int = 0
    """Most tokens of a frame, or of a video (see `Kind.video_total`); 0 for no such limit."""

    @classmethod
    def of(cls, files: ModelFiles, kind: QwenVariant, *, video: bool) -> ImageScaler:
        """As the model's files say.

        Raises:
            ModelError: for settings that are none, or that fit the model's own not.
        """
        given = files.video if video else files.image
        size: Mapping[str, Any] = given.get("size") or {}
        # transformers' image processors are Qwen2-VL's for all of the family, with its defaults
        fewest, most = kind.video_pixels if video else (56 * 56, 28 * 28 * 1280)
        own = kind if video else QWEN2
        merge = files.vision.get("spatial_merge_size", 2)
        capped = video and bool(given.get("cap_pixels_per_frame"))
        try:
            found = cls(
                patch=int(given.get("patch_size", own.patch)),
                merge=int(given.get("merge_size", 2)),
                temporal=int(given.get("temporal_patch_size", 2)),
                fewest=int(_first(given.get("min_pixels"), size.get("shortest_edge"), size.get("min_pixels"), fewest)),
                most=int(_first(given.get("max_pixels"), size.get("longest_edge"), size.get("max_pixels"), most)),
                resize=bool(given.get("do_resize", True)),
                resample=int(given.get("resample", 3)),
                factor=float(given.get("rescale_factor", 1 / 255)) if given.get("do_rescale", True) else 0.0,
                mean=_three(given.get("image_mean", own.normal[0])),
                std=_three(given.get("image_std", own.normal[1])) if given.get("do_normalize", True) else (),
                cap=int(given.get("max_video_tokens", 768 if kind.video_total else 128_000)) if capped else 0,
            )
        except (TypeError, ValueError) as error:
            raise ModelError(f"{files.root}: settings of its image processor cannot be read ({error})") from error
        for name, value, other in (
            ("patch_size", found.patch, files.vision.get("patch_size")),
            ("temporal_patch_size", found.temporal, files.vision.get("temporal_patch_size")),
            ("merge_size", found.merge, merge),
        ):
            if value < 1 or (other is not None and other != value):
                raise ModelError(
                    f"{files.root}: its {'video' if video else 'image'} processor has {name} = {value}, and config.json's "
                    f"vision_config {other}; the vision tower could not take its patches"
                )
        return found

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Width and height that an image is scaled to: multiples of a merged patch, within the limits on pixels.

        Raises:
            MediaError: for a shape that the model cannot see.
        """
        side = self.patch * self.merge
        if not self.resize:
            if width % side or height % side:
                raise MediaError(f"an image of {width} x {height} pixels; this model takes multiples of {side} unscaled")
            return width, height
        _check_ratio(width, height)
        w, h = round(width / side) * side, round(height / side) * side
        return _bounded(w, h, w * h, width, height, width * height, side, self.fewest, self.most)

    def resized_video(self, width: int, height: int, frames: int, *, together: bool) -> tuple[int, int]:
        """As `resized`, for the frames of a video."""
        side = self.patch * self.merge
        if not together:
            most = self.most
            if self.cap:
                most = max(min(most, int(self.cap * side * side * 0.9) * self.temporal // frames), int(self.fewest * 1.05))
            return self._replace(most=most).resized(width, height)
        if not self.resize:
            return self.resized(width, height)
        if width < side or height < side:
            share = max(side / height, side / width)
            width, height = int(width * share), int(height * share)
        _check_ratio(width, height)
        most = self.most
        if self.cap:
            most = frames * max(min(self.cap * side * side, self.most // frames), int(self.fewest * 1.05))
        w, h = round(width / side) * side, round(height / side) * side
        rounded = round(frames / self.temporal) * self.temporal
        return _bounded(w, h, rounded * w * h, width, height, frames * width * height, side, self.fewest, most)

    def patches(self, frames: Sequence[Any], width: int, height: int) -> Any:
        """Patches of frames scaled to a size, float32 [patches, 3 * temporal * patch * patch].

        In order of time, then of merged patches row by row, then of the patches in one; a patch is (channel, time, row,
        column).

        Args:
            frames: 8-bit RGB pixels, [height, width, 3]; a single one stands for all of a temporal patch, and the last one for
                those that are missing.
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
        cube = np.stack(rows).reshape(len(rows) // t, t, height // (p * m), m, p, width // (p * m), m, p, 3)
        cube = cube.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)  # time, rows, columns, row, column in one; channel, time, row, column
        out = np.empty((*cube.shape[:5], 3, t, p, p), np.float32)
        for channel, values in enumerate(self._values()):
            out[:, :, :, :, :, channel] = values[cube[:, :, :, :, :, channel]]
        return out.reshape(-1, 3 * t * p * p)

    def unscaled(self, patches: Any) -> Any:
        """The 8-bit values that patches were made of, uint8 of the same shape."""
        import numpy as np

        values = patches.reshape(len(patches), 3, -1).astype(np.float64)
        if self.std:
            values = values * np.array(self.std)[:, None] + np.array(self.mean)[:, None]
        if self.factor:
            values /= self.factor
        return np.rint(values).astype(np.uint8).reshape(patches.shape)

    def _values(self) -> Any:
        """What each of the 256 values of a channel becomes, float32 [3, 256].

        Scaled in double precision and normalised in single, as transformers does it.
        """
        import numpy as np

        values = np.arange(256, dtype=np.uint8)
        scaled = (values.astype(np.float64) * self.factor).astype(np.float32) if self.factor else values.astype(np.float32)
        if not self.std:
            return np.stack([scaled] * 3)
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        return (scaled - mean[:, None]) / std[:, None]


class QwenVisionProcessor(BaseVisionProcessor):
    """Images and videos of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and what is built like them."""

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
        settings = {"image": self._scale, "video": self._video_scale, "rate": self._rate, "kind": kind, "around": self._around}
        ids = frozenset(i for i in (image, video, *self._around) if i is not None)
        super().__init__(family, settings, ids, image, video)

    def _image(self, width: int, height: int) -> MediaBlock:
        w, h = self._scale.resized(width, height)
        grid = (1, h // self._scale.patch, w // self._scale.patch)
        return MediaBlock((self._image_id,) * (math.prod(grid) // self._scale.merge**2), (grid,), (self._image_id,))

    def _video(self, media: VideoRef, width: int, height: int) -> MediaBlock:
        """Each temporal patch is a run of placeholders; in Qwen3-VL behind its time and between marks of its own."""
        scale, video = self._video_scale, self._video_id
        if video is None:
            return super()._video(media, width, height)
        if len(media.frames) < scale.temporal:
            raise MediaError(
                f"a video of {len(media.frames)} frames; this model takes at least {scale.temporal}: show an image"
            )
        w, h = scale.resized_video(width, height, len(media.frames), together=self._kind.video_total)
        grid = (-(-len(media.frames) // scale.temporal), h // scale.patch, w // scale.patch)
        run = (video,) * (grid[1] * grid[2] // scale.merge**2)
        if not self._kind.timestamps:
            return MediaBlock(run * grid[0], (grid,), (video,))
        start, end = self._around
        if start is None or end is None:
            raise MediaError("this model has no <|vision_start|> and <|vision_end|>, which stand around the frames of a video")
        times = [*media.times, *[media.times[-1]] * (grid[0] * scale.temporal - len(media.times))]
        ids: list[int] = []
        for at in range(0, len(times), scale.temporal):
            said = f"<{(times[at] + times[at + scale.temporal - 1]) / 2:.1f} seconds>"
            ids += (*self._codec.encode_segment(said), start, *run, end)
        return MediaBlock(tuple(ids), (grid,), (video,))

    def _process(self, media: Media, store: MediaStore) -> Mapping[str, Any]:
        import numpy as np

        (grid,) = self.block(media).grid
        video = isinstance(media, VideoRef)
        scale = self._video_scale if video else self._scale
        values = scale.patches(pixels_of(media, store), grid[2] * scale.patch, grid[1] * scale.patch)
        names = ("pixel_values_videos", "video_grid_thw") if video else ("pixel_values", "image_grid_thw")
        return dict(zip(names, (values, np.array([grid], np.int64)), strict=True))

    def unscaled(self, patches: Any) -> Any:
        """The 8-bit values of an image's patches, uint8 of the same shape: for servers that scale and normalise themselves."""
        return self._scale.unscaled(patches)

    # Positions

    def positions(self, length: int, placed: Sequence[MediaPlacement], start: int = 0) -> Any:
        """See `VisionProcessor.positions`; as `get_rope_index` of the family counts them.

        Text counts on in all three; the rows and columns of a run of placeholders count from where it begins, and what follows
        goes on behind the longer of its sides.
        """
        import numpy as np

        out = np.empty((3, max(0, length - start)), np.int64)
        at = position = 0
        for block in (*placed, None):
            until = length if block is None else min(block.start, length)
            low = max(at, start)
            if until > low:
                out[:, low - start : until - start] = np.arange(position + low - at, position + until - at)
            position, at = position + max(0, until - at), until
            if block is None or at >= length:
                break
            shift, advance = self._inside(block)
            low, high = max(block.start, start), min(block.end, length)
            if high > low:
                out[:, low - start : high - start] = shift[:, low - block.start : high - block.start] + position
            position, at = position + advance, block.end
        return out

    def _inside(self, block: MediaPlacement) -> tuple[Any, int]:
        """Positions inside of a block, from where it begins, int64 [3, length], and how far it moves what follows."""
        media = block.media
        interval = self._interval(media) if isinstance(media, VideoRef) else 1.0
        key = (block.grid, interval, media.times if isinstance(media, VideoRef) and self._kind.timestamps else None)
        found = self._offsets.get(key)
        if found is None:
            found = self._count(block, interval)
            if len(self._offsets) >= 1024:
                self._offsets.clear()
            self._offsets[key] = found
        return found

    def _count(self, block: MediaPlacement, interval: float) -> tuple[Any, int]:
        import numpy as np

        time, rows, columns = block.grid[0]
        rows, columns = rows // self._scale.merge, columns // self._scale.merge
        row, column = np.divmod(np.arange(rows * columns, dtype=np.int64), columns)
        advance = max(rows, columns)
        if not (isinstance(block.media, VideoRef) and self._kind.timestamps):
            steps = (np.arange(time, dtype=np.int64) * np.float32(interval)).astype(np.float32).astype(np.int64)
            return np.stack([np.repeat(steps, rows * columns), np.tile(row, time), np.tile(column, time)]), advance
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

    def _interval(self, media: VideoRef) -> float:
        """Temporal positions from one temporal patch to the next."""
        if not self._rate:
            return 1.0
        passed = media.times[-1] - media.times[0]
        rate = round((len(media.times) - 1) / passed, 6) if passed > 0 else 24.0  # what transformers takes where it is unknown
        return self._rate * (self._video_scale.temporal / rate)


def _bounded(
    w: int, h: int, size: int, width: int, height: int, true_size: int, side: int, fewest: int, most: int
) -> tuple[int, int]:
    """Sides within limits on pixels (`smart_resize` of transformers' Qwen-VL processors)."""
    if size > most:
        share = math.sqrt(true_size / most)
        return max(side, math.floor(width / share / side) * side), max(side, math.floor(height / share / side) * side)
    if size < fewest:
        share = math.sqrt(fewest / true_size)
        return math.ceil(width * share / side) * side, math.ceil(height * share / side) * side
    return w, h


def _check_ratio(width: int, height: int) -> None:
    if max(width, height) / min(width, height) > _MOST_RATIO:
        raise MediaError(
            f"an image of {width} x {height} pixels: this model sees sides that differ by at most {_MOST_RATIO} times; crop it"
        )


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _three(value: Any) -> tuple[float, ...]:
    if isinstance(value, (int, float)):
        return (float(value),) * 3
    found = tuple(map(float, value))
    if len(found) != 3:
        raise ValueError(f"{value!r} is not one number per channel")
    return found
