"""`turnwright runs`: the table of runs, and what `clean` deletes and leaves alone."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from kit.runs import SMALL
from kit.viewing import write_run

from turnwright.cli.main import main
from turnwright.records import RunDir
from turnwright_view import clean


def add_checkpoint(run: Path, name: str, serial: int) -> Path:
    folder = run / "checkpoints" / name
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"x" * 5000)
    state = {"serial": serial, "cursor": {"phase": "reinforce", "step": serial}}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run of four checkpoints, of which the second is the best."""
    made = write_run(tmp_path / "runs" / "hop", steps=4)
    for serial in range(1, 5):
        add_checkpoint(made, f"step-{serial:05d}", serial)
    (made / "checkpoints" / "best.json").write_text('{"name": "step-00002", "score": 0.5}')
    (made / "checkpoints" / ".step-00003.writing").mkdir()
    (made / "engines").mkdir()
    (made / "engines" / "vllm.log").write_bytes(b"y" * 700)
    (made / "profile.json").write_text("[]")
    return made


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["runs", *words]) == 0
    return capsys.readouterr().out


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_the_table_has_a_line_for_each_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "runs" / "sweep" / "b", steps=8)
    head, hop, other = said(capsys, str(tmp_path / "runs")).splitlines()
    assert head.split()[:2] == ["run", "state"]
    assert hop.startswith("hop ")
    assert "finished  24.0% -> 97.3%" in hop
    assert " 3/60 " in hop
    assert other.startswith("sweep/b")

    monkeypatch.chdir(tmp_path)
    assert said(capsys).splitlines()[:2] == [head, hop]
    first, *_ = said(capsys, "runs", "--sort", "steps").splitlines()[1:]
    assert first.startswith("sweep/b")
    (run / "large.bin").write_bytes(b"z" * 300_000)
    largest, *_ = said(capsys, "runs", "--size").splitlines()[1:]
    assert largest.startswith("hop")


def test_json_has_the_rows(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [row] = json.loads(said(capsys, str(run), "--json"))
    assert (row["id"], row["state"], row["after"]["n"]) == ("hop", "finished", 256)
    assert row["size"] == sum(p.stat().st_size for p in run.rglob("*") if p.is_file())


def test_clean_says_what_would_go_and_deletes_only_with_yes(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files_in(run)
    listed = said(capsys, "clean", str(run.parent))
    assert files_in(run) == before
    for gone in ("step-00001", "step-00003  (", ".step-00003.writing", "engines", "profile.json"):
        assert f"{run}/" in listed
        assert gone in listed
    for kept in ("step-00002", "step-00004", "metrics.jsonl"):
        assert kept not in listed
    assert listed.splitlines()[-1].endswith("would be freed; nothing is deleted without --yes")

    done = said(capsys, "clean", str(run), "--yes")
    assert done.splitlines()[-1].endswith(" freed")
    assert done.splitlines()[-1].split()[:2] == listed.splitlines()[-1].split()[:2]
    gone = before - files_in(run)
    assert {path.partition("/")[0] for path in gone} == {"checkpoints", "engines", "profile.json"}
    kept_checkpoints = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert kept_checkpoints == ["best.json", "step-00002", "step-00004"]
    assert "nothing to delete" in said(capsys, "clean", str(run))


def test_clean_tells_programs_what_it_did(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = json.loads(said(capsys, "clean", str(run), "--yes", "--json"))
    assert result["deleted"] is True
    assert {"run", "path", "what", "size"} == set(result["leftovers"][0])
    assert [row["size"] for row in result["leftovers"] if row["path"] == "engines"] == [700]


def test_a_running_run_is_left_alone_also_if_it_started_meanwhile(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunDir(run):
        before = files_in(run)
        assert "left alone: running" in said(capsys, "clean", str(run))
        assert "left alone: running" in said(capsys, "clean", str(run), "--yes")
        assert files_in(run) == before

    # While a run is cleaned, none can start in it.
    refused = []

    def deleted(folder: Path, place: Any) -> None:
        try:
            RunDir(folder).close()
        except Exception as error:
            refused.append(str(error))

    monkeypatch.setattr(clean, "_delete", deleted)
    said(capsys, "clean", str(run), "--yes")
    assert len(refused) == 5
    assert "another process writes this run" in refused[0]


def test_nothing_behind_a_link_is_deleted(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine"
    add_checkpoint(mine, "step-00001", 1)
    other = write_run(tmp_path / "runs" / "other", steps=2)
    for name in ("checkpoints", "engines", "weights"):
        (other / name).symlink_to(mine / "checkpoints")
    (other / "profile.json").symlink_to(mine / "checkpoints" / "step-00001" / "state.json")
    (run / "checkpoints" / "step-00000").symlink_to(mine / "checkpoints" / "step-00001")
    (run / "engines" / "inside").symlink_to(mine)
    before = files_in(mine)

    said(capsys, "clean", str(tmp_path / "runs"), "--yes")
    assert files_in(mine) == before
    assert not (run / "engines").exists()
    assert (run / "checkpoints" / "step-00000").is_symlink()

    (tmp_path / "link").symlink_to(run)
    assert main(["runs", "clean", str(tmp_path / "link"), "--yes"]) == 2
    assert "is a symbolic link" in capsys.readouterr().err


def test_a_link_that_takes_a_folders_place_is_an_error(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "mine"
    add_checkpoint(mine, "step-00001", 1)
    delete = clean._delete

    def replaced_first(folder: Path, place: Any) -> None:
        if not (folder / "checkpoints").is_symlink():
            (folder / "checkpoints").rename(folder / "moved")
            (folder / "checkpoints").symlink_to(mine / "checkpoints")
        delete(folder, place)

    monkeypatch.setattr(clean, "_delete", replaced_first)
    assert main(["runs", "clean", str(run), "--yes"]) == 1
    assert "cannot be deleted" in capsys.readouterr().err
    assert (mine / "checkpoints" / "step-00001" / "model.safetensors").exists()


def test_what_is_no_run_of_training_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = tmp_path / "project"
    (project / "engines").mkdir(parents=True)
    add_checkpoint(project, "step-00001", 1)
    add_checkpoint(project, "step-00002", 2)
    before = files_in(project)
    assert main(["runs", "clean", str(project), "--yes"]) == 2
    assert "no runs there" in capsys.readouterr().err

    (project / "trajectories.jsonl").write_text("")
    assert "left alone: no run of training" in said(capsys, "clean", str(project), "--yes")
    assert files_in(project) == before | {"trajectories.jsonl"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["missing"], "missing: no such folder"),
        (["clean"], "needs a folder"),
        (["--yes"], "--yes needs clean"),
        (["clean", "missing"], "no such folder"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    os.chdir(tmp_path)
    assert main(["runs", *words]) == 2
    assert expected in capsys.readouterr().err


def test_a_cleaned_run_is_evaluated_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.toml").write_text(SMALL + "[checkpoint]\nevery = 1\nkeep = 9\n")
    out = str(tmp_path / "out")
    assert main(["train", str(tmp_path / "recipe.toml"), "--out", out, "--quiet"]) == 0
    before = len(list((tmp_path / "out" / "checkpoints").glob("*/state.json")))
    said(capsys, "clean", out, "--yes")
    assert len(list((tmp_path / "out" / "checkpoints").glob("*/state.json"))) < before
    assert main(["eval", "--run", out, "--quiet"]) == 0
    assert main(["train", "--resume", out, "--train.steps", "3", "--quiet"]) == 0
