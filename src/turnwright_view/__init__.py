"""What people look at: a run's pages, episodes and tokens; reports, exports, trackers, and replays
of what was recorded."""

from typing import TYPE_CHECKING

from turnwright._lazy import lazy_names

if TYPE_CHECKING:
    from turnwright_view.replay.loop import ReplayResult as ReplayResult
    from turnwright_view.replay.loop import replay_loop as replay_loop

if not TYPE_CHECKING:
    __all__, __getattr__ = lazy_names(__name__, __file__)
