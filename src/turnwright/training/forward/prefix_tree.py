"""Prefix trees over rows of ids: layout, cost and attention.

Rows are sorted by their keys, so their lengths and the common prefix of neighbors define a trie.
Its tokens are laid out depth first, the longest branch of a node first. Then

- the descendants of a token follow it directly, so "k is an ancestor of q, or q itself"
  is ``k <= q < ends[k]``;
- a node, its first child, that one's first child and so on are contiguous, a *chain*, and
  attend to each other as in a row;
- all other branches of a node are contiguous too and attend to the chain's tokens up to that node:
  a *side branch*, one rectangle of attention without a mask.

So attention over a trie is one causal call per chain and one plain call per branching node, at any
depth, and no key is copied.

A pass, forward and backward, is estimated in multiplications of one forward pass of the decoder:

    rows = sum over passes of  B * T * (matrices + around) + layers * (B * T (T + 1) / 2 * pair + PASS)
    tree = sum over passes of  U * (matrices + around)     + layers * (pairs * pair + calls * CALL + PASS)

B rows padded to T; U tokens of the trie, `pairs` of a query and a key in it, `calls` chains and
side branches. `matrices` is the number of matrix elements per token (of experts, the share the
token is routed to). `around` is the cost of its norms and activations, ``AROUND * layers * width``;
`pair` is ``PAIR * 2 * query heads * head size``. The head costs both the same and is omitted. A
tree is chosen if ``tree * MARGIN <= rows``.
"""  # noqa: E501

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from turnwright.engines.local.mixed_precision import plain_products
from turnwright.errors import ModelError
from turnwright.training.forward.path_attention import (
    attend_paths,
    batch_paths,
    paths_of,
    plan_paths,
)
from turnwright.training.forward.tree import BranchAttention, PrefixTree


class PrefixNode(NamedTuple):
    """Node of the trie: a run of consecutive tokens that the sorted rows from
    `first` to `last` share."""

    first: int
    last: int
    begin: int
    """Path position of its first token."""
    end: int
    start: int
    """Index of its first token in the layout."""
    level: int
    """Its depth, from 1."""
    opens: bool
    """Whether it starts a chain."""

    @property
    def stop(self) -> int:
        """End of its tokens in the layout."""
        return self.start + self.end - self.begin


@dataclass(frozen=True, slots=True)
class SortedRows:
    """Rows in the order of their keys."""

    order: tuple[int, ...]
    """Row indices, sorted."""
    lengths: tuple[int, ...]
    """Row lengths in that order."""
    common: tuple[int, ...]
    """Number of leading keys each row shares with the one before it; 0 for the first."""

    @classmethod
    def of(cls, keys: Sequence[Sequence[int]]) -> SortedRows:
        """Sort rows by their keys; equal rows keep their order."""
        arrays = [np.asarray(row, dtype=np.int64) for row in keys]
        # Big-endian bytes sort like the (unsigned) numbers; any order that
        # groups prefixes would do.
        encoded = [array.astype(">i8").tobytes() for array in arrays]
        order = sorted(range(len(keys)), key=lambda i: (encoded[i], i))
        common = [0][: len(keys)]
        for a, b in pairwise(order):
            size = min(len(arrays[a]), len(arrays[b]))
            differ = np.flatnonzero(arrays[a][:size] != arrays[b][:size])
            common.append(int(differ[0]) if len(differ) else size)
        return cls(tuple(order), tuple(len(keys[i]) for i in order), tuple(common))

    def unique(self, lo: int, hi: int) -> int:
        """Count the tokens of the trie over sorted rows `lo` to `hi`."""
        return self.lengths[lo] + sum(self.lengths[i] - self.common[i] for i in range(lo + 1, hi))


class PackedPrefixTree(NamedTuple):
    """Prefix tree over some rows, laid out."""

    tree: PrefixTree
    places: dict[int, Any]
    """Row index -> int64 array: layout index of the token at each path position."""


