"""Trackers get every row once, and whatever they do, the run does not notice."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from turnwright import trackers
from turnwright.cli.main import main
from turnwright.errors import ConfigError
from turnwright.trackers import (
    DiskFull,
    TrackerPosition,
    TrackerProcesses,
    folder_of,
    forward_rows,
    tracker_of,
)

OWN = Path(__file__).parent / "faulty_trackers.py"


def observation(run):
    return [json.loads(line) for line in (run / "heard.jsonl").read_text().splitlines()]


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def until(holds, seconds=60.0):
    last = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < last, "never happened"
        time.sleep(0.02)


@pytest.fixture
def run(make_run, tmp_path):
    return make_run(tmp_path / "hop", steps=5)


def test_a_tracker_may_be_a_module_of_the_working_directory(run, tmp_path, monkeypatch):
    (tmp_path / "my_tracker.py").write_text(OWN.read_text())
    (tmp_path / "json.py").write_text("raise SystemExit('a module of Python is hidden')")
    monkeypatch.chdir(tmp_path)
    assert TrackerProcesses(["my_tracker:Hears"], run, "games", None).close(60.0) == []
    assert len(observation(run)) > len(rows(run))


def test_every_row_arrives_once_while_it_is_written_and_after_a_resume(run):
    spec = f"{OWN}:Hears"
    followers = TrackerProcesses([spec], run, "games", None)
    until(lambda: (run / "heard.jsonl").exists() and len(observation(run)) > len(rows(run)))
    with (run / "metrics.jsonl").open("a") as file:
        file.write(
            json.dumps(
                {"phase": "train", "step": 6, "reward": 0.5, "seconds": {"tool": {"p95": 2.0}}}
            )
            + "\n"
        )
    until(lambda: observation(run)[-1] == ["train", 6, {"reward": 0.5, "seconds.tool.p95": 2.0}])
    assert followers.close() == []
    with (run / "metrics.jsonl").open("a") as file:
        file.write(
            json.dumps({"phase": "train", "step": 7, "reward": 0.75})
            + "\n"
            + '{"phase": "train", "st'
        )
    assert TrackerProcesses([spec], run, "games", "second").close() == []
    output = observation(run)
    assert [one for one in output if one[0] == "start"] == [
        ["start", "games", "hop", True],
        ["start", "games", "second", True],
    ]
    assert output[-2:] == [["train", 7, {"reward": 0.75}], ["finish"]]
    assert len(output) == 4 + len([row for row in rows_of_whole_lines(run) if "phase" in row])
    modes = {one[0] for one in output}
    assert {"train", "warmup", "eval/sampled", "eval/greedy"} <= modes


def rows_of_whole_lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().split(b"\n")[:-1]]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("Hangs", "did not finish"),
        ("Slow", "did not finish"),
        ("Raises", "failed: RuntimeError"),
        ("Full", "No space left on device"),
        ("Dies", "failed: died"),
        ("Missing", "Missing"),
    ],
)
def test_a_faulty_tracker_costs_a_sentence(run, kind, says):
    before = (run / "metrics.jsonl").read_bytes()
    followers = TrackerProcesses([f"{OWN}:{kind}"], run, "games", None)
    [process] = [process for _, process in followers._processes]
    if says.startswith("did"):
        until(lambda: (run / "track" / f"{folder_of(f'{OWN}:{kind}')}.json").exists())
        [output] = followers.close(patience_s=0.5)
    else:
        [output] = followers.close(patience_s=120)
    assert says in output
    assert "turnwright track" in output
    assert "\x1b" not in output
    assert process.status is not None, "nothing is left behind"
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_tracker_ends_with_the_training_process_however_that_ended(run):
    code = (
        "import sys, time; from pathlib import Path; from turnwright.trackers import "
        "TrackerProcesses;f = TrackerProcesses([sys.argv[1]], Path(sys.argv[2]), 'p', "
        "None);print(f._processes[0][1].pid, flush=True); time.sleep(600)"
    )
    words = [sys.executable, "-c", code, f"{OWN}:Hears", str(run)]
    training = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")},
    )
    assert training.stdout is not None
    pid = int(training.stdout.readline())
    os.kill(training.pid, signal.SIGKILL)
    training.wait()
    until(lambda: (run / "heard.jsonl").exists() and observation(run)[-1:] == [["finish"]])
    until(
        lambda: (
            not Path(f"/proc/{pid}/cmdline").exists()
            or not Path(f"/proc/{pid}/cmdline").read_bytes()
        )
    )


def test_a_disk_that_is_nearly_full_is_left_to_the_run(run, monkeypatch):
    class Never:
        def log(self, phase, step, figures):
            raise AssertionError("nothing may be written any more")

    monkeypatch.setattr(trackers, "MIN_FREE", 2**62)
    (run / "track").mkdir()
    with pytest.raises(DiskFull, match="are free on the disk"):
        forward_rows(Never(), run, TrackerPosition(run, "never"))


def test_the_command_line_sends_a_run_afterwards_and_names_mistakes(run, capsys):
    assert main(["track", str(run), "--to", f"{OWN}:Hears", "--project", "later"]) == 0
    assert observation(run)[0] == ["start", "later", "hop", True]
    assert main(["track", str(run)]) == 2
    assert "--to trackio" in capsys.readouterr().err
    assert main(["track", str(run), "--to", "wandbb"]) == 2
    assert "did you mean 'wandb'" in capsys.readouterr().err
    assert main(["track", str(run / "gone"), "--to", "wandb"]) == 2
    assert main(["track", str(run), "--to", f"{OWN}:Raises"]) == 1
    assert "no such project" in capsys.readouterr().err


def test_a_class_that_is_no_tracker_is_named(tmp_path):
    (tmp_path / "own.py").write_text("class Half:\n    def start(self, *args):\n        pass\n")
    with pytest.raises(ConfigError, match="it lacks log, finish"):
        tracker_of(f"{tmp_path / 'own.py'}:Half")


@pytest.mark.parametrize("package", ["tensorboard", "wandb", "trackio"])
def test_the_real_ones_take_a_run(run, package, monkeypatch):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is an extra that is not installed here")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(run / "track" / "trackio"))
    assert TrackerProcesses([package], run, "games", None).close(patience_s=120) == []
    written = [
        path for path in (run / "track").rglob("*") if path.is_file() and path.stat().st_size > 1000
    ]
    assert written, "nothing was kept"
