"""Rows into passes of tries: which rows share a pass, and its tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from turnwise.render.vision import VisionProcessor
from turnwise.train.forward.batch import MicroBatch, TrainingRow, placeholder_positions, positions_of
from turnwise.train.forward.routes import keys_with_routes, pack_routes
from turnwise.train.forward.tree.cost import CostModel
from turnwise.train.forward.trie import PackedPrefixTree, SortedRows, build_prefix_tree
from turnwise.types import Media
from turnwise.types.media import ids_with_media_keys


def shared_prefixes(rows: Sequence[TrainingRow]) -> SortedRows:
    """What rows share; at an image's placeholders they share what shows the same pixels, not what has the same id, and where
    experts are replayed what took the same ones."""
    return SortedRows.of(
        keys_with_routes(
            [ids_with_media_keys(row.ids, row.media) if row.media else row.ids for row in rows], [r.routes for r in rows]
        )
    )


def split_passes(shared: SortedRows, price: CostModel, micro_tokens: int) -> tuple[list[tuple[int, int]], float]:
    """Cut sorted rows into passes that together cost least, each of at most so many unique tokens; one row may be longer.

    A cut is paid for by what its sides share, which both then compute: so cuts fall between tasks first, then where branches
    are short. The least sum over all cuts is found by dynamic programming over the rows' order.

    Returns:
        Ranges of sorted rows, and their cost.
    """
    count = len(shared.lengths)
    # Of a row behind others in its pass: tokens and pairs that it adds, and calls (its chain, and the hang that it opens).
    pairs = [length * (length + 1) / 2 for length in shared.lengths]
    added = [
        ((length - common) * price.token + (own - common * (common + 1) / 2) * price.pair + price.call * (2 if common else 1))
        for length, common, own in zip(shared.lengths, shared.common, pairs, strict=True)
    ]
    whole = [price.tree(length, own, 1) for length, own in zip(shared.lengths, pairs, strict=True)]
    best, where = [0.0], [0]
    for end in range(1, count + 1):
        # Walk back over where the last pass may begin.
        least, begin, tokens, behind = float("inf"), end - 1, 0, 0.0
        for first in range(end - 1, -1, -1):
            if first < end - 1 and tokens + shared.lengths[first] > micro_tokens:
                break
            here = best[first] + whole[first] + behind
            if here < least:
                least, begin = here, first
            tokens += shared.lengths[first] - shared.common[first]
            behind += added[first]
        best.append(least)
        where.append(begin)
    ranges: list[tuple[int, int]] = []
    end = count
    while end:
        ranges.append((where[end], end))
        end = where[end]
    return ranges[::-1], best[-1]


def tree_micro(
    rows: Sequence[TrainingRow],
    first_token: Sequence[int],
    shared: SortedRows,
    lo: int,
    hi: int,
    device: torch.device | str,
    eyes: VisionProcessor | None,
) -> MicroBatch:
    """One pass over the trie of the sorted rows from `lo` to `hi`.

    Args:
        first_token: of each row, where its tokens begin among the batch's.
    """
    made = build_prefix_tree(shared, lo, hi)
    ids_t = np.empty(made.tree.size, dtype=np.int64)
    for piece in made.pieces:
        ids_t[piece.start : piece.start + piece.end - piece.begin] = rows[piece.row].ids[piece.begin : piece.end]
    chosen = sorted(shared.order[lo:hi])
    before = np.concatenate([made.places[i][np.asarray(rows[i].places) - 1] for i in chosen])
    tokens = np.concatenate([np.arange(first_token[i], first_token[i] + len(rows[i].places)) for i in chosen])

    def long(numbers: object) -> Tensor:
        return torch.as_tensor(numbers, dtype=torch.long).to(device)

    return MicroBatch(
        ids_bt=long(ids_t[None]),
        positions=_positions(rows, made, eyes).to(device),
        before_m=long(before),
        targets_m=long([target for i in chosen for target in rows[i].targets]),
        tokens_m=long(tokens),
        media=_media(rows, chosen, made, eyes),
        tree=made.tree,
        routes=pack_routes(((rows[i].routes, made.places[i]) for i in chosen), made.tree.size, device),
    )


def _positions(rows: Sequence[TrainingRow], made: PackedPrefixTree, eyes: VisionProcessor | None) -> Tensor:
    """Those of a token's path: (1, T), or (3, 1, T) where some row shows images to a model that counts in three."""
    size = made.tree.size
    plain_t = np.empty(size, dtype=np.int64)
    for piece in made.pieces:
        plain_t[piece.start : piece.start + piece.end - piece.begin] = np.arange(piece.begin, piece.end)
    turned = {i: found for i in made.places if (found := positions_of(rows[i], eyes)) is not None}
    if not turned:
        return torch.from_numpy(plain_t[None])
    positions = np.broadcast_to(plain_t, (3, 1, size)).copy()
    for i, found in turned.items():
        positions[:, 0, made.places[i]] = found
    return torch.from_numpy(positions)


def _media(
    rows: Sequence[TrainingRow], chosen: Sequence[int], made: PackedPrefixTree, eyes: VisionProcessor | None
) -> tuple[tuple[Media, tuple[int, ...]], ...]:
    """Each image or video once for each place where it stands in the trie, in the order of the layout."""
    found: dict[int, tuple[Media, tuple[int, ...]]] = {}
    for i in chosen:
        for block, at in placeholder_positions(rows[i], eyes):
            places = tuple(made.places[i][at].tolist())
            if places:
                found[places[0]] = (block.media, places)
    return tuple(found[first] for first in sorted(found))
