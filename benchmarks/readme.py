"""Write the last lines of the quickstart into README.md, as a run on this machine prints them.

    python benchmarks/readme.py

No figure is copied by hand, so README shows one run and not a mixture of several. The last digit of
a success differs between processors whose vector units sum in another order.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "README.md"
FIRST, LAST = "success    ", "  turnwright train recipes/quickstart.toml --seed 1"
"""Beginnings of the block's first and last line."""


def last_lines(out: Path) -> list[str]:
    """Run the quickstart; return its last lines, with the run where `make quickstart` puts it."""
    command = [
        sys.executable,
        "-m",
        "turnwright",
        "train",
        "recipes/quickstart.toml",
        "--out",
        str(out),
        "--display",
        "plain",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return block_of(done.stdout.replace(str(out), "runs/quickstart").splitlines())


def block_of(lines: list[str]) -> list[str]:
    """Return the block of a text's lines.

    Raises:
        SystemExit: if it is not there.
    """
    ends = [number for number, line in enumerate(lines) if line.startswith(LAST)]
    starts = [number for number, line in enumerate(lines) if line.startswith(FIRST)]
    if len(starts) != 1 or len(ends) != 1:
        raise SystemExit(f"no block from {FIRST!r} to {LAST!r}")
    return lines[starts[0] : ends[0] + 1]


def main() -> None:
    """Replace the block."""
    text = PAGE.read_text(encoding="utf-8")
    old = block_of(text.splitlines())
    with tempfile.TemporaryDirectory() as folder:
        new = last_lines(Path(folder) / "quickstart")
    PAGE.write_text(text.replace("\n".join(old), "\n".join(new)), encoding="utf-8")
    print("\n".join(new))


if __name__ == "__main__":
    main()
