"""Lenient reader of run directories, for displays: reads what exists, complete or not, without
loading large files into memory.

`read_run` reads all but the trajectories, `index` says where each of those is, and `choose` selects
a few for a report. What is read may come from anyone: a value of another type counts as missing, a
line that cannot be read is counted and left out. The strict reader is in `turnwright.records`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, TypeVar

import orjson

from turnwright import files
from turnwright.engines.policy_engine import AgentPolicies
from turnwright.errors import UsageError
from turnwright.records.episode_metrics import flatten_row
from turnwright.types import StopReason

Row = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunData:
    """Files of a run except its trajectories; missing files are empty."""

    path: Path
    config: Row
    origins: Row
    versions: Row
    summary: Row
    rows: Sequence[Row]
    """Rows of metrics.jsonl."""
    problems: Sequence[str] = field(default_factory=list)
    """What could not be read, one line each."""

    @property
    def warmup_steps(self) -> int:
        """Steps of the warm-up so far."""
        return max((integer(row.get("step")) for row in self.phase("warmup")), default=0)

    @property
    def policies(self) -> PolicyNames:
        """Names of its policies."""
        return PolicyNames(self.config, self.warmup_steps)

    def phase(self, name: str) -> list[Row]:
        """Return the rows of one phase, in order; of a step trained twice (after a resume), the
        last."""
        last_rows: dict[Any, Row] = {}
        for number, row in enumerate(self.rows):
            if row.get("phase") != name:
                continue
            # A step has several evaluations; a row without a step replaces no other.
            key = number if name == "eval" else row.get("step", -1 - number)
            last_rows[key] = row
        return list(last_rows.values())


@dataclass(frozen=True, slots=True)
class TrajectoryEntry:
    """Position of a trajectory in trajectories.jsonl, with the fields used to select it."""

    offset: int
    phase: str
    step: int
    task: str
    reward: float | None
    stop: str
    failed: bool


class Pick(NamedTuple):
    """A trajectory selected for the report, and the reason."""

    entry: TrajectoryEntry
    why: str


def read_run(path: Path) -> RunData:
    """Read a run except its trajectories."""
    problems: list[str] = []
    config = _object(path / "config.json", problems)
    summary = _object(path / "summary.json", problems)
    rows = [row for _, row in lines_of(path / "metrics.jsonl", problems, metrics_row)]
    return RunData(
        path=path,
        config=mapping(config.get("config")),
        origins=mapping(config.get("origins")),
        versions=mapping(config.get("versions") or summary.get("versions")),
        summary=summary,
        rows=rows,
        problems=problems,
    )


def index(path: Path, problems: list[str]) -> list[TrajectoryEntry]:
    """Return one small entry per trajectory; each line is parsed and discarded."""
    entries: list[TrajectoryEntry] = []
    for offset, row in lines_of(path, problems, episode_record):
        key = mapping(row.get("key"))
        phase = str(key.get("phase", ""))
        entry = TrajectoryEntry(
            offset=offset,
            phase=phase,
            # Metrics and displays count training steps from 1, keys from 0.
            step=integer(key.get("step")) + (phase == "train"),
            task=str(key.get("task", "")),
            reward=number(row.get("reward")),
            stop=str(row.get("stop") or ""),
            failed=bool(row.get("error")),
        )
        entries.append(entry)
    return entries


def load_at(path: Path, offset: int) -> Row:
    """Load the trajectory at an offset from `index`."""
    with path.open("rb") as file:
        file.seek(offset)
        return mapping(parse(file.readline()))


def choose(entries: Sequence[TrajectoryEntry]) -> list[Pick]:
    """Select examples: best and worst of the first, middle and last step and of each evaluation,
    and three failures."""
    picks: list[Pick] = []
    for phase in dict.fromkeys(entry.phase for entry in entries):
        of_phase = [entry for entry in entries if entry.phase == phase]
        if phase == "train":
            picks += _picks_of_steps(of_phase)
        elif phase in ("", "rollout"):
            picks += _ends(of_phase, "rollout")
        else:
            picks += _ends(of_phase, f"evaluation “{phase}”")

    # Failures of different kinds come first.
    failures = [entry for entry in entries if entry.failed]
    one_of_each_kind = {entry.stop: entry for entry in reversed(failures)}
    for entry in [*one_of_each_kind.values(), *failures][:3]:
        if entry not in [pick.entry for pick in picks]:
            picks.append(Pick(entry, "a failure"))
    return picks


def _picks_of_steps(entries: Sequence[TrajectoryEntry]) -> list[Pick]:
    """Select the best and the worst of the first, the middle and the last training step."""
    steps = sorted({entry.step for entry in entries})
    chosen = dict.fromkeys((steps[0], steps[len(steps) // 2], steps[-1]))
    names = ["first step", "last step"]
    if len(chosen) == 3:
        names.insert(1, "middle step")

    picks: list[Pick] = []
    for step, name in zip(chosen, names, strict=False):
        of_step = [entry for entry in entries if entry.step == step]
        picks += _ends(of_step, f"reinforcement, {name} ({step})")
    return picks


def number(value: Any) -> float | None:
    """Return a finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        as_float = float(value)
    except OverflowError:  # JSON has integers of any size
        return None
    return as_float if math.isfinite(as_float) else None


def sum_tables(rows: Iterable[Row], name: str) -> Counter[str]:
    """Sum the tables of counts in a column; other values count as nothing."""
    counts: Counter[str] = Counter()
    for row in rows:
        for key, count in mapping(row.get(name)).items():
            counts[str(key)] += int(number(count) or 0)
    return counts


def pair(value: Any) -> tuple[float, float] | None:
    """Return two finite numbers, or None for anything else."""
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        return None
    low, high = map(number, value)
    if low is None or high is None:
        return None
    return low, high


