"""Convert trajectories to padded batches of tensors; the only place that does."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from turnwright.config.schema import Aggregation, Batching, TeacherConfig
from turnwright.errors import ConfigError, SyncError, UsageError
from turnwright.renderers.vision import VisionProcessor
from turnwright.training.advantages import Credit, TokenWeights
from turnwright.training.forward.prefix_tree import (
    CostModel,
    SortedRows,
    build_prefix_tree,
    install_tree_attention,
    split_passes,
)
from turnwright.training.forward.routing_replay import (
    PassRoutes,
    keys_with_routes,
    pack_routes,
    routes_of,
)
from turnwright.training.forward.tree import PrefixTree
from turnwright.types import ExpertRoutes, Media, MediaPlacement, Trajectory, placements_between
from turnwright.types.media import ids_with_media_keys

if TYPE_CHECKING:
    from turnwright.training.forward.divergence import TeacherTargets
    from turnwright.training.forward.support import SamplingSupport

OVERHEAD_TOKENS = 128
"""Cost of one more forward pass in tokens of the tiny model on a CPU (2 ms, forward and backward,
at 18 us a token). Of 64 to 1024, 64 and 128 were fastest: 85 ms a step against 100."""
OVERHEAD_WITH_MEDIA = 2048
"""The same for a pass with images, whose tower adds many kernel calls. Of 128 to 100,000 this was
fastest on a tiny Qwen3-VL (0.78 s a step against 0.98 on a busy machine)."""


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
    """(1, T), equal for every row thanks to right padding; (3, B, T) with images in a model with
    time, height and width positions."""
    before_m: Tensor
    """Index into the flattened (B, T) of the position that predicts each
    target, the one before it."""
    targets_m: Tensor
    tokens_m: Tensor
    """Index of each target in the batch's tensors of N tokens."""
    media: tuple[tuple[Media, tuple[int, ...]], ...] = ()
    """Images and videos of the rows, in order, each with the positions of its features in
    the flattened (B, T)."""
    tree: PrefixTree | None = None
    """Attention structure of a prefix tree, laid out as one row of T unique tokens;
    None for padded rows."""
    routes: PassRoutes | None = None
    """Experts of the flattened (B, T); None without routing replay."""


Pack = Callable[
    [Sequence[TrainingRow], int, torch.device | str, VisionProcessor | None], list[MicroBatch]
]
"""Pack rows into forward passes, given maximum positions of a pass, device and vision processor."""


@dataclass(frozen=True, slots=True)
class TeacherScores:
    """Answer of one teacher for the N ids of a batch."""

    teacher: TeacherConfig
    name: str
    logp_n: Tensor
    """Log-probability of each id under the teacher, float64; NaN without an answer."""
    targets: TeacherTargets | None = None
    """Distribution at each id, for a divergence in the loss."""
    chunk_n: Tensor | None = None
    """Number of each id's chunk, whose log-probability `logp_n` is; None where each
    id is scored by itself."""
    unaligned: float = 0.0
    """Share of ids that are in no chunk."""

    def gap(self, index_k: Tensor | slice, policy_k: Tensor) -> Tensor:
        """Compute log p_teacher - log p_policy of some ids, or of their chunks;
        NaN without an answer."""
        if self.chunk_n is None:
            return self.logp_n[index_k] - policy_k
        chunk_k = self.chunk_n[index_k]
        return (
            self.logp_n[index_k]
            - torch.zeros_like(self.logp_n).index_add_(0, chunk_k, policy_k)[chunk_k]
        )


