"""Which logprob is whose, where a server leaves some out without saying which."""

from __future__ import annotations

from collections.abc import Sequence


def align_logprobs(ids: Sequence[int], entries: Sequence[tuple[int, float]]) -> list[float | None] | None:
    """Give each id its logprob, where it is certain which entry is its own.

    The entries are those of some of the ids, in order (llama.cpp leaves out ids that end inside a character). Where an entry
    could belong to several ids, none of them gets it: a logprob in the wrong place is worse than none.

    Args:
        ids: what was sampled.
        entries: (id, logprob), a subsequence of the ids.

    Returns:
        One per id, None where it is missing or uncertain; None in all for entries that are no subsequence of the ids.
    """
    first: list[int] = []
    place = 0
    for token, _ in entries:
        while place < len(ids) and ids[place] != token:
            place += 1
        if place == len(ids):
            return None
        first.append(place)
        place += 1
    last = [0] * len(entries)
    place = len(ids) - 1
    for number in range(len(entries) - 1, -1, -1):
        while ids[place] != entries[number][0]:
            place -= 1
        last[number] = place
        place -= 1
    found: list[float | None] = [None] * len(ids)
    for number, (early, late) in enumerate(zip(first, last, strict=True)):
        if early == late:
            found[early] = entries[number][1]
    return found
