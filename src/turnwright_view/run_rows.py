"""One row a run, for tables of runs: what it is, how far it is, what was learned, how large it is.

`find_runs` looks for runs in a folder, `RunRows` reads their rows and keeps them, so that asking
again costs a look at three files of each run. A run's folder may come from anyone: what cannot be
read counts as missing, and nothing in it raises.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from turnwright import files
from turnwright.display.run_data import integer, mapping, number, pair, parse, read_line
from turnwright.display.text import text_of
from turnwright.records.episode_metrics import wilson
from turnwright.records.run_dir import FAILURE_FILE, complete_lines, is_locked

RunState = Literal["running", "finished", "stopped", "failed", "no training"]

RUN_FILES = ("metrics.jsonl", "trajectories.jsonl", "journal.jsonl")
"""Files of which a run has at least one, or the settings of a run in `config.json`."""
_SEEN_FILES = ("config.json", "summary.json", "metrics.jsonl", FAILURE_FILE)
"""Files that a row is made of: while none of them changes, it is not made again."""

MAX_DEPTH = 4
"""Folders below the one that is searched for runs."""
MAX_FOLDERS = 20_000
"""Folders that one search looks into; the rest is left out."""
MAX_FILES = 200_000
"""Files of a run's folder that are counted; the size of a larger one is not known."""
MAX_JSON = 64 * 2**20
"""Bytes of a small JSON file; a larger one counts as missing."""
MAX_TEXT = 200
"""Characters of a text in a row."""
MAX_COUNT = 2**53
"""Largest number whose neighbors JavaScript can tell apart from it."""
MAX_SETTINGS = 5_000
"""Settings of a run that are compared."""
SIZE_S = 30.0
"""Seconds for which the size of a running run's folder is taken as it was."""

_PRIVATE = ("out", "track.name")
"""Settings that differ in every run."""


@dataclass(frozen=True, slots=True)
class Success:
    """Success on held-out tasks, with its Wilson interval (95%)."""

    success: float
    low: float
    high: float
    n: int
    """Number of episodes."""


@dataclass(frozen=True, slots=True)
class RunRow:
    """What a table of runs says of one run."""

    id: str
    name: str
    state: RunState
    recipe: str = ""
    """File name of its recipe; empty without one."""
    env: str = ""
    """Names of its environments."""
    model: str = ""
    seed: int | None = None
    steps: int = 0
    """Training steps so far."""
    planned: int = 0
    """Training steps in its settings."""
    before: Success | None = None
    after: Success | None = None
    reward: float | None = None
    """Mean reward of the last training step."""
    episodes: int | None = None
    """Episodes of gates, evaluations and training steps, by their rows of metrics."""
    tokens: int = 0
    """Tokens sampled in training steps."""
    wall_s: float | None = None
    started: float | None = None
    """Unix seconds."""
    updated: float = 0.0
    """Unix seconds of the last change of its files."""
    size: int | None = None
    """Bytes of its folder; None where it has too many files to count."""
    changed: Mapping[str, Any] = field(default_factory=dict)
    """Settings that differ between the runs of a table, by dotted key."""

    def as_json(self) -> dict[str, Any]:
        """Return the row as plain values of standard JSON."""
        return asdict(self) | {"changed": dict(self.changed)}


class RunRows:
    """Rows of the runs of a session, made again only where files have changed."""

    def __init__(self) -> None:
        self._readers: dict[Path, _RunReader] = {}

    def rows(self, runs: Mapping[str, Path]) -> list[RunRow]:
        """Return the row of each run, in the order of `runs`, which has each run's folder by id."""
        rows = []
        settings = []
        for run_id, path in runs.items():
            reader = self._readers.setdefault(path, _RunReader(path))
            rows.append(reader.row(run_id))
            settings.append(reader.settings)

        differing = _differing(settings)
        return [
            replace(row, changed={key: of_run.get(key) for key in differing})
            for row, of_run in zip(rows, settings, strict=True)
        ]