def build_prefix_tree(shared: SortedRows, lo: int, hi: int) -> PackedPrefixTree:
    """Build the trie over the sorted rows from `lo` to `hi`."""
    nodes = _nodes(shared, lo, hi)
    places = {shared.order[i]: np.empty(shared.lengths[i], dtype=np.int64) for i in range(lo, hi)}
    for node in nodes:
        for i in range(node.first, node.last):
            places[shared.order[i]][node.begin : node.end] = np.arange(node.start, node.stop)
    return PackedPrefixTree(_tree(nodes), places)


def _nodes(shared: SortedRows, lo: int, hi: int) -> list[PrefixNode]:
    """Return the nodes in layout order."""
    common, lengths = np.asarray(shared.common), np.asarray(shared.lengths)
    nodes: list[PrefixNode] = []
    # Rows `first` to `last` agree up to `depth` and belong to one node, which extends to where the
    # first of them differs or ends. The root has no tokens; its children share nothing.
    todo = [(lo, hi, 0, 0, True)]
    while todo:
        first, last, depth, level, opens = todo.pop()
        end = int(common[first + 1 : last].min(initial=lengths[first])) if level else 0
        if level:
            nodes.append(
                PrefixNode(first, last, depth, end, nodes[-1].stop if nodes else 0, level, opens)
            )
        cuts = [
            first,
            *(first + 1 + np.flatnonzero(common[first + 1 : last] == end)).tolist(),
            last,
        ]
        below = [(a, b) for a, b in pairwise(cuts) if lengths[b - 1] > end]
        below.sort(key=lambda rows: -int(lengths[rows[0] : rows[1]].max()))
        children = [
            (a, b, end, level + 1, not level or number > 0) for number, (a, b) in enumerate(below)
        ]
        todo += reversed(children)
    return nodes


def _tree(nodes: Sequence[PrefixNode]) -> PrefixTree:
    size = nodes[-1].stop
    ends_t = np.empty(size, dtype=np.int64)
    chains: list[tuple[int, int]] = []
    branches: list[BranchAttention] = []
    ends = [0] * len(nodes)  # end of each node's descendants
    open_at: list[int] = []
    for number in range(len(nodes)):
        while open_at and nodes[open_at[-1]].level >= nodes[number].level:
            ends[open_at.pop()] = nodes[number].start
        open_at.append(number)
    for number in open_at:
        ends[number] = size
    chain = 0
    for number, node in enumerate(nodes):
        ends_t[node.start : node.stop] = ends[number]
        if node.opens:
            chain = node.start
            chains.append((chain, node.stop))
        else:
            chains[-1] = (chain, node.stop)
        if node.stop < ends[number] > ends[number + 1]:
            branches.append(BranchAttention(ends[number + 1], ends[number], chain, node.stop))
    return PrefixTree(size, ends_t, tuple(chains), tuple(branches))


