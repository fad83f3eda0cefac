"""Runs with `[quant]`: killed and resumed, played without a trainer, in bfloat16, and
updates that change no code."""

from __future__ import annotations

import asyncio
import importlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.long_world import LONG
from kit.runs import RECIPE, ROOT, benchmark, rows, train

from turnwright.cli.main import main
from turnwright.engines.local import LocalEngine
from turnwright.training import setup
from turnwright.training.model.models import load
from turnwright.training.model.packed import quant_of
from turnwright.training.model.quantize import quantize_for_sampling, quantized_names

KINDS = {"int4": 'kind = "int4"\ngroup = 32\n', "fp8": 'kind = "fp8"\nblock = 32\n'}


@pytest.fixture(params=KINDS)
def recipe(request: Any, tmp_path: Path) -> Path:
    path = tmp_path / "quant.toml"
    plain = RECIPE.replace("kl = 0.01\n", "").replace("[lora]\nrank = 4\n", "")
    path.write_text(f"{plain}[quant]\n{KINDS[request.param]}")
    (tmp_path / "long.py").write_text(LONG)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_resumes_to_the_same_bits(tmp_path: Path, kind: str) -> None:
    bench = benchmark()
    recipe = bench.RECIPE.replace("steps = 16", "steps = 4") + f"[quant]\n{KINDS[kind]}"
    outcome = bench.compare(tmp_path, list(bench.instants(2, 0.9, random.Random(0))), recipe)
    assert outcome.kills, "no kill landed"
    assert outcome.good


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_plays_a_checkpoint_without_a_trainer_plays_the_grid(
    tmp_path: Path, recipe: Path, monkeypatch: Any, dtype: str
) -> None:
    from turnwright_serve.serve import make_service

    out = tmp_path / "run"
    train(recipe, out, "--model.dtype", dtype)
    assert all(row["codes_changed"] > 0 for row in rows(out, "train") if row["optimizer_steps"])
    checkpoint = out / "checkpoints" / "step-00003"
    model, quant = load(checkpoint, dtype=getattr(torch, dtype))[0], quant_of(checkpoint)
    want, names = quantize_for_sampling(model, quant).state_dict(), quantized_names(model, quant)
    assert any(not torch.equal(want[name], model.state_dict()[name]) for name in names)
    made: list[Any] = []

    class Recorded(LocalEngine):
        def __init__(self, model: Any, **options: Any) -> None:
            super().__init__(model, **options)
            made.append(model)

    monkeypatch.setattr(setup, "LocalEngine", Recorded)
    assert main(["eval", "--run", str(out)]) == 0
    words = ["--model.path", str(checkpoint), "--model.dtype", dtype]
    assert main(["rollout", str(recipe), *words]) == 0
    plain = tmp_path / "plain.toml"
    plain.write_text(recipe.read_text().partition("[quant]")[0])
    assert main(["rollout", str(plain), *words]) == 0
    assert main(["rollout", str(plain), *words, "--quant.kind", "none"]) == 0
    assert len(made) == 4
    assert all(
        torch.equal(tensor, model.state_dict()[name])
        for name, tensor in made.pop().state_dict().items()
    )
    made += [make_service(checkpoint)[1]._model.module] if dtype == "float32" else []
    for model in made:
        assert all(torch.equal(tensor, want[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_served_checkpoint_plays_the_grid_and_stays_on_it_with_the_weights_of_another(
    tmp_path: Path, recipe: Path, kind: str, capsys: Any
) -> None:
    from turnwright.engines import Request
    from turnwright.engines.remote import SglangEngine, VllmEngine
    from turnwright.training import score_with_model
    from turnwright_serve.serve import make_service
    from turnwright_serve.server import JsonHttpServer

    out, prompt = tmp_path / "run", list(range(10, 30))
    train(recipe, out, "--train.lr", "2e-2")
    first, *_, last = sorted((out / "checkpoints").glob("step-*"))
    quant = quant_of(last)

    def gaps(model: Any, replies: list[Any]) -> list[float]:
        score, found = score_with_model(model), []
        for reply in replies:
            wanted = score([*prompt, *reply.ids])[-len(reply.ids) :]
            found += sorted(abs(a - b) for a, b in zip(wanted, reply.logprobs, strict=True))
        return found

    async def play(client: Any, sessions: str) -> list[Any]:
        calls = (
            client.generate(Request(prompt, 30, frozenset(), n, f"{sessions}{n}")) for n in range(8)
        )
        return list(await asyncio.gather(*calls))

    async def work() -> tuple[list[Any], list[Any]]:
        app, engine = make_service(first, context=200, device="cpu")
        server = JsonHttpServer(app.routes(kind), host="127.0.0.1", port=0, token="")
        await server.start()
        client = {"vllm": VllmEngine, "sglang": SglangEngine}[kind](server.url)
        try:
            async with asyncio.timeout(100):
                before = await play(client, "a")
                await client.load_from_disk(last, 1)
                return before, await play(client, "b")
        finally:
            await client.close()
            await server.close()
            await engine.close()

    for checkpoint, replies in zip((first, last), asyncio.run(work()), strict=True):
        model = load(checkpoint)[0]
        found, masters = gaps(quantize_for_sampling(model, quant), replies), gaps(model, replies)
        assert max(found) < (0.5 if quant.kind == "fp8" else 1e-4)
        assert sum(found) < 0.1 * sum(masters)
    capsys.readouterr()
    # A server rounds no activations, so another client must not send it values that
    # are trained with them.
    words = [
        "eval",
        "--run",
        str(out),
        "--engine.kind",
        kind,
        "--engine.urls",
        '["http://127.0.0.1:1"]',
    ]
    if quant.kind == "fp8":
        assert main(words) == 2
        assert (
            "was trained with fp8 activations, which servers do not round"
            in capsys.readouterr().err
        )


def test_a_step_that_changes_no_code_is_reported_once(
    tmp_path: Path, recipe: Path, capsys: Any
) -> None:
    out = tmp_path / "run"
    assert (
        main(["train", str(recipe), "--out", str(out), "--display", "plain", "--train.lr", "1e-12"])
        == 0
    )
    still = [row for row in rows(out, "train") if row["optimizer_steps"]]
    assert len(still) > 1
    assert [row["codes_changed"] for row in still] == [0.0] * len(still)
    reported = capsys.readouterr()
    assert (reported.out + reported.err).count("changed no code of the quantized weights") == 1


IMAGE = "np.random.default_rng(self.left).integers(0, 256, (32, 32, 3), np.uint8)"
SEES = LONG.replace("class Long", "class Sees").replace(
    "import random\n", "import random\nimport numpy as np\n"
)
SEES = SEES.replace('"On."', f'[{{"role": "user", "content": [tw.Image({IMAGE}), "On."]}}]')


@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_a_vision_language_model_is_quantized_in_its_text_model(tmp_path: Path, kind: str) -> None:
    from turnwright.training.trainer.mismatch import ROUNDED_BOUND

    (tmp_path / "sees.py").write_text(SEES)
    plain = (
        RECIPE.partition("[lora]")[0]
        .replace("kl = 0.01\n", "")
        .replace("long.py:Long", "sees.py:Sees")
    )
    out, recipe = tmp_path / "run", tmp_path / "sees.toml"
    recipe.write_text(
        plain.replace("hidden = 32", "vision = true\nheads = 4")
        + f"[eval]\ntasks = 4\n[quant]\n{KINDS[kind]}"
    )
    train(recipe, out)
    trained = [row for row in rows(out, "train") if row["optimizer_steps"]]
    assert trained
    assert all(row["codes_changed"] > 0 for row in trained)
    assert max(row["mismatch_max"] for row in trained) < (ROUNDED_BOUND if kind == "fp8" else 1e-4)
    checkpoint = out / "checkpoints" / "step-00003"
    model = load(checkpoint)[0]
    names = quantized_names(model, quant_of(checkpoint))
    assert names
    assert not any("visual" in name or "lm_head" in name for name in names)
    assert main(["eval", "--run", str(out)]) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixture_of_experts_learns_with_its_experts_replayed(
    tmp_path: Path, monkeypatch: Any, kind: str
) -> None:
    """Each expert on its own grid, trained with the experts that the engine took."""
    benchmark()  # which the next one imports
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    found = importlib.import_module("low_precision").experts(kind, tmp_path)
    assert found["reward_last"] > found["reward_first"] + 0.1
    assert found["mismatch_max"] < 1e-4
    assert found["stacked"] == found["stacked_changed"] == 4