def find_runs(paths: Sequence[Path]) -> dict[str, Path]:
    """Return the runs in some folders by id: the path below the folder, or the name of a folder
    that is itself a run.

    Symbolic links below the folders are not followed, and what lies in a run is part of it.
    """
    runs: dict[str, Path] = {}
    for path in paths:
        for folder in _runs_below(path):
            run_id = _folder_name(path)
            if folder != path:
                run_id = folder.relative_to(path).as_posix()
            runs[unused_id(run_id, runs)] = folder
    return runs


def is_run_folder(folder: Path) -> bool:
    """Return whether a folder is that of a run.

    A model's folder has a `config.json` too, without the settings of a run.
    """
    return any(_is_regular(folder / name) for name in RUN_FILES) or has_settings(folder)


def has_settings(folder: Path) -> bool:
    """Return whether a folder has the settings of a run of training."""
    return isinstance(_small_json(folder / "config.json").get("config"), dict)


def _runs_below(path: Path) -> Iterator[Path]:
    """Yield the folders of runs, in order of their paths."""
    waiting = [(path, 0)]
    looked_into = 0
    while waiting and looked_into < MAX_FOLDERS:
        folder, depth = waiting.pop()
        looked_into += 1
        if is_run_folder(folder):
            yield folder
        elif depth < MAX_DEPTH:
            below = sorted(_folders_in(folder), reverse=True)  # the last of the list is the next
            waiting += [(child, depth + 1) for child in below]


def _folders_in(folder: Path) -> list[Path]:
    """Return the folders in a folder, without links and hidden ones."""
    try:
        with os.scandir(folder) as entries:
            names = [
                entry.name
                for entry in entries
                if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
            ]
    except OSError:
        return []
    return [folder / name for name in names]


def unused_id(run_id: str, taken: Mapping[str, Path]) -> str:
    """Return an id that no other run has: `quickstart`, then `quickstart-2`."""
    unused = run_id
    suffix = 1
    while unused in taken:
        suffix += 1
        unused = f"{run_id}-{suffix}"
    return unused


def folder_size(folder: Path) -> int | None:
    """Return the bytes of a folder's files, without those that links lead to; None for too many
    files."""
    total = 0
    count = 0
    waiting = [folder]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    count += 1
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(Path(entry.path))
                        continue
                    with suppress(OSError):  # gone meanwhile
                        total += entry.stat(follow_symlinks=False).st_size
        except OSError:
            continue
        if count > MAX_FILES:
            return None
    return total


