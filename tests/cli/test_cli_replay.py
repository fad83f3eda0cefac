"""`turnwright replay RUN --loop` over a run of the quickstart's recipe,
sampled by the local engine."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from kit.runs import train

from turnwright.cli.main import main

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.toml"
SMALL = {
    "model": {"hidden": 32, "heads": 2, "kv-heads": 2},
    "warmup": {"demos": 64, "steps": 2, "gate-every": 2, "gate-success": 0, "gate-tasks": 8},
    "train": {"steps": 2},
    "rollout": {"groups": 2, "group-size": 4},
    "eval": {"tasks": 4},
}
pytestmark = pytest.mark.beside("view")

WORLD = """
from turnwright.envs.builtin.hop import Hop

class Other(Hop):
    async def reset(self, task, *, seed=None):
        await super().reset(task, seed=seed)
        return "\\x1b[2J\\u202e"
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "quickstart"
    words = [
        f"--{section}.{key}={value}"
        for section, keys in SMALL.items()
        for key, value in keys.items()
    ]
    train(RECIPE, path, *words)
    return path


def test_the_same_loop_comes_to_the_same(run, capsys):
    before = {file: file.stat().st_mtime_ns for file in run.rglob("*")}
    assert main(["replay", str(run), "--loop"]) == 0
    everything = capsys.readouterr().out
    assert everything.endswith("episodes replayed, all match the record\n")
    assert main(["replay", str(run), "--loop", "--env", "recipe"]) == 0
    assert capsys.readouterr().out == everything
    for step in ("1", "2"):  # as metrics.jsonl and the viewer count
        assert main(["replay", str(run), "--loop", "--phase", "train", "--step", step]) == 0
        assert capsys.readouterr().out == "8 episodes replayed, all match the record\n"
    assert {file: file.stat().st_mtime_ns for file in run.rglob("*")} == before, (
        "the run was written to"
    )


def test_a_run_of_an_older_release_is_played_in_its_own_world(run, capsys, tmp_path):
    shutil.copytree(run, tmp_path / "old")
    path = tmp_path / "old" / "journal.jsonl"
    new = ("settings", "expected", "tools", "scores", "call", "retries")
    events = [
        event for event in map(json.loads, path.read_text().splitlines()) if event["e"] not in new
    ]
    old = [{name: value for name, value in event.items() if name not in new} for event in events]
    path.write_text("".join(json.dumps(event) + "\n" for event in old))
    assert main(["replay", str(tmp_path / "old"), "--loop", "--env", "recipe"]) == 0
    assert capsys.readouterr().out.endswith("episodes replayed, all match the record\n")
    assert main(["replay", str(tmp_path / "old"), "--loop"]) == 1
    assert "pass the environment (--env)" in capsys.readouterr().out


def test_what_changed_is_told_with_status_1(run, capsys, tmp_path):
    assert main(["replay", str(run), "--loop", "--phase", "train", "--limits.turns", "1"]) == 1
    output = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"16 episodes replayed, \d+ differ: \d+ in turns", output[-1])
    assert "differs in" in output[0]
    (tmp_path / "other.py").write_text(WORLD)
    assert (
        main(
            [
                "replay",
                str(run),
                "--loop",
                "--env",
                f"{tmp_path / 'other.py'}:Other",
                "--phase",
                "train",
            ]
        )
        == 1
    )
    output = capsys.readouterr().out
    assert not {"\x1b", "\u202e"} & set(output)
    assert output.startswith("train 1 / ")
    assert "differs in prompt at turn 1, id 5 (prompt)" in output
    assert output.endswith("16 episodes replayed, 16 differ: 16 in prompt\n")


def test_mistakes_are_told_in_a_line(run, capsys):
    assert main(["replay", str(run), "--env", "hop"]) == 2
    assert "--env needs --loop; add it" in capsys.readouterr().err
    assert main(["replay", str(run), "--limits.turns", "1"]) == 2
    assert "--limits.turns needs --loop; add it" in capsys.readouterr().err
    assert main(["replay", str(run), "--loop", "--trajectory", "nobody"]) == 1
    assert capsys.readouterr().out == "no episode was replayed\n"
