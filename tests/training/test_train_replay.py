"""Replayed experts: the engine's choice with the trainer's own scores and gradients, in every
layout; and what it is worth."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import r3
import torch
from kit.training import distance, gradient
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    MixtralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from turnwright.config import TrainConfig
from turnwright.errors import ConfigError, RoutesMissing, TurnwrightError
from turnwright.training import Credit, LossDenominator, Trainer, make_batch, trainable_tokens
from turnwright.training.forward.routing_replay import RoutingReplay, pack_routes
from turnwright.types import ExpertRoutes, Group

BANNED = frozenset((256, 257, 259))


@pytest.fixture(scope="module")
def small():
    return r3.mixture(layers=2, experts=8)


@pytest.fixture(scope="module")
def noised(small):
    """Episodes of an engine whose weights are 3% off, with branches."""
    return r3.played(r3.noisy(small, 0.03), episodes=8, history=r3.rewritten)


def trainer(model, **changes):
    config = {"routing_replay": "replay", "max_mismatch": 1e9} | changes
    return Trainer(copy.deepcopy(model), TrainConfig(**config), banned_ids=BANNED)


def by_hand(model, trajectories):
    """Logprobs by path, each path alone in an unpadded pass, experts forced by
    hooks of the test's own."""
    made = []
    for trajectory in trajectories:
        mine = []
        for sample in trajectory.samples():
            routes = torch.tensor(np.asarray(sample.routes).astype(np.int64))
            hooks = []
            for number, layer in enumerate(model.model.layers):

                def force(module, given, output, number=number, routes=routes):
                    index = routes[:-1, number]
                    share = output[0].softmax(-1).gather(-1, index)
                    return output[0], share / share.sum(-1, keepdim=True), index

                hooks.append(layer.mlp.gate.register_forward_hook(force))
            with torch.no_grad():
                logits = model(torch.tensor([sample.ids[:-1]]), use_cache=False).logits[0]
            for hook in hooks:
                hook.remove()
            logits[:, sorted(BANNED)] = -1e30
            rows = logits.log_softmax(-1)
            mine += [
                float(rows[at - 1, sample.ids[at]])
                for at, weight in enumerate(sample.weights)
                if weight
            ]
        made.append(mine)
    return made


@pytest.mark.parametrize("batching", ["rows", "tree"])
@pytest.mark.parametrize("micro_tokens", [150, 4096])
def test_the_experts_of_every_position_are_those_of_the_engine_in_every_layout(
    small, noised, batching, micro_tokens
):
    mine = trainer(small, batching=batching, micro_tokens=micro_tokens)
    got, expected = mine.logprobs(noised), by_hand(small, noised)
    assert [len(row) for row in got] == [len(row) for row in expected]
    gap = max(
        abs(a - b)
        for one, other in zip(got, expected, strict=True)
        for a, b in zip(one, other, strict=True)
    )
    assert gap < 1e-5
    off = trainer(small, routing_replay="off").logprobs(noised)
    assert (
        max(
            abs(a - b)
            for one, other in zip(got, off, strict=True)
            for a, b in zip(one, other, strict=True)
        )
        > 1e-3
    )


def steps(model, trajectories, **changes):
    """The gradient of one step, and its figures."""
    mine = trainer(model, max_grad_norm=1e9, **changes)
    groups = {}
    for number, trajectory in enumerate(trajectories):
        trajectory.reward = float(number % 3)
        groups.setdefault(trajectory.task.id, []).append(trajectory)
    figures = mine.step(
        [Group(rows[0].task, rows) for rows in groups.values()], step=0, steps=1
    ).metrics
    return gradient(mine.model), figures, mine


def test_the_gradient_is_that_of_rows_whatever_the_layout_and_reaches_every_router(small, noised):
    whole, figures, mine = steps(small, noised, batching="rows")
    for changes in (
        {"batching": "rows", "micro_tokens": 150},
        {"batching": "tree"},
        {"gradient_checkpointing": True},
    ):
        other, again, _ = steps(small, noised, **changes)
        assert distance(other, whole) < 5e-6
        assert again["loss"] == pytest.approx(figures["loss"], abs=1e-5)
    for layer in mine.model.model.layers:
        assert layer.mlp.gate.weight.grad.abs().sum() > 0
    off, _, _ = steps(small, noised, routing_replay="off")
    assert distance(off, whole) > 1e-3


def test_equal_weights_in_fp32_make_it_an_exact_no_op(small):
    rows = r3.played(small, episodes=8, history=r3.rewritten)
    assert trainer(small).logprobs(rows) == trainer(small, routing_replay="off").logprobs(rows)
    assert torch.equal(steps(small, rows)[0], steps(small, rows, routing_replay="off")[0])


def test_a_kl_to_the_same_policy_is_zero_with_the_same_experts(small, noised):
    mine = trainer(small, kl=0.1)
    mine.reference()
    figures = mine.step([Group(noised[0].task, noised[:4])], step=0, steps=1).metrics
    assert figures["kl"] == 0.0


def test_padding_takes_its_own_experts(small, noised):
    mine = trainer(small, batching="rows")
    credits = [Credit(t, 1.0, None, trainable_tokens(t)) for t in noised]
    micro = make_batch(
        credits, LossDenominator.of(credits, "token"), micro_tokens=4096, routes=True
    ).micros[-1]
    assert not micro.routes.known_p.all()
    seen = []
    mine.forward.replay.routers[0].module.register_forward_hook(lambda m, a, o: seen.append(o[2]))
    mine.forward.hidden(micro)
    mine.forward.hidden(replace(micro, routes=None))
    assert torch.equal(seen[0][~micro.routes.known_p], seen[1][~micro.routes.known_p])
    told = micro.routes.experts_pn[micro.routes.known_p][:, :4].long()
    assert torch.equal(seen[0][micro.routes.known_p].sort().values, told.sort().values)