class _RunReader:
    """Reads the row of one run, and keeps it while its files stay as they are."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: object = None
        """What the files looked like when the row was made."""
        self._row = RunRow("", "", "no training")
        self._metrics = _MetricsReader(path / "metrics.jsonl")
        self._sized: float | None = None
        """When the folder was measured, in seconds of `time.monotonic`."""
        self.settings: Mapping[str, Any] = {}
        """Settings by dotted key."""

    def row(self, run_id: str) -> RunRow:
        """Return the row as it is now."""
        running = is_locked(self._path)
        seen = (running, [file_stamp(self._path / name) for name in _SEEN_FILES])
        is_new = seen != self._seen
        if is_new:
            self._seen = seen
            self._row = self._read(running)

        # That of a running run grows with each episode, and measuring it takes longer.
        now = time.monotonic()
        is_due = self._sized is None or now - self._sized > SIZE_S
        if is_due if running else is_new:
            self._sized = now
            self._row = replace(self._row, size=folder_size(self._path))
        return replace(self._row, id=run_id)

    def _read(self, running: bool) -> RunRow:
        recorded = _small_json(self._path / "config.json")
        summary = _small_json(self._path / "summary.json")
        config = mapping(recorded.get("config"))
        self.settings = _flat(config)
        self._metrics.read()
        metrics = self._metrics

        wall_s = number(summary.get("wall_s"))
        if wall_s is None:
            wall_s = metrics.last_s
        planned = integer(mapping(config.get("train")).get("steps"))
        return RunRow(
            id="",
            name=_short(_folder_name(self._path)),
            state=self._state(running, bool(config), bool(summary)),
            recipe=_short(_text(recorded.get("recipe")).rpartition("/")[2]),
            env=_short(", ".join(_env_names(config))),
            model=_model_name(config),
            seed=_seed(config),
            steps=metrics.steps,
            planned=max(planned, 0),
            before=metrics.evaluation("before") or _of_summary(summary, "before"),
            after=metrics.evaluation("after") or _of_summary(summary, "after"),
            reward=metrics.reward,
            episodes=metrics.episodes,
            tokens=metrics.tokens,
            wall_s=wall_s,
            started=_changed_at(self._path / ".lock"),  # created once, and never written
            updated=self._updated(),
            size=self._row.size,
        )

    def _state(self, running: bool, has_settings: bool, has_summary: bool) -> RunState:
        if running:
            return "running"
        if has_summary:
            return "finished"
        if _small_json(self._path / FAILURE_FILE):
            return "failed"
        if has_settings or self._metrics.has_rows:
            return "stopped"
        return "no training"

    def _updated(self) -> float:
        """Return when the run's files were last written."""
        times = [_changed_at(self._path / name) for name in (*_SEEN_FILES, *RUN_FILES)]
        return max((changed for changed in times if changed is not None), default=0.0)


class _MetricsReader:
    """Reads what a row says of metrics.jsonl; goes on where it stopped when the file has grown."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None
        """Device and number of the file that was read."""
        self._clear()

    def _clear(self) -> None:
        self._offset = 0
        self._steps: dict[int, tuple[int, int]] = {}
        """Sampled tokens and episodes of each training step."""
        self._evaluations: dict[str, Success] = {}
        self._other_episodes = 0
        self.reward: float | None = None
        self.last_s: float | None = None
        self.has_rows = False

    def read(self) -> None:
        """Read what was written since the last call."""
        try:
            status = os.stat(self._path)
        except OSError:
            self._file = None
            self._clear()
            return

        file = (status.st_dev, status.st_ino)
        if file != self._file or status.st_size < self._offset:
            self._clear()
            self._file = file
        with suppress(OSError):
            for offset, line in complete_lines(self._path, self._offset):
                read_line(line, self._take)
                self._offset = offset + len(line)

    @property
    def steps(self) -> int:
        """Training steps so far."""
        return max(self._steps, default=0)

    @property
    def tokens(self) -> int:
        """Tokens sampled in training steps."""
        return sum(tokens for tokens, _ in self._steps.values())

    @property
    def episodes(self) -> int | None:
        """Episodes that rows were made of; None without rows of any."""
        of_steps = sum(episodes for _, episodes in self._steps.values())
        return of_steps + self._other_episodes or None

    def evaluation(self, name: str) -> Success | None:
        """Return a sampled evaluation by its name, or the greedy one where there is no other."""
        return self._evaluations.get(f"{name}/sampled") or self._evaluations.get(f"{name}/greedy")

    def _take(self, row: Mapping[str, Any]) -> None:
        self.has_rows = True
        seconds = number(row.get("time_s"))
        if seconds is not None:
            self.last_s = seconds

        phase = row.get("phase")
        if phase == "train":
            tokens = _count(row.get("sampled_tokens"))
            episodes = _count(row.get("trajectories"))
            self._steps[integer(row.get("step"))] = tokens, episodes
            self.reward = number(row.get("reward"))
        elif phase in ("eval", "gate"):
            self._other_episodes += _count(row.get("n"))
            success = _success(row.get("success"), row.get("ci"), row.get("n"))
            if phase == "eval" and success is not None:
                self._evaluations[f"{row.get('name')}/{row.get('mode')}"] = success


def _success(share: Any, interval: Any, episodes: Any) -> Success | None:
    """Return a success rate; None unless it and the number of episodes are known."""
    success = number(share)
    n = integer(episodes)
    if success is None or n < 1 or not 0 <= success <= 1:
        return None
    bounds = pair(interval) or wilson(round(success * n), n)
    return Success(success, *bounds, n)


def _count(value: Any) -> int:
    """Return a number of things; 0 for anything else."""
    figure = number(value)
    if figure is None or not 0 <= figure <= MAX_COUNT:
        return 0
    return int(figure)


def _of_summary(summary: Mapping[str, Any], name: str) -> Success | None:
    """Return an evaluation of a run whose metrics are not there."""
    interval = summary.get(f"success_{name}_ci")
    return _success(summary.get(f"success_{name}"), interval, summary.get("n_eval"))


def _env_names(config: Mapping[str, Any]) -> list[str]:
    envs = config.get("env")
    if not isinstance(envs, list):
        return []
    rows = [mapping(env) for env in envs[:8]]
    return [_text(row.get("name") or row.get("use")) for row in rows]


def _model_name(config: Mapping[str, Any]) -> str:
    """Return the last part of a model's path, or `tiny`; empty without settings."""
    if "model" not in config:
        return ""
    path = _text(mapping(config["model"]).get("path"))
    return _short(path.rstrip("/").rpartition("/")[2]) or "tiny"


