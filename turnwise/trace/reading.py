"""Finished trajectories of a run read back from trajectories.jsonl, one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from turnwise.errors import TraceError
from turnwise.trace.record import SCHEMA, read_message, read_span, read_turn
from turnwise.trace.run import read_json_lines
from turnwise.types import EpisodeKey, Failure, StopReason, Task, Trajectory


def read_trajectory(row: Mapping[str, Any]) -> Trajectory:
    """The trajectory that `trajectory_row` wrote; images and videos by reference, and without what engines add per token.

    Raises:
        TraceError: for a row of another schema, or one that is not complete.
    """
    if row.get("schema") != SCHEMA:
        raise TraceError(f"a record of schema {row.get('schema')!r}, this version reads {SCHEMA}")
    try:
        task, key, error = row["task"], row["key"], row["error"]
        found = Trajectory(
            read_task(task),
            EpisodeKey(key["phase"], key["step"], key["task"], key["sample"], key["attempt"]),
            [read_span(span) for span in row["spans"]],
            [read_turn(turn) for turn in row["turns"]],
            row["reward"],
            stop=StopReason(row["stop"]) if row["stop"] else None,
            error=Failure(**error) if error else None,
            wall_s=row["wall_s"],
        )
        found.rewards, found.metrics, found.branches = row["rewards"], row["metrics"], row["branches"]
        found.reward_s, found.template = row.get("reward_s", 0.0), row.get("template", "")
        found.final = tuple(read_message(message) for message in row["final"])
        found.failures = [Failure(**failure) for failure in row.get("failures", ())]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TraceError(f"a record that is not complete ({type(error).__name__}: {error})") from error
    return found


def read_task(row: Mapping[str, Any]) -> Task:
    """The task that stands in a record; images that are for its environment alone are not in it."""
    messages = tuple(read_message(message) for message in row["messages"])
    return Task(messages, id=row["id"], answer=row["answer"], info=row.get("info") or {}, env=row.get("env") or "")


def read_trajectories(run: Path) -> Iterator[Trajectory]:
    """The finished trajectories of a run, in the order of its file.

    Raises:
        TraceError: when there is no file, or a line of it is no record.
    """
    path = run / "trajectories.jsonl"
    if not path.is_file():
        raise TraceError(f"{path}: is not there; name the directory of a run that has played episodes")
    for number, row in enumerate(read_json_lines(path), 1):
        try:
            yield read_trajectory(row)
        except TraceError as error:
            raise TraceError(f"{path}, line {number}: {error}") from error


def read_tasks(run: Path) -> dict[str, Task]:
    """The tasks of a run's finished trajectories, by id; none where there is no such file.

    Raises:
        TraceError: when a line of it is no record.
    """
    found: dict[str, Task] = {}
    for number, row in enumerate(read_json_lines(run / "trajectories.jsonl"), 1):
        try:
            task = row["task"]
            if task["id"] not in found:
                found[task["id"]] = read_task(task)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TraceError(f"{run / 'trajectories.jsonl'}, line {number}: a task that cannot be read ({error!r})") from error
    return found
