"""Token trees: the trie, its attention, and the same loss and gradient as of rows (invariant 5)."""

import itertools
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit.double_precision import Model64
from kit.training import STILL, M, P, branched, chain, distance, gradient, learn, random_groups
from kit.trees import Tree64, ancestors, families, laid, small
from transformers import MistralConfig, MistralForCausalLM, Qwen3ForCausalLM

from turnwright.config import LoraConfig, TrainConfig
from turnwright.errors import ConfigError, TurnwrightError
from turnwright.training import Trainer, add_lora, build_prefix_tree
from turnwright.training.advantages import advantages
from turnwright.training.forward import prefix_tree
from turnwright.training.forward.path_attention import _group, batch_paths, paths_of, plan_paths
from turnwright.training.forward.prefix_tree import (
    NAME,
    CostModel,
    SortedRows,
    _nodes,
    attend,
    block_mask,
    flex_attend,
    install_tree_attention,
    split_passes,
)
from turnwright.types import Group, Task

ROWS = st.lists(st.lists(st.integers(-2, 2), min_size=1, max_size=12), min_size=1, max_size=8)


# The trie.


@given(ROWS)
def test_a_token_sees_its_ancestors_and_nothing_else(rows):
    made = laid(rows)
    sees = ancestors(made)
    order = torch.arange(made.tree.size)
    by_ends = (order[None] <= order[:, None]) & (
        order[:, None] < torch.from_numpy(made.tree.ends_t)[None]
    )
    assert torch.equal(sees, by_ends)
    times = torch.zeros_like(sees, dtype=torch.long)
    for start, end in made.tree.chains:
        times[start:end, start:end] += torch.ones(end - start, end - start, dtype=torch.long).tril()
    for branch in made.tree.branches:
        times[branch.first : branch.last, branch.key : branch.keys] += 1
    assert torch.equal(times, sees.long()), (
        "each pair of query and key is in one chain or branch, once"
    )
    assert made.tree.pairs == int(sees.sum())


@given(ROWS)
def test_what_rows_share_is_there_once(rows):
    made = laid(rows)
    prefixes = {tuple(row[: n + 1]) for row in rows for n in range(len(row))}
    assert made.tree.size == len(prefixes) == SortedRows.of(rows).unique(0, len(rows))
    at = {}
    for number, row in enumerate(rows):
        for depth, place in enumerate(made.places[number].tolist()):
            assert at.setdefault(place, tuple(row[: depth + 1])) == tuple(row[: depth + 1])
    assert sorted(at) == list(range(made.tree.size))
    shared = SortedRows.of(rows)
    nodes = [
        (p.start, tuple(rows[shared.order[p.first]][p.begin : p.end]))
        for p in _nodes(shared, 0, len(rows))
    ]
    assert [start for start, _ in nodes] == [
        0,
        *itertools.accumulate(len(ids) for _, ids in nodes),
    ][:-1]
    # Path-compressed: a node ends where rows differ or one of them ends, so no two could be one.
    assert all(ids for _, ids in nodes)


def test_eleven_hundred_turns_are_no_deeper_than_the_stack():
    trunk, rows = [], []
    for turn in range(1100):
        rows.append([*trunk, 1000 + turn])
        trunk.append(turn)
    made = laid(rows)
    assert made.tree.size == 1099 + 1100


@settings(max_examples=60)
@given(ROWS, st.integers(1, 40), st.floats(0.0, 5.0), st.floats(0.0, 30.0))
def test_the_cuts_into_passes_are_the_cheapest(rows, most, pair, once):
    shared, cost_model, count = (
        SortedRows.of(rows),
        CostModel(token=10.0, pair=pair, call=0.0, once=once),
        len(rows),
    )
    ranges, cost = split_passes(shared, cost_model, most)
    assert [lo for lo, _ in ranges] == [0, *(hi for _, hi in ranges[:-1])]
    assert ranges[-1][1] == count

    def of(lo, hi):
        tree = build_prefix_tree(shared, lo, hi).tree
        return cost_model.tree(tree.size, tree.pairs, 0)

    def fits(lo, hi):
        return hi == lo + 1 or shared.unique(lo, hi) <= most

    assert all(fits(lo, hi) for lo, hi in ranges)
    assert cost == pytest.approx(sum(of(lo, hi) for lo, hi in ranges))
    every = []
    for marks in itertools.product((False, True), repeat=count - 1):
        edges = [0, *(i + 1 for i, mark in enumerate(marks) if mark), count]
        parts = list(itertools.pairwise(edges))
        if all(fits(lo, hi) for lo, hi in parts):
            every.append(sum(of(lo, hi) for lo, hi in parts))
    assert cost == pytest.approx(min(every))


