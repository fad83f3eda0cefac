"""Trajectories as tensors: the only place where ids become a padded batch."""

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
from turnwise.training.credit import TokenWeights, holders
from turnwise.training.forward.head import SamplingSupport
from turnwise.training.forward.prefix_tree import PrefixTree
from turnwise.training.forward.routing_replay import PassRoutes, pack_routes, routes_of
from turnwise.types import ExpertRoutes, Media, MediaPlacement, Trajectory, placements_between

OVERHEAD_TOKENS = 128
"""What one more forward pass costs, in tokens of the tiny model (2 ms, forward and backward, at 18 us a token); of 64 to 1024,
64 and 128 were the fastest: 85 ms a step against 100."""
OVERHEAD_SEEN = 2048
"""The same for a pass that shows images, whose tower costs more calls than tokens: of 128 to 100,000 this took the least
time on a tiny Qwen3-VL (0.78 s a step against 0.98 on a busy machine)."""


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """One root-to-leaf path, up to the last id that carries loss."""

    ids: list[int]
    """The ids that are fed, so without the last target: nothing is predicted from it."""
    places: list[int]
    """Path positions of the ids that carry loss; each is predicted from the position before it."""
    targets: list[int]
    """The ids at those positions."""
    weights: list[float]
    logprobs: list[float]
    """The engine's, NaN where it gave none."""
    trajectory: int
    """Index into the batch's trajectories."""
    media: tuple[MediaPlacement, ...] = ()
    """Images and videos among the ids."""
    slots: list[tuple[int, int]] = field(default_factory=list)
    """The span that holds each id that carries loss, and the id's place in it."""
    routes: ExpertRoutes | None = None
    """The experts of each id; None where they are not replayed."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass: B rows padded on the right to T, and the M ids in them that carry loss."""

    ids_bt: Tensor
    positions: Tensor
    """Explicit positions: (1, T), since right padding leaves them the same for every row; (3, B, T) where a row shows images
    to a model that counts in time, height and width."""
    before_m: Tensor
    """Index into the flattened (B, T) of the position that predicts the target, that is, the one before it."""
    targets_m: Tensor
    tokens_m: Tensor
    """Index of the target in the batch's tensors of N tokens."""
    media: tuple[tuple[Media, tuple[int, ...]], ...] = ()
    """What the rows show, row by row: each image or video, and where in the flattened (B, T) its features stand."""
    tree: PrefixTree | None = None
    """Who attends to whom where the pass is a trie of rows, laid out as one row of T unique tokens; None for padded rows."""
    routes: PassRoutes | None = None
    """The experts of the flattened (B, T); None where they are not replayed."""


Pack = Callable[[Sequence[TrainingRow], int, torch.device | str, VisionProcessor | None], list[MicroBatch]]
"""Puts rows into forward passes, given the most positions of a pass, the device and the model's eyes."""


