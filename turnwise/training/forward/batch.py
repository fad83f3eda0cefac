"""Convert trajectories to padded batches of tensors; the only place that does."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from turnwise.errors import UsageError
from turnwise.renderers.vision import VisionProcessor
from turnwise.training.advantages import Credit
from turnwise.training.credit import TokenWeights
from turnwise.training.forward.head import SamplingSupport
from turnwise.training.forward.prefix_tree import PrefixTree
from turnwise.training.forward.routing_replay import PassRoutes, pack_routes, routes_of
from turnwise.types import ExpertRoutes, Media, MediaPlacement, Trajectory, placements_between

OVERHEAD_TOKENS = 128
"""Cost of one more forward pass in tokens of the tiny model (2 ms, forward and backward, at 18 us a token). Of 64 to 1024,
64 and 128 were fastest: 85 ms a step against 100."""
OVERHEAD_WITH_MEDIA = 2048
"""The same for a pass with images, whose tower adds many kernel calls. Of 128 to 100,000 this was fastest on a tiny Qwen3-VL
(0.78 s a step against 0.98 on a busy machine)."""


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """One root-to-leaf path, up to the last id that carries loss."""

    ids: list[int]
    """Input ids, without the last target."""
    places: list[int]
    """Path positions of the ids that carry loss; each is predicted from the position before it."""
    targets: list[int]
    """The ids at those positions."""
    weights: list[float]
    logprobs: list[float]
    """The engine's logprobs, NaN if missing."""
    trajectory: int
    """Index into the batch's trajectories."""
    media: tuple[MediaPlacement, ...] = ()
    """Images and videos among the ids."""
    slots: list[tuple[int, int]] = field(default_factory=list)
    """(span, offset) of each id that carries loss."""
    routes: ExpertRoutes | None = None
    """Experts of each id; None without routing replay."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass: B rows right-padded to T, and the M ids in them that carry loss."""

    ids_bt: Tensor
    positions: Tensor
    """(1, T), equal for every row thanks to right padding; (3, B, T) with images in a model with time, height and width
    positions."""
    before_m: Tensor
    """Index into the flattened (B, T) of the position that predicts each target, the one before it."""
    targets_m: Tensor
    tokens_m: Tensor
    """Index of each target in the batch's tensors of N tokens."""
    media: tuple[tuple[Media, tuple[int, ...]], ...] = ()
    """Images and videos of the rows, in order, each with the positions of its features in the flattened (B, T)."""
    tree: PrefixTree | None = None
    """Attention structure of a prefix tree, laid out as one row of T unique tokens; None for padded rows."""
    routes: PassRoutes | None = None
    """Experts of the flattened (B, T); None without routing replay."""


Pack = Callable[[Sequence[TrainingRow], int, torch.device | str, VisionProcessor | None], list[MicroBatch]]
"""Pack rows into forward passes, given maximum positions of a pass, device and vision processor."""


@dataclass(slots=True)
class TrainingBatch:
    """All N ids that carry loss in one optimizer step, and the forward passes that cover them.

    Per-token tensors are float64 on the model's device and are cast where they meet logits.
    """

    trajectories: list[Trajectory]
    micros: list[MicroBatch]
    weights_n: Tensor
    """Weight of the token in the loss, aggregation and denominators included."""
    advantages_n: Tensor
    engine_n: Tensor
    """The engine's logprobs, NaN if missing."""
    trajectory_n: Tensor
    """Index of the token's trajectory."""
    start_n: Tensor | None = None
    """The trainer's logprobs before the step's first update."""
    reference_n: Tensor | None = None
    """The reference policy's logprobs."""
    correction_n: Tensor | None = None
    """Importance-correction weight of each token's policy loss."""
    slots: list[tuple[int, int]] = field(default_factory=list)
    """(span, offset) of each token in its trajectory."""
    support: SamplingSupport | None = None
    """Top-k/top-p support of each token before the step's first update; None without truncation."""
    packed: Callable[[int], list[MicroBatch]] = lambda _: []
    """Pack the same rows into passes of at most the given number of positions; token indices do not change."""
    max_positions: int = 0
    """Maximum positions of a pass."""

    def repack(self, max_positions: int) -> None:
        """Split it into passes of at most `max_positions`."""
        if max_positions != self.max_positions:
            self.micros, self.max_positions = self.packed(max_positions), max_positions

    @property
    def size(self) -> int:
        """Number of ids that carry loss."""
        return int(self.weights_n.numel())

    @property
    def fed_positions(self) -> int:
        """Number of positions fed through the model, padding included."""
        return sum(micro.ids_bt.numel() for micro in self.micros)