# Attention.


def heads(rows, dtype, grouped=2, width=8, seed=0):
    torch.manual_seed(seed)
    made = laid(rows)
    shapes = (2 * grouped, 2, 2)
    return made, [
        torch.randn(1, n, made.tree.size, width, dtype=dtype, requires_grad=True) for n in shapes
    ]


def dense(made, q, k, v):
    """The same by a mask of all pairs."""
    k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
    score = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~ancestors(made), -torch.inf)
    return (score.softmax(-1) @ v).transpose(1, 2)


@settings(max_examples=60, deadline=None)
@given(
    ROWS, st.sampled_from((1, 2)), st.none() | st.lists(st.integers(0, 3), min_size=96, max_size=96)
)
def test_a_call_for_each_chain_and_any_batches_of_paths_are_masked_attention(
    rows, grouped, batches
):
    made, parts = heads(rows, torch.float64, grouped)
    made.tree.cache["paths"] = None
    if batches is not None:
        split = [
            [c for c in range(len(made.tree.chains)) if batches[c] == number] for number in range(4)
        ]
        made.tree.cache["paths"] = batch_paths(
            made.tree, paths_of(made.tree), [group for group in split if group]
        )
    weights = torch.randn(1, made.tree.size, 2 * grouped, 8, dtype=torch.float64)
    found = []
    for out in (
        attend(torch.nn.Identity(), *parts, None, turnwright_tree=made.tree)[0],
        dense(made, *parts),
    ):
        found.append((out, *torch.autograd.grad((out * weights).sum(), parts)))
    for mine, theirs in zip(*found, strict=True):
        assert (mine - theirs).abs().max() < 1e-12


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=20),
    st.floats(0.0, 5000.0),
)
def test_groups_of_chains_are_padded_no_more_than_allowed(chains, most):
    sizes, lengths = [size for size, _ in chains], [size + above for size, above in chains]
    groups = _group(sizes, lengths, most)
    assert sorted(itertools.chain(*groups)) == list(range(len(chains)))
    for group in groups:
        padded = len(group) * max(sizes[c] for c in group) * max(lengths[c] for c in group)
        assert padded - sum(sizes[c] * lengths[c] for c in group) <= most


def test_paths_are_taken_where_calls_would_cost_more_than_copies():
    short = laid([[*range(40), n, n + 1, n + 2] for n in range(100, 160)]).tree
    costs = {"pair": 256.0, "call": 1.8e6, "width": 128}
    plan = plan_paths(short, **costs)
    assert sum(len(batch.queries_nq) for batch in plan.batches) == len(short.chains) == 60
    assert len(plan.batches) <= 3
    assert plan_paths(short, **costs | {"call": 0.0}) is None
    assert plan_paths(short, **costs | {"width": 10**6}) is None
    long = laid([[*range(3000), n] for n in range(4000, 4060)]).tree
    assert plan_paths(long, **costs) is None  # its pairs are nearly all of the cost
    deep = laid([[*range(1000), n] for n in range(4000, 4060)]).tree
    assert (
        plan_paths(deep, **costs | {"pair": 1.0}) is None
    )  # 60 copies of 1,000 keys for 1,060 tokens


