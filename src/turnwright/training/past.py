"""Earlier versions of a trained policy as opponents: kept in the run directory, and played by
engines of their own.

Which version an episode plays, and how many are kept, is decided by `PastVersions`; `PastPolicy`
writes them, loads them, and removes those that nothing can ask for.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from turnwright.engines import Engine
from turnwright.engines.policy_engine import PastVersions
from turnwright.training.checkpoint import flush, remove_directory, save_model
from turnwright.training.policies import Policy


class PastPolicy:
    """Versions of a trained policy, in `directory/step-N`."""

    def __init__(
        self,
        of: Policy,
        directory: Path,
        source: Path,
        load: Callable[[Path, int], Engine],
        *,
        every: int,
        keep: int,
        lag: int,
        seed: int,
    ) -> None:
        """`source` is the model directory of the policy, `load` makes an engine of a version's
        directory and number; the others are those of `PastVersions`."""
        self._policy = of
        self._directory = directory
        self._source = source
        self._load_version = load
        self._warmed = 0
        self.engine = PastVersions(
            self._load, of.engine, every=every, keep=keep, lag=lag, seed=seed
        )

    def begin(self, warmed: int) -> None:
        """Play versions from here on, the current policy before; `warmed` is the number of updates
        before the first step."""
        self._warmed = warmed
        self.engine.begin()

    def save(self, step: int, template: str | None) -> None:
        """Write the version of a step if it is one to keep and is not there; a kill leaves nothing
        partial under its name."""
        final = self._path(step)
        if step % self.engine.every or final.exists():
            return

        draft = final.with_name(f".{final.name}.writing")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        save_model(self._policy.trainer, self._source, draft, template)
        for path in draft.iterdir():
            flush(path)
        os.replace(draft, final)
        flush(self._directory)

    def prune(self, checkpoints: Collection[int]) -> None:
        """Remove versions that nothing can ask for: no group in flight, and no resume from a
        checkpoint of one of these steps.

        A run that is resumed from a checkpoint writes the versions of its step and later ones
        itself.
        """
        for partial in self._directory.glob(".*.dropped"):
            shutil.rmtree(partial, ignore_errors=True)

        newest = max(checkpoints, default=-1)
        for path in self._directory.glob("step-*"):
            number = path.name.removeprefix("step-")
            if not number.isdecimal():
                continue
            step = int(number)
            needed = step > newest or any(
                self.engine.oldest(checkpoint) <= step <= checkpoint for checkpoint in checkpoints
            )
            if not needed:
                remove_directory(path)

    def _path(self, step: int) -> Path:
        return self._directory / f"step-{step:05d}"

    def _load(self, step: int) -> Engine:
        return self._load_version(self._path(step), self._warmed + step)
