"""Progress of a rollout's episodes, for terminals and notebooks.

`EpisodeProgress` turns finished episodes into progress of a listener; `ProgressBar` is the listener
of calls from Python, a bar of tqdm, which knows how to draw in a notebook. The command line has
panels of its own (`turnwright.display.progress`).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from turnwright.records.listeners import NullListener, ProgressListener
from turnwright.types import EpisodeKey, Trajectory

if TYPE_CHECKING:
    from tqdm import tqdm


class EpisodeProgress:
    """Counts the episodes of a rollout as they finish, and reports them."""

    def __init__(self, watch: ProgressListener) -> None:
        self._watch = watch
        self._begun = False
        self._clear()

    def _clear(self) -> None:
        self._last: dict[EpisodeKey, tuple[float | None, int]] = {}
        """Reward and number of turns of each episode's last play."""
        # Sums over these plays: a rollout may have 100,000 episodes, and each is reported.
        self._reward = 0.0
        self._rewarded = 0
        self._turns = 0

    def begin(self, name: str, total: int) -> None:
        """Start a phase of `total` episodes."""
        self._clear()
        self._begun = True
        self._watch.phase(name, total, "episodes")

    def finished(self, trajectory: Trajectory) -> None:
        """Count an episode; one that is played again counts once."""
        if not self._begun:
            return

        earlier = self._last.get(trajectory.key)
        if earlier is not None:
            self._add(*earlier, sign=-1)
        play = trajectory.reward, len(trajectory.turns)
        self._last[trajectory.key] = play
        self._add(*play, sign=1)

        episodes = len(self._last)
        figures = {"turns": self._turns / episodes}
        if self._rewarded:
            figures["reward"] = self._reward / self._rewarded
        self._watch.progress(episodes, figures)

    def _add(self, reward: float | None, turns: int, *, sign: int) -> None:
        """Add a play to the sums, or take it away."""
        self._turns += sign * turns
        if reward is not None:
            self._reward += sign * reward
            self._rewarded += sign


class ProgressBar(ProgressListener):
    """A bar for each phase, with the mean reward and turns of its episodes so far."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None

    def phase(self, name: str, total: int, unit: str) -> None:
        self.close()
        with suppress(Exception):  # a closed terminal must not stop the rollout
            self._bar = _bar_class()(total=total, desc=name, unit=" " + unit.removesuffix("s"))

    def progress(self, done: int, metrics: Mapping[str, Any]) -> None:
        bar = self._bar
        if bar is None:
            return
        with suppress(Exception):
            figures = {
                name: f"{metrics[name]:.3g}"
                for name in ("reward", "success", "turns")
                if name in metrics
            }
            bar.set_postfix(figures, refresh=False)
            bar.update(done - bar.n)

    def note(self, text: str) -> None:
        warnings.warn(text, stacklevel=2)

    def close(self) -> None:
        if self._bar is not None:
            with suppress(Exception):
                self._bar.close()
        self._bar = None


def progress_listener(progress: bool | None) -> ProgressListener:
    """Return what shows progress: a bar, or nothing.

    None shows it where somebody looks: in a notebook, and where standard error is a terminal.
    """
    if progress is None:
        progress = _in_notebook() or (sys.stderr is not None and sys.stderr.isatty())
    return ProgressBar() if progress else NullListener()


def _bar_class() -> Any:
    """Return tqdm's bar for where the program runs.

    In a notebook without ipywidgets it draws text, and need not say that it could draw better.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tqdm.auto import tqdm
    return tqdm


def _in_notebook() -> bool:
    """Return whether this is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"
