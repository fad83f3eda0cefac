"""The vision part of a renderer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from turnwright.media import MediaStore
from turnwright.types import Media, MediaPlacement


class MediaBlock(NamedTuple):
    """Ids of an image or video."""

    ids: tuple[int, ...]
    """Expanded ids, for training and for engines that take ids verbatim."""
    grid: tuple[tuple[int, ...], ...]
    """See `MediaPlacement.grid`."""
    compact: tuple[int, ...]
    """Ids that a chat template writes in its place."""


class VisionProcessor(Protocol):
    """Vision part of a model's renderer: a row of the family table with the
    model's own settings."""

    placeholder_ids: frozenset[int]
    """Ids that only the template and blocks write, around and for images: never sampled,
    never encoded from text."""
    pad_ids: frozenset[int]
    """Placeholder ids that take one row of the vision tower's features each."""
    fingerprint: str
    """Hash of the family and of every setting that affects ids or pixel values."""

    def block(self, media: Media) -> MediaBlock:
        """Return the ids of an image or video; they depend on its size alone, no pixels are read.

        Raises `MediaError` if the model does not support its kind or shape.
        """

    def expand(
        self, ids: Sequence[int], media: Sequence[Media]
    ) -> tuple[list[int], tuple[MediaPlacement, ...]]:
        """Replace each placeholder in compact ids, as a template writes them,
        by the block of its media.

        Raises `TemplateError` if number, kinds or order of placeholders and media differ.
        """

    def place(
        self, ids: Sequence[int], media: Sequence[Media]
    ) -> tuple[list[int], tuple[MediaPlacement, ...]]:
        """Find the media of ids: each placeholder is compact, as `expand` takes it,
        or the block of its media.

        Raises `MediaError` if number, kinds, order or sizes of placeholders and media differ.
        """

    def compact(self, ids: Sequence[int], placed: Sequence[MediaPlacement]) -> list[int]:
        """Reverse `expand`, for engines that expand placeholders themselves."""

    def check(self, ids: Sequence[int], placed: Sequence[MediaPlacement]) -> None:
        """Check that ids and media match: every pad is in a block, and every block
        has one pad per feature.

        Raises `MediaError` if they do not match, with the counts.
        """

    def positions(self, length: int, placed: Sequence[MediaPlacement], start: int = 0) -> Any:
        """Return rotary positions of ids `start` to `length`, int64 [3, length -
        start] (time, height, width).

        None for families with one-dimensional positions.
        """

    def process(self, media: Media, store: MediaStore) -> Mapping[str, Any]:
        """Return the pixel values of an image or video from the model's own processor, by the
        processor's array names."""

    def merge(self, chunks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Concatenate the pixel values of several media: one allocation and one copy per key."""
