"""Packages of the index as files, for what tests read inside of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def download(package: str, folder: Path | str, *options: str) -> str:
    """Download one package without what it requires; return why it could not be had, or nothing."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", *options, "--dest", str(folder), package]
    done = subprocess.run(command, capture_output=True, text=True)
    if not done.returncode:
        return ""
    lines = (done.stderr or done.stdout).strip().splitlines() or ["no reason given"]
    return lines[-1][:300]
