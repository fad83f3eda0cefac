"""What the sanity check found in a run, for people: three columns around the first difference of each cause."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from turnwise.view.rundir import Row, lines_of, number
from turnwise.view.text import single_line, visible

FILE = "sanity.jsonl"
_COLUMNS = ("sampled", "canonical", "sent")
_MOST = 40
"""Reports shown at most, whatever the file holds."""
_LONGEST = 600


@dataclass(frozen=True, slots=True)
class RenderFinding:
    """One cause, as it was first seen."""

    cause: str
    sentence: str
    count: int
    """How often the reinforcement steps saw it."""
    where: str
    columns: Sequence[tuple[str, str]]
    """Each of sampled, canonical, sent with its text."""


def findings(run_dir: Path, rows: Sequence[Row], problems: list[str]) -> list[RenderFinding]:
    """The reports of a run, the commonest cause first.

    Args:
        rows: of metrics.jsonl, for the counts.
        problems: gets a line where the file cannot be read.
    """
    counts: Counter[str] = Counter()
    for row in rows:
        for name, value in row.items():
            if str(name).startswith("template_breaks_"):
                counts[str(name).removeprefix("template_breaks_")] += int(number(value) or 0)
    found: list[RenderFinding] = []
    for _, row in lines_of(run_dir / FILE, problems):
        cause, key = str(row.get("cause", "")), row.get("key")
        episode = "/".join(map(str, key)) if isinstance(key, list) else ""
        turn = number(row.get("turn"))
        place = f"turn {int(turn) + 1}" if turn is not None and turn >= 0 else "the opening prompt"
        where = f"episode {episode}, {place}, id {row.get('position')} of the path, in what is of origin {row.get('origin')}"
        texts = [(name, str(row.get(name) or "")[:_LONGEST]) for name in _COLUMNS]
        said = str(row.get("said") or "")[:_LONGEST]
        found.append(
            RenderFinding(cause, " ".join(filter(None, (str(row.get("sentence") or ""), said))), counts[cause], where, texts)
        )
        if len(found) == _MOST:
            break
    return sorted(found, key=lambda one: (-one.count, one.cause))


def table(found: Sequence[RenderFinding], width: int = 120) -> list[str]:
    """The reports as lines for a terminal: under each cause three columns, line breaks and other signs written out."""
    lines: list[str] = []
    cell = max(16, (width - 6) // 3)
    for one in found:
        seen = f" ({one.count} in the steps)" if one.count else ""
        lines += ["", single_line(f"{one.cause}{seen}: {one.sentence}"), single_line(f"  {one.where}")]
        cells = [textwrap.wrap(_shown(text), cell, drop_whitespace=False) or [""] for _, text in one.columns]
        lines.append("   ".join(name.ljust(cell) for name, _ in one.columns).rstrip())
        for number_ in range(max(map(len, cells))):
            row = [rows[number_] if number_ < len(rows) else "" for rows in cells]
            lines.append("   ".join(text.ljust(cell) for text in row).rstrip())
    return lines[1:]


def _shown(text: str) -> str:
    return visible(text).replace("\n", "\u23ce").replace("\t", "\u21e5").replace(" ", "\u00b7")