@pytest.mark.parametrize("batched", [False, True])
def test_in_bfloat16_the_parts_are_put_together_in_float32(batched):
    trunk = list(range(100))
    rows = [trunk[: 10 * n] + [1000 + n] * 20 for n in range(1, 10)]
    made, parts = heads(rows, torch.float64)
    every = [range(len(made.tree.chains))]
    made.tree.cache["paths"] = (
        batch_paths(made.tree, paths_of(made.tree), every) if batched else None
    )
    exact = dense(made, *parts)
    narrow = [part.detach().bfloat16().requires_grad_() for part in parts]
    out = attend(torch.nn.Identity(), *narrow, None, turnwright_tree=made.tree)[0]
    own = dense(made, *narrow)
    assert out.dtype == torch.bfloat16
    mine = torch.autograd.grad(out.sum(), narrow)
    theirs = torch.autograd.grad(exact.sum(), parts)
    out, exact, own = out.detach(), exact.detach(), own.detach()
    assert distance(out.double(), exact) < 1.2 * distance(own.double(), exact) + 1e-4
    assert all(distance(a.double(), b) < 2e-2 for a, b in zip(mine[1:], theirs[1:], strict=True))


def long_rows():
    trunk = list(range(600))
    return [
        trunk[:300] + [1000] * 130,
        trunk[:500] + [1001] * 40,
        [*trunk, 7],
        trunk[:128] + [3] * 128,
        [5] * 260,
    ]


def test_blocks_of_flex_attention_are_those_that_torch_finds():
    from torch.nn.attention.flex_attention import create_block_mask

    made = laid(long_rows())
    mask, size = block_mask(made.tree, "cpu"), made.tree.size
    found = create_block_mask(mask.mask_mod, 1, 1, size, size, device="cpu")

    def listed(counts, indices):
        return [
            sorted(row[:n].tolist()) for n, row in zip(counts[0, 0], indices[0, 0], strict=True)
        ]

    assert listed(mask.kv_num_blocks, mask.kv_indices) == listed(
        found.kv_num_blocks, found.kv_indices
    )
    assert listed(mask.full_kv_num_blocks, mask.full_kv_indices) == listed(
        found.full_kv_num_blocks, found.full_kv_indices
    )
    assert int(mask.full_kv_num_blocks.sum()) > 0
    # What has no block is what nobody sees, and what has a whole one is what all see.
    tiles = (
        torch.nn.functional.pad(ancestors(made), (0, -size % 128) * 2)
        .unflatten(0, (-1, 128))
        .unflatten(2, (-1, 128))
    )
    some = [[int(at) for at in row.nonzero()[:, 0]] for row in tiles.any(3).any(1)]
    partial, full = (
        listed(mask.kv_num_blocks, mask.kv_indices),
        listed(mask.full_kv_num_blocks, mask.full_kv_indices),
    )
    assert [sorted(a + b) for a, b in zip(partial, full, strict=True)] == some
    assert block_mask(made.tree, "cpu") is mask


@pytest.mark.filterwarnings("ignore")
def test_flex_attention_is_the_same_attention():
    """Its forward pass, without the compiler; torch has its backward pass on GPUs alone."""
    from torch.nn.attention.flex_attention import flex_attention

    made, parts = heads(long_rows(), torch.float32)
    parts = [part.detach() for part in parts]
    out = flex_attend(*parts, made.tree, None, run=flex_attention).transpose(1, 2)
    assert (
        out - attend(torch.nn.Identity(), *parts, None, turnwright_tree=made.tree)[0]
    ).abs().max() < 1e-5


# Loss and gradient: invariant 5.


@settings(max_examples=15, deadline=None)
@given(
    families(), st.sampled_from(("token", "trajectory", "fixed")), st.sampled_from((1, 25, 100_000))
)
def test_invariant_5_tree_versus_rows_in_float64(made, aggregation, micro_tokens):
    if not any(credit.tokens for credit in advantages(made).trained):
        return
    rows, base = learn(Model64(), made, aggregation=aggregation, batching="rows")
    figures, found = learn(
        Tree64(), made, aggregation=aggregation, batching="tree", micro_tokens=micro_tokens
    )
    assert figures["tree_share"] == 1.0
    assert (found - base).norm() <= 1e-10 * max(base.norm(), 1e-3)
    assert figures["loss"] == pytest.approx(rows["loss"], rel=1e-9, abs=1e-12)


