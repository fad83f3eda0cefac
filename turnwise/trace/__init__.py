"""Runs on disk: written as they happen, read back whole."""

from turnwise.trace.record import replay, trajectory_row
from turnwise.trace.run import Checks, JsonLines, RunDir, read_json_lines, to_json
from turnwise.trace.watch import EpisodeListener, Quiet, Watch

__all__ = [
    "Checks",
    "EpisodeListener",
    "JsonLines",
    "Quiet",
    "RunDir",
    "Watch",
    "read_json_lines",
    "replay",
    "to_json",
    "trajectory_row",
]
