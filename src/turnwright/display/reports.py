"""Reports of runs: files that commands of installed packages write, such as the page of the
viewer."""

from __future__ import annotations

from pathlib import Path

from turnwright import plugins


def reports_of(run: Path, *, renew: bool) -> list[Path]:
    """Return the reports of a run that ended; write those that are missing, or all to `renew`
    them."""
    writers = [
        command.report for command in plugins.importable("commands") if command.report is not None
    ]
    return [write(run, renew) for write in writers]
