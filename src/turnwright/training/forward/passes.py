"""Forward passes as tensors: rows padded to a common length, or laid out as a prefix tree.

`row_passes` decides which padded rows share a pass, `packing.py` whether a tree is cheaper, and
`make_pass` makes the tensors of either.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from turnwright.errors import UsageError
from turnwright.renderers.vision import VisionProcessor
from turnwright.training.forward.routing_replay import PassRoutes, pack_routes
from turnwright.training.forward.training_rows import TrainingRow
from turnwright.training.forward.tree import PrefixTree
from turnwright.types import Media

OVERHEAD_TOKENS = 128
"""Cost of one more forward pass in tokens of the tiny model on a CPU (2 ms, forward and backward,
at 18 us a token). Of 64 to 1024, 64 and 128 were fastest: 85 ms a step against 100."""
OVERHEAD_WITH_MEDIA = 2048
"""The same for a pass with images, whose tower adds many kernel calls. Of 128 to 100,000 this was
fastest on a tiny Qwen3-VL (0.78 s a step against 0.98 on a busy machine)."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass: B rows right-padded to T, and the M ids in them that carry loss."""

    ids_bt: Tensor
    positions: Tensor
    """(1, T), equal for every row thanks to right padding; (3, B, T) with images in a model with
    time, height and width positions."""
    before_m: Tensor
    """Index into the flattened (B, T) of the position that predicts each target, the one before
    it."""
    targets_m: Tensor
    tokens_m: Tensor
    """Index of each target in the batch's tensors of N tokens."""
    media: tuple[tuple[Media, tuple[int, ...]], ...] = ()
    """Images and videos of the rows, in order, each with the positions of its features in the
    flattened (B, T)."""
    tree: PrefixTree | None = None
    """Attention structure of a prefix tree, laid out as one row of T unique tokens; None for padded
    rows."""
    routes: PassRoutes | None = None
    """Experts of the flattened (B, T); None without routing replay."""


Pack = Callable[
    [Sequence[TrainingRow], int, torch.device | str, VisionProcessor | None], list[MicroBatch]
]
"""Pack rows into forward passes, given maximum positions of a pass, device and vision processor."""


def padded(
    rows: Sequence[TrainingRow],
    micro_tokens: int,
    device: torch.device | str,
    vision: VisionProcessor | None = None,
) -> list[MicroBatch]:
    """Pack rows into right-padded passes."""
    return pack_rows(rows, row_passes(rows, micro_tokens), device, vision)


def row_passes(
    rows: Sequence[TrainingRow], micro_tokens: int, overhead: float = OVERHEAD_TOKENS
) -> list[list[int]]:
    """Split rows, sorted by length, into forward passes; return their indices.

    A pass ends before it would exceed `micro_tokens` positions, or where the padding for a longer
    row costs more than another pass: `overhead` tokens.
    """
    pass_cost = overhead
    if any(row.media for row in rows):
        pass_cost = max(OVERHEAD_WITH_MEDIA, overhead)

    passes: list[list[int]] = []
    padding = 0
    for index in sorted(range(len(rows)), key=lambda index: (len(rows[index].ids), index)):
        length = len(rows[index].ids)
        if passes:
            # All rows of the pass are as long as its last one, and would be padded to this one.
            current = passes[-1]
            padding += len(current) * (length - len(rows[current[-1]].ids))
        if not passes or padding > pass_cost or length * (len(passes[-1]) + 1) > micro_tokens:
            passes.append([])
            padding = 0
        passes[-1].append(index)
    return passes


def pack_rows(
    rows: Sequence[TrainingRow],
    passes: Sequence[Sequence[int]],
    device: torch.device | str,
    vision: VisionProcessor | None,
) -> list[MicroBatch]:
    """Build the tensors of passes of padded rows."""
    micros = []
    for indices in passes:
        width = max(len(rows[index].ids) for index in indices)
        places = {}
        for line, index in enumerate(indices):
            places[index] = line * width + np.arange(len(rows[index].ids))
        micros.append(make_pass(rows, places, (len(indices), width), device, vision))
    return micros


def make_pass(
    rows: Sequence[TrainingRow],
    places: Mapping[int, Any],
    shape: tuple[int, int],
    device: torch.device | str,
    vision: VisionProcessor | None,
    tree: PrefixTree | None = None,
) -> MicroBatch:
    """Build the tensors of a pass of shape (B, T).

    `places` has, by row, where its ids are in the flattened (B, T); in a tree several rows have
    their common prefix at the same places.
    """
    size = shape[0] * shape[1]
    ids = np.zeros(size, dtype=np.int64)
    positions = np.tile(np.arange(shape[1]), shape[0])
    for index, row_places in places.items():
        ids[row_places] = rows[index].ids
        positions[row_places] = np.arange(len(row_places))

    media, positions_by_axis = _media_of(rows, places, vision)
    if positions_by_axis:
        positions = np.broadcast_to(positions, (3, size)).copy()
        for row_places, row_positions in positions_by_axis:
            positions[:, row_places] = row_positions
        positions = positions.reshape(3, *shape)
    else:
        positions = positions[None, : shape[1]]

    # Each target is predicted from the position before it. Rows number the tokens of the step in
    # their order.
    first_token = list(itertools.accumulate((len(row.places) for row in rows), initial=0))
    before, targets, tokens = [], [], []
    for index, row_places in places.items():
        before.append(row_places[np.asarray(rows[index].places) - 1])
        targets += rows[index].targets
        tokens.append(np.arange(first_token[index], first_token[index + 1]))

    routed = []
    for index, row_places in places.items():
        routes = rows[index].routes
        if routes is not None:
            routed.append((routes, row_places))

    def long(numbers: Any) -> Tensor:
        return torch.as_tensor(numbers, dtype=torch.long).to(device)

    return MicroBatch(
        ids_bt=long(ids.reshape(shape)),
        positions=long(positions),
        before_m=long(np.concatenate(before)),
        targets_m=long(targets),
        tokens_m=long(np.concatenate(tokens)),
        media=media,
        tree=tree,
        routes=pack_routes(routed, size, device) if routed else None,
    )


def _media_of(
    rows: Sequence[TrainingRow],
    places: Mapping[int, Any],
    vision: VisionProcessor | None,
) -> tuple[tuple[tuple[Media, tuple[int, ...]], ...], list[tuple[Any, Any]]]:
    """Return the images and videos of a pass with the positions of their features, and, for models
    with time, height and width positions, the (3, T) of each row at its places."""
    # An image that rows share as a prefix is in the pass once, at its first placeholder.
    by_place: dict[int, tuple[Media, tuple[int, ...]]] = {}
    positions_by_axis = []
    for index, row_places in places.items():
        row = rows[index]
        if not row.media:
            continue
        if vision is None:
            raise UsageError(
                "trajectories contain images, but the trainer has no pixels; pass "
                "pixels=Rollout(...).pixels to Trainer"
            )
        for block in row.media:
            features = tuple(
                int(row_places[place])
                for place in range(block.start, block.end)
                if row.ids[place] in vision.pad_ids
            )
            if features:
                by_place[features[0]] = (block.media, features)
        row_positions = vision.positions(len(row_places), row.media)
        if row_positions is not None:
            positions_by_axis.append((row_places, row_positions))
    return tuple(by_place[place] for place in sorted(by_place)), positions_by_axis