@dataclass(frozen=True, slots=True)
class LossDenominator:
    """Denominators of a step's loss: sampled tokens and trajectories, never rows, leaves or micro-batches."""

    aggregation: Literal["token", "trajectory", "fixed"]
    tokens: int
    trajectories: int
    fixed_length: int = 1
    parts: int = 1
    """Optimizer steps that share the denominators; each one's gradient is an unbiased estimate of the full step's."""

    @classmethod
    def of(
        cls,
        credits: Sequence[Credit],
        aggregation: Literal["token", "trajectory", "fixed"],
        fixed_length: int = 1,
        parts: int = 1,
    ) -> LossDenominator:
        """Count the tokens and trajectories of a step; trajectories without signal count, dropped ones do not."""
        counted = [credit for credit in credits if credit.counted]
        filled = sum(1 for credit in counted if credit.tokens)
        return cls(aggregation, sum(credit.tokens for credit in counted), filled, fixed_length, parts)

    def token_weight(self, trajectory_tokens: int) -> float:
        """Return the loss weight of a token, in a trajectory of `trajectory_tokens` trained tokens.

        `token`: 1 / tokens of the step (DAPO, arXiv 2503.14476, section 3.3); `trajectory`: 1 / (trajectories * its own tokens)
        (GRPO, arXiv 2402.03300, eq. 3); `fixed`: 1 / (trajectories * fixed_length) (Dr. GRPO, arXiv 2503.20783).
        """
        if self.aggregation == "token":
            return self.parts / self.tokens
        own = trajectory_tokens if self.aggregation == "trajectory" else self.fixed_length
        return self.parts / (self.trajectories * own)


