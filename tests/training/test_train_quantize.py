"""Low precision: codes and grids, packed tensors, straight-through layers, and the same policy
in trainer and engine."""

import asyncio
import copy
import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from turnwright.config import QuantConfig
from turnwright.engines.local.quantization import WeightGrid, packed_grid, unpack
from turnwright.errors import ConfigError
from turnwright.training.model.quantize import (
    GridLinear,
    OnGrid,
    grid_of,
    packed,
    quantize_for_sampling,
    quantize_for_training,
    quantized_names,
)
from turnwright.types import EpisodeKey

GRIDS = {
    "int4": WeightGrid("int4", 8),
    "int4-bf16": WeightGrid("int4", 8, scale_dtype=torch.bfloat16),
    "fp8": WeightGrid("fp8", 8, activations=True),
}


@st.composite
def matrices(draw):
    """A matrix of magnitudes from 1e-6 to 1e3, in places all zero; experts may be stacked."""
    shape = [
        *draw(st.sampled_from([(), (3,)])),
        8 * draw(st.integers(1, 3)),
        8 * draw(st.integers(1, 3)),
    ]
    made = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 2**31))))
    made = made * 10.0 ** draw(st.floats(-6, 3))
    if draw(st.booleans()):
        made[..., :8] = 0.0
    return made


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
@given(weight=matrices())
def test_a_grid_of_a_grid_is_the_grid_to_the_bit(grid, weight):
    once = grid.on_grid(weight)
    assert torch.equal(grid.on_grid(once), once)
    assert once.isfinite().all()


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
@given(weight=matrices())
def test_a_weight_is_within_half_a_step_of_its_code(grid, weight):
    codes, scale = grid.codes(weight)
    assert torch.equal(grid.values(codes, scale, weight.dtype), grid.on_grid(weight))
    gap = (grid.on_grid(weight) - weight).abs()
    if grid.kind == "int4":
        assert codes.abs().max() <= 7
        step = scale.float().repeat_interleave(8, -1)
        # A bfloat16 scale that was rounded down clips the largest weight by
        # up to 7 / 256 of a step.
        assert (gap <= 0.53 * step + 1e-30).all()
    else:
        step = scale.repeat_interleave(8, -1).repeat_interleave(8, -2)
        # e4m3: 3 bits behind the leading one, steps of 2**-9 below 2**-6.
        assert (gap <= torch.maximum(weight.abs() / 16, step * 2**-10) * 1.0001).all()


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
@given(weight=matrices())
def test_packed_tensors_read_back_as_the_grid_to_the_bit(grid, weight):
    weight = weight if weight.dim() == 2 else weight[0]
    tensors = dict(grid.pack("a.weight", weight)) | {"norm.weight": weight[0]}
    read = dict(unpack(tensors, grid, torch.float32))
    assert sorted(read) == ["a.weight", "norm.weight"]
    assert torch.equal(read["a.weight"], grid.on_grid(weight))
    assert torch.equal(read["norm.weight"], weight[0])
    assert packed_grid(grid.config(["lm_head"])) == replace(grid, scale_dtype=None)


def test_int4_is_packed_low_nibble_first_in_eight_codes_of_an_int32():
    grid = WeightGrid("int4", 8)
    weight = torch.tensor([[-7.0, -3, 0, 1, 2, 3, 4, 7]])
    tensors = dict(grid.pack("a.weight", weight))
    assert tensors["a.weight_packed"].tolist() == [[int("fcba9851", 16) - 2**32]]
    assert tensors["a.weight_scale"].tolist() == [[1.0]]
    assert tensors["a.weight_shape"].tolist() == [1, 8]


@given(rows=matrices(), others=matrices())
def test_rounded_inputs_of_a_row_do_not_depend_on_other_rows(rows, others):
    grid = GRIDS["fp8"]
    flat = rows.reshape(-1, rows.shape[-1])
    together = grid.round_inputs(flat)
    assert all(
        torch.equal(grid.round_inputs(row[None])[0], got)
        for row, got in zip(flat, together, strict=True)
    )
    assert ((together - flat).abs() <= flat.abs().amax(-1, keepdim=True) / 16).all()
    assert grid.round_inputs(others[..., :4]).shape == others[..., :4].shape


