"""One row a run: found in folders, read of whatever lies there, kept while nothing changes."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from turnwright.records import RunDir
from turnwright.records.run_dir import FAILURE_FILE, is_locked
from turnwright_view import run_rows
from turnwright_view.run_rows import RunRow, RunRows, find_runs

MakeRun = Callable[..., Path]

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["train", "eval", "before", "sampled", 2**70, 1e308])
)
KEYS = (
    "config env model path phase step n success ci name mode sampled_tokens trajectories train "
    "steps seed recipe wall_s time_s"
)
NAMES = st.text(max_size=3) | st.sampled_from(KEYS.split())
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=6),
    max_leaves=12,
)


def row_of(run: Path) -> RunRow:
    [row] = RunRows().rows({"run": run})
    return row


def write_settings(run: Path, **config: Any) -> Path:
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.json").write_text(json.dumps({"config": config}))
    return run


def test_a_row_says_what_was_learned_and_how_far_the_run_is(
    tmp_path: Path, make_run: MakeRun
) -> None:
    row = row_of(make_run(tmp_path / "hop-run", steps=60))
    assert (row.name, row.state, row.env, row.model, row.seed) == (
        "hop-run",
        "finished",
        "hop",
        "tiny",
        0,
    )
    assert row.before is not None
    assert row.after is not None
    assert (row.before.success, row.before.n) == (0.24, 256)
    assert row.after.low < row.after.success == 0.973 < row.after.high
    assert row.steps == 59
    assert row.wall_s == 93.2
    assert row.size == sum(file.stat().st_size for file in (tmp_path / "hop-run").iterdir())
    rows = map(json.loads, (tmp_path / "hop-run" / "metrics.jsonl").read_text().splitlines())
    assert row.tokens == sum(row.get("sampled_tokens", 0) for row in rows)


def test_runs_are_found_below_a_folder_but_not_in_runs_models_or_links(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    write_settings(runs / "a", seed=1)
    write_settings(runs / "a" / "inside", seed=1)  # part of the run `a`
    write_settings(runs / "sweep" / "lr" / "1" / "b", seed=1)
    write_settings(runs / "1" / "2" / "3" / "4" / "too-deep", seed=1)
    write_settings(runs / ".hidden" / "c", seed=1)
    (runs / "recorded").mkdir()
    (runs / "recorded" / "trajectories.jsonl").write_text("")
    (runs / "model").mkdir()
    (runs / "model" / "config.json").write_text('{"hidden_size": 64}')
    (runs / "link").symlink_to(runs / "a")

    assert list(find_runs([runs])) == ["a", "recorded", "sweep/lr/1/b"]
    assert find_runs([runs / "a"]) == {"a": runs / "a"}
    assert find_runs([runs / "model"]) == {}
    assert find_runs([tmp_path / "missing"]) == {}


def test_two_runs_of_one_name_have_two_ids(tmp_path: Path) -> None:
    first = write_settings(tmp_path / "x" / "run")
    second = write_settings(tmp_path / "y" / "run")
    assert find_runs([first, second]) == {"run": first, "run-2": second}


def test_the_state_follows_the_process_of_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    rows = RunRows()

    def state() -> str:
        [row] = rows.rows({"run": run})
        return row.state

    with RunDir(run) as opened:
        assert state() == "running"
        assert is_locked(run)
    assert state() == "no training"
    with RunDir(run) as opened:
        opened.write_json("config.json", {"config": {}, "seed": 0})
        opened.metrics.append({"phase": "train", "step": 1})
        assert state() == "running"
    assert state() == "stopped"
    (run / FAILURE_FILE).write_text('{"type": "EngineError"}')
    assert state() == "failed"
    (run / "summary.json").write_text('{"rl_steps": 1}')
    assert state() == "finished"


def test_looking_whether_a_run_is_locked_never_keeps_one_from_starting(tmp_path: Path) -> None:
    RunDir(tmp_path).close()
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            is_locked(tmp_path)
            time.sleep(0.0005)

    watchers = [threading.Thread(target=look) for _ in range(4)]
    for watcher in watchers:
        watcher.start()
    try:
        for _ in range(50):
            RunDir(tmp_path).close()
    finally:
        over.set()
        for watcher in watchers:
            watcher.join()


def test_looking_creates_no_lock_and_follows_no_link(tmp_path: Path) -> None:
    assert not is_locked(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with RunDir(tmp_path / "other"):
        (tmp_path / ".lock").symlink_to(tmp_path / "other" / ".lock")
        assert not is_locked(tmp_path)


def test_a_row_is_read_on_from_where_the_metrics_have_grown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_settings(tmp_path / "run")
    lines_read = []
    whole = run_rows.read_line

    def counted(line: bytes, read: Callable[[Any], Any]) -> Any:
        lines_read.append(line)
        return whole(line, read)

    monkeypatch.setattr(run_rows, "read_line", counted)
    rows = RunRows()
    for step in range(1, 4):
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"phase": "train", "step": step, "sampled_tokens": 10}) + "\n")
            file.write('{"phase": "train", "st')  # a line that is being written
        [row] = rows.rows({"run": run})
        assert (row.steps, row.tokens) == (step, 10 * step)
        with (run / "metrics.jsonl").open("r+") as file:
            file.truncate(os.path.getsize(run / "metrics.jsonl") - len('{"phase": "train", "st'))
    assert len(lines_read) == 3

    rows.rows({"run": run})
    assert len(lines_read) == 3
    (run / "metrics.jsonl").write_text('{"phase": "train", "step": 1, "sampled_tokens": 7}\n')
    [row] = rows.rows({"run": run})
    assert (row.steps, row.tokens) == (1, 7)


def test_settings_that_differ_are_in_every_row(tmp_path: Path) -> None:
    shared = {"out": "x", "env": [{"use": "hop"}], "rollout": {"stop": []}}
    first = write_settings(tmp_path / "a", **shared, train={"lr": 1e-3, "steps": 5})
    second = write_settings(
        tmp_path / "b", **{**shared, "out": "y"}, train={"lr": 2e-3, "steps": 5}
    )
    without = tmp_path / "c"
    without.mkdir()
    rows = RunRows().rows({"a": first, "b": second, "c": without})
    assert [dict(row.changed) for row in rows] == [
        {"train.lr": 1e-3},
        {"train.lr": 2e-3},
        {"train.lr": None},
    ]


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=JSON, summary=JSON, metrics=st.lists(JSON, max_size=4), other=JSON)
def test_nothing_in_a_folder_raises_and_every_row_is_standard_json(
    tmp_path: Path, config: Any, summary: Any, metrics: list[Any], other: Any
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"config": config, "recipe": other}))
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    lines = [json.dumps(row) + "\n" for row in metrics]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    second = write_settings(tmp_path.parent / f"{tmp_path.name}-second", env=other, model=other)

    for row in RunRows().rows({"a": tmp_path, "b": second}):
        json.dumps(row.as_json(), allow_nan=False)


def test_files_that_are_no_files_and_values_nested_without_end_count_as_missing(
    tmp_path: Path,
) -> None:
    os.mkfifo(tmp_path / "config.json")
    os.mkfifo(tmp_path / "metrics.jsonl")
    os.mkfifo(tmp_path / ".lock")
    (tmp_path / "summary.json").mkdir()
    assert row_of(tmp_path).state == "no training"

    deep = tmp_path / "deep"
    deep.mkdir()
    nested = "[" * 1015 + "]" * 1015
    (deep / "config.json").write_text(
        f'{{"config": {{"env": [{{"use": {nested}}}], "x": {nested}}}}}'
    )
    assert len(row_of(deep).env) <= run_rows.MAX_TEXT