@dataclass(slots=True)
class TrainingBatch:
    """All ids that carry loss in one optimizer step, N of them, and the forward passes that cover them.

    Per-token tensors are float64 on the model's device and are cast where they meet logits.
    """

    trajectories: list[Trajectory]
    micros: list[MicroBatch]
    weights_n: Tensor
    """Share of the token in the loss: the aggregation and its denominators are in here."""
    advantages_n: Tensor
    engine_n: Tensor
    """The engine's logprobs, NaN where it gave none."""
    trajectory_n: Tensor
    """Index of the trajectory that sampled it."""
    start_n: Tensor | None = None
    """The trainer's logprobs before the step's first update."""
    reference_n: Tensor | None = None
    """The reference policy's logprobs."""
    correction_n: Tensor | None = None
    """What the policy loss of each token is multiplied with, for an engine that samples from another distribution."""
    slots: list[tuple[int, int]] = field(default_factory=list)
    """The span of its trajectory that holds each token, and the token's place in it."""
    kept: SamplingSupport | None = None
    """What top-k and top-p left for each token before the step's first update, where they cut."""
    packed: Callable[[int], list[MicroBatch]] = lambda _: []
    """The same rows in passes of at most so many positions; tokens keep their places."""
    most: int = 0
    """Positions of a pass, at most."""

    def repack(self, most: int) -> None:
        """Cut it into passes of at most so many positions."""
        if most != self.most:
            self.micros, self.most = self.packed(most), most

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
    """The denominators of a step's loss: sampled tokens and trajectories, never rows, leaves or micro-batches."""

    aggregation: Literal["token", "trajectory", "fixed"]
    tokens: int
    trajectories: int
    fixed_length: int = 1
    parts: int = 1
    """Optimizer steps that share the denominators; each one's gradient is an unbiased estimate of the whole step's."""

    @classmethod
    def of(
        cls,
        credits: Sequence[Credit],
        aggregation: Literal["token", "trajectory", "fixed"],
        fixed_length: int = 1,
        parts: int = 1,
    ) -> LossDenominator:
        """Count what the credits of a whole step hold; trajectories without signal count, dropped ones do not."""
        counted = [credit for credit in credits if credit.counted]
        filled = sum(1 for credit in counted if credit.tokens)
        return cls(aggregation, sum(credit.tokens for credit in counted), filled, fixed_length, parts)

    def token_weight(self, trajectory_tokens: int) -> float:
        """What a token of weight 1 contributes, in a trajectory that has so many of them.

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
    eyes: VisionProcessor | None = None,
    pack: Pack | None = None,
    routes: bool = False,
) -> TrainingBatch:
    """Put the sampled ids of credits that have an advantage into forward passes.

    Rows are cut behind their last target and sorted by length into passes that are padded on the right: causal attention
    needs no mask then, so this is right for any Hugging Face causal model. On the tiny model (2 layers, width 64) and 128
    rows of 15 to 60 ids, forward and backward took 85 ms so, 95 ms packed into one row with a loop of attention calls per
    sequence, and 126 ms padded without sorting.

    Args:
        credits: in canonical order; those without an advantage are left out.
        micro_tokens: most positions of a pass, padding included; one row alone may be longer.
        eyes: of the model, where trajectories show images.
        pack: puts rows into passes in another way, such as `turnwise.training.forward.tree_attention.Layout.pack`.
        routes: whether rows bring the experts that the engine chose.

    Raises:
        UsageError: for a trajectory with images where there are no eyes.
        RoutesMissing: where `routes`, and the experts of an id that is fed are not known.
    """
    trained = [credit for credit in credits if credit.advantage is not None and credit.tokens]
    rows: list[TrainingRow] = []
    for index, credit in enumerate(trained):
        mine = rows_of(credit.trajectory, index, credit.weights, routes=routes)
        have = sum(len(row.places) for row in mine)
        assert have == credit.tokens, f"{credit.trajectory.key}: {credit.tokens} ids to train, {have} found on its paths"
        rows.extend(mine)
    shares = [scale.token_weight(credit.tokens) for credit in trained]

    def per_token(numbers: list[float], dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.tensor(numbers, dtype=dtype).to(device)

    def packed(most: int) -> list[MicroBatch]:
        return (pack or padded)(rows, most, device, eyes)

    return TrainingBatch(
        trajectories=[credit.trajectory for credit in trained],
        micros=packed(micro_tokens),
        weights_n=per_token([shares[row.trajectory] * weight for row in rows for weight in row.weights]),
        advantages_n=per_token([trained[row.trajectory].advantage_of(*slot) for row in rows for slot in row.slots]),
        engine_n=per_token([logprob for row in rows for logprob in row.logprobs]),
        trajectory_n=per_token([row.trajectory for row in rows for _ in row.places], torch.long),
        slots=[slot for row in rows for slot in row.slots],
        packed=packed,
        most=micro_tokens,
    )


def rows_of(
    trajectory: Trajectory, index: int, scale: TokenWeights | None = None, *, routes: bool = False
) -> list[TrainingRow]:
    """The paths of a trajectory on which ids carry loss; each of its trained ids is in exactly one of them."""
    rows = []
    for sample, holding in zip(trajectory.samples(), holders(trajectory), strict=True):
        # Position 0 has nothing before it that could predict it; `advantage.NO_CONTEXT` counts it.
        places = [place for place, weight in enumerate(sample.weights) if weight and place]
        if scale is not None:
            places = [place for place in places if scale.of(*holding[place])]
        if not places:
            continue
        logprobs = [sample.logprobs[place] for place in places]
        rows.append(
            TrainingRow(
                ids=sample.ids[: places[-1]],
                places=places,
                targets=[sample.ids[place] for place in places],
                weights=[sample.weights[p] * (1.0 if scale is None else scale.of(*holding[p])) for p in places],
                logprobs=[math.nan if logprob is None else logprob for logprob in logprobs],
                trajectory=index,
                media=placements_between(sample.media, 0, places[-1]),
                slots=[holding[place] for place in places],
                routes=routes_of(sample, places[-1]) if routes else None,
            )
        )
    return rows


def padded(
    rows: Sequence[TrainingRow], micro_tokens: int, device: torch.device | str, eyes: VisionProcessor | None = None
) -> list[MicroBatch]:
    """Rows in passes that are padded on the right."""
    return pack_rows(rows, row_passes(rows, micro_tokens), device, eyes)


def row_passes(rows: Sequence[TrainingRow], micro_tokens: int) -> list[list[int]]:
    """Cut rows, sorted by length, into forward passes; their indices.

    A pass ends before it would hold more than `micro_tokens` positions, or where the padding that a longer row would bring
    costs more than another pass does.
    """
    dear = OVERHEAD_SEEN if any(row.media for row in rows) else OVERHEAD_TOKENS
    by_length = sorted(range(len(rows)), key=lambda i: (len(rows[i].ids), i))
    passes: list[list[int]] = []
    padding = 0
    for i in by_length:
        length = len(rows[i].ids)
        if passes:
            current = passes[-1]
            padding += len(current) * (length - len(rows[current[-1]].ids))
        if not passes or padding > dear or length * (len(passes[-1]) + 1) > micro_tokens:
            passes.append([])
            padding = 0
        passes[-1].append(i)
    return passes


def row_offsets(rows: Sequence[TrainingRow]) -> list[int]:
    """Where each row's tokens begin among the batch's."""
    return list(itertools.accumulate([0, *(len(row.places) for row in rows[:-1])]))


def pack_rows(
    rows: Sequence[TrainingRow], passes: Sequence[Sequence[int]], device: torch.device | str, eyes: VisionProcessor | None
) -> list[MicroBatch]:
    """The tensors of passes of padded rows."""
    first_token = row_offsets(rows)
    return [_micro([rows[i] for i in chosen], [first_token[i] for i in chosen], device, eyes) for chosen in passes]


def _micro(
    rows: Sequence[TrainingRow], first_token: Sequence[int], device: torch.device | str, eyes: VisionProcessor | None
) -> MicroBatch:
    width = max(len(row.ids) for row in rows)
    ids = [row.ids + [0] * (width - len(row.ids)) for row in rows]
    before = [line * width + place - 1 for line, row in enumerate(rows) for place in row.places]
    tokens = [first + offset for first, row in zip(first_token, rows, strict=True) for offset in range(len(row.places))]

    def long(numbers: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long).to(device)

    return MicroBatch(
        ids_bt=long(ids),
        positions=torch.from_numpy(_positions(rows, width, eyes)).to(device),
        before_m=long(before),
        targets_m=long([target for row in rows for target in row.targets]),
        tokens_m=long(tokens),
        media=tuple(
            (block.media, tuple(line * width + place for place in at))
            for line, row in enumerate(rows)
            for block, at in placeholder_positions(row, eyes)
        ),
        routes=pack_routes(
            ((row.routes, line * width + np.arange(len(row.ids))) for line, row in enumerate(rows)), len(rows) * width, device
        ),
    )


def placeholder_positions(row: TrainingRow, eyes: VisionProcessor | None) -> Iterator[tuple[MediaPlacement, list[int]]]:
    """The path positions at which the features of each of a row's media stand."""
    for block in row.media:
        assert eyes is not None
        yield block, [at for at in range(block.start, block.end) if row.ids[at] in eyes.pad_ids]


