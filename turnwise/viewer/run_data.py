"""Reading a run directory for people: whatever is there, complete or not, without holding a large file in memory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RunData:
    """What a run left behind, apart from its trajectories; missing files are empty."""

    path: Path
    config: Row
    origins: Row
    versions: Row
    summary: Row
    rows: Sequence[Row]
    """Rows of metrics.jsonl."""
    problems: Sequence[str] = field(default_factory=list)
    """What could not be read, one line each."""

    def phase(self, name: str) -> list[Row]:
        """The rows of one phase, in order; of a step that was trained twice (after a resume) the last."""
        last: dict[Any, Row] = {}
        for index, row in enumerate(self.rows):
            if row.get("phase") == name:
                last[row.get("step", -1 - index) if name != "eval" else index] = row
        return list(last.values())


@dataclass(frozen=True, slots=True)
class TrajectoryEntry:
    """Where a trajectory stands in trajectories.jsonl, and what it is chosen by."""

    offset: int
    phase: str
    step: int
    task: str
    reward: float | None
    stop: str
    failed: bool


@dataclass(frozen=True, slots=True)
class Pick:
    """A trajectory that the report shows, and why."""

    entry: TrajectoryEntry
    why: str


def read_run(path: Path) -> RunData:
    """Everything of a run but its trajectories."""
    problems: list[str] = []
    config = _object(path / "config.json", problems)
    summary = _object(path / "summary.json", problems)
    rows = [row for _, row in lines_of(path / "metrics.jsonl", problems)]
    versions = config.get("versions") or summary.get("versions")
    return RunData(
        path,
        _mapping(config.get("config")),
        _mapping(config.get("origins")),
        _mapping(versions),
        summary,
        rows,
        problems,
    )


def index(path: Path, problems: list[str]) -> list[TrajectoryEntry]:
    """One small entry per trajectory; each line is parsed and let go."""
    entries: list[TrajectoryEntry] = []
    for offset, row in lines_of(path, problems):
        key = _mapping(row.get("key"))
        entries.append(
            TrajectoryEntry(
                offset,
                str(key.get("phase", "")),
                integer(key.get("step")),
                str(key.get("task", "")),
                number(row.get("reward")),
                str(row.get("stop") or ""),
                bool(row.get("error")),
            )
        )
    return entries


def load_at(path: Path, offset: int) -> Row:
    """The trajectory at an offset that `index` found."""
    with path.open("rb") as file:
        file.seek(offset)
        return _mapping(parse(file.readline()))


def choose(entries: Sequence[TrajectoryEntry], *, failures: int = 3) -> list[Pick]:
    """Examples that tell a run's story: the first, middle and last step's best and worst, each evaluation's, and failures."""
    picks: list[Pick] = []
    for phase in dict.fromkeys(entry.phase for entry in entries):
        those = [entry for entry in entries if entry.phase == phase]
        steps = sorted({entry.step for entry in those})
        if phase != "train":
            picks += _ends(those, "rollout" if phase in ("", "rollout") else f"evaluation “{phase}”")
            continue
        chosen = dict.fromkeys((steps[0], steps[len(steps) // 2], steps[-1]))
        names = ("first step", "middle step", "last step") if len(chosen) == 3 else ("first step", "last step")
        for step, name in zip(chosen, names, strict=False):
            picks += _ends([entry for entry in those if entry.step == step], f"reinforcement, {name} ({step})")
    broken = [entry for entry in entries if entry.failed]
    kinds = {entry.stop: entry for entry in reversed(broken)}  # one of each kind first
    for entry in [*kinds.values(), *broken][:failures]:
        if entry not in [pick.entry for pick in picks]:
            picks.append(Pick(entry, "a failure"))
    return picks


def number(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def integer(value: Any) -> int:
    """A whole number, -1 for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else -1


def _ends(entries: Sequence[TrajectoryEntry], name: str) -> list[Pick]:
    scored = [entry for entry in entries if entry.reward is not None]
    if not scored:
        return [Pick(entries[0], name)] if entries else []
    best = max(scored, key=lambda entry: entry.reward or 0.0)
    worst = min(scored, key=lambda entry: entry.reward or 0.0)
    if best.reward == worst.reward:
        return [Pick(best, f"{name}: all alike")]
    return [Pick(best, f"{name}: best"), Pick(worst, f"{name}: worst")]


def lines_of(path: Path, problems: list[str]) -> Iterator[tuple[int, Row]]:
    """(offset, object) of each line; a line that cannot be read is counted, not fatal."""
    if not path.is_file():
        return
    unreadable = 0
    offset = 0
    try:
        with path.open("rb") as file:
            for line in file:
                row = parse(line) if line.strip() else {}
                if isinstance(row, dict) and row:
                    yield offset, row
                elif line.strip():
                    unreadable += 1
                offset += len(line)
    except OSError as error:
        problems.append(f"{path.name}: cannot be read ({error.strerror})")
    if unreadable:
        lines = "1 line that could not be read is" if unreadable == 1 else f"{unreadable} lines that could not be read are"
        problems.append(f"{path.name}: {lines} left out")


def parse(text: bytes) -> Any:
    """The value of a line of JSON, None where it is none; takes what a strict reader refuses, as lone surrogates."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(text)  # takes what orjson refuses: lone surrogates, NaN, integers over 64 bits
    except (ValueError, RecursionError):
        return None


def _object(path: Path, problems: list[str]) -> Row:
    try:
        value = parse(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        problems.append(f"{path.name}: cannot be read ({error.strerror})")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{path.name}: is not a JSON object")
    return _mapping(value)


def _mapping(value: Any) -> Row:
    return value if isinstance(value, Mapping) else {}
