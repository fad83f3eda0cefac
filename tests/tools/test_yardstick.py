"""The yardstick notices every bit that changes, and nothing that may."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import yardstick

KEY = ["train", 0, "task", 0, 0]


def lines(path: Path, *found: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(one) + "\n" for one in found))


def made(run: Path) -> Path:
    """A run directory of two episodes and one step."""
    (run / "checkpoints" / "step-00001").mkdir(parents=True)
    span = {"origin": "model", "ids": [5, 6], "logprobs": [-0.5, -0.25]}
    opened = {"e": "opened", "settings": "name", "crc": "00"}
    turn = {
        "e": "turn",
        "crc": "00",
        "spans": [span],
        "answers": [[0, 0.0, {}, 0.1, 0]],
        "turn": {"generate_s": 0.1, "cached": 2},
    }
    error = {
        "type": "ValueError",
        "message": "text",
        "traceback": "text",
        "place": "file.py:1",
        "phase": "step",
    }
    closed = {"e": "closed", "reward": 1.0, "error": error, "wall_s": 0.2}
    keys = [KEY, [*KEY[:3], 1, 0]]
    events = [event | {"k": key} for event in (opened, turn, closed) for key in keys]
    lines(
        run / "journal.jsonl",
        {"e": "settings", "name": "name", "value": {"limits": {"env_s": 60.0}}},
        *events,
        {"e": "trained", "step": 0},
    )
    names = ("phase", "step", "task", "sample", "attempt")
    lines(
        run / "trajectories.jsonl",
        *(
            {
                "key": dict(zip(names, key, strict=True)),
                "spans": [span],
                "metrics": {"render_checks": 1},
            }
            for key in keys
        ),
    )
    lines(run / "training.jsonl", {"key": KEY, "advantage": 0.5, "logprobs": {"1": [-0.5]}})
    lines(
        run / "metrics.jsonl",
        {"phase": "train", "step": 1, "loss": 0.1, "used": 1.0, "time_s": 1.0},
    )
    lines(run / "sanity.jsonl", {"cause": "close", "key": KEY, "sentence": "text"})
    config = {"out": str(run), "limits": {"turns": 6}, "env": [{"on_invalid": "resample"}]}
    origins = {"out": "command line", "limits.turns": "default", "env.0.on_invalid": "default"}
    lines(
        run / "config.json", {"config": config, "origins": origins, "versions": {"python": "3.11"}}
    )
    lines(run / "summary.json", {"success_after": 0.5, "wall_s": 3.0})
    lines(
        run / "checkpoints" / "step-00001" / "state.json",
        {"crc": "00", "cursor": {"step": 1, "journal": [10, 20]}},
    )
    weights(run, 1.0)
    return run


def weights(run: Path, value: float) -> None:
    head = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    path = run / "checkpoints" / "step-00001" / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(head)) + head + struct.pack("<2f", 0.5, value))


def edit(file: str, change: Callable[[list[dict[str, Any]]], Any]) -> Callable[[Path], None]:
    def apply(run: Path) -> None:
        found = yardstick.rows(run / file)
        change(found)
        lines(run / file, *found)

    return apply


def compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *edits: Callable[[Path], None]
) -> tuple[int, dict[str, Any]]:
    older, newer = made(tmp_path / "older"), made(tmp_path / "newer")
    for apply in edits:
        apply(newer)
    status = yardstick.main(["compare", str(older), str(newer)])
    return status, json.loads(capsys.readouterr().out)


def at(*path: Any, value: Any) -> Callable[[list[dict[str, Any]]], None]:
    def change(found: Any) -> None:
        for step in path[:-1]:
            found = found[step]
        found[path[-1]] = value

    return change


def test_two_runs_of_one_checkout_are_identical(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = compared(tmp_path, capsys)
    assert status == 0
    assert found["identical"]
    assert found["exceptions"] == {}


@pytest.mark.parametrize(
    ("file", "path", "value", "field"),
    [
        ("journal.jsonl", (3, "spans", 0, "ids", 1), 7, "spans[0].ids[1]"),
        ("journal.jsonl", (5, "reward"), 1, "reward"),  # 1 and 1.0 are other bytes
        ("journal.jsonl", (0, "value", "limits", "env_s"), 61.0, "settings.limits.env_s"),
        ("journal.jsonl", (5, "error", "type"), "KeyError", "error.type"),
        (
            "trajectories.jsonl",
            (1, "spans", 0, "logprobs", 0),
            -0.5000000000000001,
            "spans[0].logprobs[0]",
        ),
        ("trajectories.jsonl", (0, "key", "sample"), 4, ""),
        ("training.jsonl", (0, "logprobs", "1", 0), None, "logprobs.1[0]"),
        ("metrics.jsonl", (0, "loss"), -0.1, "loss"),
        ("metrics.jsonl", (0, "extra"), 1, "extra"),
        ("sanity.jsonl", (0, "cause"), "other", ""),
        ("config.json", (0, "config", "limits", "turns"), 7, ""),
        ("summary.json", (0, "success_after"), 0.0, ""),
        ("checkpoints/step-00001/state.json", (0, "cursor", "step"), 2, "cursor.step"),
    ],
)
def test_a_changed_value_is_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    file: str,
    path: tuple[Any, ...],
    value: Any,
    field: str,
) -> None:
    status, found = compared(tmp_path, capsys, edit(file, at(*path, value=value)))
    assert status == 1
    assert (found["run"], found["file"], found["field"]) == ("run", file.partition("/")[0], field)
    assert repr(found["older"]) != repr(found["newer"])


def test_a_bit_of_a_weight_is_named_by_its_element(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = compared(tmp_path, capsys, lambda run: weights(run, 1.0000001192092896))
    assert status == 1
    assert (found["record"], found["field"]) == ("step-00001/model.safetensors", "w element 1")
    assert (found["older"], found["newer"]) == (
        "0x3f800000 (1.0)",
        "0x3f800001 (1.0000001192092896)",
    )


def test_an_event_more_less_or_elsewhere_in_its_episode_is_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def swap(found: list[dict[str, Any]]) -> None:
        found[3], found[5] = found[5], found[3]  # the turn and the end of one episode

    def late(found: list[dict[str, Any]]) -> None:
        found.append(found.pop(5))  # an episode ends after its step was trained

    for n, change in enumerate(
        (swap, late, lambda found: found.pop(3), lambda found: found.append(dict(found[3])))
    ):
        (tmp_path / str(n)).mkdir()
        status, found = compared(tmp_path / str(n), capsys, edit("journal.jsonl", change))
        assert status == 1, n
        assert found["file"] == "journal.jsonl"


def test_clocks_texts_of_failures_and_the_order_of_episodes_do_not_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def reorder(found: list[dict[str, Any]]) -> None:
        found[1:3] = found[2:0:-1]
        found[3:5] = found[4:2:-1]

    def clocks(found: list[dict[str, Any]]) -> None:
        found[3] |= {"crc": "11", "answers": [[0, 0.0, {}, 9.9, 0]], "turn": {"generate_s": 9.9}}
        found[5]["error"] |= {"message": "other", "traceback": "other", "place": "other.py:9"}
        found[5]["wall_s"] = 9.9

    edits = (
        edit("journal.jsonl", clocks),
        edit("journal.jsonl", reorder),
        edit("trajectories.jsonl", lambda found: found.reverse()),
    )
    others = (
        edit("metrics.jsonl", at(0, "time_s", value=9.9)),
        edit("config.json", at(0, "versions", "python", value="3.12")),
    )
    status, found = compared(
        tmp_path, capsys, *edits, *others, edit("summary.json", at(0, "wall_s", value=9.9))
    )
    assert status == 0, found


def test_names_of_before_are_those_of_now(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older, newer = made(tmp_path / "older"), made(tmp_path / "newer")
    for run, limits, rules in (
        (older, {"wall_clock": 60.0}, {"on_invalid": "ask_again", "rejected": "trained"}),
        (newer, {"wall_clock_s": 60.0}, {"on_invalid": "resample", "rejected_replies": "trained"}),
    ):
        settings = {"v": 1 + (run is newer), "limits": limits, "rules": rules}
        edit("journal.jsonl", at(0, "value", value=settings))(run)
    old_metrics = {"template_checks": 1, "template_breaks_close": 2, "turnwise/turns": 3}
    new_metrics = {"render_checks": 1, "render_mismatch_close": 2, "turnwright/turns": 3}
    edit("trajectories.jsonl", at(0, "metrics", value=old_metrics))(older)
    edit("trajectories.jsonl", at(0, "metrics", value=new_metrics))(newer)
    assert yardstick.main(["compare", str(older), str(newer)]) == 0, capsys.readouterr()
    edit("journal.jsonl", at(0, "value", "limits", value={"wall_clock_s": 61.0}))(newer)
    assert yardstick.main(["compare", str(older), str(newer)]) == 1


def test_an_exemption_is_a_field_that_only_the_newer_run_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        yardstick, "EXEMPTIONS", (yardstick.Exemption("seed", "journal.jsonl", r"spans\[]\.seed"),)
    )
    added = edit("journal.jsonl", at(3, "spans", 0, "seed", value=[5]))
    status, found = compared(tmp_path, capsys, added)
    assert status == 0
    assert found["exceptions"] == {"seed": 1}
    added(tmp_path / "older")
    edit("journal.jsonl", at(3, "spans", 0, "seed", value=[6]))(tmp_path / "newer")
    assert yardstick.main(["compare", str(tmp_path / "older"), str(tmp_path / "newer")]) == 1
    assert json.loads(capsys.readouterr().out)["field"] == "spans[0].seed[0]"
    # Only the older has it.
    assert yardstick.main(["compare", str(tmp_path / "older"), str(made(tmp_path / "third"))]) == 1


def test_recordings_of_other_recipes_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path / "a" / "one")
    made(tmp_path / "b" / "other")
    assert yardstick.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "has the runs ['one']" in capsys.readouterr().err