@dataclass(slots=True)
class TrainingBatch:
    """All N ids that carry loss in one optimizer step, and the forward passes that cover them;
    per-token tensors are float64 on the model's device and are cast where they meet logits."""

    trajectories: list[Trajectory]
    micros: list[MicroBatch]
    weights_n: Tensor
    """Weight of the token in the loss, aggregation and denominators included."""
    advantages_n: Tensor
    engine_n: Tensor
    """The engine's logprobs, NaN if missing."""
    trajectory_n: Tensor
    """Index of the token's trajectory."""
    lags_n: Tensor
    """Updates between the policy that sampled the token and the one trained, integers; 0 where
    versions are not compared."""
    kept_n: Tensor
    """Whether the token was sampled on a cache of older weights than its own."""
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
    rows: list[TrainingRow] = field(default_factory=list)
    """Rows of the passes; tokens are numbered in their order."""
    teachers: list[TeacherScores] = field(default_factory=list)
    """Answers of the teachers."""
    packed: Callable[[int], list[MicroBatch]] = lambda _: []
    """Pack the same rows into passes of at most the given number of positions; token
    indices do not change."""
    max_positions: int = 0
    """Maximum positions of a pass."""

    def repack(self, max_positions: int) -> None:
        """Split it into passes of at most `max_positions`."""
        if max_positions != self.max_positions:
            self.micros, self.max_positions = self.packed(max_positions), max_positions

    def support_of(self, micro: MicroBatch) -> SamplingSupport | None:
        """Return the support of a pass's targets."""
        return None if self.support is None else self.support.take(micro.tokens_m)

    def targets_of(self, micro: MicroBatch) -> list[TeacherTargets]:
        """Return the teachers' distributions at a pass's targets."""
        return [
            scores.targets.take(micro.tokens_m)
            for scores in self.teachers
            if scores.targets is not None
        ]

    @property
    def size(self) -> int:
        """Number of ids that carry loss."""
        return int(self.weights_n.numel())

    @property
    def current_n(self) -> Tensor:
        """Whether the token was sampled by the weights before the step, and on their cache, so that
        its logprob is known."""
        return (self.lags_n == 0) & ~self.kept_n


@dataclass(frozen=True, slots=True)
class LossDenominator:
    """Denominators of a step's loss: sampled tokens and trajectories, never rows,
    leaves or micro-batches."""

    aggregation: Aggregation
    tokens: int
    trajectories: int
    fixed_length: int = 1
    parts: int = 1
    """Optimizer steps that share the denominators; each one's gradient is an unbiased
    estimate of the full step's."""

    @classmethod
    def of(
        cls,
        credits: Sequence[Credit],
        aggregation: Aggregation,
        fixed_length: int = 1,
        parts: int = 1,
    ) -> LossDenominator:
        """Count the tokens and trajectories of a step; trajectories without signal
        count, dropped ones do not."""
        counted = [credit for credit in credits if credit.counted]
        filled = sum(1 for credit in counted if credit.tokens)
        return cls(
            aggregation, sum(credit.tokens for credit in counted), filled, fixed_length, parts
        )

    def token_weight(self, trajectory_tokens: int) -> float:
        """Return the loss weight of a token, in a trajectory of `trajectory_tokens` trained tokens.

        `token`: 1 / tokens of the step (DAPO, arXiv 2503.14476, section 3.3); `trajectory`: 1 /
        (trajectories * its own tokens) (GRPO, arXiv 2402.03300, eq. 3); `fixed`: 1 / (trajectories
        * fixed_length) (Dr. GRPO, arXiv 2503.20783).
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
    version: int | None = None,
) -> TrainingBatch:
    """Pack the sampled ids of credits with an advantage into forward passes of at most
    `micro_tokens` positions, or a single longer row.

    Rows end before their last target and are sorted by length into right-padded passes. Causal
    attention needs no mask then, for any Hugging Face causal model. On the tiny model (2
    layers, width 64) and 128 rows of 15 to 60 ids, forward and backward took 85 ms this way.
    Packing into one row with an attention call per sequence took 95 ms, padding without sorting
    126 ms. `pack` is another way to pack rows, such as `BatchPacker.pack`. `version` is the
    policy version of the trained weights; None counts every token as theirs. Raises `SyncError`
    for a token of a newer policy.
    """
    trained = [credit for credit in credits if credit.advantage is not None and credit.tokens]
    rows: list[TrainingRow] = []
    for index, credit in enumerate(trained):
        trajectory_rows = rows_of(credit.trajectory, index, credit.weights, routes=routes)
        have = sum(len(row.places) for row in trajectory_rows)
        assert have == credit.tokens, (
            f"{credit.trajectory.key}: {credit.tokens} ids to train, {have} found on its paths"
        )
        rows.extend(trajectory_rows)
    token_weights = [scale.token_weight(credit.tokens) for credit in trained]
    ages = [
        age for row in rows for age in _ages(trained[row.trajectory].trajectory, row.slots, version)
    ]

    def per_token(numbers: list[float], dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.tensor(numbers, dtype=dtype).to(device)

    def packed(max_positions: int) -> list[MicroBatch]:
        return (pack or padded)(rows, max_positions, device, vision)

    return TrainingBatch(
        trajectories=[credit.trajectory for credit in trained],
        micros=packed(micro_tokens),
        weights_n=per_token(
            [token_weights[row.trajectory] * weight for row in rows for weight in row.weights]
        ),
        advantages_n=per_token(
            [value for row in rows for value in trained[row.trajectory].advantages_of(row.slots)]
        ),
        engine_n=per_token([logprob for row in rows for logprob in row.logprobs]),
        trajectory_n=per_token([row.trajectory for row in rows for _ in row.places], torch.long),
        lags_n=per_token([lag for lag, _ in ages], torch.long),
        kept_n=per_token([kept for _, kept in ages], torch.bool),
        slots=[slot for row in rows for slot in row.slots],
        rows=rows,
        packed=packed,
        max_positions=micro_tokens,
    )


def _ages(
    trajectory: Trajectory, slots: Sequence[tuple[int, int]], version: int | None
) -> list[tuple[int, bool]]:
    """Return `_age` of each slot's span."""
    by_span = {span: _age(trajectory, span, version) for span in {span for span, _ in slots}}
    return [by_span[span] for span, _ in slots]


