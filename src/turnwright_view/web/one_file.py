"""The page with its runs as one file, which needs no server and no network; a run's report is one.

A file has a selection of episodes: failures, the whole last step, the worst and the best of each
step, groups whose rewards are equal, and evaluations. They are packed by some dozens, compressed,
and a pack is read when one of its episodes is looked at.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import sqlite3
import time
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, TextIO

from turnwright.display.text import csp_digest
from turnwright.errors import TraceError
from turnwright_view.run_rows import RunRow, RunRows, find_runs
from turnwright_view.web import bundle
from turnwright_view.web.episode import episode_page
from turnwright_view.web.episode_rows import EpisodeColumns
from turnwright_view.web.index import ROUND_BYTES, RunIndex
from turnwright_view.web.media import Thumbnails
from turnwright_view.web.overview import glossary, overview
from turnwright_view.web.search import EpisodeFilter
from turnwright_view.web.texts import embed_json, escape_json

EPISODES = 200
"""Episodes of a file, unless more are asked for; the help of `--episodes` says so."""

MAX_BYTES = 5_000_000
"""Bytes of a file with `EPISODES`; with more of them, the bytes grow as they do."""

PACK = 24
"""Episodes of a pack: few are unpacked for one, and those of a step share most of their texts."""

PACK_BYTES = 2 * 2**20
"""Bytes of a pack before it is compressed, of at least one episode."""

PROGRESS_S = 1.0
"""Seconds after which progress is told."""

METRIC_ROWS = 4_000
"""Rows of metrics of a run in a file; of more, some are left out evenly."""


_ENDS_ELEMENT = re.compile("</(script|style)|<!--|<script", re.IGNORECASE)


class PackingProgress:
    """Tells on a stream what takes longer than a second, on one line that is written anew."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._began = self._told = time.monotonic()
        self._has_told = False

    def tell(self, text: str) -> None:
        """Say what is being done."""
        now = time.monotonic()
        is_due = now - self._began > PROGRESS_S and now - self._told > PROGRESS_S / 4
        if self._stream is None or not is_due:
            return
        self._told = now
        self._has_told = True
        end = "\r" if self._stream.isatty() else "\n"
        if end == "\n":
            self._told += 5  # lines of a log
        self._stream.write(f"{text:<60}{end}")
        self._stream.flush()

    def close(self) -> None:
        """Leave the line as it was before."""
        if self._stream is not None and self._has_told and self._stream.isatty():
            self._stream.write(" " * 60 + "\r")
            self._stream.flush()


@dataclass(slots=True)
class PackedRun:
    """A run as it stands in the file."""

    overview: dict[str, Any]
    all: int
    """Number of its episodes, also of those that are not in the file."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    packs: list[str] = field(default_factory=list)


def write_page(
    paths: Sequence[Path],
    out: Path,
    *,
    episodes: int = EPISODES,
    progress: TextIO | None = None,
) -> int:
    """Write the page of runs, or of those below a folder, as one file; return its number of
    episodes."""
    runs = find_runs(paths)
    told = PackingProgress(progress)
    max_bytes = max(MAX_BYTES, MAX_BYTES * episodes // EPISODES)
    rows = RunRows().rows(runs)
    fixed = len(_page(*_content(rows, {})).encode())
    share = max(0, max_bytes - fixed) // max(1, len(runs))

    packed: dict[str, PackedRun] = {}
    for row, path in zip(rows, runs.values(), strict=True):
        packed[row.id] = _packed(row, path, episodes // len(runs), share, told)
    _write(out, _page(*_content(rows, packed)))
    told.close()
    return sum(len(run.rows) for run in packed.values())


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the page of one run, by default to `run_dir/report.html`, and return its path; missing
    files leave out parts."""
    path = out or run_dir / "report.html"
    write_page([run_dir], path)
    return path


def _write(path: Path, text: str) -> None:
    """Write a file in one piece, so that no half of it is ever seen."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(text.encode())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        why = f"cannot be written ({error.strerror}); free space or choose another path with --html"
        raise TraceError(f"{path}: {why}") from error


def _content(
    rows: Sequence[RunRow], packed: dict[str, PackedRun]
) -> tuple[dict[str, Any], list[str]]:
    """Return the data of the page, and its elements with packs of episodes."""
    data = {
        "session": {
            "folder": "",
            "live": False,
            "glossary": glossary(),
            "runs": [row.as_json() for row in rows],
        },
        "overviews": {run_id: run.overview for run_id, run in packed.items()},
        "episodes": {
            run_id: {"rows": run.rows, "all": run.all, "chunks": len(run.packs)}
            for run_id, run in packed.items()
        },
    }
    elements = []
    for number, run in enumerate(packed.values()):
        for place, pack in enumerate(run.packs):
            name = f"chunk-{number}-{place}"
            elements.append(f'<script type="text/plain" id="{name}">{pack}</script>')
    return data, elements


def _page(data: dict[str, Any], elements: Sequence[str]) -> str:
    scripts = (bundle.vendor_script(), bundle.script())
    styles = (bundle.vendor_style(), bundle.style())
    for text in (*scripts, *styles):
        if _ENDS_ELEMENT.search(text):
            raise RuntimeError("the page's own code would end its element")
    allowed_scripts = " ".join(f"'sha256-{csp_digest(text)}'" for text in scripts)
    allowed_styles = " ".join(f"'sha256-{csp_digest(text)}'" for text in styles)
    policy = (
        f"default-src 'none'; script-src {allowed_scripts}; style-src {allowed_styles}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    head += "\n".join(f"<style>{text}</style>" for text in styles)
    content = f'<script type="application/json" id="data">{embed_json(escape_json(data))}</script>'
    code = [f"<script>{text}</script>" for text in scripts]
    return bundle.page(head, "\n".join([content, *elements, *code]))


def _packed(
    row: RunRow, path: Path, episodes: int, max_bytes: int, told: PackingProgress
) -> PackedRun:
    """Index a run and pack some of its episodes into so many bytes."""
    index = RunIndex(path)
    try:
        while index.update(ROUND_BYTES):
            state = index.progress()
            told.tell(f"reading {row.name}: {state['read'] / max(1, state['size']):.0%}")
        page = overview(index, row.id, row.name, row.state)
        page["rows"] = _thinned(page["rows"])
        run = PackedRun(page, index.state().episodes)
        left = max_bytes - len(embed_json(escape_json(page)))
        _pack(index, run, chosen(index, episodes), left, told, row.name)
        return run
    except sqlite3.Error as error:
        raise TraceError(
            f"{index.file}: the index of episodes cannot be written ({error}): the disk is full, "
            "or a file may not grow so large; free space, or name another folder with "
            "XDG_CACHE_HOME"
        ) from error
    finally:
        index.close()


def _thinned(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out rows of metrics evenly where there are very many."""
    every = 1 + len(rows) // METRIC_ROWS
    return rows if every == 1 else [*rows[:-1:every], rows[-1]]


