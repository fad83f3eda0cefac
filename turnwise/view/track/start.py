"""The trackers of a run, seen from the training process: started, and at the end waited for a little."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from turnwise.view.text import single_line
from turnwise.view.track.base import folder_of

PATIENCE_S = 10.0
"""Seconds that the end of a run waits for trackers to take the last rows."""


class TrackerProcesses:
    """A process for each tracker; training writes metrics.jsonl and does nothing else for them."""

    def __init__(self, to: Sequence[str], run: Path, project: str, name: str | None) -> None:
        """Start them. One that cannot be started is told of by `close`.

        Args:
            to: trackers by name, or `file.py:Class`.
            run: the run directory.
            project: what they call the project.
            name: what they call the run; its directory's name where None.
        """
        self._run = run.resolve()
        self._processes: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._failed: list[str] = []
        for spec in to:
            try:
                (self._run / "track").mkdir(exist_ok=True)
                with (self._run / "track" / f"{folder_of(spec)}.log").open("ab") as log:
                    words = [*_COMMAND, spec, str(self._run), project, name or self._run.name]
                    process = subprocess.Popen(
                        words, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True, env=_environment()
                    )
            except OSError as error:
                self._failed.append(f"tracker {spec} could not be started ({error.strerror})")
                continue
            self._processes.append((spec, process))

    def close(self, patience_s: float | None = None) -> list[str]:
        """Let them take the last rows, and end those that do not come to an end.

        Returns:
            A sentence for each tracker that did not take everything.
        """
        until = time.monotonic() + (PATIENCE_S if patience_s is None else patience_s)
        for _, process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for spec, process in self._processes:
            try:
                status = process.wait(max(0.0, until - time.monotonic()))
                stuck = False
            except subprocess.TimeoutExpired:
                process.kill()
                status, stuck = process.wait(), True
            if status or stuck:
                self._failed.append(self._told(spec, stuck))
        self._processes = []
        return self._failed

    def _told(self, spec: str, stuck: bool) -> str:
        try:
            found = json.loads((self._run / "track" / f"{folder_of(spec)}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            found = {}
        why = "did not come to an end" if stuck else single_line(str(found.get("error") or "died"), 400)
        log = self._run / "track" / f"{folder_of(spec)}.log"
        return (
            f"tracker {spec} {'' if stuck else 'failed: '}{why}, after {found.get('rows', 0)} rows; metrics.jsonl has all, "
            f"send the rest with: turnwise track {self._run} --to {spec} (see {log})"
        )


def follow_once(to: Sequence[str], run: Path, project: str, name: str | None, patience_s: float = 600.0) -> list[str]:
    """Send what a run that is over, or stopped, has in its metrics.jsonl; gives what went wrong, a sentence each."""
    return TrackerProcesses(to, run, project, name).close(patience_s)


_COMMAND = (sys.executable, "-m", "turnwise.view.track.follow")


def _environment() -> dict[str, str]:
    """That of this process, in which Turnwise itself can be imported wherever it came from."""
    root = str(Path(__file__).parents[3])
    path = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root}
