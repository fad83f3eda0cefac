"""VisionProcessor protocol and its shared base class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from turnwright.errors import MediaError, TemplateError
from turnwright.media import MediaStore, scaled_size
from turnwright.renderers.model_files import remember
from turnwright.renderers.template import digest
from turnwright.renderers.vision_protocol import MediaBlock, VisionProcessor
from turnwright.types import Media, MediaPlacement, VideoRef


class BaseVisionProcessor(VisionProcessor):
    """Base class of vision processors; a family defines blocks, positions and pixel processing."""

    def __init__(
        self,
        family: str,
        settings: Mapping[str, Any],
        placeholder_ids: frozenset[int],
        image_id: int,
        video_id: int | None = None,
    ) -> None:
        """`settings` are everything that affects ids, positions or pixel values; no `video_id`:
        no support of videos."""
        self.family = family
        self.placeholder_ids = placeholder_ids
        self.pad_ids = frozenset(i for i in (image_id, video_id) if i is not None)
        self.fingerprint = digest([family, settings, sorted(placeholder_ids), image_id, video_id])
        self._image_id = image_id
        self._video_id = video_id
        self._blocks: dict[Any, MediaBlock] = {}

    # Defined by the family

    def _image(self, width: int, height: int) -> MediaBlock:
        raise NotImplementedError

    def _video(self, media: VideoRef, width: int, height: int) -> MediaBlock:
        raise MediaError(
            f"a model of type {self.family} takes no videos here; give their frames as images"
        )

    def _process(self, media: Media, store: MediaStore) -> Mapping[str, Any]:
        raise NotImplementedError

    _axis = 0
    """Axis along which the pixel values of several images are concatenated."""

    # The protocol

    def block(self, media: Media) -> MediaBlock:
        first = media.frames[0] if isinstance(media, VideoRef) else media
        if first.width < 1 or first.height < 1:
            raise MediaError(
                f"image {first.sha256[:12]}: unknown size; take references from a media store"
            )
        width, height = scaled_size(first.width, first.height, first.max_pixels)
        key = (width, height, media.times if isinstance(media, VideoRef) else None)
        found = self._blocks.get(key)
        if found is None:
            found = (
                self._video(media, width, height)
                if isinstance(media, VideoRef)
                else self._image(width, height)
            )
            if not self.pad_ids.intersection(found.ids):
                raise MediaError(
                    f"an image of {width} x {height} pixels gives no patches in a model of type "
                    f"{self.family}"
                )
            remember(self._blocks, key, found, limit=4096)
        return found

    def expand(
        self, ids: Sequence[int], media: Sequence[Media]
    ) -> tuple[list[int], tuple[MediaPlacement, ...]]:
        blocks = [self.block(one) for one in media]
        pads = [(at, token) for at, token in enumerate(ids) if token in self.pad_ids]
        expected = [
            self._video_id if isinstance(one, VideoRef) else self._image_id for one in media
        ]
        if [token for _, token in pads] != expected:
            raise TemplateError(
                "the template writes placeholders of "
                f"{_count([t == self._video_id for _, t in pads])}, but the messages contain "
                f"{_count([isinstance(one, VideoRef) for one in media])}, perhaps in another order"
            )
        out: list[int] = []
        placed: list[MediaPlacement] = []
        done = 0
        for (at, _), one, block in zip(pads, media, blocks, strict=True):
            out += ids[done:at]
            placed.append(MediaPlacement(one, len(out), len(block.ids), block.grid, block.compact))
            out += block.ids
            done = at + 1
        out += ids[done:]
        return out, tuple(placed)

    def place(
        self, ids: Sequence[int], media: Sequence[Media]
    ) -> tuple[list[int], tuple[MediaPlacement, ...]]:
        out: list[int] = []
        done = 0
        for one in media:
            block = self.block(one)
            pad = next((at for at in range(done, len(ids)) if ids[at] in self.pad_ids), None)
            if pad is None:  # `expand` refuses them
                break
            start = pad - next(at for at, token in enumerate(block.ids) if token in self.pad_ids)
            end = start + len(block.ids)
            if start < done or tuple(ids[start:end]) != block.ids:
                # A compact placeholder; `expand` checks its kind.
                start, end = pad, pad + 1
            out += (*ids[done:start], ids[pad])
            done = end
        try:
            return self.expand([*out, *ids[done:]], media)
        except TemplateError:
            raise MediaError(
                f"{_pads(ids, self.pad_ids)} placeholders among {len(ids)} ids do not fit "
                f"{len(media)} images or videos: write one for each, in their order, or the ids "
                "that each expands to"
            ) from None

    def compact(self, ids: Sequence[int], placed: Sequence[MediaPlacement]) -> list[int]:
        out: list[int] = []
        done = 0
        for block in placed:
            out += (*ids[done : block.start], *block.compact)
            done = block.end
        return out + list(ids[done:])

    def check(self, ids: Sequence[int], placed: Sequence[MediaPlacement]) -> None:
        if not placed and self.pad_ids.isdisjoint(ids):
            return
        inside = 0
        for block in placed:
            known = self.block(block.media)
            if tuple(ids[block.start : block.end]) != known.ids or block.grid != known.grid:
                raise MediaError(
                    f"{block.media.key[:12]} at {block.start}: "
                    f"{_pads(ids[block.start : block.end], self.pad_ids)} placeholders in "
                    f"{block.length} ids with the grid {block.grid}; its processor makes "
                    f"{_pads(known.ids, self.pad_ids)} in {len(known.ids)} with the grid "
                    f"{known.grid}"
                )
            inside += _pads(known.ids, self.pad_ids)
        if (found := _pads(ids, self.pad_ids)) != inside:
            blocks = f"but {inside} in the blocks of {len(placed)} images"
            raise MediaError(f"{found} placeholders of images among {len(ids)} ids, {blocks}")

    def positions(self, length: int, placed: Sequence[MediaPlacement], start: int = 0) -> Any:
        return None

    def process(self, media: Media, store: MediaStore) -> Mapping[str, Any]:
        _ = self.block(media)  # rejects media without a block before any processor runs
        return self._process(media, store)

    def merge(self, chunks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        import numpy as np

        rows: dict[str, list[Any]] = {}
        for chunk in chunks:
            for name, array in chunk.items():
                rows.setdefault(name, []).append(array)
        return {
            name: np.concatenate(arrays, 0 if name.endswith("_thw") else self._axis)
            for name, arrays in rows.items()
        }


def pixels_of(media: Media, store: MediaStore) -> list[Any]:
    """Return the pixels of an image, or of each frame of a video, uint8 [height, width, 3]."""
    return [
        store.pixels(frame) for frame in (media.frames if isinstance(media, VideoRef) else (media,))
    ]


def _pads(ids: Sequence[int], pads: frozenset[int]) -> int:
    return sum(token in pads for token in ids)


def _count(videos: Sequence[bool]) -> str:
    return f"{len(videos) - sum(videos)} images and {sum(videos)} videos"
