"""Packed int4 weights in a real vLLM on a CPU: updates, a server that was killed, and a run."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import signal

import pytest
import torch
from kit import real_servers as kit

from turnwright.cli.main import main
from turnwright.config import QuantConfig
from turnwright.engines import Request
from turnwright.engines.remote import VllmEngine
from turnwright.engines.remote.fleet_settings import FleetSettings, WeightDelivery
from turnwright.engines.remote.managed import ManagedFleet, ServerProcess, how_to_install
from turnwright.engines.remote.weight_files import ModelDirectories
from turnwright.training import score_with_model, unique_weights
from turnwright.training.model.models import load
from turnwright.training.model.packed import packing, quantization_config
from turnwright.training.model.quantize import quantize_for_training

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]
CLOSE, CLOSE_ON_AVERAGE = 0.2, 0.02
"""Bounds on |logprob of server - of trainer| in nats; both compute in
bfloat16, in another order."""


@pytest.fixture(scope="module")
def home():
    if not (kit.PLACE / "vllm").is_dir():
        pytest.skip(f"{kit.PLACE / 'vllm'}: not installed; `{how_to_install('vllm', gpu=False)}`")
    return kit.PLACE


def test_vllm_takes_packed_int4_weights_twice_and_again_after_it_was_killed(home, tmp_path):
    source, quant = kit.Model(tmp_path).source, QuantConfig(kind="int4", group=32, packed=True)
    module, _ = load(source, "cpu", torch.bfloat16)
    quantize_for_training(module, quant)
    pack = packing(module, quant)
    directories = ModelDirectories(
        tmp_path / "weights", source, untie=True, quantization=quantization_config(module, quant)
    )
    server = ServerProcess("vllm", home, tmp_path / "vllm.log", context=kit.CONTEXT, gpu=False)

    def gaps(replies, of):
        score, found = score_with_model(of), []
        for prompt, reply in replies:
            wanted = score([*prompt, *reply.ids])[-len(reply.ids) :]
            found += [abs(a - b) for a, b in zip(wanted, reply.logprobs, strict=True)]
        return max(found), sum(found) / len(found)

    async def play(engine, version):
        prompts = [list(range(10 + n, 42 + n)) for n in range(8)]
        calls = (
            engine.generate(Request(p, 32, frozenset(), n, f"{version}-{n}"))
            for n, p in enumerate(prompts)
        )
        return list(zip(prompts, await asyncio.gather(*calls), strict=True))

    async def work():
        engine = ManagedFleet(
            [VllmEngine(server.url)],
            [server],
            FleetSettings(patience_s=900.0),
            start_s=900.0,
            delivery=WeightDelivery(
                directories=directories, expected_logprobs=score_with_model(module), tolerance=CLOSE
            ),
        )
        found = []
        torch.manual_seed(2)
        for version in range(3):
            before = copy.deepcopy(module)
            if version:
                with torch.no_grad():
                    for parameter in module.parameters():
                        parameter += 0.05 * torch.randn(parameter.shape)
            await engine.update(pack(unique_weights(module)), version)
            found.append(
                (gaps(replies := await play(engine, version), module), gaps(replies, before))
            )
        os.kill(server.pid, signal.SIGKILL)
        replies = await play(engine, "again")
        found.append((gaps(replies, module), gaps(replies, before)))
        await engine.close()
        return found

    found = asyncio.run(work())
    print("packed int4 in vLLM: max and mean |dlogp|, and of the policy before:", found)
    assert server.starts == 2
    assert "CPUWNA16LinearKernel" in server.log.read_text()
    for (most, mean), _ in found:
        assert most < CLOSE
        assert mean < CLOSE_ON_AVERAGE
    for (_, mean), (_, stale) in found[1:]:
        assert stale > 10 * mean, "the bound would let old weights pass"
    config = json.loads((directories.root / "policy-2" / "config.json").read_text())
    assert config["quantization_config"]["format"] == "pack-quantized"


def test_a_run_trains_through_a_vllm_of_packed_int4_weights(home, tmp_path, capsys):
    words = kit.train_long_world(tmp_path)
    words += [
        "--train.lr",
        "1e-2",
        "--train.steps",
        "3",
        "--rollout.groups",
        "4",
        "--rollout.group-size",
        "4",
    ]
    words += [
        "--eval.tasks",
        "4",
        "--engine.kind",
        "vllm",
        "--engine.install-dir",
        str(home),
        "--model.dtype",
        "bfloat16",
    ]
    words += [
        "--quant.kind",
        "int4",
        "--quant.group",
        "32",
        "--quant.packed",
        "true",
        "--out",
        str(tmp_path / "run"),
    ]
    assert main(words) == 0, capsys.readouterr().err
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    steps = [row for row in rows if row["phase"] == "train"]
    gaps = [row["mismatch_max"] for row in steps]
    print(
        f"a run through packed int4 weights: max |dlogp| {gaps}, codes changed "
        f"{[row['codes_changed'] for row in steps]}"
    )
    assert len(gaps) == 3
    assert max(gaps) < CLOSE
    assert all(row["codes_changed"] > 0 for row in steps)
    assert "CPUWNA16LinearKernel" in (tmp_path / "run" / "engines" / "vllm-0.log").read_text()