def make_batch(
    credits: Sequence[Credit],
    scale: LossDenominator,
    *,
    micro_tokens: int,
    device: torch.device | str = "cpu",
    vision: VisionProcessor | None = None,
    pack: Pack | None = None,
    routes: bool = False,
) -> TrainingBatch:
    """Pack the sampled ids of credits with an advantage into forward passes.

    Rows end before their last target and are sorted by length into right-padded passes. Causal attention needs no mask then,
    for any Hugging Face causal model. On the tiny model (2 layers, width 64) and 128 rows of 15 to 60 ids, forward and backward
    took 85 ms this way. Packing into one row with an attention call per sequence took 95 ms, padding without sorting 126 ms.

    Args:
        credits: in canonical order; those without an advantage are skipped.
        micro_tokens: maximum positions of a pass, padding included; a single row may be longer.
        vision: the model's vision processor, for trajectories with images.
        pack: another way to pack rows, such as `BatchPacker.pack`.
        routes: whether rows carry the engine's experts.

    Raises:
        UsageError: for a trajectory with images without a vision processor.
        RoutesMissing: with `routes`, when the experts of an input id are unknown.
    """
    trained = [credit for credit in credits if credit.advantage is not None and credit.tokens]
    rows: list[TrainingRow] = []
    for index, credit in enumerate(trained):
        trajectory_rows = rows_of(credit.trajectory, index, credit.weights, routes=routes)
        have = sum(len(row.places) for row in trajectory_rows)
        assert have == credit.tokens, f"{credit.trajectory.key}: {credit.tokens} ids to train, {have} found on its paths"
        rows.extend(trajectory_rows)
    token_weights = [scale.token_weight(credit.tokens) for credit in trained]

    def per_token(numbers: list[float], dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.tensor(numbers, dtype=dtype).to(device)

    def packed(max_positions: int) -> list[MicroBatch]:
        return (pack or padded)(rows, max_positions, device, vision)

    return TrainingBatch(
        trajectories=[credit.trajectory for credit in trained],
        micros=packed(micro_tokens),
        weights_n=per_token([token_weights[row.trajectory] * weight for row in rows for weight in row.weights]),
        advantages_n=per_token([trained[row.trajectory].advantage_of(*slot) for row in rows for slot in row.slots]),
        engine_n=per_token([logprob for row in rows for logprob in row.logprobs]),
        trajectory_n=per_token([row.trajectory for row in rows for _ in row.places], torch.long),
        slots=[slot for row in rows for slot in row.slots],
        packed=packed,
        max_positions=micro_tokens,
    )


def rows_of(
    trajectory: Trajectory, index: int, scale: TokenWeights | None = None, *, routes: bool = False
) -> list[TrainingRow]:
    """Return the paths of a trajectory with ids that carry loss; each trained id is in exactly one of them."""
    rows = []
    for sample in trajectory.samples():
        # Nothing predicts position 0; `advantages.NO_CONTEXT` counts it.
        places = [place for place, weight in enumerate(sample.weights) if weight and place]
        if scale is not None:
            places = [place for place in places if scale.of(*sample.slots[place])]
        if not places:
            continue
        logprobs = [sample.logprobs[place] for place in places]
        rows.append(
            TrainingRow(
                ids=sample.ids[: places[-1]],
                places=places,
                targets=[sample.ids[place] for place in places],
                weights=[sample.weights[p] * (1.0 if scale is None else scale.of(*sample.slots[p])) for p in places],
                logprobs=[math.nan if logprob is None else logprob for logprob in logprobs],
                trajectory=index,
                media=placements_between(sample.media, 0, places[-1]),
                slots=[sample.slots[place] for place in places],
                routes=routes_of(sample, places[-1]) if routes else None,
            )
        )
    return rows


def padded(
    rows: Sequence[TrainingRow], micro_tokens: int, device: torch.device | str, vision: VisionProcessor | None = None
) -> list[MicroBatch]:
    """Pack rows into right-padded passes."""
    return pack_rows(rows, row_passes(rows, micro_tokens), device, vision)


def row_passes(rows: Sequence[TrainingRow], micro_tokens: int) -> list[list[int]]:
    """Split rows, sorted by length, into forward passes; return their indices.

    A pass ends before it would exceed `micro_tokens` positions, or where the padding for a longer row costs more than another
    pass.
    """
    pass_cost = OVERHEAD_WITH_MEDIA if any(row.media for row in rows) else OVERHEAD_TOKENS
    by_length = sorted(range(len(rows)), key=lambda i: (len(rows[i].ids), i))
    passes: list[list[int]] = []
    padding = 0
    for i in by_length:
        length = len(rows[i].ids)
        if passes:
            current = passes[-1]
            padding += len(current) * (length - len(rows[current[-1]].ids))
        if not passes or padding > pass_cost or length * (len(passes[-1]) + 1) > micro_tokens:
            passes.append([])
            padding = 0
        passes[-1].append(i)
    return passes


def row_offsets(rows: Sequence[TrainingRow]) -> list[int]:
    """Return the index of each row's first token among the batch's tokens."""
    return list(itertools.accumulate([0, *(len(row.places) for row in rows[:-1])]))


def pack_rows(
    rows: Sequence[TrainingRow], passes: Sequence[Sequence[int]], device: torch.device | str, vision: VisionProcessor | None
) -> list[MicroBatch]:
    """Build the tensors of passes of padded rows."""
    first_token = row_offsets(rows)
    return [_micro([rows[i] for i in chosen], [first_token[i] for i in chosen], device, vision) for chosen in passes]


def _micro(
    rows: Sequence[TrainingRow], first_token: Sequence[int], device: torch.device | str, vision: VisionProcessor | None
) -> MicroBatch:
    width = max(len(row.ids) for row in rows)
    ids = [row.ids + [0] * (width - len(row.ids)) for row in rows]
    before = [line * width + place - 1 for line, row in enumerate(rows) for place in row.places]
    tokens = [first + offset for first, row in zip(first_token, rows, strict=True) for offset in range(len(row.places))]

    def long(numbers: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long).to(device)

    return MicroBatch(
        ids_bt=long(ids),
        positions=torch.from_numpy(_positions(rows, width, vision)).to(device),
        before_m=long(before),
        targets_m=long([target for row in rows for target in row.targets]),
        tokens_m=long(tokens),
        media=tuple(
            (block.media, tuple(line * width + place for place in at))
            for line, row in enumerate(rows)
            for block, at in placeholder_positions(row, vision)
        ),
        routes=pack_routes(
            ((row.routes, line * width + np.arange(len(row.ids))) for line, row in enumerate(rows)), len(rows) * width, device
        ),
    )


def placeholder_positions(row: TrainingRow, vision: VisionProcessor | None) -> Iterator[tuple[MediaPlacement, list[int]]]:
    """Yield each of a row's media with the path positions of its features."""
    for block in row.media:
        assert vision is not None
        yield block, [at for at in range(block.start, block.end) if row.ids[at] in vision.pad_ids]


def positions_of(row: TrainingRow, vision: VisionProcessor | None) -> Any:
    """Return positions (3, length) of a row with images in a model with 3D positions; None if they are 0, 1, 2, ...

    Raises:
        UsageError: for a row with images without a vision processor.
    """
    if not row.media:
        return None
    if vision is None:
        raise UsageError(
            "trajectories contain images, but the trainer has no pixels; pass pixels=Rollout(...).pixels to Trainer"
        )
    return vision.positions(len(row.ids), row.media)


def _positions(rows: Sequence[TrainingRow], width: int, vision: VisionProcessor | None) -> Any:
    """Return positions (1, T), or (3, B, T) with images in a model with 3D positions; those of padding are not used."""
    plain = np.arange(width)
    multimodal = {line: found for line, row in enumerate(rows) if (found := positions_of(row, vision)) is not None}
    if not multimodal:
        return plain[None]
    positions = np.broadcast_to(plain, (3, len(rows), width)).copy()
    for line, found in multimodal.items():
        positions[:, line, : len(rows[line].ids)] = found
    return positions


def split_minibatches(credits: Sequence[Credit], parts: int, seed: str) -> list[list[Credit]]:
    """Split credits into minibatches of complete trajectories by a shuffle seeded with `seed`; each keeps canonical order.

    Only credits that carry loss are dealt, so no minibatch is empty; there may be fewer minibatches than `parts`.
    """
    trained = [credit for credit in credits if credit.reason is None and credit.tokens]
    if parts <= 1:
        return [trained] if trained else []
    order = list(range(len(trained)))
    random.Random(seed).shuffle(order)
    dealt = [sorted(order[part::parts]) for part in range(parts)]
    return [[trained[index] for index in part] for part in dealt if part]
