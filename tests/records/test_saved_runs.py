"""`turnwright.load_run`: metrics as columns, and episodes that are read when they are asked for."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pandas
import pytest
from kit.runs import SMALL

import turnwright as tw
from turnwright.cli.main import main
from turnwright.errors import TraceError, UsageError
from turnwright.records import RunDir
from turnwright.records.serialization import read_trajectories
from turnwright.saved_runs import Run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "recipe.toml").write_text(SMALL)
    out = folder / "out"
    assert main(["train", str(folder / "recipe.toml"), "--out", str(out), "--quiet"]) == 0
    return out


@pytest.fixture
def run(trained: Path) -> Run:
    return tw.load_run(trained)


def test_a_run_has_its_settings_summary_and_evaluations(run: Run) -> None:
    assert run.config["env"][0]["use"] == "hop"
    assert run.summary["rl_steps"] == 2
    names = [(success.name, success.mode, success.step) for success in run.evaluations]
    assert names == [
        ("before", "sampled", 0),
        ("before", "greedy", 0),
        ("after", "sampled", 2),
        ("after", "greedy", 2),
    ]
    first = run.evaluations[0]
    assert first.n == 4
    assert 0 <= first.low <= first.success <= first.high <= 1
    assert "2 training steps" in repr(run)
    assert not run.is_running
    with RunDir(run.path):
        assert run.is_running


def test_metrics_are_columns_by_phase_and_frames(run: Run) -> None:
    metrics = run.metrics
    assert {"warmup", "gate", "eval", "train"} <= set(metrics)
    rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    train = [row for row in rows if row["phase"] == "train"]
    assert metrics["train"]["reward"] == [row["reward"] for row in train]
    assert metrics["train"]["step"] == [1, 2]
    stop = next(iter(train[0]["stops"]))
    of_stop = metrics["train"][f"stops.{stop}"]
    assert [count for count in of_stop if not math.isnan(count)] == [
        row["stops"][stop] for row in train if stop in row["stops"]
    ]

    frame = metrics.frame()
    assert isinstance(frame, pandas.DataFrame)
    assert len(frame) == len(rows)
    assert list(frame[frame.phase == "eval"].name) == [
        "before sampled",
        "before greedy",
        "after sampled",
        "after greedy",
    ]
    assert metrics["train"].frame()["loss"].tolist() == metrics["train"]["loss"]


def test_episodes_are_those_that_the_strict_reader_gives(run: Run) -> None:
    recorded = list(read_trajectories(run.path))
    episodes = run.episodes
    assert len(episodes) == len(recorded)
    assert [episode.trajectory for episode in episodes] == recorded
    assert episodes[-1].trajectory == recorded[-1]
    assert [episode.key for episode in episodes[2:5]] == [t.key for t in recorded[2:5]]
    assert len(episodes[::2]) == (len(recorded) + 1) // 2
    with pytest.raises(IndexError):
        episodes[len(recorded)]


def test_training_gives_each_of_its_episodes_an_advantage_or_a_reason(run: Run) -> None:
    for episode in run.episodes:
        if episode.phase == "train":
            assert (episode.advantage is None) == (episode.reason is not None)
        else:
            assert (episode.advantage, episode.reason) == (None, None)
    rows = [json.loads(line) for line in (run.path / "training.jsonl").read_text().splitlines()]
    by_key = {tuple(row["key"]): row["advantage"] for row in rows}
    trained = run.episodes.filter(phase="train")
    assert len(trained) == len(by_key) == 8
    for episode in trained:
        key = episode.key
        name = (key.phase, key.step, key.task, key.sample, key.attempt)
        assert episode.advantage == by_key[name]


def test_filters_agree_with_looking_at_every_episode(run: Run) -> None:
    recorded = list(read_trajectories(run.path))
    task = recorded[-1].task.id
    stop = str(recorded[0].stop)
    filtered = run.episodes.filter
    for kept, expected in (
        (filtered(phase="train"), [t for t in recorded if t.key.phase == "train"]),
        (
            filtered(phase="train", step=2),
            [t for t in recorded if t.key.phase == "train" and t.key.step == 1],
        ),
        (filtered(step=(2, None)), [t for t in recorded if t.key.metrics_step >= 2]),
        (filtered(task=task), [t for t in recorded if t.task.id == task]),
        (filtered(stop=stop), [t for t in recorded if t.stop == stop]),
        (filtered(reward=0.0), [t for t in recorded if t.reward == 0]),
        (
            filtered(reward=(0.5, 1.0)),
            [t for t in recorded if t.reward is not None and 0.5 <= t.reward <= 1],
        ),
        (filtered(failed=True), [t for t in recorded if t.error is not None]),
        (
            filtered(lambda episode: len(episode.trajectory.turns) > 1),
            [t for t in recorded if len(t.turns) > 1],
        ),
        (
            filtered(phase="train").filter(step=1),
            [t for t in recorded if t.key.phase == "train" and t.key.step == 0],
        ),
    ):
        assert [episode.trajectory for episode in kept] == expected


def test_groups_have_the_samples_of_one_task_at_one_step(run: Run) -> None:
    groups = run.episodes.filter(phase="train").groups
    assert len(groups) == 4
    for group in groups:
        assert [trajectory.key.sample for trajectory in group.trajectories] == [0, 1]
        assert len({trajectory.key.group for trajectory in group.trajectories}) == 1
    assert sum(len(group.trajectories) for group in run.groups) == len(run.episodes)


def test_a_run_is_followed_while_it_goes_on(trained: Path, tmp_path: Path) -> None:
    lines = (trained / "trajectories.jsonl").read_bytes().splitlines(keepends=True)
    growing = tmp_path / "trajectories.jsonl"
    growing.write_bytes(b"".join(lines[:3]) + lines[3][:50])
    run = tw.load_run(tmp_path)
    first = run.episodes
    assert len(first) == 3
    growing.write_bytes(b"".join(lines))
    assert len(first) == 3
    assert len(run.episodes) == len(lines)

    # An episode that is played again after a resume counts once, as it was played last.
    again = json.loads(lines[0])
    again["reward"] = 0.25
    with growing.open("ab") as file:
        file.write(json.dumps(again).encode() + b"\n")
    assert len(run.episodes) == len(lines)
    assert [episode.reward for episode in run.episodes.filter(reward=0.25)] == [0.25]
    assert run.episodes[-1].trajectory.reward == 0.25


def test_records_are_read_one_at_a_time(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from turnwright import saved_runs

    read = []
    strict = saved_runs.read_trajectory

    def counted(row: dict) -> tw.Trajectory:
        read.append(row["key"])
        return strict(row)

    monkeypatch.setattr(saved_runs, "read_trajectory", counted)
    run = tw.load_run(trained)
    failures = run.episodes.filter(phase="train", reward=(None, 0.5))
    assert len(failures) > 0
    assert repr(failures[0]).startswith("<Episode train ")
    assert read == []
    assert failures[0].trajectory.key == failures[0].key
    assert len(read) == 1


def test_an_edited_record_is_an_error_that_names_its_line(trained: Path, tmp_path: Path) -> None:
    lines = (trained / "trajectories.jsonl").read_bytes().splitlines(keepends=True)
    file = tmp_path / "trajectories.jsonl"
    file.write_bytes(lines[0] + b'{"key": 3}\n')
    with pytest.raises(TraceError, match=r"trajectories.jsonl, line 2: an incomplete record"):
        len(tw.load_run(tmp_path).episodes)

    file.write_bytes(lines[0] + lines[1])
    episodes = tw.load_run(tmp_path).episodes
    row = json.loads(lines[0])
    row["spans"][1]["parent"] = 7
    file.write_bytes(json.dumps(row).encode() + b"\n")
    with pytest.raises(TraceError, match=r"line 1: .*has the parent 7"):
        _ = episodes[0].trajectory
    file.write_bytes(lines[1] + lines[0])
    with pytest.raises(TraceError, match="line 1: the file changed"):
        _ = episodes[0].trajectory


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such directory"):
        tw.load_run(tmp_path / "missing")
    with pytest.raises(UsageError, match="no run is there"):
        tw.load_run(tmp_path)
