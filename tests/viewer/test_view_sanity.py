"""The sanity check's reports on a terminal and in the page; what they quote
is of models and tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kit.viewing import SentPage

from turnwright.cli.main import main
from turnwright.display.diagnosis import findings, table
from turnwright_view.web import write_report

HOSTILE = "</pre><script>alert(1)</script>\x1b[31m\u202e&<b> \n"


def report(**more: Any) -> dict[str, Any]:
    row = {
        "cause": "thinking_stripped",
        "position": 7,
        "origin": "model",
        "turn": 0,
        "sentence": "Not shown.",
        "said": "",
    }
    return (
        row
        | {"sampled": "one", "canonical": "two", "sent": "three", "key": ["train", 0, "t", 1, 0]}
        | more
    )


def write(folder: Path, *rows: Any) -> None:
    (folder / "sanity.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = [
        {
            "phase": "train",
            "step": 1,
            "render_mismatch_close": 3,
            "render_mismatch_thinking_stripped": 1,
        }
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))


def findings_of(run: Path) -> list[dict[str, Any]]:
    """Findings in the report of a run."""
    page = SentPage(write_report(run).read_text())
    (overview,) = page.data["overviews"].values()
    found: list[dict[str, Any]] = overview["findings"]
    return found


def test_three_columns_the_commonest_cause_first(tmp_path: Path, capsys: Any) -> None:
    write(tmp_path, report(), report(cause="close", sent="a b\nc", turn=-1))
    assert main(["view", str(tmp_path), "--report"]) == 0
    out = capsys.readouterr().out
    assert out.index("close (3 in the steps)") < out.index(
        "thinking_stripped (1 in the steps): Not shown."
    )
    assert "a\u00b7b\u23cec" in out
    assert "the opening prompt" in out
    first, second = findings_of(tmp_path)
    assert (first["cause"], first["count"]) == ("close", 3)
    assert second["columns"] == [["sampled", "one"], ["canonical", "two"], ["sent", "three"]]
    assert second["key"] == "train/1/t/1/0"


def test_nothing_found_says_nothing(tmp_path: Path, capsys: Any) -> None:
    write(tmp_path)
    assert main(["view", str(tmp_path), "--report"]) == 0
    assert "sanity" not in capsys.readouterr().out
    assert findings_of(tmp_path) == []


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    write(
        tmp_path,
        report(
            **dict.fromkeys(
                ("cause", "sampled", "canonical", "sent", "said", "origin", "sentence"), HOSTILE
            )
        ),
    )
    page = write_report(tmp_path).read_text()
    assert "<script>alert" not in page
    assert "&<b>" not in page
    assert "\x1b" not in page
    assert "\u202e" not in page
    lines = "\n".join(table(findings(tmp_path, [], [])))
    assert "\x1b" not in lines
    assert "\u202e" not in lines


def test_odd_rows_are_shown_or_left_out(tmp_path: Path) -> None:
    write(
        tmp_path,
        {},
        [],
        3,
        {"cause": None},
        {"cause": 1, "key": 5, "turn": "x", "sent": [1]},
        *[report()] * 1000,
    )
    (tmp_path / "sanity.jsonl").open("a").write("{broken\n")
    problems: list[str] = []
    found = findings(tmp_path, [{"render_mismatch_close": "x"}], problems)
    assert 0 < len(found) <= 40
    assert len(findings_of(tmp_path)) <= 40
    assert table(found, width=40)