ALGORITHMS = (
    "grpo",
    "dr_grpo",
    "dapo",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "gspo",
    "cispo",
)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(made=families())
def test_invariant_5_every_algorithm_with_ratios_that_differ(algorithm, made):
    """Against the engine's logprobs, so that siblings' equal tokens have ratios, clips and
    corrections of their own."""
    more = {"algorithm": algorithm, "old_logprobs": "engine", "epochs": 2}
    if algorithm in ("grpo", "cispo"):
        more |= {"old_logprobs": "trainer", "correction": "tis"}
    if not any(credit.tokens for credit in advantages(made).trained):
        return
    model = small()
    rows, base = learn(model, made, batching="rows", **more)
    figures, found = learn(model, made, batching="tree", micro_tokens=40, **more)
    assert figures["loss"] == pytest.approx(rows["loss"], abs=1e-5)
    # Where equal replies with opposite advantages cancel, what is left is rounding.
    assert (found - base).norm() <= 5e-6 * max(base.norm(), 1.0)
    for name in ("ratio_mean", "clip_fraction", "entropy", "mismatch_mean"):
        assert figures[name] == pytest.approx(rows[name], abs=1e-5)


def test_equal_tokens_of_siblings_keep_a_ratio_and_an_advantage_each():
    """Two siblings say the same; one was paid. Merged advantages would cancel, but their old
    logprobs differ, and one is clipped."""
    made = [
        Group(
            Task("t", id="t"),
            [
                chain([(P, [1, 2, 3]), (M, [4, 5, 6])], reward=1.0 - n, sample=n, logprob=-9.0 - n)
                for n in range(2)
            ],
        )
    ]
    model = small()
    trainer = Trainer(model, TrainConfig(**STILL, batching="tree", old_logprobs="engine"))
    figures = trainer.step(made, step=0, steps=10).metrics
    micro = trainer._batch(advantages(made).credits, trainer_scale(made)).micros[0]
    assert micro.ids_bt.tolist() == [[1, 2, 3, 4, 5]], "the prompt and the reply are fed once"
    assert micro.before_m.tolist() == [2, 3, 4, 2, 3, 4]
    assert sorted(micro.tokens_m.tolist()) == list(range(6))
    rows, base = learn(model, made, batching="rows", old_logprobs="engine")
    assert 0 < rows["clip_fraction"] < 1
    assert figures["clip_fraction"] == rows["clip_fraction"]
    assert distance(gradient_of(trainer, made), base) < 5e-6


def trainer_scale(made):
    from turnwright.training import LossDenominator

    return LossDenominator.of(advantages(made).credits, "token")


def gradient_of(trainer, made):
    trainer.step(made, step=0, steps=10)
    return gradient(trainer.model)


@settings(max_examples=10, deadline=None)
@given(families(), st.randoms())
def test_order_of_groups_and_siblings_changes_no_bit(made, rng):
    mixed = [
        Group(g.task, rng.sample(g.trajectories, len(g.trajectories)))
        for g in rng.sample(made, len(made))
    ]
    model = small()
    rows, base = learn(model, made, batching="tree", kl=0.0)
    other, found = learn(model, mixed, batching="tree", kl=0.0)
    assert torch.equal(base, found)
    assert rows["loss"] == other["loss"]


def test_a_chain_and_its_five_branches_share_all_that_they_have_in_common(tiny_model):
    made = random_groups(9, groups=3, size=4, turns=4)
    trees = [Group(g.task, [branched(t) for t in g.trajectories]) for g in made]
    chains, base = learn(tiny_model, made, batching="rows")
    figures, found = learn(tiny_model, trees, batching="tree")
    assert distance(found, base) < 5e-6
    assert figures["loss"] == pytest.approx(chains["loss"], abs=1e-5)
    unbranched, _ = learn(tiny_model, made, batching="tree")
    trainer = Trainer(tiny_model, TrainConfig(**STILL, batching="tree"))
    fed = [
        sum(
            m.ids_bt.numel() for m in trainer._batch(advantages(g).credits, trainer_scale(g)).micros
        )
        for g in (made, trees)
    ]
    assert fed[0] == fed[1], "branches of one chain are the chain"
    assert unbranched["tree_unique_share"] > figures["tree_unique_share"]