def test_the_gradient_of_a_layer_is_that_of_the_layer_on_the_grid():
    torch.manual_seed(0)
    layer, inputs = nn.Linear(16, 8), torch.randn(5, 16, requires_grad=True)
    for grid in GRIDS.values():
        plain = copy.deepcopy(layer)
        plain.weight.data = grid.on_grid(layer.weight.data)
        rounded = (
            grid.round_inputs(inputs.detach()) if grid.activations else inputs.detach()
        ).requires_grad_()
        plain(rounded).square().sum().backward()
        trained = copy.deepcopy(layer)
        trained.grid, trained.__class__ = grid, GridLinear
        inputs.grad = None
        trained(inputs).square().sum().backward()
        assert torch.equal(trained.weight.grad, plain.weight.grad)
        assert torch.equal(inputs.grad, rounded.grad)
        assert torch.equal(trained.weight, layer.weight), "masters stay"


def qwen(**sizes):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    shape = {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 16,
    }
    shape |= {
        "num_key_value_heads": 4,
        "vocab_size": 260,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
    }
    return Qwen3ForCausalLM(Qwen3Config(**shape | sizes)).eval()


def mixture():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "head_dim": 16,
        "num_experts": 8,
    }
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
    }
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=260, initializer_range=0.1, tie_word_embeddings=True, **sizes, **heads
        )
    ).eval()


QUANTS = {
    "int4": QuantConfig(kind="int4", group=32),
    "fp8-weights": QuantConfig(kind="fp8", block=64, activations=False),
    "fp8": QuantConfig(kind="fp8", block=64),
}
IDS = torch.arange(40)[None] * 7 % 260


@pytest.mark.parametrize("quant", QUANTS.values(), ids=QUANTS)
def test_trainer_and_engine_modules_compute_the_same_bits(quant):
    model = qwen()
    sampled = quantize_for_sampling(model, quant)
    names, trained = list(model.state_dict()), copy.deepcopy(model)
    quantize_for_training(trained, quant)
    with torch.no_grad():
        assert torch.equal(trained(IDS).logits, sampled(IDS).logits)
        assert not torch.equal(model(IDS).logits, sampled(IDS).logits)
    assert list(trained.state_dict()) == names == list(sampled.state_dict())
    assert quantized_names(model, quant) == {name for name in names if "_proj." in name}


@pytest.mark.parametrize("name", ["int4", "fp8-weights"])
def test_each_expert_of_a_mixture_is_on_its_own_grid(name):
    model, quant = mixture(), QUANTS[name]
    trained, sampled = copy.deepcopy(model), quantize_for_sampling(model, quant)
    quantize_for_training(trained, quant)
    logits = trained(IDS).logits
    assert torch.equal(logits, sampled(IDS).logits)
    logits.square().sum().backward()
    experts = trained.model.layers[0].mlp.experts
    assert experts.gate_up_proj.grad.abs().sum() > 0
    assert experts.down_proj.grad.abs().sum() > 0
    assert torch.equal(experts.gate_up_proj, model.model.layers[0].mlp.experts.gate_up_proj)
    names = quantized_names(model, quant)
    assert "model.layers.0.mlp.experts.down_proj" in names
    assert "model.layers.0.mlp.gate.weight" not in names
    grid = WeightGrid("int4", 32) if name == "int4" else WeightGrid("fp8", 64)
    one = model.model.layers[0].mlp.experts.down_proj[3].detach()
    assert torch.equal(sampled.model.layers[0].mlp.experts.down_proj[3], grid.on_grid(one))


def test_activations_of_stacked_experts_are_refused_by_name():
    with pytest.raises(
        ConfigError, match=r"mlp.experts \(stacked experts\).*quant.activations = false"
    ):
        quantize_for_training(mixture(), QUANTS["fp8"])


@pytest.mark.parametrize(
    ("quant", "message"),
    [
        (QuantConfig(kind="int4"), r"layers.0.self_attn.q_proj.weight: 64 inputs are no multiple of quant.group = 128"),  # noqa: E501
        (QuantConfig(kind="fp8"), r"layers.0.self_attn.q_proj.weight: a side of 64 is no multiple of quant.block = 128"),  # noqa: E501
        (QuantConfig(kind="int4", group=32, skip=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),  # noqa: E501
         "no linear layer outside quant.skip"),
    ],
)  # fmt: skip
def test_layers_that_do_not_fit_are_refused_by_name(quant, message):
    with pytest.raises(ConfigError, match=message):
        quantize_for_training(qwen(), quant)