def positions_of(row: TrainingRow, eyes: VisionProcessor | None) -> Any:
    """Positions (3, length) of a row that shows images to a model that counts in three; None where they are 0, 1, 2, ...

    Raises:
        UsageError: for a row with images where there are no eyes.
    """
    if not row.media:
        return None
    if eyes is None:
        raise UsageError("trajectories show images, and nothing is known of them: give pixels=Rollout(...).pixels to Trainer")
    return eyes.positions(len(row.ids), row.media)


def _positions(rows: Sequence[TrainingRow], width: int, eyes: VisionProcessor | None) -> Any:
    """(1, T), or (3, B, T) where a row shows images to a model that counts in three; padding's are never looked at."""
    plain = np.arange(width)
    turned = {line: found for line, row in enumerate(rows) if (found := positions_of(row, eyes)) is not None}
    if not turned:
        return plain[None]
    positions = np.broadcast_to(plain, (3, len(rows), width)).copy()
    for line, found in turned.items():
        positions[:, line, : len(rows[line].ids)] = found
    return positions


def split_minibatches(credits: Sequence[Credit], parts: int, seed: str) -> list[list[Credit]]:
    """Deal credits into minibatches of whole trajectories, by a shuffle that `seed` names; each stays in canonical order.

    Only credits that carry loss are dealt, so that no minibatch is left without any; there may be fewer minibatches than asked.
    """
    trained = [credit for credit in credits if credit.reason is None and credit.tokens]
    if parts <= 1:
        return [trained] if trained else []
    places = list(range(len(trained)))
    random.Random(seed).shuffle(places)
    dealt = [sorted(places[part::parts]) for part in range(parts)]
    return [[trained[place] for place in part] for part in dealt if part]