def test_a_reference_policy_and_scored_passes_follow_the_tree_too(tiny_model):
    made = random_groups(4, groups=2, size=4)
    found = []
    for batching in ("rows", "tree"):
        trainer = Trainer(
            tiny_model, TrainConfig(**STILL, batching=batching, kl=0.1, minibatches=2)
        )
        trainer.reference()
        found.append(
            (
                trainer.step(made, step=0, steps=10).metrics,
                gradient(tiny_model),
                trainer.logprobs(made[0].trajectories),
            )
        )
    assert distance(found[1][1], found[0][1]) < 5e-6
    assert found[1][0]["kl"] == pytest.approx(found[0][0]["kl"], abs=1e-6)
    assert all(np.allclose(a, b, atol=1e-5) for a, b in zip(found[0][2], found[1][2], strict=True))


# Micro-batches, and what is chosen.


@pytest.mark.parametrize("micro_tokens", [1, 40, 100, 4096])
def test_the_budget_counts_unique_tokens(tiny_model, micro_tokens):
    made = random_groups(6, groups=4, size=4)
    trainer = Trainer(tiny_model, TrainConfig(**STILL, batching="tree", micro_tokens=micro_tokens))
    credits = advantages(made).credits
    batch = trainer._batch(credits, trainer_scale(made))
    longest = max(len(s.ids) for c in credits for s in c.trajectory.samples())
    assert all(micro.ids_bt.shape == (1, micro.tree.size) for micro in batch.micros)
    assert all(micro.ids_bt.numel() <= max(micro_tokens, longest) for micro in batch.micros)
    assert sorted(torch.cat([micro.tokens_m for micro in batch.micros]).tolist()) == list(
        range(batch.size)
    )
    assert len(batch.micros) == 1 or micro_tokens < 4096


def wide_group(prompt, count, reply):
    """Siblings on one prompt, whose replies differ from their first id on."""
    shared = (P, [at % 50 for at in range(prompt)])
    rows = [
        chain([shared, (M, [n, *range(reply - 1)])], reward=float(n % 2), sample=n)
        for n in range(count)
    ]
    return [Group(Task("t", id="t"), rows)]


def test_auto_builds_a_tree_where_that_is_estimated_to_pay_and_says_why():
    model = small()
    figures, base = learn(model, wide_group(150, 16, 20))
    assert figures["tree_share"] == 1.0
    assert figures["tree_gain"] > 1.1
    unique = (150 + 16 * 19) / (16 * (150 + 19))
    assert figures["tree_unique_share"] == pytest.approx(unique)
    assert distance(learn(model, wide_group(150, 16, 20), batching="rows")[1], base) < 5e-6
    trainer = Trainer(model, TrainConfig(**STILL))
    trainer.step(wide_group(1, 16, 20), step=0, steps=1)
    assert trainer.layout.summary().startswith("batching: rows are computed separately")
    assert trainer.layout.summary() == ""
    assert learn(model, wide_group(1, 16, 20))[0]["tree_share"] == 0.0


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda: Model64(), "does not use transformers' attention"),
        (lambda: windowed(), "sliding_window"),
        (lambda: eager(), "'eager'"),
        (
            lambda: small(use_sliding_window=True, sliding_window=8, max_window_layers=1),
            "sliding_window",
        ),
    ],
)
def test_models_whose_attention_is_another_keep_their_rows_and_say_why(model, why):
    model, made = model(), wide_group(30, 8, 6)
    names = getattr(getattr(model, "config", None), "_attn_implementation", None)
    trainer = Trainer(model, TrainConfig(**STILL))
    assert trainer.step(made, step=0, steps=1).metrics["tree_share"] == 0.0
    assert why in trainer.layout.why_not
    assert why in trainer.layout.summary()
    assert names == getattr(getattr(model, "config", None), "_attn_implementation", None)
    with pytest.raises(ConfigError, match=r'train.batching = "tree" is not possible'):
        Trainer(model, TrainConfig(batching="tree"))