def test_stages_put_named_weights_on_the_grid_or_into_packed_tensors():
    model, quant = qwen(), QUANTS["int4"]
    grid, names = WeightGrid("int4", 32), quantized_names(model, QUANTS["int4"])
    weights = dict(model.state_dict())
    plain = dict(OnGrid(grid, names)(iter(weights.items())))
    assert all(
        torch.equal(plain[name], quantize_for_sampling(model, quant).state_dict()[name])
        for name in weights
    )
    small = dict(packed(grid, names)(iter(weights.items())))
    assert all(
        torch.equal(tensor, plain[name]) for name, tensor in unpack(small, grid, torch.float32)
    )
    assert len(small) == len(weights) + 2 * len(names)


@pytest.mark.parametrize("quant", QUANTS.values(), ids=QUANTS)
def test_the_fused_engine_gives_the_logprobs_of_the_trainers_layers(quant):
    from turnwright.engines import Request
    from turnwright.engines.local import LocalEngine

    model = qwen()
    engine = LocalEngine(quantize_for_sampling(model, quant), context=128)
    assert engine.fused
    trained = copy.deepcopy(model)
    quantize_for_training(trained, quant)

    async def play():
        request = Request(IDS[0, :20].tolist(), 30, frozenset(), seed=1, session="a")
        reply = await engine.generate(request)
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.add_(
                    0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
                )
        grid = WeightGrid("int4", 32) if quant.kind == "int4" else WeightGrid("fp8", 64)
        unique = {name: t for name, t in trained.state_dict().items() if name != "lm_head.weight"}
        await engine.update(OnGrid(grid, quantized_names(model, quant))(iter(unique.items())), 1)
        return reply, await engine.generate(replace(request, session="b"))

    before, after = asyncio.run(play())
    ids = torch.tensor([[*IDS[0, :20].tolist(), *after.ids]])
    with torch.no_grad():
        logp = trained(ids).logits[0].log_softmax(-1)
    want = [float(logp[19 + n, one]) for n, one in enumerate(after.ids)]
    gaps = [abs(a - b) for a, b in zip(want, after.logprobs, strict=True)]
    # One id may land on the other side of an fp8 boundary.
    assert sorted(gaps)[-2] < 1e-3
    assert max(gaps) < (0.1 if quant == QUANTS["fp8"] else 1e-4)
    assert before.ids != after.ids


def test_a_fused_pass_that_rounds_is_taken_for_any_weights_and_one_that_omits_a_rounding_is_not(
    monkeypatch,
):
    from turnwright.engines.local import LocalEngine
    from turnwright.engines.local.fused_decoder import FusedLayer

    def fused(seed):
        model, generator = qwen(), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        return LocalEngine(quantize_for_sampling(model, QUANTS["fp8"]), context=128).fused

    assert all(fused(seed) for seed in range(12))
    own = FusedLayer.inputs
    for skipped in range(4):
        calls = itertools.count()

        def inputs(layer, rows, skipped=skipped, calls=calls):
            return rows if next(calls) % 4 == skipped else own(layer, rows)

        monkeypatch.setattr(FusedLayer, "inputs", inputs)
        assert not any(fused(seed) for seed in range(3))


RECIPE = '[[env]]\nuse = "hop"\n[quant]\nkind = "int4"\ngroup = 32\n'


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("group = 12", "quant.group = 12: must be a multiple of 8"),
        ("block = 64", 'quant.block = 64: has no effect: it needs quant.kind = fp8'),
        ("train = false", 'quant.train = False: .*set train.correction, such as "tis"'),
        ("[lora]\nrank = 4", "the base alone would be quantized.*set lora.rank = 0"),
        ('train = false\n[train]\ncorrection = "tis"\n[engine]\nkind = "vllm"', "quant.train .*is for the local engine"),  # noqa: E501
        ("packed = true", r"quant.packed = True: is for servers"),
        ('packed = true\n[engine]\nkind = "vllm"\nupdate = "group"', "servers convert packed.*engine.update = .disk."),  # noqa: E501
        ('packed = true\n[engine]\nkind = "sglang"\nupdate = "tensors"', "servers convert packed.*engine.update = .disk."),  # noqa: E501
    ],
)  # fmt: skip
def test_settings_that_cannot_hold_are_refused_in_one_line(tmp_path, more, message):
    from turnwright.config import load

    path = tmp_path / "r.toml"
    path.write_text(
        (RECIPE.replace("group = 32\n", "") if more.startswith("group") else RECIPE) + more + "\n"
    )
    with pytest.raises(ConfigError, match=message) as found:
        load(path)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            "packed = true\nactivations = false",
            "servers round activations with packed fp8 weights; set quant.activations = true",
        ),
        ("", "is for the local engine.*set quant.activations = false"),
        ("packed = true", None),
    ],
)
def test_servers_round_activations_with_packed_fp8_weights_only(tmp_path, more, message):
    from turnwright.config import load

    path = tmp_path / "r.toml"
    recipe = RECIPE.replace("group = 32\n", "").replace("int4", "fp8")
    path.write_text(f'{recipe}{more}\n[engine]\nkind = "vllm"\n')
    if message is None:
        assert load(path).config.quant.packed
        return
    with pytest.raises(ConfigError, match=message):
        load(path)