def _seed(config: Mapping[str, Any]) -> int | None:
    seed = integer(config.get("seed"))
    return seed if 0 <= seed <= MAX_COUNT else None


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted key, those of environments and policies by their number.

    Lists and what is nested deeper than settings are become JSON.
    """
    flat: dict[str, Any] = {}
    waiting = [("", config, 0)]
    while waiting and len(flat) < MAX_SETTINGS:
        prefix, tree, depth = waiting.pop()
        for name, value in tree.items():
            key = f"{prefix}{name}"
            tables = value if isinstance(value, list) else [value]
            is_list = isinstance(value, list)
            if not tables or depth > MAX_DEPTH or not all(isinstance(t, dict) for t in tables):
                flat[_short(key)] = _plain(value)
                continue
            for index, table in enumerate(tables):
                inner = f"{key}.{index}." if is_list else f"{key}."
                waiting.append((inner, table, depth + 1))
    return flat


def _plain(value: Any) -> Any:
    """Return a setting as a short value of standard JSON."""
    if value is None or isinstance(value, bool):
        return value
    figure = number(value)
    if figure is not None and abs(figure) <= MAX_COUNT:
        return value
    return _short(_text(value))


def _differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys whose values are not the same in all runs that have settings."""
    known = [of_run for of_run in settings if of_run]
    keys: dict[str, None] = {}
    for of_run in known:
        keys.update(dict.fromkeys(of_run))

    differing = []
    for key in keys:
        values = {repr(of_run.get(key)) for of_run in known}
        if len(values) > 1 and key not in _PRIVATE:
            differing.append(key)
    return sorted(differing)


def _small_json(path: Path) -> Mapping[str, Any]:
    """Return the object in a JSON file; empty for anything else."""
    try:
        if not _is_regular(path) or path.stat().st_size > MAX_JSON:
            return {}
        return mapping(parse(files.read_bytes(path)))
    except OSError:
        return {}


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def file_stamp(path: Path) -> tuple[int, int] | None:
    """Return what tells whether a file has changed: its size and the time of its last change."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _changed_at(path: Path) -> float | None:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return None


def _short(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def _text(value: Any) -> str:
    """Return a value as text; nothing of one that is nested too deep."""
    try:
        return text_of(value)
    except (RecursionError, ValueError):
        return ""


def _folder_name(folder: Path) -> str:
    """Return the name of a folder that may be given as "." or as a link."""
    return os.path.basename(os.path.realpath(folder)) or "run"
