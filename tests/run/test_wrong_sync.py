"""Engines that are not what they say: each stops the run before anything is
trained on its episodes."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.long_world import LONG
from kit.runs import RECIPE, rows

from turnwright.cli.main import main
from turnwright.engines.local import LocalEngine, fingerprint
from turnwright.training import setup
from turnwright.training.trainer.weight_probe import MAX_SHARE, MIN_POSITIONS, count_missing

pytest.importorskip("peft")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "long.py").write_text(LONG)
    path = tmp_path / "wrong.toml"
    path.write_text(RECIPE)
    return path


class KeepsOld(LocalEngine):
    """Says that new weights arrived, and goes on with those that it had."""

    told = True
    """Whether its fingerprint is of what came, as one would have it that does not
    look at what it holds."""

    def _update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> str:
        given = list(weights)
        own = {name: tensor.clone() for name, tensor in self._model.module.state_dict().items()}
        held = super()._update_weights(
            [(name, self.chosen(name, own[name], tensor)) for name, tensor in given], version
        )
        return fingerprint(given) if self.told else held

    def chosen(self, name: str, own: Any, sent: Any) -> Any:
        return own


class DropsAdapters(KeepsOld):
    """Leaves the LoRA out: the weights of adapted layers stay those of the base model."""

    def chosen(self, name: str, own: Any, sent: Any) -> Any:
        return own if name.endswith("_proj.weight") else sent


class KeepsOldAndTells(KeepsOld):
    told = False


class DropsAdaptersAndTells(DropsAdapters):
    told = False


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(
    "engine", [KeepsOld, KeepsOldAndTells, DropsAdapters, DropsAdaptersAndTells]
)
def test_an_engine_with_other_weights_stops_the_run_at_the_first_step(
    tmp_path: Path, recipe: Path, monkeypatch: Any, capsys: Any, engine: type[KeepsOld], lora: bool
) -> None:
    """Caught by the fingerprint where the engine takes it of what it holds, else by the
    logprobs of what it samples."""
    monkeypatch.setattr(setup, "LocalEngine", engine)
    out = tmp_path / "run"
    words = [] if lora else ["--lora.rank", "0"]
    assert main(["train", str(recipe), "--out", str(out), "--display", "none", *words]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    if not engine.told:
        assert (
            "the engine holds other weights than the trainer sent (policy 1, the engine reports 1)"
            in said
        )
    elif lora or engine is KeepsOld:
        assert "the engine reports policy 1, but at" in said
        assert "its logprobs lack the last update" in said
    # a part of an update may point elsewhere than the whole of it; the logprobs of what it
    # sampled are far off then
    else:
        assert "engine and trainer disagree on sampled ids" in said
        assert "Check that the engine has the newest weights (version and fingerprint)" in said
    # The first update is what does not arrive.
    assert [row["step"] for row in rows(out, "train")] == [1]


ASYNC = ["--schedule.mode", "async", "--schedule.staleness", "1", "--train.correction", "tis"]


@pytest.mark.parametrize("schedule", [[], ASYNC], ids=["sync", "async"])
def test_a_small_update_that_was_lost_is_seen_too(
    tmp_path: Path, recipe: Path, monkeypatch: Any, capsys: Any, schedule: list[str]
) -> None:
    """In `async` the engine is asked while it samples, and the step waits for the
    answer before it trains."""
    words = [
        "train",
        str(recipe),
        "--lora.rank",
        "0",
        "--train.lr",
        "1e-7",
        "--train.steps",
        "2",
        "--display",
        "none",
    ]
    words = [*words, *schedule, "--out"]
    assert main([*words, str(tmp_path / "right")]) == 0
    monkeypatch.setattr(setup, "LocalEngine", KeepsOld)
    assert main([*words, str(tmp_path / "run")]) == 1
    assert "its logprobs lack the last update" in capsys.readouterr().err
    assert len(rows(tmp_path / "run", "train")) == 1
    # The bound on single logprobs would have let it pass.
    assert main([*words, str(tmp_path / "bound"), "--train.max-mismatch", "1e-3"]) == 0


def test_where_engine_and_trainer_differ_on_purpose_nobody_asks(
    tmp_path: Path, recipe: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(setup, "LocalEngine", KeepsOld)
    words = ["--train.max-mismatch", "1000", "--train.steps", "2", "--display", "none"]
    assert main(["train", str(recipe), "--out", str(tmp_path / "run"), *words]) == 0


# The estimate.

sizes = st.lists(st.floats(0.1, 1), min_size=16, max_size=16)


@given(moved=sizes, noise=st.lists(st.floats(-0.04, 0.04), min_size=16, max_size=16))
def test_an_engine_of_the_old_weights_lacks_the_update_everywhere(
    moved: list[float], noise: list[float]
) -> None:
    assert count_missing([(s + n, s) for s, n in zip(moved, noise, strict=True)]) == (16, 16)
    assert count_missing([(n, s) for s, n in zip(moved, noise, strict=True)]) == (0, 16)


@pytest.mark.parametrize("size", [0.01, 0.3, 0.9, 3, 100])
def test_rounding_alone_is_hardly_ever_taken_for_a_lost_update(size: float) -> None:
    """Also where a few places are moved, and rounded, a hundred times as far as others."""
    rng = random.Random(0)
    worst = 0.0
    for _ in range(20_000):
        scales = [10 ** rng.uniform(-2, 0) for _ in range(16)]
        lost, places = count_missing(
            [(scale * size * rng.gauss(0, 1), scale * rng.gauss(0, 1)) for scale in scales]
        )
        worst = max(worst, lost / places)
    assert worst < MAX_SHARE


def test_too_little_to_tell() -> None:
    assert count_missing([(1.0, 0.0)] * 5) == (0, 0)
    assert count_missing([(float("nan"), 1.0), (1.0, 1.0)]) == (1, 1)
    assert MIN_POSITIONS > 1