@pytest.fixture(scope="module")
def tiny_directory(tmp_path_factory):
    from turnwright.config import ModelConfig
    from turnwright.training.model.models import create_tiny_model

    return create_tiny_model(
        ModelConfig(heads=4, kv_heads=4), ["look up the code 17"], tmp_path_factory.mktemp("tiny")
    )


@pytest.mark.parametrize("kind", ["int4", "fp8"])
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_a_packed_directory_loads_as_the_grid_to_the_bit(tmp_path, tiny_directory, kind, experts):
    import shutil

    from turnwright.cli.pack import pack_model
    from turnwright.engines.local import LocalEngine
    from turnwright.training.model.models import load

    source = tiny_directory
    if experts:
        model = mixture()
        model.resize_token_embeddings(320)
        shutil.copytree(
            tiny_directory,
            source := tmp_path / "mixture",
            ignore=shutil.ignore_patterns("*.safetensors"),
        )
        model.save_pretrained(source)
    size = 32 if kind == "int4" else 64
    pack_model(source, tmp_path / "packed", kind, size)
    quant = QuantConfig(kind=kind, group=32, block=64, activations=False)
    want = quantize_for_sampling(load(source)[0], quant).state_dict()
    got = load(tmp_path / "packed")[0]
    assert want.keys() == got.state_dict().keys()
    assert all(torch.equal(want[name], tensor) for name, tensor in got.state_dict().items())
    assert all(parameter.requires_grad for parameter in got.parameters())
    assert LocalEngine.load(tmp_path / "packed", context=64).fused is not experts
    small, large = (
        sum(f.stat().st_size for f in d.glob("*.safetensors"))
        for d in (tmp_path / "packed", source)
    )
    assert small < large / 2
    with pytest.raises(ConfigError, match="already exists; choose another --out"):
        pack_model(source, tmp_path / "packed", kind, size)
    with pytest.raises(ConfigError, match=r'quant.kind is "none"; choose --kind int4 or fp8'):
        pack_model(source, tmp_path / "none")


@pytest.mark.parametrize(
    "quant",
    [QuantConfig(kind="int4", group=8), QuantConfig(kind="fp8", block=8)],
    ids=["int4", "fp8"],
)
def test_a_resumed_trainer_goes_on_with_the_same_bits(tmp_path, tiny_dir, quant):
    from kit.training import random_groups

    from turnwright.config import TrainConfig
    from turnwright.training import Checkpoints, Trainer
    from turnwright.training.model.models import load

    def made(source):
        model, _ = load(source)
        quantize_for_training(model, quant)
        return Trainer(model, TrainConfig(max_mismatch=1e9, lr=1e-2))

    kept, trainer = Checkpoints(tmp_path / "checkpoints", tiny_dir, keep=2), made(tiny_dir)
    start = copy.deepcopy(trainer.model.state_dict())
    trainer.step(random_groups(0), step=0, steps=4)
    saved = kept.save("step-0001", trainer, {"step": 1}).resolve()
    trainer.step(random_groups(1), step=1, steps=4)
    resumed = made(saved)
    resumed.load(saved)
    resumed.step(random_groups(1), step=1, steps=4)
    ours, theirs = trainer.model.state_dict(), resumed.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert any(
        not torch.equal(ours[name], start[name]) for name in quantized_names(trainer.model, quant)
    )