def _age(trajectory: Trajectory, index: int, version: int | None) -> tuple[int, bool]:
    """Return how many updates the policy of a span is older than `version`, and whether its cache
    is older than that policy."""
    span = trajectory.spans[index]
    if version is None or span.version is None:
        return 0, False
    if span.version > version:
        key = trajectory.key
        raise SyncError(
            f"task {key.task!r}, sample {key.sample}, step {key.metrics_step} was sampled by "
            f"policy {span.version}, newer than policy {version} that is trained; pass "
            "Trainer.step the version that the engine has for the trainer's weights"
        )
    return (
        version - span.version,
        span.cache_version is not None and span.cache_version < span.version,
    )


def rows_of(
    trajectory: Trajectory, index: int, scale: TokenWeights | None = None, *, routes: bool = False
) -> list[TrainingRow]:
    """Return the paths of a trajectory with ids that carry loss; each trained
    id is in exactly one of them.

    `scale` has the weights of its ids, those that an agent function gave included
    (`with_turn_weights`); None has only those.
    """
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
                weights=[
                    sample.weights[p] if scale is None else scale.of(*sample.slots[p])
                    for p in places
                ],
                logprobs=[math.nan if logprob is None else logprob for logprob in logprobs],
                trajectory=index,
                media=placements_between(sample.media, 0, places[-1]),
                slots=[sample.slots[place] for place in places],
                routes=routes_of(sample, places[-1]) if routes else None,
            )
        )
    return rows


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
    """Split rows, sorted by length, into forward passes; return their indices. A pass ends before
    it would exceed `micro_tokens` positions, or where the padding for a longer row costs more than
    another pass: `overhead` tokens."""
    pass_cost = max(OVERHEAD_WITH_MEDIA, overhead) if any(row.media for row in rows) else overhead
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


def pack_rows(
    rows: Sequence[TrainingRow],
    passes: Sequence[Sequence[int]],
    device: torch.device | str,
    vision: VisionProcessor | None,
) -> list[MicroBatch]:
    """Build the tensors of passes of padded rows."""
    made = []
    for chosen in passes:
        width = max(len(rows[i].ids) for i in chosen)
        places = {i: line * width + np.arange(len(rows[i].ids)) for line, i in enumerate(chosen)}
        made.append(_make_pass(rows, places, (len(chosen), width), device, vision))
    return made


def tree_micro(
    rows: Sequence[TrainingRow],
    shared: SortedRows,
    lo: int,
    hi: int,
    device: torch.device | str,
    vision: VisionProcessor | None,
) -> MicroBatch:
    """Build one pass over the trie of the sorted rows from `lo` to `hi`."""
    made = build_prefix_tree(shared, lo, hi)
    places = {i: made.places[i] for i in sorted(shared.order[lo:hi])}
    return _make_pass(rows, places, (1, made.tree.size), device, vision, made.tree)