def sentence_of(stop: str) -> str:
    """Return the sentence of a stop reason; empty for anything else."""
    return StopReason(stop).sentence if stop in set(StopReason) else ""


def integer(value: Any) -> int:
    """Return an integer of 64 bits, or -1 for anything else."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return value if is_integer and abs(value) < 1 << 63 else -1


def _ends(entries: Sequence[TrajectoryEntry], name: str) -> list[Pick]:
    """Select the best and the worst of some trajectories; `name` says which these are."""
    scored = [entry for entry in entries if entry.reward is not None]
    if not scored:
        return [Pick(entries[0], name)] if entries else []

    best = max(scored, key=lambda entry: entry.reward or 0.0)
    worst = min(scored, key=lambda entry: entry.reward or 0.0)
    if best.reward == worst.reward:
        return [Pick(best, f"{name}: all alike")]
    return [Pick(best, f"{name}: best"), Pick(worst, f"{name}: worst")]


def read_line(line: bytes, read: Callable[[Row], T]) -> T | None:
    """Return what `read` makes of a line's object; None for an unreadable line.

    Lines may come from anyone, and have any shape. So a line is unreadable where `read` fails in
    whatever way; callers count such lines and go on with the next.
    """
    try:
        row = parse(line)
        return read(row) if isinstance(row, dict) and row else None
    except Exception:
        return None


def as_it_is(row: Row) -> Row:
    """Return any object, for files whose readers take each field by itself."""
    return row


def episode_record(row: Row) -> Row:
    """Return an object that has the shape of an episode's record; raise `TypeError` for any
    other."""
    for name in ("spans", "turns", "failed_turns", "final", "failures"):
        if not isinstance(row.get(name), (list, NoneType)):
            raise TypeError(f"{name} is no list")
    return row


def metrics_row(row: Row) -> Row:
    """Return a row of metrics; raise an error for one that cannot be used."""
    hash(row.get("step"))  # it distinguishes rows
    for _ in flatten_row(row):  # fails for tables in tables without end
        pass
    return row


def lines_of(
    path: Path, problems: list[str], read: Callable[[Row], Row] = as_it_is
) -> Iterator[tuple[int, Row]]:
    """Yield (offset, object) of each line, as `read` returns it; unreadable lines are counted and
    skipped."""
    if not path.exists():
        return

    unreadable = 0
    offset = 0
    try:
        with files.open_file(path) as file:
            for line in file:
                row = read_line(line, read)
                if row is not None:
                    yield offset, row
                elif line.strip():
                    unreadable += 1
                offset += len(line)
    except OSError as error:
        problems.append(f"{path.name}: cannot be read ({error.strerror})")
    if unreadable:
        problems.append(unreadable_lines(path, unreadable))


def unreadable_lines(path: Path, count: int) -> str:
    """Say how many lines of a file were left out."""
    return f"{path.name}: skipped {count} unreadable line{'' if count == 1 else 's'}"


def parse(text: bytes) -> Any:
    """Parse a line of JSON; None if invalid.

    Accepts what a strict reader rejects, such as lone surrogates.
    """
    with suppress(orjson.JSONDecodeError):
        return orjson.loads(text)
    # The standard library's reader accepts lone surrogates, NaN and integers over 64 bits.
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return None


def _object(path: Path, problems: list[str]) -> Row:
    """Return the object that a JSON file has; empty for anything else, which is a problem."""
    try:
        value = parse(files.read_bytes(path))
    except FileNotFoundError:
        return {}
    except OSError as error:
        problems.append(f"{path.name}: cannot be read ({error.strerror})")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{path.name}: is not a JSON object")
    return mapping(value)


def mapping(value: Any) -> Row:
    """Return a mapping, or an empty one for anything else."""
    return value if isinstance(value, Mapping) else {}


class PolicyNames:
    """Names of what sampled a span: its policy, where a run has several, and the version by the
    steps that a user counts."""

    def __init__(self, config: Row, warmup_steps: int) -> None:
        """`config` is that of the run, as far as it can be read."""
        rows = [mapping(row) for row in _list(config.get("policy"))]
        self._rows = {str(row.get("name")): row for row in rows}
        agents: dict[str, list[str]] = {}
        for name, row in self._rows.items():
            agents[name] = [str(agent) for agent in _list(row.get("agents"))] or [name]
        self._agents = AgentPolicies(agents)
        self._warmup_steps = warmup_steps

    def of(self, span: Row) -> str:
        """Return the policy of a span's agent; empty where the run has one policy, or none for this
        agent."""
        try:
            return self._agents.of(str(span.get("agent") or "main"))
        except UsageError:
            return ""

    def is_frozen(self, span: Row) -> bool:
        """Return whether a policy that is not trained sampled the span."""
        if span.get("origin") != "model":
            return False
        row = self._rows.get(self.of(span), {})
        return row.get("trained") is False or bool(row.get("urls") or row.get("past"))

    def label(self, span: Row) -> str:
        """Return policy and version of a sampled span: "asker after 3 steps"."""
        name = self.of(span)
        version = policy_name(span.get("version"), self._warmup_steps)

        past_of = mapping(self._rows.get(name, {}).get("past")).get("of")
        if past_of is not None:
            return f"{name}: {past_of} {version}"
        if self.is_frozen(span):
            return f"{name}, not trained"
        return f"{name} {version}".strip()


def policy_name(version: Any, warmup_steps: int) -> str:
    """Name a policy by the steps that a user counts: those of the warm-up before reinforcement,
    then those of reinforcement."""
    if number(version) is None:
        return "?"
    steps = integer(version) - warmup_steps
    return f"after {steps} steps" if steps >= 0 else f"of warm-up step {integer(version)}"


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
