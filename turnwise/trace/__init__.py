"""Runs on disk: written as they happen, read back whole."""

from turnwise.trace.record import rebuild_trajectories, trajectory_row
from turnwise.trace.run import Checks, JsonLines, RunDir, read_json_lines, to_json
from turnwise.trace.watch import EpisodeListener, NullListener, ProgressListener

__all__ = [
    "Checks",
    "EpisodeListener",
    "JsonLines",
    "NullListener",
    "ProgressListener",
    "RunDir",
    "read_json_lines",
    "rebuild_trajectories",
    "to_json",
    "trajectory_row",
]
