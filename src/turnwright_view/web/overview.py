"""The page of a run: its story, evaluations, tables, diagnoses, findings and settings."""

from __future__ import annotations

from typing import Any

from turnwright import files
from turnwright.display.diagnosis import FILE as SANITY
from turnwright.display.diagnosis import findings
from turnwright.display.run_data import Row, RunData, mapping, number, parse, read_run
from turnwright.records.episode_metrics import METRIC_GROUPS, flatten_row
from turnwright.records.run_dir import LOG_FILE
from turnwright_view.run_rows import file_stamp
from turnwright_view.web.diagnosed import diagnoses_of
from turnwright_view.web.episode_rows import EpisodeAddress, key_of_values
from turnwright_view.web.evaluations import held_out
from turnwright_view.web.index import RunIndex
from turnwright_view.web.run_tables import (
    command_of,
    settings,
    stops_by_step,
    time_split,
    tokens_by_lag,
    untrained_tokens,
)
from turnwright_view.web.story import story_of
from turnwright_view.web.texts import truncate


def overview(index: RunIndex, run_id: str, name: str, state: str, since: int = 0) -> dict[str, Any]:
    """Return the page of a run, with rows of metrics from index `since` on.

    `since` of the page says which rows it has: all of a run that was begun anew and has fewer.
    """
    run = read_run(index.path)
    if since > len(run.rows):
        since = 0
    progress = index.progress()
    evaluations = held_out(run)
    diagnoses = diagnoses_of(run)
    changed, defaults = settings(run)
    problems: list[str] = list(run.problems)
    found = findings(index.path, run.rows, problems)
    return {
        "id": run_id,
        "name": truncate(name, 200),
        "state": state,
        "story": story_of(run, run_id, evaluations, progress["count"]),
        "evaluations": [evaluation.as_json for evaluation in evaluations],
        "reference": number(run.summary.get("single_turn_best")),
        "rows": [flat_row(row) for row in run.rows[since:]],
        "since": since,
        "stops": stops_by_step(run),
        "untrained": untrained_tokens(run),
        "lags": tokens_by_lag(run),
        "time": time_split(run),
        "diagnoses": diagnoses,
        "findings": [
            {
                "cause": truncate(finding.cause),
                "sentence": truncate(finding.sentence),
                "where": truncate(finding.where),
                "count": finding.count,
                "columns": [[column, truncate(text)] for column, text in finding.columns],
                "key": _address(finding.key),
            }
            for finding in found
        ],
        "settings": [[truncate(part) for part in row] for row in changed],
        "defaults": defaults,
        "versions": _versions(run),
        "command": command_of(run, _recipe(index)),
        "problems": [truncate(problem) for problem in (*problems, *index.problems())],
        "indexed": progress,
        "facets": facets(index),
        "log": LOG_FILE if (index.path / LOG_FILE).is_file() else "",
    }


def flat_row(row: Row) -> dict[str, Any]:
    """Return a row of metrics with its tables flattened."""
    flat: dict[str, Any] = {}
    for name in ("phase", "name", "mode"):
        if name in row:
            flat[name] = truncate(str(row[name]), 200)
    for name, value in flatten_row(row):
        flat[truncate(name, 400)] = round(value, 9)
    return flat


def facets(index: RunIndex) -> dict[str, Any]:
    """Return the values that a list can be filtered by, with their counts."""
    values = index.facets()
    for kind, counts in values.items():
        if kind != "step":
            values[kind] = [[truncate(value, 400), count] for value, count in counts]
    return values


def glossary() -> dict[str, list[str]]:
    """Return unit, meaning, advice and theme of each metric, as docs/metrics.md has them."""
    return {
        metric.name: [metric.unit, metric.meaning, metric.advice, theme]
        for theme, metrics in METRIC_GROUPS.items()
        for metric in metrics
    }


def _address(key: Any) -> str:
    """Return the address of a recorded key; empty for anything else."""
    if len(key) != len(EpisodeAddress._fields):
        return ""
    return key_of_values(key).address


def _versions(run: RunData) -> dict[str, str]:
    """Return versions of packages, and what the run was computed on."""
    machine = run.summary.get("machine")
    facts: dict[str, Any] = dict(run.versions)
    if isinstance(machine, dict):
        facts |= machine
    elif machine:
        facts["machine"] = machine
    return {truncate(str(name), 80): truncate(str(value), 400) for name, value in facts.items()}


def _recipe(index: RunIndex) -> Any:
    try:
        recorded = parse(files.read_bytes(index.path / "config.json"))
    except OSError:
        return None
    return mapping(recorded).get("recipe")


def look(index: RunIndex) -> tuple[Any, ...]:
    """Return what tells whether the page of a run has changed."""
    files = ("config.json", "summary.json", "metrics.jsonl", SANITY, LOG_FILE)
    return (
        *(file_stamp(index.path / name) for name in files),
        index.progress(),
        index.problems(),
    )