def _make_pass(
    rows: Sequence[TrainingRow],
    places: dict[int, Any],
    shape: tuple[int, int],
    device: torch.device | str,
    vision: VisionProcessor | None,
    tree: PrefixTree | None = None,
) -> MicroBatch:
    """Build the tensors of a pass of shape (B, T); `places` are, by row, its path positions in
    the flattened (B, T)."""
    first_token = list(itertools.accumulate((len(row.places) for row in rows), initial=0))
    size = shape[0] * shape[1]
    ids, positions = np.zeros(size, dtype=np.int64), np.tile(np.arange(shape[1]), shape[0])
    # An image is in the pass once per position in the trie, in layout order.
    media: dict[int, tuple[Media, tuple[int, ...]]] = {}
    multimodal = []
    for i, at in places.items():
        ids[at], positions[at] = rows[i].ids, np.arange(len(at))
        if not rows[i].media:
            continue
        if vision is None:
            raise UsageError(
                "trajectories contain images, but the trainer has no pixels; pass "
                "pixels=Rollout(...).pixels to Trainer"
            )
        for block in rows[i].media:
            if found := tuple(
                int(at[k])
                for k in range(block.start, block.end)
                if rows[i].ids[k] in vision.pad_ids
            ):
                media[found[0]] = (block.media, found)
        if (own := vision.positions(len(at), rows[i].media)) is not None:
            multimodal.append((at, own))
    if multimodal:
        positions = np.broadcast_to(positions, (3, size)).copy()
        for at, own in multimodal:
            positions[:, at] = own
    routed = [(routes, at) for i, at in places.items() if (routes := rows[i].routes) is not None]

    def long(numbers: Any) -> Tensor:
        return torch.as_tensor(numbers, dtype=torch.long).to(device)

    return MicroBatch(
        ids_bt=long(ids.reshape(shape)),
        positions=long(
            positions[None, : shape[1]] if positions.ndim == 1 else positions.reshape(3, *shape)
        ),
        before_m=long(
            np.concatenate([at[np.asarray(rows[i].places) - 1] for i, at in places.items()])
        ),
        targets_m=long([target for i in places for target in rows[i].targets]),
        tokens_m=long(
            np.concatenate([np.arange(first_token[i], first_token[i + 1]) for i in places])
        ),
        media=tuple(media[first] for first in sorted(media)),
        tree=tree,
        routes=pack_routes(routed, size, device) if routed else None,
    )


def shared_prefixes(rows: Sequence[TrainingRow]) -> SortedRows:
    """Sort rows by prefix. At image placeholders, rows share a prefix if the pixels are equal, with
    routing replay if the experts are equal too."""
    keys = [ids_with_media_keys(row.ids, row.media) if row.media else row.ids for row in rows]
    routed = any(row.routes is not None for row in rows)
    return SortedRows.of(keys_with_routes(keys, [row.routes for row in rows]) if routed else keys)


def split_minibatches(credits: Sequence[Credit], parts: int, seed: str) -> list[list[Credit]]:
    """Split credits into at most `parts` minibatches of complete trajectories by a seeded shuffle;
    each keeps canonical order. Only credits that carry loss are dealt, so none is empty."""
    trained = [credit for credit in credits if credit.reason is None and credit.tokens]
    if parts <= 1:
        return [trained] if trained else []
    order = list(range(len(trained)))
    random.Random(seed).shuffle(order)
    dealt = [sorted(order[part::parts]) for part in range(parts)]
    return [[trained[index] for index in part] for part in dealt if part]


MARGIN = 1.1
"""Minimum saving of a tree; estimates are no more accurate."""


@dataclass(frozen=True, slots=True)
class BatchingChoice:
    """Choice for one batch, and its reason."""

    tree: bool
    tokens: int
    """Tokens of all rows, without padding."""
    unique: int
    """Of those, tokens counted once if rows share them."""
    gain: float
    """Estimated cost of rows / cost of the tree; 0 if not estimated."""
    why: str


