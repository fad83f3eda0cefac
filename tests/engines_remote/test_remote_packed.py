"""Packed weights of servers: the directories and requests that they get, and what a server that
reads them samples from."""

from __future__ import annotations

import asyncio
import json

import pytest

pytest.importorskip("torch")
import torch
from safetensors.torch import load_file, save_file

from turnwright.config import ModelConfig, QuantConfig
from turnwright.engines import Request
from turnwright.engines.local import LocalEngine
from turnwright.engines.remote import Fleet, SglangEngine, VllmEngine
from turnwright.engines.remote.fleet_settings import WeightDelivery
from turnwright.engines.remote.managed import start_command
from turnwright.engines.remote.weight_files import ModelDirectories
from turnwright.errors import SyncError
from turnwright.training import create_tiny_model, score_with_model, unique_weights
from turnwright.training.model.models import load
from turnwright.training.model.packed import packing, quantization_config, write_packed
from turnwright.training.model.quantize import quantize_for_training
from turnwright_serve import make_service
from turnwright_serve.serve import stored_rows
from turnwright_serve.server import JsonHttpServer

STORED = "turnwright_serve.serve.load"
QUANTS = {
    "int4": QuantConfig(kind="int4", group=32, packed=True),
    "fp8": QuantConfig(kind="fp8", block=32, packed=True),
}
CLIENTS = {"vllm": VllmEngine, "sglang": SglangEngine}
PROMPT = list(range(10, 30))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return create_tiny_model(
        ModelConfig(hidden=32, layers=1),
        ["look up the code 17"],
        tmp_path_factory.mktemp("m") / "m",
    )


@pytest.mark.parametrize("kind", QUANTS)
@pytest.mark.parametrize("server", CLIENTS)
def test_a_server_of_packed_weights_takes_packed_updates_from_a_disk(
    tmp_path, source, kind, server
):
    quant, module = QUANTS[kind], load(source)[0]
    write_packed(source, tmp_path / "packed", quant)
    pack, stated = packing(module, quant), quantization_config(module, quant)
    # `turnwright serve` reads the weights of a file, which has no activations.
    quantize_for_training(module, QuantConfig(kind=kind, group=32, block=32, activations=False))
    directories = ModelDirectories(tmp_path / "weights", source, quantization=stated)

    async def work():
        app, engine = make_service(tmp_path / "packed", context=100, device="cpu")
        http = JsonHttpServer(app.routes(server), host="127.0.0.1", port=0, token="")
        await http.start()
        fleet = Fleet(
            [CLIENTS[server](http.url)],
            delivery=WeightDelivery(
                directories=directories, expected_logprobs=score_with_model(module)
            ),
        )
        replies = []
        try:
            async with asyncio.timeout(100):
                for version in (1, 2):
                    with torch.no_grad():
                        for parameter in module.parameters():
                            parameter += 0.1 * torch.randn(
                                parameter.shape, generator=torch.Generator().manual_seed(version)
                            )
                    await fleet.update(pack(unique_weights(module)), version)
                    reply = await fleet.generate(Request(PROMPT, 40, frozenset(), 1, str(version)))
                    assert reply.version == version
                    wanted = score_with_model(module)([*PROMPT, *reply.ids])[-len(reply.ids) :]
                    replies.append(
                        max(abs(a - b) for a, b in zip(wanted, reply.logprobs, strict=True))
                    )
                with torch.no_grad():  # the trainer goes on, and the server does not
                    module.model.layers[0].mlp.down_proj.weight *= 1.5
                with pytest.raises(SyncError, match="differ from the trainer's by up to"):
                    await fleet.load_from_disk(directories.root / "policy-2", 3)
        finally:
            await fleet.close()
            await http.close()
            await engine.close()
        return replies

    assert max(asyncio.run(work())) < 1e-4
    config = json.loads((directories.root / "policy-2" / "config.json").read_text())
    tensors = load_file(directories.root / "policy-2" / "model.safetensors")
    layer = "model.layers.0.mlp.down_proj"
    if kind == "int4":
        assert config["quantization_config"]["format"] == "pack-quantized"
        assert config["quantization_config"]["ignore"] == ["lm_head"]
        assert tensors[f"{layer}.weight_packed"].dtype == torch.int32
        assert {"weight_scale", "weight_shape"} <= {name.rpartition(".")[2] for name in tensors}
    else:
        assert config["quantization_config"] == {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "modules_to_not_convert": ["lm_head"],
        }
        assert tensors[f"{layer}.weight"].dtype == torch.float8_e4m3fn
        assert tensors[f"{layer}.weight_scale_inv"].dtype == torch.float32
    assert f"{layer}.weight" not in tensors or kind == "fp8"


