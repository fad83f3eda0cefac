"""What lies in a run's folder of checkpoints, read without torch: `Checkpoints` writes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwright import files

STATE_FILE = "state.json"
"""File of a checkpoint beside its weights: its number, the run's state and checksums."""
BEST_FILE = "best.json"
"""File beside the checkpoints that names the best."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Complete checkpoint; `path` is valid for `--model.path`."""

    path: Path
    serial: int
    """Number of the save within the run; the highest is the newest."""
    cursor: Mapping[str, Any]
    """Run state passed to `save`."""

    @property
    def step(self) -> int:
        """Reinforcement steps that it covers."""
        return int(self.cursor["step"]) if self.cursor["phase"] == "reinforce" else 0


def read_checkpoint(path: str | Path) -> Checkpoint | None:
    """Read a checkpoint's state; None unless the directory holds a complete one."""
    path = Path(path)
    try:
        state = files.read_json(path / STATE_FILE)
        return Checkpoint(path, int(state["serial"]), state["cursor"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_checkpoints(root: Path) -> list[Checkpoint]:
    """Return the complete checkpoints in a folder, oldest first."""
    if not root.is_dir():
        return []

    checkpoints: list[Checkpoint] = []
    for path in root.iterdir():
        checkpoint = None if path.name.startswith(".") else read_checkpoint(path)
        if checkpoint is not None:
            checkpoints.append(checkpoint)
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.serial)


def best_checkpoint(root: Path) -> tuple[str, float] | None:
    """Return name and score of the checkpoint that is marked as the best; None if none is marked or
    it is gone."""
    try:
        row = files.read_json(root / BEST_FILE)
        name = str(row["name"])
        score = float(row["score"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if read_checkpoint(root / name) is None:
        return None
    return name, score
