"""Prefix trees over rows of ids: layout, cost and attention.

`build_prefix_tree` lays out a tree over sorted rows, `split_passes` decides which rows share one,
`CostModel` what a pass of a tree or of rows costs, and `attend` is the attention that transformers'
layers call (`install_tree_attention`). On CPUs it goes by chain, here (`TreeAttention`), or by path
(`path_attention.py`); on GPUs by FlexAttention.

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

A pass, forward and backward, is estimated in multiplications of one forward pass of the decoder::

    rows = sum over passes of  B * T * (matrices + around)
                               + layers * (B * T (T + 1) / 2 * pair + PASS)
    tree = sum over passes of  U * (matrices + around)
                               + layers * (pairs * pair + calls * CALL + PASS)

B rows padded to T; U tokens of the trie, `pairs` of a query and a key in it, `calls` chains and
side branches. `matrices` is the number of matrix elements per token (of experts, the share the
token is routed to). `around` is the cost of its norms and activations, ``AROUND * layers * width``;
`pair` is ``PAIR * 2 * query heads * head size``. The head costs both the same and is omitted. A
tree is chosen if ``tree * MARGIN <= rows``.
"""

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
    """Node of the trie: a run of consecutive tokens that the sorted rows from `first` to `last`
    share."""

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
        # Big-endian bytes sort like the (unsigned) numbers; any order that groups prefixes would
        # do.
        encoded = [array.astype(">i8").tobytes() for array in arrays]
        order = sorted(range(len(keys)), key=lambda row: (encoded[row], row))

        common = [0] if len(keys) else []
        for row, following in pairwise(order):
            size = min(len(arrays[row]), len(arrays[following]))
            differ = np.flatnonzero(arrays[row][:size] != arrays[following][:size])
            common.append(int(differ[0]) if len(differ) else size)
        return cls(tuple(order), tuple(len(keys[row]) for row in order), tuple(common))

    def unique(self, lo: int, hi: int) -> int:
        """Count the tokens of the trie over sorted rows `lo` to `hi`."""
        added = sum(self.lengths[row] - self.common[row] for row in range(lo + 1, hi))
        return self.lengths[lo] + added


class PackedPrefixTree(NamedTuple):
    """Prefix tree over some rows, laid out."""

    tree: PrefixTree
    places: dict[int, Any]
    """Row index -> int64 array: layout index of the token at each path position."""


def build_prefix_tree(shared: SortedRows, lo: int, hi: int) -> PackedPrefixTree:
    """Build the trie over the sorted rows from `lo` to `hi`."""
    nodes = _nodes(shared, lo, hi)
    places = {
        shared.order[row]: np.empty(shared.lengths[row], dtype=np.int64) for row in range(lo, hi)
    }
    for node in nodes:
        for row in range(node.first, node.last):
            places[shared.order[row]][node.begin : node.end] = np.arange(node.start, node.stop)
    return PackedPrefixTree(_tree(nodes), places)


def _nodes(shared: SortedRows, lo: int, hi: int) -> list[PrefixNode]:
    """Return the nodes in layout order."""
    common = np.asarray(shared.common)
    lengths = np.asarray(shared.lengths)
    nodes: list[PrefixNode] = []

    # Rows `first` to `last` agree up to `depth` and belong to one node, which extends to where the
    # first of them differs or ends. The root has no tokens; its children share nothing.
    todo = [(lo, hi, 0, 0, True)]
    while todo:
        first, last, depth, level, opens = todo.pop()
        end = 0
        if level:
            end = int(common[first + 1 : last].min(initial=lengths[first]))
            start = nodes[-1].stop if nodes else 0
            nodes.append(PrefixNode(first, last, depth, end, start, level, opens))

        # Rows that share no more than the node belong to other children; one that ends here, to
        # none. The longest child continues the chain.
        parting = first + 1 + np.flatnonzero(common[first + 1 : last] == end)
        cuts = [first, *parting.tolist(), last]
        below = [(begin, stop) for begin, stop in pairwise(cuts) if lengths[stop - 1] > end]
        below.sort(key=lambda rows: -int(lengths[rows[0] : rows[1]].max()))
        children = [
            (begin, stop, end, level + 1, not level or number > 0)
            for number, (begin, stop) in enumerate(below)
        ]
        todo += reversed(children)
    return nodes


