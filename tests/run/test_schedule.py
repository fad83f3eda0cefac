"""Runs that sample while they train: as deterministic as their mode promises, and exact after kills."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from test_kill_resume import SMALL, benchmark

from turnwise.cli.main import main

STALENESS = 2


def recipe(bench: Any, mode: str, steps: int, **more: str) -> str:
    """The recipe of the benchmark in another mode."""
    lines = "".join(f"{name} = {value}\n" for name, value in more.items())
    text: str = bench.RECIPE.replace("steps = 16", f'steps = {steps}\ncorrection = "tis"')
    return f'{text}\n[schedule]\nmode = "{mode}"\n{lines}'


def test_one_step_off_is_the_same_twice_and_after_kills(tmp_path: Path) -> None:
    bench = benchmark()
    outcome = bench.compare(tmp_path, ["rollout", "checkpoint", 0.3, 0.6], recipe(bench, "one_step_off", 6))
    assert outcome.kills
    assert outcome.ids_equal
    assert outcome.weights_equal
    assert outcome.metrics_equal
    lags = Counter(step + warmed - version for step, warmed, version in lags_of(bench, tmp_path / "peace"))
    assert set(lags) == {0, 1}, "the first batch has no lag, each other one of 1"


def lags_of(bench: Any, run: Path) -> list[tuple[int, int, int]]:
    """(step trained, warm-up steps, version) of each sampled span of a run whose batches are named by their steps."""
    warmed = json.loads((run / "summary.json").read_text())["warmup_steps"]
    return [(key[0], warmed, span[3]) for key, spans in bench.trained(run).items() for span in spans if span[0] == "model"]


def check_stream(bench: Any, run: Path, staleness: int, steps: int, groups: int) -> None:
    """Check that every group that was admitted was trained once and in time, on spans that were sampled once."""
    warmed = json.loads((run / "summary.json").read_text())["warmup_steps"]
    admitted: dict[int, int] = {}
    batches: dict[int, list[int]] = {}
    keys: dict[int, set[tuple[int, str]]] = {}
    spans: dict[tuple[int, str], list[dict[str, Any]]] = {}
    opened: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for event in bench.events(run):
        if event["e"] == "admitted":
            assert event["group"] not in admitted
            admitted[event["group"]] = event["version"]
        elif event["e"] == "batch":
            assert event["step"] not in batches
            batches[event["step"]] = event["groups"]
            keys[event["step"]] = {(step, task) for step, task in event["keys"]}
        elif "k" in event and event["k"][0] == "train":
            key = tuple(event["k"])
            if event["e"] == "opened":
                opened[key] = []
            opened[key] += event.get("spans", ())
            if event["e"] == "closed":
                spans.setdefault((key[1], key[2]), []).extend(opened.pop(key))
    taken = [group for found in batches.values() for group in found]
    assert sorted(batches) == list(range(steps))
    assert sorted(taken) == sorted(admitted) == list(range(steps * groups)), "every group once, and nothing discarded"
    lags = Counter()
    for step, found in keys.items():
        for key in found:
            lags.update(step + warmed - span["version"] for span in spans[key] if span["origin"] == "model")
    assert min(lags) >= 0
    assert max(lags) <= staleness, lags
    assert sum(lags[lag] for lag in lags if lag), "some were sampled by an older policy"


@pytest.mark.parametrize("hold", ["false", "true"])
def test_asynchronous_groups_are_trained_once_and_in_time_after_kills(tmp_path: Path, hold: str) -> None:
    bench = benchmark()
    text = recipe(bench, "async", 8, staleness=str(STALENESS), hold=hold)
    file, run, rng = tmp_path / "recipe.toml", tmp_path / "run", random.Random(hold)
    file.write_text(text)
    for instant in ("rollout", "checkpoint", rng.uniform(0.1, 0.6), rng.uniform(0.1, 0.9)):
        words = bench.command("--resume", run) if (run / "config.json").exists() else bench.command(file, "--out", run)
        bench.kill_when(words, run, instant)
    bench.finish(bench.command("--resume", run))
    check_stream(bench, run, STALENESS, steps=8, groups=6)


def test_asynchronous_at_staleness_0_is_the_synchronous_run(tmp_path: Path) -> None:
    bench = benchmark()
    plain, stream = tmp_path / "plain.toml", tmp_path / "stream.toml"
    plain.write_text(SMALL.replace("steps = 2\n[eval]", "steps = 4\n[eval]"))
    stream.write_text(plain.read_text() + '[schedule]\nmode = "async"\nstaleness = 0\n')
    for file in (plain, stream):
        assert main(["train", str(file), "--out", str(tmp_path / file.stem), "--display", "none"]) == 0
    one, other = tmp_path / "plain", tmp_path / "stream"
    assert bench.trained(one) == bench.trained(other)
    assert bench.weights(one) == bench.weights(other)
    assert bench.metrics(one) == bench.metrics(other)


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ('mode = "async"', "schedule.staleness = 2 (the default): trains on tokens of older policies, which needs"),
        ('mode = "one_step_off"', 'schedule.mode = "one_step_off": trains on tokens of older policies, which needs'),
        ("staleness = 3", "schedule.staleness = 3: has no effect: it needs schedule.mode = async"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], keys: str, error: str) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(f"{SMALL}[schedule]\n{keys}\n")
    assert main(["train", str(file), "--out", str(tmp_path / "run")]) != 0
    assert error in capsys.readouterr().err
