"""Type checkers on a user's code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CODE = Path(__file__).parents[1] / "packaging/users_code"


def marked() -> dict[int, str]:
    """The lines of the mistakes, and their numbers."""
    lines = (CODE / "mistakes.py").read_text().splitlines()
    return {
        number: line.rpartition("# ")[2]
        for number, line in enumerate(lines, 1)
        if re.search(r"# \d$", line)
    }


def found_by(command: list[object], file: str, folder: Path) -> set[int]:
    """The lines in which a type checker finds an error."""
    (folder / file).write_text((CODE / file).read_text())
    done = subprocess.run(
        [str(word) for word in command] + [file], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    errors = re.findall(rf"{re.escape(file)}:(\d+):(?:\d+ -)? error", done.stdout)
    assert bool(errors) == bool(done.returncode), done.stdout
    return {int(line) for line in errors}


def check(command: list[object], folder: Path) -> None:
    """Check that right code has no error, and that each mistake is one."""
    assert found_by(command, "right.py", folder) == set()
    assert found_by(command, "mistakes.py", folder) == set(marked())


def mypy(python: object = sys.executable) -> list[object]:
    return [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--python-executable",
        python,
        "--cache-dir",
        "cache",
    ]
