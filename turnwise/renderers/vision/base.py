"""VisionProcessor protocol and its shared base class."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from turnwise.errors import MediaError, TemplateError
from turnwise.media import MediaStore, scaled_size
from turnwise.renderers.template import digest
from turnwise.types import Media, MediaPlacement, VideoRef


class MediaBlock(NamedTuple):
    """An image or a video as ids."""

    ids: tuple[int, ...]
    """Expanded: what training and engines that take ids verbatim see."""
    grid: tuple[tuple[int, ...], ...]
    """See `MediaPlacement.grid`."""
    compact: tuple[int, ...]
    """What a chat template writes in its place."""


class VisionProcessor(Protocol):
    """The vision side of one model's renderer; one row of a table of families, with the model's own settings."""

    placeholder_ids: frozenset[int]
    """Ids that only the template and blocks write, around and for images: never sampled, never in a text."""
    pad_ids: frozenset[int]
    """Those of them at which the vision tower's features stand, one row of features each."""
    fingerprint: str
    """Hash of the family and of every setting that decides ids or pixel values."""

    def block(self, media: Media) -> MediaBlock:
        """The ids of an image or a video; from its size alone, no pixels are read.

        Raises:
            MediaError: when the model cannot see it (its kind, its shape).
        """
        ...

    def expand(self, ids: Sequence[int], media: Sequence[Media]) -> tuple[list[int], tuple[MediaPlacement, ...]]:
        """Compact ids, as a template writes them, with each medium's block in place of its placeholder.

        Raises:
            TemplateError: when there are not as many placeholders as media, of their kinds, in their order.
        """
        ...

    def compact(self, ids: Sequence[int], placed: Sequence[MediaPlacement]) -> list[int]:
        """The reverse of `expand`: for engines that expand placeholders themselves."""
        ...

    def check(self, ids: Sequence[int], placed: Sequence[MediaPlacement]) -> None:
        """See that ids and media belong together: every pad is in a block, and every block has as many pads as features.

        Raises:
            MediaError: with the counts, where they do not.
        """
        ...

    def positions(self, length: int, placed: Sequence[MediaPlacement], start: int = 0) -> Any:
        """Rotary positions of ids `start` to `length`, int64 [3, length - start] (time, height, width); None where the family
        counts in one dimension."""
        ...

    def process(self, media: Media, store: MediaStore) -> Mapping[str, Any]:
        """The pixel values of one image or video as the model's own processor makes them, arrays by the processor's names."""
        ...

    def merge(self, chunks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The pixel values of several, one after another: one allocation and one copy per key."""
        ...


_MOST_KEPT = 4096


class BaseVisionProcessor:
    """Eyes of one model; a family says what a block is, where it stands, and how pixels become arrays."""

    def __init__(
        self, family: str, settings: Mapping[str, Any], media_ids: frozenset[int], image_id: int, video_id: int | None = None
    ) -> None:
        """
        Args:
            family: the model's type, for errors and the fingerprint.
            settings: everything that decides ids, positions or pixel values.
            media_ids: see `VisionProcessor.placeholder_ids`.
            image_id: the placeholder of an image, in what a template writes and in blocks.
            video_id: the placeholder of a video; None where the model sees none.
        """
        self.family = family
        self.placeholder_ids = media_ids
        self.pad_ids = frozenset(i for i in (image_id, video_id) if i is not None)
        self.fingerprint = digest([family, settings, sorted(media_ids), image_id, video_id])
        self._image_id = image_id
        self._video_id = video_id
        self._blocks: dict[Any, MediaBlock] = {}

    # What a family says

    def _image(self, width: int, height: int) -> MediaBlock:
        raise NotImplementedError

    def _video(self, media: VideoRef, width: int, height: int) -> MediaBlock:
        raise MediaError(f"a model of type {self.family} sees no videos here; show their frames as images")

    def _process(self, media: Media, store: MediaStore) -> Mapping[str, Any]:
        raise NotImplementedError

    _axis = 0
    """Along which the pixel values of several images stand one after another."""

    # The protocol

    def block(self, media: Media) -> MediaBlock:
        """See `VisionProcessor.block`."""
        first = media.frames[0] if isinstance(media, VideoRef) else media
        if first.width < 1 or first.height < 1:
            raise MediaError(f"image {first.sha256[:12]}: its size is not known; take references from a media store")
        width, height = scaled_size(first.width, first.height, first.max_pixels)
        key = (width, height, media.times if isinstance(media, VideoRef) else None)
        found = self._blocks.get(key)
        if found is None:
            found = self._video(media, width, height) if isinstance(media, VideoRef) else self._image(width, height)
            if not self.pad_ids.intersection(found.ids):
                raise MediaError(f"an image of {width} x {height} pixels gives no patches in a model of type {self.family}")
            if len(self._blocks) >= _MOST_KEPT:
                self._blocks.clear()
            self._blocks[key] = found
        return found

    def expand(self, ids: Sequence[int], media: Sequence[Media]) -> tuple[list[int], tuple[MediaPlacement, ...]]:
        """See `VisionProcessor.expand`."""
        blocks = [self.block(one) for one in media]
        spots = [(at, token) for at, token in enumerate(ids) if token in self.pad_ids]
        told = [self._video_id if isinstance(one, VideoRef) else self._image_id for one in media]
        if [token for _, token in spots] != told:
            raise TemplateError(
                f"the template writes {_count([t == self._video_id for _, t in spots])} as placeholders, and the messages hold "
                f"{_count([isinstance(one, VideoRef) for one in media])}, in another order perhaps"
            )
        out: list[int] = []
        placed: list[MediaPlacement] = []
        done = 0
        for (at, _), one, block in zip(spots, media, blocks, strict=True):
            out += ids[done:at]
            placed.append(MediaPlacement(one, len(out), len(block.ids), block.grid, block.compact))
            out += block.ids
            done = at + 1
        out += ids[done:]
        return out, tuple(placed)

    def compact(self, ids: Sequence[int], placed: Sequence[MediaPlacement]) -> list[int]:
        """See `VisionProcessor.compact`."""
        out: list[int] = []
        done = 0
        for block in placed:
            out += ids[done : block.start]
            out += block.compact
            done = block.end
        out += ids[done:]
        return out

    def check(self, ids: Sequence[int], placed: Sequence[MediaPlacement]) -> None:
        """See `VisionProcessor.check`."""
        if not placed and self.pad_ids.isdisjoint(ids):
            return
        inside = 0
        for block in placed:
            known = self.block(block.media)
            if tuple(ids[block.start : block.end]) != known.ids or block.grid != known.grid:
                raise MediaError(
                    f"{block.media.key[:12]} at {block.start}: {_pads(ids[block.start : block.end], self.pad_ids)} "
                    f"placeholders in {block.length} ids with the grid {block.grid}; its processor makes "
                    f"{_pads(known.ids, self.pad_ids)} in {len(known.ids)} with the grid {known.grid}"
                )
            inside += _pads(known.ids, self.pad_ids)
        if (found := _pads(ids, self.pad_ids)) != inside:
            raise MediaError(
                f"{found} placeholders of images among {len(ids)} ids, and {inside} in the blocks of {len(placed)} images"
            )

    def positions(self, length: int, placed: Sequence[MediaPlacement], start: int = 0) -> Any:
        """See `VisionProcessor.positions`; one dimension unless the family says otherwise."""
        return None

    def process(self, media: Media, store: MediaStore) -> Mapping[str, Any]:
        """See `VisionProcessor.process`.

        Raises:
            MediaError: when the store does not have it, or the model cannot see it.
        """
        _ = self.block(media)  # what no block can be made of never reaches a processor
        return self._process(media, store)

    def merge(self, chunks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """See `VisionProcessor.merge`."""
        import numpy as np

        rows: dict[str, list[Any]] = {}
        for chunk in chunks:
            for name, array in chunk.items():
                rows.setdefault(name, []).append(array)
        axis: Callable[[str], int] = lambda name: 0 if name.endswith("_thw") else self._axis  # noqa: E731
        return {name: np.concatenate(arrays, axis=axis(name)) for name, arrays in rows.items()}


def pixels_of(media: Media, store: MediaStore) -> list[Any]:
    """The pixels of an image, or of each frame of a video, [height, width, 3] of uint8."""
    return [store.pixels(frame) for frame in (media.frames if isinstance(media, VideoRef) else (media,))]


def _pads(ids: Sequence[int], pads: frozenset[int]) -> int:
    return sum(token in pads for token in ids)


def _count(videos: Sequence[bool]) -> str:
    return f"{len(videos) - sum(videos)} images and {sum(videos)} videos"