PASS = {"cpu": 3.5e7, "cuda": 1.3e11}
"""Cost of a forward pass per layer, besides its tokens: launching its kernels. On the CPU of
benchmarks/results 1.6 to 2.3 ms, where a multiplication takes 0.05 ns of a pass forward and
backward; on an H200 3.8 ms, at 3.5e13 of them a second in bfloat16 (a model of 0.4 billion numbers,
beside other programs)."""
CALL = 1.8e6
"""Cost of one more attention call per layer: 90 us on that CPU. On CUDA the
full tree is one call."""
TREE_PASS = 0.3
"""Cost of a tree's pass beyond that of a pass of rows, relative to it, on CUDA:
FlexAttention's call."""
AROUND = 1800
"""Cost of norms, rotary positions and activations of a token, per unit of width and
layer: 0.09 us on that CPU."""
PAIR = 2.0
"""Cost of a multiplication in attention relative to one in a matrix."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Costs of a token, of a (query, key) pair, of an attention call and of a pass."""

    token: float
    pair: float
    call: float
    once: float
    tree_once: float = 0.0
    """Cost of a tree's pass beyond that of another."""

    @classmethod
    def of(cls, decoder: nn.Module) -> CostModel:
        """Estimate it for a decoder of transformers on its device."""
        device = next(decoder.parameters()).device.type
        config: Any = decoder.config
        layers, width = int(config.num_hidden_layers), int(config.hidden_size)
        heads = int(config.num_attention_heads)
        head = int(getattr(config, "head_dim", None) or width // heads)
        routed = int(getattr(config, "num_experts_per_tok", None) or 1)
        matrices = 0.0
        for name, parameter in decoder.named_parameters():
            if parameter.ndim == 2 and "embed" not in name:
                matrices += parameter.numel()
            elif parameter.ndim == 3:  # experts
                matrices += parameter.numel() * min(1.0, routed / parameter.shape[0])
        once = PASS.get(device, PASS["cuda"]) * layers
        return cls(
            token=matrices + AROUND * layers * width,
            pair=PAIR * 2 * heads * head * layers,
            call=CALL * layers if device == "cpu" else 0.0,
            once=once,
            tree_once=0.0 if device == "cpu" else TREE_PASS * once,
        )

    def rows(self, shapes: Sequence[tuple[int, int]]) -> float:
        """Estimate passes of (B, T) padded rows."""
        tokens = sum(b * t for b, t in shapes)
        pairs = sum(b * t * (t + 1) / 2 for b, t in shapes)
        return tokens * self.token + pairs * self.pair + len(shapes) * self.once

    def tree(self, tokens: int, pairs: float, calls: int) -> float:
        """Estimate one pass of a trie."""
        return (
            tokens * self.token + pairs * self.pair + calls * self.call + self.once + self.tree_once
        )


def split_passes(
    shared: SortedRows, cost_model: CostModel, micro_tokens: int
) -> tuple[list[tuple[int, int]], float]:
    """Split sorted rows into ranges of minimum total cost, each of at most `micro_tokens` unique
    tokens or a row; return both.

    A split recomputes the prefix that both sides share. So splits fall between tasks first, then at
    short prefixes. Dynamic programming over the rows' order finds the minimum.
    """
    count = len(shared.lengths)
    # Cost that a row adds to its pass: tokens, pairs, and calls (its chain, and the
    # side branch it opens).
    pairs = [length * (length + 1) / 2 for length in shared.lengths]
    added = [
        (
            (length - common) * cost_model.token
            + (own - common * (common + 1) / 2) * cost_model.pair
            + cost_model.call * (2 if common else 1)
        )
        for length, common, own in zip(shared.lengths, shared.common, pairs, strict=True)
    ]
    single = [
        cost_model.tree(length, own, 1) for length, own in zip(shared.lengths, pairs, strict=True)
    ]
    before = list(accumulate(added, initial=0.0))
    tokens = list(
        accumulate(
            (length - common for length, common in zip(shared.lengths, shared.common, strict=True)),
            initial=0,
        )
    )
    best, where, lowest = [0.0], [0], 0
    # The last pass begins where `best + single - before` is smallest, of the starts from which it
    # is not too long. The first of them only moves up, and a start that costs no less than a later
    # one is never taken again: each row enters the window once.
    window: deque[tuple[float, int]] = deque()
    for end in range(1, count + 1):
        candidate = best[-1] + single[end - 1] - before[end]
        while window and window[-1][0] >= candidate:
            window.pop()
        window.append((candidate, end - 1))
        while (
            lowest < end - 1
            and shared.lengths[lowest] + tokens[end] - tokens[lowest + 1] > micro_tokens
        ):
            lowest += 1
        while window[0][1] < lowest:
            window.popleft()
        minimum, begin = window[0]
        best.append(minimum + before[end])
        where.append(begin)
    ranges: list[tuple[int, int]] = []
    end = count
    while end:
        ranges.append((where[end], end))
        end = where[end]
    return ranges[::-1], best[-1]


BLOCK = 128
"""Queries and keys per block: FlexAttention's own size."""


def block_mask(tree: PrefixTree, device: torch.device | str) -> Any:
    """Return the BlockMask [1, 1, T, T] of a tree, built once per device.

    A token's descendants follow it directly. So a block of keys is partly visible to a later block
    of queries if the furthest end among its keys is after the first query, and fully if the nearest
    end is after the last query.
    """
    from torch.nn.attention.flex_attention import BlockMask

    name = f"flex {device}"
    if name not in tree.cache:
        some, every = _blocks(tree)
        ends_t = torch.from_numpy(tree.ends_t).to(device)

        def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query < ends_t[key])

        partial, full = (_listed(table, device) for table in (some & ~every, every))
        tree.cache[name] = BlockMask.from_kv_blocks(
            *partial, *full, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(tree.size, tree.size)
        )
    return tree.cache[name]


