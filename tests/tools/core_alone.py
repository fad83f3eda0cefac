"""Run the core's tests in a copy of the tree without the packages beside it: `make test-core`,
which takes pytest's arguments.

A test belongs to the core unless its file, or a kit that it imports, names one of those
packages (`tests/conftest.py`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from turnwright.plugins import PACKAGES

ROOT = Path(__file__).resolve().parents[2]


def copy_core(folder: Path) -> Path:
    """Copy what git tracks, without the packages; return the copy."""
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, tracked.split("\0")):
        parts = Path(name).parts
        if parts[0] == "src" and parts[1] in PACKAGES:
            continue
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    return folder


def interpreter(folder: Path) -> Path:
    """Make an environment that has the packages of this one, but for the editable
    installation of the tree."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # Paths of a .pth file are added without their own .pth files, by which an editable
    # installation is found.
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


def main(words: list[str]) -> int:
    """Run pytest in the copy, and return its status."""
    with tempfile.TemporaryDirectory(prefix="turnwright-core-") as folder:
        tree = copy_core(Path(folder, "tree"))
        python = interpreter(Path(folder, "venv"))
        (tree / ".venv").symlink_to(Path(folder, "venv"))
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        env["PYTHONPATH"] = str(tree / "src")
        return subprocess.run(
            [python, "-m", "pytest", *words], cwd=tree, env=env, check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