@pytest.mark.parametrize(
    ("gaps", "effect", "passes"),
    [
        ([0.0], 0.0, True),
        ([0.02] * 10, 0.0, True),
        ([0.02] * 11, 0.0, False),
        ([0.09], 0.0, True),
        ([0.4], 0.0, False),
        ([0.6], 0.1, False),
        ([0.01] * 1000, 0.05, True),  # a crossing in a prompt that all episodes share
        ([0.01] * 1000, 0.03, False),  # an engine that rounds otherwise
    ],
)
def test_with_rounded_activations_few_ids_may_differ_or_all_by_a_part_of_what_rounding_changes(
    gaps, effect, passes
):
    from types import SimpleNamespace

    from turnwright.config import TrainConfig
    from turnwright.errors import SyncError
    from turnwright.training import LogitDistribution
    from turnwright.training.trainer.mismatch import check_mismatch

    count = 1000
    engine = torch.full((count,), -1.0, dtype=torch.float64)
    start = engine.clone()
    start[: len(gaps)] += torch.tensor(gaps, dtype=torch.float64)
    batch = SimpleNamespace(
        start_n=start,
        engine_n=engine,
        current_n=torch.ones(count, dtype=torch.bool),
        trajectory_n=torch.zeros(count, dtype=torch.long),
        trajectories=[SimpleNamespace(turns=(), key=EpisodeKey("train", 0, "t", 0))],
        slots=[(0, 0)] * count,
    )

    def refused(**options):
        try:
            check_mismatch(
                batch, TrainConfig(), torch.float32, LogitDistribution(1.0, frozenset()), **options
            )
        except SyncError:
            return True
        return False

    assert refused(rounding_effect=lambda: effect) is not passes
    assert refused() is (max(gaps) > 1e-3)
    # A crossing that moved most ids in two steps in a row is none.
    most = len(gaps) > count / 2
    assert refused(rounding_effect=lambda: effect, differing_steps=1) is not passes
    assert refused(rounding_effect=lambda: effect, differing_steps=2) is (most or not passes)


@pytest.mark.parametrize("factor", [1.0, 1.03])
def test_a_fault_of_the_last_layer_is_found_although_rounding_changes_more(factor):
    from turnwright.config import TrainConfig
    from turnwright.engines import Request
    from turnwright.engines.local import LocalEngine
    from turnwright.errors import SyncError
    from turnwright.training import Trainer
    from turnwright.types import EpisodeKey, Group, Origin, Span, StopReason, Task, Trajectory

    model, quant = qwen(), QUANTS["fp8"]
    served = quantize_for_sampling(model, quant)
    with torch.no_grad():
        served.model.layers[1].mlp.down_proj.weight.mul_(factor)
    engine = LocalEngine(served, context=128)
    quantize_for_training(model, quant)
    trainer = Trainer(model, TrainConfig(lr=1e-12, schedule="constant"))

    async def group(step):
        rows, task = [], Task("t", id="t")
        for number in range(4):
            prompt = [*range(20, 50), step, number]
            reply = await engine.generate(
                Request(prompt, 30, frozenset(), number, f"{step}-{number}")
            )
            spans = [
                Span(Origin.PROMPT, prompt),
                Span(Origin.MODEL, list(reply.ids), 0, 32, list(reply.logprobs), 0),
            ]
            key = EpisodeKey("train", step, "t", number)
            rows.append(
                Trajectory(task, key, spans, reward=float(number % 2), stop=StopReason.DONE)
            )
        return [Group(task, rows)]

    async def play():
        try:
            for step in range(5):
                trainer.step(await group(step), step=step, steps=5)
        except SyncError:
            return step
        finally:
            await engine.close()
        return None

    # The first two steps could be crossings in a shared prompt.
    assert asyncio.run(play()) == (None if factor == 1.0 else 2)


@pytest.mark.parametrize("name", QUANTS)
def test_an_engine_with_the_quantized_weights_of_before_is_found_at_every_update(name):
    from kit.training import random_groups

    from turnwright.config import TrainConfig
    from turnwright.engines.local import LocalEngine
    from turnwright.errors import SyncError
    from turnwright.training import Trainer

    model, quant = qwen(), QUANTS[name]
    engine = LocalEngine(quantize_for_sampling(model, quant), context=128)
    names = quantized_names(model, quant)
    quantize_for_training(model, quant)
    trainer = Trainer(model, TrainConfig(max_mismatch=1e9, lr=1e-3, schedule="constant"))
    trainer.transforms.append(OnGrid(grid_of(quant), names))

    async def found(probe, weights, version):
        await engine.update(weights, version)
        try:
            await probe.ask(engine, version, frozenset(), 60)
        except SyncError as error:
            return "lack the last update" in str(error)
        return False

    async def play():
        outcomes = []
        for step in range(10):
            before = list(trainer.weights())
            assert (
                trainer.step(random_groups(step), step=step, steps=10).metrics["codes_changed"] > 0
            )
            probe = trainer.take_probe()
            assert sum((probe.before_kv != probe.after_kv).any(1)) >= 12
            outcomes.append(
                (
                    await found(probe, before, step + 1),
                    await found(probe, trainer.weights(), step + 1),
                )
            )
        return outcomes

    assert asyncio.run(play()) == [(True, False)] * 10
