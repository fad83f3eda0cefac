"""The last lines of the quickstart as README shows them.

    python benchmarks/quickstart.py

Trains recipes/quickstart.toml (seed 0), and writes what it prints at its end to
`benchmarks/results/quickstart.txt` and to README's block between `<!-- quickstart -->` and
`<!-- end -->`; a test compares both.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "quickstart.txt"
PAGE = ROOT / "README.md"
BLOCK = re.compile(r"(?<=<!-- quickstart -->\n```text\n).*?(?=```\n<!-- end -->)", re.S)


def last_lines() -> str:
    """Train in a process of its own, and return what it prints after the progress."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "quickstart"
        words = [
            sys.executable,
            "-m",
            "turnwright",
            "train",
            str(ROOT / "recipes" / "quickstart.toml"),
        ]
        words += ["--out", str(out), "--display", "none"]
        env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
        done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    lines = done.stdout[done.stdout.index("success ") :]
    return lines.replace(str(out), "runs/quickstart").replace(f"{ROOT}/", "")


def main() -> None:
    """Write the file and the page."""
    lines = last_lines()
    RESULT.write_text(lines)
    page = PAGE.read_text()
    assert BLOCK.search(page), "README has no block <!-- quickstart -->"
    PAGE.write_text(BLOCK.sub(lambda _: lines, page))
    print(lines, end="")


if __name__ == "__main__":
    main()
