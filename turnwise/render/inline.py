"""Going on inside a reply: where in its ids a text is cut."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]


def cut_ids(decode: Decode, ids: Sequence[int], chars: int) -> tuple[int, str]:
    """Where ids are cut so that the first `chars` characters of their text stay.

    Only whole ids stay, and only up to where a character ends, so that what is left over is text: the ids that stay and
    the ids of the text behind them say, byte for byte, what the reply said. (Bytes that are no UTF-8 are read as U+FFFD, by
    the environment too: where the cut lies inside an id that holds some, they are written so.)

    Returns:
        How many ids stay, and the text of the next ones up to the cut.
    """
    kept = decode(ids)[:chars]
    count = bisect_right(range(len(ids) + 1), len(kept), key=lambda n: len(decode(ids[:n]))) - 1
    while not kept.startswith(said := decode(ids[:count])):
        count -= 1
    return count, kept[len(said) :]
