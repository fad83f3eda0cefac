"""What one model sees: the ids that an image takes, what its processor makes of it, and the positions that it counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from turnwise.media import MediaStore
from turnwise.types import Media, MediaPlacement


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
