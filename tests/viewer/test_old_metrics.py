"""Rows of older runs have old names of metrics; everything that reads rows has them under the current names."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from turnwise.records.metrics import METRICS, flatten_row, with_current_metrics
from turnwise.trackers import TrackerPosition, forward_rows
from turnwise.viewer.diagnosis import diagnose, findings
from turnwise.viewer.report import render_report
from turnwise.viewer.run_data import read_run
from turnwise.viewer.web.index import TrajectoryIndex
from turnwise.viewer.web.pages import overview

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import yardstick

OLD = [(doc.name, alias) for doc in METRICS for alias in doc.aliases]


def documented(path):
    """Return the metrics that a flattened name belongs to."""
    stems = [(doc.name, doc.name.partition("<")) for doc in METRICS]
    return [name for name, (stem, family, _) in stems if name == path or (family and path.startswith(stem))]


def example(name):
    """Return a metric of a family as a row has it: (key, value)."""
    stem, family, _ = name.partition("<")
    if stem.endswith("."):
        return stem[:-1], {"one": 2}
    return (f"{stem}one" if family else name), 2


OLD_ROW = dict(example(alias) for _, alias in OLD)
ROW = dict(example(name) for name, _ in OLD)


@pytest.mark.parametrize(("name", "alias"), OLD)
def test_an_old_name_is_read_as_the_current_one(name, alias):
    (key, value), (old, _) = example(name), example(alias)
    assert with_current_metrics({"phase": "train", old: value}) == {"phase": "train", key: value}
    assert with_current_metrics({key: value}) == {key: value}
    assert documented(next(flatten_row({key: value}))[0]) == [name]
    assert documented(next(flatten_row({old: value}))[0]) == []  # nothing else has the name


def test_the_yardstick_knows_every_old_name():
    stems = {name.partition("<")[0]: alias.partition("<")[0] for name, alias in OLD}
    assert {new: old for new, old in stems.items() if new.endswith("_")} == yardstick.METRIC_PREFIXES
    assert {n.removesuffix("."): old.removesuffix(".") for n, old in stems.items() if not n.endswith("_")} == yardstick.METRICS
    assert yardstick.metrics_row(ROW) == yardstick.metrics_row(OLD_ROW) == OLD_ROW


class Receives:
    """Tracker that keeps what it receives."""

    def __init__(self):
        self.rows = []

    def log(self, phase, step, figures):
        self.rows.append((phase, step, figures))


def forwarded(run, name):
    (run / "track").mkdir(exist_ok=True)
    tracker = Receives()
    forward_rows(tracker, run, TrackerPosition(run, name))
    return tracker.rows


def test_viewer_diagnosis_report_and_trackers_read_both(make_run, tmp_path):
    run = make_run(tmp_path / "run", steps=12)
    path = run / "metrics.jsonl"
    # No tool is called and the render check fails, so that diagnosis and findings depend on renamed metrics.
    more = ROW | {"tool_users": 0.0, "gate_passed": False}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [more | row if row["phase"] == "train" else row for row in rows] + [more | {"phase": "gate", "step": 1}]

    def write(table):
        path.write_text("".join(json.dumps(row) + "\n" for row in table))

    def shown():
        found = read_run(run)
        causes = [(one.cause, one.count) for one in findings(run, found.rows, [])]
        page = overview(TrajectoryIndex(run))["rows"]
        text = render_report(run)
        return found.rows, diagnose(found.rows, found.summary), causes, page, text[text.index("<body") :]

    (run / "sanity.jsonl").write_text(json.dumps({"cause": "one", "sentence": "text", "key": ["train", 0, "t", 0, 0]}) + "\n")
    write(rows)
    current, tracked = shown(), forwarded(run, "current")
    assert [one.name for one in current[1]] == ["the tool is never called"]
    assert current[2] == [("one", 26)]  # 2 in each of 13 rows
    back = {example(name)[0]: example(alias)[0] for name, alias in OLD}
    write([{back.get(name, name): value for name, value in row.items()} for row in rows])
    assert '"updates": 2' in path.read_text()
    assert "optimizer_steps" not in path.read_text()
    assert (shown(), forwarded(run, "older")) == (current, tracked)