def test_a_context_without_routes_is_refused_by_name(small):
    rows = r3.played(small, episodes=4)
    turn = rows[2].turns[1]
    start, routes = turn.extras["routes"]
    turn.extras["routes"] = (start, routes.slice(0, 5))
    with pytest.raises(
        RoutesMissing, match=rf"task='0', sample=2.*position {start + 5} are unknown"
    ):
        trainer(small).logprobs(rows)
    for one in rows[2].turns:
        one.extras.clear()
    with pytest.raises(RoutesMissing, match="position 0 are unknown"):
        steps(small, rows)
    assert len(trainer(small, routing_replay="off").logprobs(rows)) == 4


def test_demonstrations_need_none(small):
    rows = r3.played(small, episodes=4)
    for row in rows:
        for turn in row.turns:
            turn.extras.clear()
    assert trainer(small).supervised(rows, lr=1e-3)["loss"] > 0


def test_routes_that_name_dense_layers_too_are_read_by_layer(small, noised):
    expected = trainer(small).logprobs(noised)
    sparse = r3.mixture(layers=2, experts=8)
    for row in (wide := copy.deepcopy(noised)):
        for turn in row.turns:
            start, routes = turn.extras["routes"]
            array = np.asarray(routes)
            # A server that tells no shape.
            turn.extras["routes"] = (
                start,
                ExpertRoutes(array.tobytes(), 1, array[0].size),
            )
    assert trainer(sparse).logprobs(wide) == expected
    model = AutoModelForCausalLM.from_config(
        type(sparse.config)(**(sparse.config.to_dict() | {"mlp_only_layers": [0]}))
    )
    replay = RoutingReplay(model)
    assert [router.layer for router in replay.routers] == [1]
    two = np.arange(16, dtype=np.uint8).reshape(2, 2, 4) % 8
    replay.set_routes(pack_routes([(ExpertRoutes.of(two), np.arange(2))], 3, "cpu"))
    assert replay._chosen[0][:2].tolist() == two[:, 1].tolist()
    with pytest.raises(TurnwrightError, match="the models differ"):
        replay.set_routes(pack_routes([(ExpertRoutes.of(two[:, :, :3]), np.arange(2))], 3, "cpu"))
    with pytest.raises(TurnwrightError, match="reports expert 9"):
        replay.set_routes(pack_routes([(ExpertRoutes.of(two + 2), np.arange(2))], 3, "cpu"))


SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
}
HEADS = {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        (Qwen3MoeConfig, {"num_experts": 6, "norm_topk_prob": True}),
        (Qwen3MoeConfig, {"num_experts": 6, "norm_topk_prob": False}),
        (MixtralConfig, {"num_local_experts": 6}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_own_experts_replayed_change_no_bit(kind, more, dtype):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**SIZES, **HEADS, **more)).to(dtype).eval()
    ids = torch.randint(0, 60, (2, 17))
    kept = []
    replay = RoutingReplay(model)
    hooks = [
        r.module.register_forward_hook(lambda m, a, o: kept.append(o[2])) for r in replay.routers
    ]
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        for hook in hooks:
            hook.remove()
        routes = ExpertRoutes.of(torch.stack(kept, 1).numpy())
        replay.set_routes(pack_routes([(routes, np.arange(34))], 34, "cpu"))
        assert torch.equal(model(ids, use_cache=False).logits, expected)
        twin = copy.deepcopy(model)
        replay.set_routes(
            pack_routes([(ExpertRoutes(bytes(len(routes.data)), 2, 2), np.arange(34))], 34, "cpu")
        )
        assert not torch.equal(model(ids, use_cache=False).logits, expected)
        assert torch.equal(twin(ids, use_cache=False).logits, expected), "a copy chooses its own"


def test_models_that_cannot_be_led_are_refused():
    dense = AutoModelForCausalLM.from_config(
        Qwen3Config(**{k: v for k, v in (SIZES | HEADS).items() if "exp" not in k})
    )
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM has no router"):
        trainer(dense)
    sigmoid = DeepseekV3Config(
        **SIZES, num_attention_heads=2, num_key_value_heads=2, n_routed_experts=8, n_group=2, topk_group=1,  # noqa: E501
        first_k_dense_replace=1,
        num_experts_per_tok=2, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,  # noqa: E501
    )  # fmt: skip
    with pytest.raises(ConfigError, match="neither a softmax"):
        trainer(AutoModelForCausalLM.from_config(sigmoid))


@pytest.fixture(scope="module")
def strong():
    return r3.mixture()


@pytest.mark.parametrize(
    ("noise", "dtype", "history"),
    [
        (0.01, None, r3.rewritten),
        pytest.param(0.01, None, "append", marks=pytest.mark.slow),
        pytest.param(0.0, torch.bfloat16, "append", marks=pytest.mark.slow),
    ],
    ids=["branches", "noise", "bf16"],
)
def test_replay_halves_the_mismatch_where_experts_differ(strong, noise, dtype, history):
    engine = r3.noisy(strong, noise) if noise else strong
    found = r3.compare(
        copy.deepcopy(strong), r3.played(engine, episodes=4, history=history, dtype=dtype)
    )
    off, on, shifted = found.means(found.flipped)
    print(
        f"flipped {float(found.flipped.double().mean()):.0%}: off {off:.2e}, replay {on:.2e}, "
        f"shifted by one {shifted:.2e}"
    )
    assert found.flipped.sum() > 50
    assert on <= 0.5 * off
    assert shifted > off
