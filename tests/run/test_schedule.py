"""Runs that sample while they train: as deterministic as their mode promises,
and exact after kills."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from kit.runs import SMALL, benchmark, train

from turnwright.cli.main import main


def recipe(bench: Any, mode: str, steps: int, **more: object) -> str:
    """The recipe of the benchmark in another mode."""
    text: str = bench.with_schedule(
        bench.RECIPE.replace("steps = 16", f"steps = {steps}"), mode, **more
    )
    return text


def test_one_step_off_is_the_same_twice_and_after_kills(tmp_path: Path) -> None:
    bench = benchmark()
    outcome = bench.compare(
        tmp_path, ["rollout", "checkpoint", 0.3, 0.6], recipe(bench, "one_step_off", 6)
    )
    assert outcome.kills
    assert outcome.ids_equal
    assert outcome.weights_equal
    assert outcome.metrics_equal
    lags = Counter(
        step + warmed - version for step, warmed, version in lags_of(bench, tmp_path / "peace")
    )
    assert set(lags) == {0, 1}, "the first batch has no lag, each other one of 1"


def lags_of(bench: Any, run: Path) -> list[tuple[int, int, int]]:
    """(step trained, warm-up steps, version) of each sampled span of a run whose batches are
    named by their steps."""
    warmed = json.loads((run / "summary.json").read_text())["warmup_steps"]
    return [
        (key[0], warmed, span[3])
        for key, spans in bench.trained(run).items()
        for span in spans
        if span[0] == "model"
    ]


@pytest.mark.parametrize("hold", [False, True])
def test_asynchronous_groups_are_trained_once_and_in_time_after_kills(
    tmp_path: Path, hold: bool
) -> None:
    bench, rng = benchmark(), random.Random(hold)
    kills = ["rollout", "checkpoint", rng.uniform(0.1, 0.6), rng.uniform(0.1, 0.9)]
    stream = bench.besiege_stream(
        tmp_path, kills, recipe(bench, "async", 8, staleness=2, hold=hold)
    )
    assert stream.kills
    assert stream.good, stream
    assert max(stream.lags) in (1, 2), (
        "some were sampled by an older policy, none by one over the bound"
    )
    batches = [event["groups"] for event in bench.events(tmp_path / "war") if event["e"] == "batch"]
    assert sorted(group for groups in batches for group in groups) == list(range(8 * 6)), (
        "nothing is discarded"
    )


def test_asynchronous_at_staleness_0_is_the_synchronous_run(tmp_path: Path) -> None:
    bench = benchmark()
    plain, stream = tmp_path / "plain.toml", tmp_path / "stream.toml"
    plain.write_text(SMALL.replace("steps = 2\n[eval]", "steps = 4\n[eval]"))
    stream.write_text(plain.read_text() + '[schedule]\nmode = "async"\nstaleness = 0\n')
    for file in (plain, stream):
        train(file, tmp_path / file.stem)
    one, other = tmp_path / "plain", tmp_path / "stream"
    assert bench.trained(one) == bench.trained(other)
    assert bench.weights(one) == bench.weights(other)
    assert bench.metrics(one) == bench.metrics(other)


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        (
            'mode = "async"',
            "schedule.staleness = 2 (the default): trains on tokens of older policies, which needs",
        ),
        (
            'mode = "one_step_off"',
            'schedule.mode = "one_step_off": trains on tokens of older policies, which needs',
        ),
        ("staleness = 3", "schedule.staleness = 3: has no effect: it needs schedule.mode = async"),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], keys: str, error: str
) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(f"{SMALL}[schedule]\n{keys}\n")
    assert main(["train", str(file), "--out", str(tmp_path / "run")]) != 0
    assert error in capsys.readouterr().err
