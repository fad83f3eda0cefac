"""`turnwright.load_run`: a run's directory as Python objects, while the run goes on and after it.

`Run` has its settings, metrics, evaluations and episodes. Metrics are columns of numbers
(`Metrics`). Episodes are read when they are asked for: `SavedEpisodes` keeps a few words of each,
and the place of its record in trajectories.jsonl.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import orjson

from turnwright import files
from turnwright.display.run_data import Row, lines_of, mapping, metrics_row, number, pair
from turnwright.errors import TraceError, UsageError
from turnwright.records.episode_metrics import flatten_row, wilson
from turnwright.records.run_dir import complete_lines, is_locked
from turnwright.records.serialization import read_trajectory
from turnwright.types import EpisodeKey, Group, Trajectory
from turnwright.types.notebook import html_of

if TYPE_CHECKING:
    import pandas

TRAJECTORIES = "trajectories.jsonl"
TRAINING = "training.jsonl"

NAMED = 8
"""Metrics that a repr names."""

Range = tuple[float | None, float | None]
"""Bounds of a number, both included; None is no bound."""


def load_run(path: str | Path) -> Run:
    """Open the directory of a run, which may still be running.

    Example::

        >>> from turnwright.records import RunDir
        >>> with RunDir("runs/first") as recorded:
        ...     recorded.metrics.append({"phase": "train", "step": 1, "reward": 0.5})
        >>> run = tw.load_run("runs/first")
        >>> run.metrics["train"]["reward"]
        [0.5]
        >>> [episode.trajectory.error for episode in run.episodes.filter(failed=True)]
        []

    Raises:
        UsageError: for a path that is no directory of a run.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such directory; name the one that train printed")
    names = ("config.json", "metrics.jsonl", TRAJECTORIES)
    if not any((folder / name).is_file() for name in names):
        raise UsageError(f"{folder}: no run is there; name the directory that train printed")
    return Run(folder)


@dataclass(frozen=True, slots=True)
class HeldOutSuccess:
    """Held-out success that a run measured."""

    name: str
    """`before`, `after`, or `step-20` during training."""
    mode: str
    """`sampled`, `greedy`, or `blind`: sampled, without the images."""
    step: int
    """Training steps before it."""
    success: float
    low: float
    high: float
    """Bounds of the Wilson interval (95%)."""
    n: int
    """Episodes with a reward."""
    turns: float | None
    reward: float | None