def _tree(nodes: Sequence[PrefixNode]) -> PrefixTree:
    """Return the attention structure of nodes in layout order."""
    size = nodes[-1].stop

    # A node's descendants end where the next node of its level, or of one above, begins.
    ends = [0] * len(nodes)
    open_nodes: list[int] = []
    for number, node in enumerate(nodes):
        while open_nodes and nodes[open_nodes[-1]].level >= node.level:
            ends[open_nodes.pop()] = node.start
        open_nodes.append(number)
    for number in open_nodes:
        ends[number] = size

    ends_t = np.empty(size, dtype=np.int64)
    chains: list[tuple[int, int]] = []
    branches: list[BranchAttention] = []
    chain_start = 0
    for number, node in enumerate(nodes):
        ends_t[node.start : node.stop] = ends[number]
        if node.opens:
            chain_start = node.start
            chains.append((chain_start, node.stop))
        else:
            chains[-1] = (chain_start, node.stop)

        # Of its descendants, those after the first child's are side branches.
        if node.stop < ends[number] > ends[number + 1]:
            branches.append(BranchAttention(ends[number + 1], ends[number], chain_start, node.stop))
    return PrefixTree(size, ends_t, tuple(chains), tuple(branches))


PASS = {"cpu": 3.5e7, "cuda": 1.3e11}
"""Cost of a forward pass per layer, besides its tokens: launching its kernels. On the CPU of
benchmarks/results 1.6 to 2.3 ms, where a multiplication takes 0.05 ns of a pass forward and
backward; on an H200 3.8 ms, at 3.5e13 of them a second in bfloat16 (a model of 0.4 billion numbers,
beside other programs)."""
CALL = 1.8e6
"""Cost of one more attention call per layer: 90 us on that CPU. On CUDA the full tree is one
call."""
TREE_PASS = 0.3
"""Cost of a tree's pass beyond that of a pass of rows, relative to it, on CUDA: FlexAttention's
call."""
AROUND = 1800
"""Cost of norms, rotary positions and activations of a token, per unit of width and layer: 0.09 us
on that CPU."""
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
        layers = int(config.num_hidden_layers)
        width = int(config.hidden_size)
        heads = int(config.num_attention_heads)
        head_size = int(getattr(config, "head_dim", None) or width // heads)
        routed = int(getattr(config, "num_experts_per_tok", None) or 1)

        matrices = 0.0
        for name, parameter in decoder.named_parameters():
            if parameter.ndim == 2 and "embed" not in name:
                matrices += parameter.numel()
            elif parameter.ndim == 3:
                # Experts, of which a token is routed to some.
                matrices += parameter.numel() * min(1.0, routed / parameter.shape[0])

        once = PASS.get(device, PASS["cuda"]) * layers
        return cls(
            token=matrices + AROUND * layers * width,
            pair=PAIR * 2 * heads * head_size * layers,
            call=CALL * layers if device == "cpu" else 0.0,
            once=once,
            tree_once=0.0 if device == "cpu" else TREE_PASS * once,
        )

    def rows(self, shapes: Sequence[tuple[int, int]]) -> float:
        """Estimate passes of (B, T) padded rows."""
        tokens = sum(rows * length for rows, length in shapes)
        pairs = sum(rows * length * (length + 1) / 2 for rows, length in shapes)
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

    # Cost that a row adds to its pass: tokens, pairs, and calls (its chain, and the side branch it
    # opens); and that of the row alone.
    added: list[float] = []
    single: list[float] = []
    added_tokens: list[int] = []
    for length, common in zip(shared.lengths, shared.common, strict=True):
        pairs = length * (length + 1) / 2
        added.append(
            (length - common) * cost_model.token
            + (pairs - common * (common + 1) / 2) * cost_model.pair
            + cost_model.call * (2 if common else 1)
        )
        single.append(cost_model.tree(length, pairs, 1))
        added_tokens.append(length - common)
    before = list(accumulate(added, initial=0.0))
    tokens = list(accumulate(added_tokens, initial=0))

    # The last pass begins where `best + single - before` is smallest, of the starts from which it
    # is not too long. The first of them only moves up, and a start that costs no less than a later
    # one is never taken again: each row enters the window once.
    best = [0.0]
    begins = [0]
    lowest = 0
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
        begins.append(begin)

    # Back from the end, by where each range begins.
    ranges: list[tuple[int, int]] = []
    end = count
    while end:
        ranges.append((begins[end], end))
        end = begins[end]
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

        partial = _listed(some & ~every, device)
        full = _listed(every, device)
        tree.cache[name] = BlockMask.from_kv_blocks(
            *partial, *full, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(tree.size, tree.size)
        )
    return tree.cache[name]


def _blocks(tree: PrefixTree) -> tuple[Any, Any]:
    """Return two tables [query blocks, key blocks]: whether some query sees some key, and whether
    each sees each."""
    count = -(-tree.size // BLOCK)
    spare = count * BLOCK - tree.size
    furthest = np.pad(tree.ends_t, (0, spare)).reshape(count, BLOCK).max(1)
    nearest = np.pad(tree.ends_t, (0, spare)).reshape(count, BLOCK).min(1)
    first = np.arange(count)[:, None] * BLOCK
    earlier = np.tri(count, k=-1, dtype=bool)
    some = (earlier & (furthest[None] > first)) | np.eye(count, dtype=bool)
    every = earlier & (nearest[None] >= first + BLOCK)
    return some, every


def _listed(table: Any, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Return counts and indices of each query block's key blocks as BlockMask expects them, unused
    indices last."""
    counts = torch.from_numpy(table.sum(1).astype(np.int32))
    indices = torch.from_numpy(np.argsort(~table, axis=1, kind="stable").astype(np.int32))
    return counts[None, None].to(device), indices[None, None].to(device)


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
    return run(
        query,
        key,
        value,
        block_mask=block_mask(tree, query.device),
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        kernel_options=_KERNEL,
    )


_KERNEL = {"FORCE_USE_FLEX_ATTENTION": True}
"""Below 128 queries torch takes its kernel for decoding, which has no variant for several query
heads per key head."""
NAME = "turnwright_tree"
"""Name of this attention in transformers."""
FLASH: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
"""CPU kernel of scaled_dot_product_attention, which also returns the log-sum-exp; None if torch
lacks it."""
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
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        tree: PrefixTree,
        scale: float | None,
    ) -> Tensor:
        """Attend from [G, K, T, D], G query heads per key head, to [1, K, T, D]; [T, K, G, D] of
        the result is contiguous."""
        shared, heads, size, width = query.shape
        wide = torch.promote_types(query.dtype, torch.float32)
        out = query.new_empty((size, heads, shared, width), dtype=wide).permute(2, 1, 0, 3)
        sums = query.new_empty((size, heads, shared), dtype=wide).permute(2, 1, 0)
        for start, end in tree.chains:
            chain = slice(start, end)
            out[:, :, chain], sums[:, :, chain] = _forward(
                query, key, value, chain, chain, True, scale
            )

        # A side branch adds a part to what its queries have from their chain.
        for branch in tree.branches:
            block = slice(branch.first, branch.last)
            keys = slice(branch.key, branch.keys)
            side, side_sums = _forward(query, key, value, block, keys, False, scale)
            block_out = out[:, :, block]
            block_sums = sums[:, :, block]
            block_out.lerp_(side.to(wide), torch.sigmoid(side_sums - block_sums)[..., None])
            torch.logaddexp(block_sums, side_sums, out=block_sums)

        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.tree = tree
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of query, key and value."""
        query, key, value, out, sums = ctx.saved_tensors
        tree: PrefixTree = ctx.tree
        d_query = torch.empty_like(query, dtype=sums.dtype)
        d_key = torch.empty_like(key, dtype=sums.dtype)
        d_value = torch.empty_like(value, dtype=sums.dtype)
        repeated = (query.shape[0], -1, -1, -1)

        parts = [(slice(start, end), slice(start, end), True) for start, end in tree.chains]
        for branch in tree.branches:
            rows = slice(branch.first, branch.last)
            parts.append((rows, slice(branch.key, branch.keys), False))
        for rows, keys, causal in parts:
            dq, dk, dv = FLASH_BACK(
                grad[:, :, rows],
                query[:, :, rows],
                key[:, :, keys].expand(repeated),
                value[:, :, keys].expand(repeated),
                out[:, :, rows],
                sums[:, :, rows],
                0.0,
                causal,
                attn_mask=None,
                scale=ctx.scale,
            )
            if causal:
                # Chains come first and hold every token once.
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
    """Attend from rows to keys; return the output and the log-sum-exp."""
    repeated = (query.shape[0], -1, -1, -1)
    attended: tuple[Tensor, Tensor] = FLASH(
        query[:, :, rows],
        key[:, :, keys].expand(repeated),
        value[:, :, keys].expand(repeated),
        0.0,
        causal,
        attn_mask=None,
        scale=scale,
    )
    return attended


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
    tree = turnwright_tree
    if tree is None:
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return sdpa(module, query, key, value, attention_mask, scaling=scaling, **kwargs)  # type: ignore[no-any-return]

    for name in REFUSED:
        if kwargs.get(name) is not None:
            raise ModelError(f"{type(module).__name__} uses '{name}'")
    heads = key.shape[1]
    width = value.shape[3]
    if width != key.shape[3]:
        raise ModelError(
            f"{type(module).__name__} has key size {key.shape[3]} and value size {width}"
        )

    # How many layers came here: a model whose attention was changed has fewer.
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

    The attention's name is in the config, which models created from one config share, so this
    decoder gets a copy.
    """
    config = getattr(decoder, "config", None)
    name = getattr(config, "_attn_implementation", None)
    if config is None or name is None:
        return f"{type(decoder).__name__} does not use transformers' attention"
    if name not in ("sdpa", NAME):
        return f"its attention is {name!r}, only 'sdpa' is replaced"
    if FLASH is None or FLASH_BACK is None:
        return "this torch has no flash attention for CPUs"

    own_config = copy.copy(config)
    own_config._attn_implementation = NAME
    sharing = [module for module in decoder.modules() if getattr(module, "config", None) is config]
    for module in sharing:
        module.config = own_config

    # Rounding would hide what differs.
    with plain_products(decoder):
        reason = _difference(decoder)
    if reason:
        for module in sharing:
            module.config = config
    return reason


def _difference(decoder: nn.Module) -> str:
    """Describe how tree attention differs from that of the rows; empty if it does not."""
    first = next(decoder.parameters())
    on_cpu = first.device.type == "cpu"
    rows = PROOF if on_cpu else (PROOF[0] + PROOF_TAIL, *PROOF[1:])
    packed = build_prefix_tree(SortedRows.of(rows), 0, len(rows))
    try:
        with torch.no_grad():
            inputs = _laid_out(packed, rows, first.device)
            by_tree = _hidden_by_tree(decoder, packed.tree, inputs, on_cpu=on_cpu)
            attended = packed.tree.cache.get("layers", 0)
            largest = _largest_difference(decoder, packed, rows, by_tree)

        # The gradient has another kernel.
        trained = [parameter for parameter in decoder.parameters() if parameter.requires_grad]
        if not on_cpu and trained:
            loss = _hidden(decoder, *inputs, turnwright_tree=packed.tree).sum()
            torch.autograd.grad(loss, trained[0], allow_unused=True)
    except (ModelError, TypeError) as error:
        return str(error)
    except Exception as error:
        # Compiling FlexAttention raises nearly anything: no compiler, a size without a kernel.
        if on_cpu:
            raise
        return f"FlexAttention does not run here: {' '.join(str(error).split())[:200]}"

    layers = getattr(decoder.config, "num_hidden_layers", None)
    if attended != layers:
        return f"{attended} of its {layers} layers look up their attention by name"
    if not largest <= PROOF_TOLERANCE.get(first.dtype, 0.1):
        return f"hidden states of a small tree differ from those of its rows by {largest:.2g}"
    return ""


def _laid_out(
    packed: PackedPrefixTree, rows: Sequence[Sequence[int]], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the ids and positions of a tree's tokens, (1, T) each."""
    ids_t = np.empty(packed.tree.size, dtype=np.int64)
    positions_t = np.empty(packed.tree.size, dtype=np.int64)
    for number, row in enumerate(rows):
        places = packed.places[number]
        ids_t[places] = row
        positions_t[places] = np.arange(len(row))
    ids_1t = torch.from_numpy(ids_t)[None].to(device)
    positions_1t = torch.from_numpy(positions_t)[None].to(device)
    return ids_1t, positions_1t


def _hidden_by_tree(
    decoder: nn.Module, tree: PrefixTree, inputs: tuple[Tensor, Tensor], *, on_cpu: bool
) -> list[Tensor]:
    """Return the hidden states of a tree's tokens, in each way that trees of a run may go."""
    caches: list[dict[str, Any]] = [{}]
    if on_cpu:
        batches = batch_paths(tree, paths_of(tree), [range(len(tree.chains))])
        caches = [{"paths": None}, {"paths": batches}]

    by_tree: list[Tensor] = []
    for cache_of_way in caches:
        tree.cache.clear()
        tree.cache.update(cache_of_way)
        by_tree.append(_hidden(decoder, *inputs, turnwright_tree=tree))
    return by_tree


def _largest_difference(
    decoder: nn.Module,
    packed: PackedPrefixTree,
    rows: Sequence[Sequence[int]],
    by_tree: Sequence[Tensor],
) -> float:
    """Compare hidden states of a tree with those of its rows, relative to the largest number in
    these."""
    device = by_tree[0].device
    largest = 0.0
    for number, row in enumerate(rows):
        ids_bt = torch.tensor([row], device=device)
        expected = _hidden(decoder, ids_bt, torch.arange(len(row), device=device)[None])
        places = torch.from_numpy(packed.places[number]).to(device)
        for hidden in by_tree:
            difference = (expected[0] - hidden[0, places]).abs().max() / expected.abs().max()
            largest = max(largest, float(difference))
    return largest


def _hidden(decoder: nn.Module, ids_bt: Tensor, positions_1t: Tensor, **more: Any) -> Tensor:
    output = decoder(
        input_ids=ids_bt, position_ids=positions_1t, attention_mask=None, use_cache=False, **more
    )
    hidden: Tensor = output.last_hidden_state
    return hidden