def _blocks(tree: PrefixTree) -> tuple[Any, Any]:
    """Return two tables [query blocks, key blocks]: whether some query sees some key, and
    whether each sees each."""
    count = -(-tree.size // BLOCK)
    spare = count * BLOCK - tree.size
    furthest = np.pad(tree.ends_t, (0, spare)).reshape(count, BLOCK).max(1)
    nearest = np.pad(tree.ends_t, (0, spare)).reshape(count, BLOCK).min(1)
    first = np.arange(count)[:, None] * BLOCK
    earlier = np.tri(count, k=-1, dtype=bool)
    some = (earlier & (furthest[None] > first)) | np.eye(count, dtype=bool)
    return some, earlier & (nearest[None] >= first + BLOCK)


def _listed(table: Any, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Return counts and indices of each query block's key blocks as BlockMask expects
    them, unused indices last."""
    counts = table.sum(1).astype(np.int32)
    indices = np.argsort(~table, axis=1, kind="stable").astype(np.int32)
    return torch.from_numpy(counts)[None, None].to(device), torch.from_numpy(indices)[
        None, None
    ].to(device)


GRAPHS = 128
"""Versions of FlexAttention that may be compiled in a process."""


@cache
def _compiled() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    # By default torch gives up after eight versions of a function, and then computes all scores
    # without a kernel. A model needs six: one, two or more blocks, with and without gradients.
    # Another model with other heads, six more.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
    # Passes have many lengths; without `dynamic` each would be a version of its own.
    return torch.compile(flex_attention, dynamic=True)  # type: ignore[no-any-return]


def flex_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tree: PrefixTree,
    scale: float | None,
    run: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Attend to ancestors with FlexAttention, compiled by default; all tensors are
    [1, their heads, T, D]."""
    run = _compiled() if run is None else run
    more = {"scale": scale, "enable_gqa": query.shape[1] != key.shape[1], "kernel_options": _KERNEL}
    return run(query, key, value, block_mask=block_mask(tree, query.device), **more)


_KERNEL = {"FORCE_USE_FLEX_ATTENTION": True}
"""Below 128 queries torch takes its kernel for decoding, which has no variant for several
query heads per key head."""
NAME = "turnwright_tree"
"""Name of this attention in transformers."""
FLASH: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
"""CPU kernel of scaled_dot_product_attention, which also returns the log-sum-exp;
None if torch lacks it."""
REFUSED = ("sliding_window", "softcap", "s_aux", "position_bias")
"""Extensions of some models' attention that are not supported here."""
FLASH_BACK: Any = getattr(
    torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None
)


class TreeAttention(torch.autograd.Function):  # type: ignore[misc]
    """Attention of a tree's tokens, one call per chain and per side branch.

    A query's parts are combined by their log-sum-exp, as in FlashAttention (arXiv 2205.14135,
    section 3.1): with s = logaddexp(s_1, s_2), out = exp(s_1 - s) out_1 + exp(s_2 - s) out_2. In
    the backward pass each part gets the combined output and log-sum-exp, so its probabilities and
    gradient are those of the full attention.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, tree: PrefixTree, scale: float | None
    ) -> Tensor:
        """Attend from [G, K, T, D], G query heads per key head, to [1, K, T, D]; [T, K, G, D] of
        the result is contiguous."""
        shared, heads, size, width = query.shape
        wide = torch.promote_types(query.dtype, torch.float32)
        out = query.new_empty((size, heads, shared, width), dtype=wide).permute(2, 1, 0, 3)
        sums = query.new_empty((size, heads, shared), dtype=wide).permute(2, 1, 0)
        for start, end in tree.chains:
            here = slice(start, end)
            out[:, :, here], sums[:, :, here] = _forward(query, key, value, here, here, True, scale)
        for first, last, start, end in tree.branches:
            block = slice(first, last)
            side, side_sums = _forward(query, key, value, block, slice(start, end), False, scale)
            block_out, block_sums = out[:, :, block], sums[:, :, block]
            block_out.lerp_(side.to(wide), torch.sigmoid(side_sums - block_sums)[..., None])
            torch.logaddexp(block_sums, side_sums, out=block_sums)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.tree, ctx.scale = tree, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of query, key and value."""
        query, key, value, out, sums = ctx.saved_tensors
        tree: PrefixTree = ctx.tree
        d_query, d_key, d_value = (
            torch.empty_like(part, dtype=sums.dtype) for part in (query, key, value)
        )
        parts = [(slice(s, e), slice(s, e), True) for s, e in tree.chains]
        parts += [(slice(h.first, h.last), slice(h.key, h.keys), False) for h in tree.branches]
        for rows, keys, causal in parts:
            many = (query.shape[0], -1, -1, -1)
            dq, dk, dv = FLASH_BACK(
                grad[:, :, rows],
                query[:, :, rows],
                key[:, :, keys].expand(many),
                value[:, :, keys].expand(many),
                out[:, :, rows],
                sums[:, :, rows],
                0.0,
                causal,
                attn_mask=None,
                scale=ctx.scale,
            )
            if causal:  # chains hold every token once
                d_query[:, :, rows] = dq
                d_key[:, :, keys] = dk.sum(0, keepdim=True, dtype=sums.dtype)
                d_value[:, :, keys] = dv.sum(0, keepdim=True, dtype=sums.dtype)
            else:
                d_query[:, :, rows] += dq
                d_key[:, :, keys] += dk.sum(0, keepdim=True, dtype=sums.dtype)
                d_value[:, :, keys] += dv.sum(0, keepdim=True, dtype=sums.dtype)
        return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), None, None


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: slice,
    keys: slice,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    many = (query.shape[0], -1, -1, -1)
    k, v = key[:, :, keys].expand(many), value[:, :, keys].expand(many)
    found: tuple[Tensor, Tensor] = FLASH(
        query[:, :, rows], k, v, 0.0, causal, attn_mask=None, scale=scale
    )
    return found


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    turnwright_tree: PrefixTree | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend with transformers' signature, [1, their heads, T, D] to [1, T, query heads, D] and no
    attention weights; without a tree, call scaled_dot_product_attention."""
    if turnwright_tree is None:
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return sdpa(module, query, key, value, attention_mask, scaling=scaling, **kwargs)  # type: ignore[no-any-return]
    for name in REFUSED:
        if kwargs.get(name) is not None:
            raise ModelError(f"{type(module).__name__} uses '{name}'")
    tree, heads, width = turnwright_tree, key.shape[1], value.shape[3]
    if width != key.shape[3]:
        raise ModelError(
            f"{type(module).__name__} has key size {key.shape[3]} and value size {width}"
        )
    tree.cache["layers"] = tree.cache.get("layers", 0) + 1
    if query.device.type != "cpu":
        return flex_attend(query, key, value, tree, scaling).transpose(1, 2), None
    if "paths" not in tree.cache:
        pair = PAIR * 2 * query.shape[1] * width
        tree.cache["paths"] = plan_paths(tree, pair=pair, call=CALL, width=2 * heads * width)
    if tree.cache["paths"] is not None:
        return attend_paths(query, key, value, tree.cache["paths"], scaling), None
    grouped = query.view(heads, -1, *query.shape[2:]).transpose(0, 1)
    out = TreeAttention.apply(grouped, key, value, tree, scaling)
    return out.permute(2, 1, 0, 3).reshape(1, tree.size, -1, width), None


AttentionInterface.register(NAME, attend)


PROOF = ((0, 1, 2, 3, 4, 5), (0, 1, 2, 5, 1), (0, 1, 2, 5, 2), (0, 3, 1))
"""Rows on which tree attention is compared with row attention."""
PROOF_TAIL = (1, 2) * 80
"""Makes a row longer than a block of FlexAttention, whose kernels are then those of a run."""
PROOF_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4}
"""Maximum difference of a hidden state, relative to the largest number in it; norms are in float32
at best. 0.1 for narrower types."""


def install_tree_attention(decoder: nn.Module) -> str:
    """Make a decoder's attention follow a pass's tree, if it has one; return why that is not
    possible, empty on success.

    The attention's name is in the config, which models created from one config share, so
    this decoder gets a copy.
    """
    config = getattr(decoder, "config", None)
    name = getattr(config, "_attn_implementation", None)
    if config is None or name is None:
        return f"{type(decoder).__name__} does not use transformers' attention"
    if name not in ("sdpa", NAME):
        return f"its attention is {name!r}, only 'sdpa' is replaced"
    if FLASH is None or FLASH_BACK is None:
        return "this torch has no flash attention for CPUs"
    before = [
        (module, module.config)
        for module in decoder.modules()
        if getattr(module, "config", None) is config
    ]
    own = copy.copy(config)
    own._attn_implementation = NAME
    for module, _ in before:
        module.config = own
    with plain_products(decoder):  # rounding would hide what differs
        reason = _difference(decoder)
    if reason:
        for module, original in before:
            module.config = original
    return reason


def _difference(decoder: nn.Module) -> str:
    """Describe how tree attention differs from that of the rows; empty if it does not."""
    first = next(decoder.parameters())
    on_cpu = first.device.type == "cpu"
    rows = PROOF if on_cpu else (PROOF[0] + PROOF_TAIL, *PROOF[1:])
    made = build_prefix_tree(SortedRows.of(rows), 0, len(rows))
    try:
        with torch.no_grad():
            ids_t, positions_t = (
                np.empty(made.tree.size, dtype=np.int64),
                np.empty(made.tree.size, dtype=np.int64),
            )
            for number, row in enumerate(rows):
                ids_t[made.places[number]], positions_t[made.places[number]] = (
                    row,
                    np.arange(len(row)),
                )
            given = tuple(
                torch.from_numpy(array)[None].to(first.device) for array in (ids_t, positions_t)
            )
            ways: list[dict[str, Any]] = [{}]
            if on_cpu:  # trees of a run go either way
                batches = batch_paths(
                    made.tree, paths_of(made.tree), [range(len(made.tree.chains))]
                )
                ways = [{"paths": None}, {"paths": batches}]
            got = []
            for way in ways:
                made.tree.cache.clear()
                made.tree.cache.update(way)
                got.append(_hidden(decoder, *given, turnwright_tree=made.tree))
            attended = made.tree.cache.get("layers", 0)
            largest = 0.0
            for number, row in enumerate(rows):
                ids_bt = torch.tensor([row], device=first.device)
                expected = _hidden(
                    decoder, ids_bt, torch.arange(len(row), device=first.device)[None]
                )
                for hidden in got:
                    actual = hidden[0, torch.from_numpy(made.places[number]).to(first.device)]
                    largest = max(
                        largest, float((expected[0] - actual).abs().max() / expected.abs().max())
                    )
        if not on_cpu and (trained := [p for p in decoder.parameters() if p.requires_grad]):
            loss = _hidden(decoder, *given, turnwright_tree=made.tree).sum()
            torch.autograd.grad(loss, trained[0], allow_unused=True)  # another kernel
    except (ModelError, TypeError) as error:
        return str(error)
    # compiling FlexAttention raises nearly anything: no compiler, a size without a kernel
    except Exception as error:
        if on_cpu:
            raise
        return f"FlexAttention does not run here: {' '.join(str(error).split())[:200]}"
    layers = getattr(decoder.config, "num_hidden_layers", None)
    if attended != layers:
        return f"{attended} of its {layers} layers look up their attention by name"
    if not largest <= PROOF_TOLERANCE.get(first.dtype, 0.1):
        return f"hidden states of a small tree differ from those of its rows by {largest:.2g}"
    return ""


def _hidden(decoder: nn.Module, ids_bt: Tensor, positions_1t: Tensor, **more: Any) -> Tensor:
    output = decoder(
        input_ids=ids_bt, position_ids=positions_1t, attention_mask=None, use_cache=False, **more
    )
    hidden: Tensor = output.last_hidden_state
    return hidden