class Run:
    """A run's directory; each property reads what is there now."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._index = _EpisodeIndex(path)

    @property
    def name(self) -> str:
        """Name of its directory."""
        return self.path.resolve().name

    @property
    def is_running(self) -> bool:
        """Whether a process writes to it now."""
        return is_locked(self.path)

    @property
    def config(self) -> Mapping[str, Any]:
        """Settings, nested as in a recipe; empty for a directory of recorded episodes."""
        return mapping(_json_object(self.path / "config.json").get("config"))

    @property
    def summary(self) -> Mapping[str, Any]:
        """Content of summary.json; empty until the run is finished."""
        return _json_object(self.path / "summary.json")

    @property
    def metrics(self) -> Metrics:
        """Metrics by phase, each as columns: `run.metrics["train"]["reward"]`."""
        return Metrics.read(self.path / "metrics.jsonl")

    @property
    def evaluations(self) -> list[HeldOutSuccess]:
        """Evaluations in the order in which they were made."""
        evaluations = []
        for _, row in lines_of(self.path / "metrics.jsonl", [], metrics_row):
            success = _held_out(row) if row.get("phase") == "eval" else None
            if success is not None:
                evaluations.append(success)
        return evaluations

    @property
    def episodes(self) -> SavedEpisodes:
        """Episodes that are recorded so far, in the order in which they ended."""
        return SavedEpisodes(self._index, self._index.update())

    @property
    def groups(self) -> Groups:
        """Episodes of one task at one step together, in the order in which the first ended."""
        return self.episodes.groups

    def __repr__(self) -> str:
        """Return one line: how far it is, and the last success."""
        train = self.metrics.get("train")
        steps = 0 if train is None else train.rows
        parts = [f"{steps} training steps"]
        evaluations = self.evaluations
        if evaluations:
            last = evaluations[-1]
            parts.append(f"success {last.success:.1%} {last.name} ({last.mode})")
        if self.is_running:
            parts.append("running")
        return f"<Run {self.path}: {', '.join(parts)}>"

    def _repr_html_(self) -> str | None:
        return html_of(self)


class Columns(Mapping[str, list[float]]):
    """Metrics of one phase, a list for each; a row that lacks one has NaN there.

    Metrics that are tables have dotted names, such as `stops.done` and `seconds.generate.p95`.
    """

    def __init__(self, columns: Mapping[str, list[float]], rows: int) -> None:
        self._columns = columns
        self.rows = rows
        """Number of rows."""

    def __getitem__(self, name: str) -> list[float]:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        names = ", ".join(list(self)[:NAMED])
        return f"<{self.rows} rows of {len(self)} metrics: {names}, ...>"

    def frame(self) -> pandas.DataFrame:
        """Return a pandas DataFrame with a row for each step; needs pandas."""
        return _pandas().DataFrame(dict(self._columns))


class Metrics(Mapping[str, Columns]):
    """Metrics of a run by phase: `warmup`, `gate`, `eval`, `train`."""

    def __init__(self, phases: Mapping[str, Columns], names: Mapping[str, list[str]]) -> None:
        self._phases = phases
        self._names = names
        """Names of evaluations and gates by phase, one for each row."""

    @classmethod
    def read(cls, path: Path) -> Metrics:
        """Read the rows of metrics.jsonl; of a step that was trained twice, the last."""
        rows: dict[str, dict[Any, Mapping[str, float]]] = {}
        names: dict[str, dict[Any, str]] = {}
        for place, (_, row) in enumerate(lines_of(path, [], metrics_row)):
            phase = str(row.get("phase", ""))
            # A step has several evaluations; a row without a step replaces no other.
            key = place if phase in ("eval", "gate") else row.get("step", -1 - place)
            rows.setdefault(phase, {})[key] = dict(flatten_row(row))
            words = [str(row[name]) for name in ("name", "mode") if row.get(name)]
            names.setdefault(phase, {})[key] = " ".join(words)

        phases = {phase: _columns([*of_phase.values()]) for phase, of_phase in rows.items()}
        return cls(phases, {phase: [*of_phase.values()] for phase, of_phase in names.items()})

    def __getitem__(self, phase: str) -> Columns:
        return self._phases[phase]

    def __iter__(self) -> Iterator[str]:
        return iter(self._phases)

    def __len__(self) -> int:
        return len(self._phases)

    def __repr__(self) -> str:
        return f"<Metrics {dict(self._phases)}>"

    def frame(self) -> pandas.DataFrame:
        """Return all rows as a pandas DataFrame, with columns `phase` and `name`; needs pandas."""
        pandas = _pandas()
        frames = []
        for phase, columns in self._phases.items():
            frame = columns.frame()
            frame.insert(0, "name", self._names[phase])
            frame.insert(0, "phase", phase)
            frames.append(frame)
        if not frames:
            return pandas.DataFrame()
        return pandas.concat(frames, ignore_index=True)


@dataclass(frozen=True, slots=True)
class _Entry:
    """What is kept of an episode."""

    key: EpisodeKey
    offset: int
    """Byte of its record in trajectories.jsonl."""
    line: int
    """From 1."""
    reward: float | None
    stop: str
    failed: bool


class SavedEpisode:
    """A recorded episode; its trajectory is read when it is asked for."""

    def __init__(self, index: _EpisodeIndex, entry: _Entry) -> None:
        self._index = index
        self._entry = entry

    @property
    def key(self) -> EpisodeKey:
        """Its key; `step` counts training from 1, `key.step` from 0."""
        return self._entry.key

    @property
    def run(self) -> Path:
        """Directory of its run."""
        return self._index.path

    @property
    def reward(self) -> float | None:
        """Reward; None if it was not computed."""
        return self._entry.reward

    @property
    def stop(self) -> str:
        """Why it ended, a `StopReason`."""
        return self._entry.stop

    @property
    def failed(self) -> bool:
        """Whether an error ended it."""
        return self._entry.failed

    @property
    def phase(self) -> str:
        """`train`, or the name of an evaluation."""
        return self.key.phase

    @property
    def step(self) -> int:
        """Step as metrics and displays count, training from 1."""
        return self.key.metrics_step

    @property
    def task(self) -> str:
        """Id of its task."""
        return self.key.task

    @property
    def trajectory(self) -> Trajectory:
        """The record; raises `TraceError` if it was edited since."""
        return self._index.trajectory(self._entry)

    @property
    def advantage(self) -> float | None:
        """Advantage in training; None where none was computed, or until the step is trained."""
        return self._index.training(self.key)[0]

    @property
    def reason(self) -> str | None:
        """Why training left the episode out; None where it did not."""
        return self._index.training(self.key)[1]

    def show(self, limit: int = 2000) -> None:
        """Print the conversation, as `Trajectory.show`."""
        self.trajectory.show(limit)

    def __repr__(self) -> str:
        """Return one line, without reading the record."""
        return f"<Episode {self.key.label}: reward={self.reward} stop={self.stop}>"

    def _repr_html_(self) -> str | None:
        return html_of(self)


class SavedEpisodes(Sequence[SavedEpisode]):
    """Episodes of a run, read when they are asked for."""

    def __init__(self, index: _EpisodeIndex, entries: Sequence[_Entry]) -> None:
        self._index = index
        self._entries = entries

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, place: int) -> SavedEpisode: ...
    @overload
    def __getitem__(self, place: slice) -> SavedEpisodes: ...
    def __getitem__(self, place: int | slice) -> SavedEpisode | SavedEpisodes:
        if isinstance(place, slice):
            return SavedEpisodes(self._index, self._entries[place])
        return SavedEpisode(self._index, self._entries[place])

    def __iter__(self) -> Iterator[SavedEpisode]:
        for entry in self._entries:
            yield SavedEpisode(self._index, entry)

    def __repr__(self) -> str:
        return f"<{len(self)} episodes of {self._index.path}>"

    def filter(
        self,
        where: Callable[[SavedEpisode], bool] | None = None,
        *,
        phase: str | None = None,
        step: int | Range | None = None,
        task: str | None = None,
        reward: float | Range | None = None,
        stop: str | None = None,
        failed: bool | None = None,
    ) -> SavedEpisodes:
        """Return the episodes that meet all conditions, in the same order.

        Example::

            worst = run.episodes.filter(phase="train", step=(40, None), reward=(None, 0.0))
            long = run.episodes.filter(lambda episode: len(episode.trajectory.turns) > 4)

        Args:
            where: any condition; one that looks at trajectories reads their records.
            phase: `train`, or the name of an evaluation.
            step: a step as metrics count, or the first and the last, None without a bound.
            task: a task's id.
            reward: a reward, or the least and the largest; none that was not computed.
            stop: a stop reason.
            failed: whether an error ended it.
        """
        entries = []
        for entry in self._entries:
            if phase is not None and entry.key.phase != phase:
                continue
            if task is not None and entry.key.task != task:
                continue
            if stop is not None and entry.stop != stop:
                continue
            if failed is not None and entry.failed != failed:
                continue
            if not _is_within(entry.key.metrics_step, step):
                continue
            if not _is_within(entry.reward, reward):
                continue
            if where is None or where(SavedEpisode(self._index, entry)):
                entries.append(entry)
        return SavedEpisodes(self._index, entries)

    @property
    def groups(self) -> Groups:
        """These episodes by group."""
        return Groups(self)


class Groups(Sequence[Group]):
    """Groups of episodes: those of one task at one step, read when they are asked for."""

    def __init__(self, episodes: SavedEpisodes) -> None:
        places: dict[tuple[str, int, str], list[int]] = {}
        for place, entry in enumerate(episodes._entries):
            places.setdefault(entry.key.group, []).append(place)
        self._episodes = episodes
        self._places = [*places.values()]

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, place: int) -> Group: ...
    @overload
    def __getitem__(self, place: slice) -> list[Group]: ...
    def __getitem__(self, place: int | slice) -> Group | list[Group]:
        if isinstance(place, slice):
            return [self._group(places) for places in self._places[place]]
        return self._group(self._places[place])

    def __iter__(self) -> Iterator[Group]:
        return map(self._group, self._places)

    def __repr__(self) -> str:
        return f"<{len(self)} groups of {len(self._episodes)} episodes>"

    def _group(self, places: Sequence[int]) -> Group:
        trajectories = [self._episodes[place].trajectory for place in places]
        trajectories.sort(key=lambda trajectory: trajectory.key.sample)
        return Group(trajectories[0].task, trajectories)


class _EpisodeIndex:
    """Places of a run's episodes in its files, extended as these grow."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries: dict[EpisodeKey, _Entry] = {}
        self._read = 0
        """Bytes of trajectories.jsonl that are indexed."""
        self._lines = 0
        self._training: dict[tuple[Any, ...], tuple[float | None, str | None]] = {}
        """Advantage and reason by key."""
        self._training_read = 0

    def update(self) -> list[_Entry]:
        """Return an entry for each episode; of one that is recorded twice, after a resume, the
        last."""
        file = self.path / TRAJECTORIES
        for offset, line in complete_lines(file, self._read):
            self._lines += 1
            entry = self._entry_of(line, offset)
            self._entries.pop(entry.key, None)
            self._entries[entry.key] = entry
            self._read = offset + len(line)
        return list(self._entries.values())

    def _entry_of(self, line: bytes, offset: int) -> _Entry:
        try:
            row = orjson.loads(line)
            key = EpisodeKey(**row["key"])
            hash(key)  # its values must not be lists
            return _Entry(
                key=key,
                offset=offset,
                line=self._lines,
                reward=number(row["reward"]),
                stop=str(row["stop"] or ""),
                failed=bool(row["error"]),
            )
        except Exception as error:  # records may come from anyone, and have any shape
            where = f"{self.path / TRAJECTORIES}, line {self._lines}"
            raise TraceError(
                f"{where}: an incomplete record ({type(error).__name__}: {error})"
            ) from error

    def trajectory(self, entry: _Entry) -> Trajectory:
        """Read the record of an episode."""
        file = self.path / TRAJECTORIES
        try:
            with files.open_file(file) as stream:
                stream.seek(entry.offset)
                row = orjson.loads(stream.readline())
            trajectory = read_trajectory(row)
        except (OSError, ValueError, TraceError) as error:
            raise TraceError(f"{file}, line {entry.line}: {error}") from error
        if trajectory.key != entry.key:
            raise TraceError(f"{file}, line {entry.line}: the file changed; load the run again")
        return trajectory

    def training(self, key: EpisodeKey) -> tuple[float | None, str | None]:
        """Return what training made of an episode: its advantage, and why it was left out."""
        name = (key.phase, key.step, key.task, key.sample, key.attempt)
        if name not in self._training:
            self._read_training()
        return self._training.get(name, (None, None))

    def _read_training(self) -> None:
        for offset, line in complete_lines(self.path / TRAINING, self._training_read):
            self._training_read = offset + len(line)
            try:
                row = orjson.loads(line)
                reason = row["reason"]
                of_key = tuple(row["key"])
                self._training[of_key] = number(row["advantage"]), reason and str(reason)
            except (ValueError, TypeError, KeyError) as error:
                where = f"{self.path / TRAINING}, byte {offset}"
                raise TraceError(f"{where}: an incomplete row ({error!r})") from error