def test_plain_weights_of_a_packed_source_get_a_config_without_quantization(tmp_path, source):
    write_packed(source, tmp_path / "packed", QUANTS["int4"])
    module = load(tmp_path / "packed")[0]
    directories = ModelDirectories(tmp_path / "weights", tmp_path / "packed")
    directory, _ = directories.write(unique_weights(module), 1)
    assert "quantization_config" not in json.loads((directory / "config.json").read_text())
    got = load(directory)[0].state_dict()
    assert all(torch.equal(tensor, got[name]) for name, tensor in module.state_dict().items())
    assert LocalEngine.load(directory, context=64).fused


@pytest.mark.parametrize("server", CLIENTS)
def test_a_server_of_a_packed_directory_starts_in_bfloat16_on_a_cpu(tmp_path, source, server):
    (tmp_path / server).mkdir()
    write_packed(source, tmp_path / "packed", QUANTS["int4"])
    for directory, dtype in ((source, "float32"), (tmp_path / "packed", "bfloat16")):
        plan = start_command(server, tmp_path, directory, host="127.0.0.1", port=1)
        command = plan.commands[0]
        assert command[command.index("--dtype") + 1] == dtype
        assert f"--dtype {dtype}" in dict(plan.why)
        assert plan.env.get("VLLM_CPU_INT4_W4A8") == (
            "0" if (server, dtype) == ("vllm", "bfloat16") else None
        )


@pytest.mark.parametrize("server", CLIENTS)
def test_a_server_reads_the_weights_of_its_own_model_without_building_another(
    tmp_path, source, server, monkeypatch
):
    other = create_tiny_model(
        ModelConfig(hidden=32, layers=1), ["look up the code 17"], tmp_path / "other", seed=5
    )

    async def work():
        app, engine = make_service(source, context=100, device="cpu")
        monkeypatch.setattr(STORED, lambda *parts: pytest.fail("a second model was built"))
        http = JsonHttpServer(app.routes(server), host="127.0.0.1", port=0, token="")
        await http.start()
        client = CLIENTS[server](http.url)
        try:
            before = await client.score(PROMPT)
            await client.load_from_disk(other, 1)
            return before, await client.score(PROMPT)
        finally:
            await client.close()
            await http.close()
            await engine.close()

    wanted = [score_with_model(load(path)[0])(PROMPT) for path in (source, other)]
    for found, known in zip(asyncio.run(work()), wanted, strict=True):
        assert found == pytest.approx(known, abs=1e-5)


def test_weights_of_another_layout_are_left_to_transformers(tmp_path, source):
    own = load(source)[0].state_dict()
    unique = frozenset(name for name, _ in unique_weights(load(source)[0]))
    stored = dict(stored_rows(source, own, unique))
    assert unique <= stored.keys() <= own.keys()
    assert all(torch.equal(stored[name], own[name]) for name in stored)
    name = next(iter(stored))
    changed = {
        "missing": {key: tensor for key, tensor in stored.items() if key != name},
        "another name": stored | {"more": stored[name].clone()},
        "another shape": stored | {name: stored[name][:-1].clone()},
    }
    for kind, tensors in changed.items():
        (tmp_path / kind).mkdir()
        save_file(tensors, tmp_path / kind / "model.safetensors")
        assert stored_rows(tmp_path / kind, own, unique) is None
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "model.safetensors").write_bytes(
        (source / "model.safetensors").read_bytes()[:-9]
    )
    assert stored_rows(tmp_path / "damaged", own, unique) is None
    write_packed(source, tmp_path / "packed", QUANTS["int4"])
    assert stored_rows(tmp_path / "packed", own, unique) is None
