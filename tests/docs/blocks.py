"""Code blocks of Markdown files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted(
    [
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "benchmarks" / "results").glob("*.md"),
        *(path for path in ROOT.glob("*.md")),
        ROOT / "src/turnwright/cli/templates/README.md.jinja",
    ]
)

_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,})[ ]*(?P<language>[^\s`]*)[^\n]*$")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    path: Path
    line: int
    """Of the opening fence, from 1."""
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"

    @property
    def file(self) -> str | None:
        """The file that the block stands for: its first line is a comment that
        names one (`# guess.py`)."""
        match = re.match(r"# ([\w./-]+\.(?:py|toml|jsonl))\s*(?:\n|$)", self.text)
        return match.group(1) if match else None

    @property
    def commands(self) -> list[tuple[str, list[str]]]:
        """Of a console block: each line behind `$ `, without its comment, and the lines
        that it is said to print."""
        found: list[tuple[str, list[str]]] = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                found.append((re.sub(r"\s+# .*$", "", line[2:]).strip(), []))
            elif line.strip() and found:
                found[-1][1].append(line.rstrip())
            elif line.strip():
                raise ValueError(f"{self.where}: {line!r} stands before the first '$ '")
        return found


def blocks(path: Path) -> list[Block]:
    """The fenced blocks of a file, in order."""
    found: list[Block] = []
    opened: tuple[int, str, str, str] | None = None
    lines: list[str] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        match = _FENCE.match(line)
        if opened is None and match:
            opened, lines = (number, match["fence"], match["language"], match["indent"]), []
        elif (
            opened is not None
            and match
            and match["fence"].startswith(opened[1])
            and not match["language"]
        ):
            found.append(Block(path, opened[0], opened[2], "\n".join(lines) + "\n"))
            opened = None
        elif opened is not None:
            lines.append(line.removeprefix(opened[3]))
    if opened is not None:
        raise ValueError(f"{path}:{opened[0]}: the block is never closed")
    return found


def all_blocks(*languages: str) -> list[Block]:
    """The blocks of every documentation file, of these languages."""
    return [
        block
        for path in FILES
        for block in blocks(path)
        if not languages or block.language in languages
    ]