def windowed():
    sizes = {
        "vocab_size": 60,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    return MistralForCausalLM(
        MistralConfig(**sizes, num_key_value_heads=1, head_dim=16, sliding_window=8)
    ).eval()


def eager():
    model = small()
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize("way", ["attend_paths", "_forward"])
def test_both_ways_of_a_tree_are_proven_on_the_model(way, monkeypatch):
    assert install_tree_attention(small().model) == ""
    attention = getattr(prefix_tree, way)

    def wrong(query, *given):
        found = attention(query, *given)
        return (found[0] * 1.01, found[1]) if way == "_forward" else found * 1.01

    monkeypatch.setattr(prefix_tree, way, wrong)
    assert "differ from those of its rows" in install_tree_attention(small().model)


def test_another_model_of_the_same_config_keeps_its_attention():
    first = small()
    second = Qwen3ForCausalLM(first.config).eval()
    assert second.config is first.config
    ids = torch.arange(8)[None]
    with torch.no_grad():
        before = [model(input_ids=ids).logits for model in (first, second)]
        Trainer(first, TrainConfig())
        assert first.model.config._attn_implementation == NAME
        assert (
            second.model.config._attn_implementation == first.config._attn_implementation == "sdpa"
        )
        assert all(
            torch.equal(model(input_ids=ids).logits, own)
            for model, own in zip((first, second), before, strict=True)
        )


# Gradient checkpointing.


@pytest.mark.parametrize("batching", ["rows", "tree"])
def test_gradient_checkpointing_keeps_less_and_changes_no_bit(batching):
    made = random_groups(4, groups=2, size=4)
    found = []
    for on in (False, True):
        kept = 0

        def pack(tensor):
            nonlocal kept
            kept += tensor.nbytes
            return tensor

        model = small()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            figures, grad = learn(model, made, batching=batching, gradient_checkpointing=on)
        found.append((figures["loss"], grad, kept))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])
    assert found[1][2] < 0.7 * found[0][2]


def test_gradient_checkpointing_of_a_model_without_such_layers_is_refused():
    with pytest.raises(ConfigError, match="gradient_checkpointing"):
        Trainer(Model64(), TrainConfig(gradient_checkpointing=True))


def test_lora_is_trained_along_trees_and_with_checkpointing_to_the_same_bits():
    made = random_groups(4, groups=2, size=4)
    found = {}
    for batching, again in (("rows", False), ("tree", False), ("tree", True)):
        model = small()
        add_lora(model, LoraConfig(rank=4), seed=1)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # begins at 0, where nothing would reach A
                torch.nn.init.normal_(
                    parameter, std=0.1, generator=torch.Generator().manual_seed(len(name))
                )
        figures, grad = learn(model, made, batching=batching, gradient_checkpointing=again)
        found[batching, again] = grad
        assert figures["tree_share"] == (batching == "tree")
    assert distance(found["tree", False], found["rows", False]) < 5e-6
    assert torch.equal(found["tree", False], found["tree", True])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_flex_attention_is_the_same_at_several_lengths():
    for rows in (long_rows(), long_rows()[:3], [row[:200] for row in long_rows()]):
        made, parts = heads(rows, torch.float32, width=16)
        parts = [part.detach() for part in parts]
        out = flex_attend(*parts, made.tree, None).transpose(1, 2)
        assert (
            out - attend(torch.nn.Identity(), *parts, None, turnwright_tree=made.tree)[0]
        ).abs().max() < 1e-5


@pytest.mark.slow
def test_flex_attention_stays_compiled_for_models_with_other_heads(monkeypatch):
    def device_check(*_args):
        """FlexAttention refuses gradients on a CPU, also where nothing is
        computed by its kernels."""

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", device_check)
    prefix_tree._compiled.cache_clear()
    try:
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=8):
            for key_heads in (1, 2, 3):
                for size in (20, 100, 150, 300):
                    tree = build_prefix_tree(
                        SortedRows.of([list(range(size)), list(range(size - 1))]), 0, 2
                    ).tree
                    for gradients in (False, True):
                        shapes = [
                            (1, count, tree.size, 16)
                            for count in (2 * key_heads, key_heads, key_heads)
                        ]
                        parts = [torch.randn(shape, requires_grad=gradients) for shape in shapes]
                        with torch.set_grad_enabled(gradients):
                            assert flex_attend(*parts, tree, None).shape == parts[0].shape
    finally:
        prefix_tree._compiled.cache_clear()
        torch._dynamo.reset()


def test_attention_that_is_changed_later_is_noticed():
    model, made = small(), wide_group(30, 4, 6)
    trainer = Trainer(model, TrainConfig(**STILL, batching="tree"))
    model.set_attn_implementation("sdpa")
    with pytest.raises(TurnwrightError, match="was changed after its trainer was created"):
        trainer.step(made, step=0, steps=1)