def _pack(
    index: RunIndex,
    run: PackedRun,
    selection: Sequence[EpisodeColumns],
    left: int,
    told: PackingProgress,
    name: str,
) -> None:
    """Pack episodes until the room is used up; what does not fit is left out."""
    thumbnails = Thumbnails(index.path)
    for group in _groups(index, selection, told, name):
        pack = _compressed(group, thumbnails)
        if len(pack) > left and len(group) > 1:
            # The last of them may still fit one by one.
            groups = [[page] for page in group]
            packs = [_compressed(one, thumbnails) for one in groups]
        else:
            groups = [group]
            packs = [pack]

        for pages, pack in zip(groups, packs, strict=True):
            size = len(pack) + sum(len(embed_json(page["row"])) + 16 for page in pages)
            if size > left:
                continue
            left -= size
            for page in pages:
                run.rows.append({**page["row"], "chunk": len(run.packs)})
            run.packs.append(pack)
    run.rows.sort(key=lambda row: int(row["number"]))


def _groups(
    index: RunIndex,
    selection: Sequence[EpisodeColumns],
    told: PackingProgress,
    name: str,
) -> Iterator[list[dict[str, Any]]]:
    """Yield the pages of episodes in packs, escaped."""
    group: list[dict[str, Any]] = []
    size = 0
    for number, columns in enumerate(selection):
        told.tell(f"packing episodes of {name}: {number} of {len(selection)}")
        page = escape_json(episode_page(index, columns))
        group.append(page)
        size += columns.length
        if len(group) == PACK or size > PACK_BYTES:
            yield group
            group = []
            size = 0
    if group:
        yield group


def _compressed(pages: Sequence[dict[str, Any]], thumbnails: Thumbnails) -> str:
    """Return a pack of episodes with the images that they show."""
    media: dict[str, str] = {}
    for page in pages:
        for name in _hashes(page):
            png = "" if name in media else thumbnails.png(name)
            if png:
                media[name] = png
    content = {"episodes": {page["key"]: page for page in pages}, "media": media}
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, default=str)
    return b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


def _hashes(page: Any) -> Iterable[str]:
    """Yield the hashes of images that an episode shows."""
    if isinstance(page, dict):
        if isinstance(page.get("hash"), str):
            yield page["hash"]
        for value in page.values():
            yield from _hashes(value)
    elif isinstance(page, list):
        for value in page:
            if isinstance(value, (dict, list)):
                yield from _hashes(value)


def chosen(index: RunIndex, most: int) -> list[EpisodeColumns]:
    """Return the most informative episodes of a run, at most so many: some of each kind."""
    picked: dict[int, None] = {}
    for round_ in zip_longest(*_kinds(index)):
        for number in round_:
            if number is not None and len(picked) < most:
                picked[number] = None
    if len(picked) < most:
        for number in index.numbers(EpisodeFilter()):
            if len(picked) < most:
                picked[number] = None
    return [columns for columns in map(index.at, sorted(picked)) if columns is not None]


def _kinds(index: RunIndex) -> list[list[int]]:
    """Return the numbers of episodes by what makes them worth a look, the best examples first."""
    facets = index.facets()
    phases = [phase for phase, _ in facets["phase"]]
    failures = index.numbers(EpisodeFilter(error="*"))
    ties = index.numbers(EpisodeFilter(tie=True))

    extremes: list[int] = []
    last_step: list[int] = []
    steps = index.steps("train")
    for step in _spread(steps):
        numbers = index.numbers(EpisodeFilter(phase="train", step=(step, step)), "worst")
        extremes += [numbers[0], numbers[-1]]
        if step == steps[-1]:
            last_step = numbers

    others: list[int] = []
    for phase in phases:
        if phase != "train":
            others += _ends(index.numbers(EpisodeFilter(phase=phase), "worst"))
    return [failures, last_step, extremes, others, ties]


def _ends(numbers: Sequence[int]) -> list[int]:
    """Return some of the worst and of the best."""
    return list(dict.fromkeys([*numbers[:4], *numbers[-2:]]))


def _spread(steps: Sequence[int]) -> list[int]:
    """Return steps in the order in which they are worth a look: last, first, middle, and so on."""
    ordered: dict[int, None] = {}
    if steps:
        ordered[steps[-1]] = None
    parts = 1
    while len(ordered) < len(steps):
        for part in range(parts + 1):
            ordered[steps[(len(steps) - 1) * part // parts]] = None
        parts *= 2
    return list(ordered)