def _is_within(value: float | None, wanted: float | Range | None) -> bool:
    """Return whether a number is the one that is wanted, or between its bounds."""
    if wanted is None:
        return True
    if value is None:
        return False
    if not isinstance(wanted, tuple):
        return value == wanted
    low, high = wanted
    return (low is None or value >= low) and (high is None or value <= high)


def _columns(rows: Sequence[Mapping[str, float]]) -> Columns:
    names: dict[str, None] = {}
    for row in rows:
        names.update(dict.fromkeys(row))
    columns = {name: [row.get(name, math.nan) for row in rows] for name in names}
    return Columns(columns, len(rows))


def _held_out(row: Row) -> HeldOutSuccess | None:
    """Return an evaluation's row; None without a success rate."""
    success = number(row.get("success"))
    n = int(number(row.get("n")) or 0)
    if success is None or n < 1 or not 0 <= success <= 1:
        return None
    low, high = pair(row.get("ci")) or wilson(round(success * n), n)
    return HeldOutSuccess(
        name=str(row.get("name", "")),
        mode=str(row.get("mode", "sampled")),
        step=int(number(row.get("step")) or 0),
        success=success,
        low=low,
        high=high,
        n=n,
        turns=number(row.get("turns")),
        reward=number(row.get("reward")),
    )


def _json_object(path: Path) -> Mapping[str, Any]:
    """Return the object in a JSON file; empty if there is no such file."""
    try:
        return mapping(files.read_json(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TraceError(f"{path}: cannot be read ({error}); restore it from a copy") from error


def _pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise UsageError("frame() needs pandas: pip install pandas") from None
    return pandas
