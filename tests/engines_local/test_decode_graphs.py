"""What CUDA graphs of decoding passes are given and give back, with a recorder that computes each
replay anew, on a CPU."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.local_engines import model, request, run, words

from turnwright.engines.local import LocalEngine
from turnwright.engines.local.cuda_graphs import DecodeGraphs


class Again:
    """Stands in for a CUDA graph: a replay runs the recorded function on what is in its tensors."""

    def __init__(self, function: Callable[[], torch.Tensor]) -> None:
        self.function, self.result, self.replays = function, function().clone(), 0

    def replay(self) -> None:
        self.replays += 1
        self.result.copy_(self.function())


def engine_without(monkeypatch: pytest.MonkeyPatch) -> LocalEngine:
    monkeypatch.setattr("turnwright.engines.local.model.make_fused_decoder", lambda *parts: None)
    return LocalEngine(model())


def engine_with(record: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[LocalEngine, DecodeGraphs]:
    monkeypatch.setattr("turnwright.engines.local.cuda_graphs.record", record)
    # All rows in one call, as on a GPU.
    monkeypatch.setattr("turnwright.engines.local.model.SLOTS_PER_CALL", 1 << 30)
    engine = engine_without(monkeypatch)
    graphs = DecodeGraphs(engine._model.cache, engine._model.device)
    engine._model.graphs = graphs
    return engine, graphs


async def work(engine: LocalEngine) -> list[tuple[list[int], list[float]]]:
    """From 1 to 40 calls at once, an update between, then contexts for which the cache grows."""
    found = []
    for number, count in enumerate((1, 5, 40, 3)):
        asked = [
            request(words(10 + 90 * number + n, n), f"{number}/{n}", seed=n, max_tokens=9 + n)
            for n in range(count)
        ]
        found += [
            (list(a.ids), list(a.logprobs))
            for a in await asyncio.gather(*map(engine.generate, asked))
        ]
        if number == 1:
            await engine.update(model(seed=3).state_dict().items(), version=1)
    return found


@pytest.mark.parametrize("kept", [1, 32])
def test_replies_are_those_without_graphs(monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    monkeypatch.setattr("turnwright.engines.local.cuda_graphs.MOST_GRAPHS", kept)
    made: list[Again] = []

    def record(
        function: Callable[[], torch.Tensor], device: torch.device
    ) -> tuple[Again, torch.Tensor]:
        made.append(Again(function))
        return made[-1], made[-1].result

    engine, graphs = engine_with(record, monkeypatch)
    found = run(engine, work)
    assert graphs.usable
    assert sum(graph.replays for graph in made) > 60
    assert {rows for rows, _ in graphs._graphs} <= {16, 32, 64}
    assert len(graphs._graphs) <= kept
    plain = run(engine_without(monkeypatch), work)
    assert [ids for ids, _ in found] == [ids for ids, _ in plain]
    gaps = [
        abs(a - b)
        for (_, one), (_, other) in zip(found, plain, strict=True)
        for a, b in zip(one, other, strict=True)
    ]
    assert max(gaps) < 1e-4  # keys are attended in one call instead of chunks


def test_a_pass_that_cannot_be_recorded_is_computed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def record(function: Callable[[], torch.Tensor], device: torch.device) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    engine, graphs = engine_with(record, monkeypatch)
    assert run(engine, work) == run(engine_without(monkeypatch), work)
    assert not graphs.usable
    assert (
        caplog.text.count("decoding is slower: operation not permitted when stream is capturing")
        == 1
    )
