"""Run directories: written during a run, readable at any time."""

from turnwright.records.episode_metrics import rollout_metrics
from turnwright.records.listeners import EpisodeListener, NullListener, ProgressListener
from turnwright.records.run_dir import Checks, JsonLines, RunDir, read_json_lines, to_json
from turnwright.records.serialization import rebuild_trajectories, trajectory_row

__all__ = [
    "Checks",
    "EpisodeListener",
    "JsonLines",
    "NullListener",
    "ProgressListener",
    "RunDir",
    "read_json_lines",
    "rebuild_trajectories",
    "rollout_metrics",
    "to_json",
    "trajectory_row",
]