class BatchPacker:
    """Packs rows into passes by `train.batching`. `decoder` is None if the model does not expose
    it; raise `ConfigError` for `tree` with one whose attention cannot follow a tree."""

    def __init__(self, batching: Batching, decoder: nn.Module | None) -> None:
        self.batching = batching
        self.why_not = ""
        """Why trees are not possible."""
        self.choices: list[BatchingChoice] = []
        """Choices for the step's batches, in order."""
        self._reported = False
        self.cost_model: CostModel | None = None
        """None if trees are not possible."""
        if batching == "rows":
            self.why_not = 'train.batching = "rows"'
        elif decoder is None:
            self.why_not = "the model does not expose its decoder separately from its head"
        else:
            self.why_not = install_tree_attention(decoder)
        if self.why_not and batching == "tree":
            raise ConfigError(
                f'train.batching = "tree" is not possible with this model: {self.why_not}; use '
                '"auto"'
            )
        self.overhead: float = OVERHEAD_TOKENS
        """Cost of one more pass of rows, in tokens."""
        if decoder is not None:
            if not self.why_not:
                self.cost_model = CostModel.of(decoder)
            if next(decoder.parameters()).device.type != "cpu":
                with suppress(AttributeError):  # not a transformer with heads
                    costs = CostModel.of(decoder)
                    self.overhead = costs.once / costs.token

    def pack(
        self,
        rows: Sequence[TrainingRow],
        micro_tokens: int,
        device: torch.device | str,
        vision: VisionProcessor | None,
    ) -> list[MicroBatch]:
        """Pack rows into passes of at most `micro_tokens` positions: padded, or
        unique ones of a tree."""
        passes = row_passes(rows, micro_tokens, self.overhead)
        if self.cost_model is None or not rows:
            size = sum(len(row.ids) for row in rows)
            self.choices.append(BatchingChoice(False, size, size, 0.0, self.why_not))
            return pack_rows(rows, passes, device, vision)
        shared = shared_prefixes(rows)
        ranges, cost = split_passes(shared, self.cost_model, micro_tokens)
        shapes = [(len(chosen), max(len(rows[i].ids) for i in chosen)) for chosen in passes]
        gain = self.cost_model.rows(shapes) / cost
        tree = self.batching == "tree" or gain >= MARGIN
        tokens, unique = sum(shared.lengths), shared.unique(0, len(rows))
        why = (
            f"{unique} of {tokens} tokens are unique; a tree is estimated to cost "
            f"{1 / gain:.2f} times the cost of rows"
        )
        self.choices.append(BatchingChoice(tree, tokens, unique, gain, why))
        if not tree:
            return pack_rows(rows, passes, device, vision)
        return [tree_micro(rows, shared, lo, hi, device, vision) for lo, hi in ranges]

    def pack_plainly(
        self,
        rows: Sequence[TrainingRow],
        micro_tokens: int,
        device: torch.device | str,
        vision: VisionProcessor | None,
    ) -> list[MicroBatch]:
        """Pack rows as `pack` does without a tree; `figures` does not count them."""
        return pack_rows(rows, row_passes(rows, micro_tokens, self.overhead), device, vision)

    def start_step(self) -> None:
        """Start a step: `figures` and `summary` cover the batches from here on."""
        self.choices.clear()

    def summary(self) -> str:
        """Describe the choice for the step's first batch in one sentence; empty if there is none or
        after the first call."""
        if self._reported or not self.choices:
            return ""
        self._reported = True
        if self.choices[0].tree:
            return f"batching: shared prefixes are computed once, as a tree: {self.choices[0].why}"
        return f"batching: rows are computed separately, not as a tree: {self.choices[0].why}"

    def figures(self) -> dict[str, float]:
        """Return the shares of batches that are trees and of unique tokens, and the mean estimated
        cost of rows / of trees."""
        choices = self.choices
        if not choices:
            return {}
        estimated = [choice.gain for choice in choices if choice.gain]
        figures = {"tree_share": sum(choice.tree for choice in choices) / len(choices)}
        if estimated:
            figures["tree_gain"] = sum(estimated) / len(estimated)
            figures["tree_unique_share"] = sum(choice.unique for choice in choices) / sum(
                choice.tokens for choice in choices
            )
        return figures
