"""What episodes are played by, in the journal once for all that are alike: whoever plays them again begins with it."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from turnwise.config import EnvRules
from turnwise.config.schema import HISTORY_OBJECT
from turnwise.engine import StopText
from turnwise.render.history import History, policy_name
from turnwise.trace.record import LOOP
from turnwise.trace.run import JsonLines

if TYPE_CHECKING:
    from turnwise.rollout.runner import Episode, Rollout


class Settings:
    """Writes the settings of episodes down, and names them."""

    def __init__(self, journal: JsonLines, history: History, stop: StopText | None) -> None:
        """
        Args:
            journal: where they go.
            history: of the rollout, as it was given.
            stop: of the rollout.
        """
        self._journal = journal
        self._history = history if isinstance(history, str) else f"{HISTORY_OBJECT}{policy_name(history)}"
        self._stop = list(stop.texts) if stop is not None else []
        self._named: dict[tuple[Any, ...], tuple[EnvRules, str]] = {}

    def name(self, rollout: Rollout, episode: Episode) -> str:
        """The name under which the journal has what an episode is played by."""
        alone, blank = episode.group_reward is None, rollout.sight.store.blank
        varies = id(episode.rules), episode.max_turns, rollout.want, blank, episode.play is None, alone
        if varies in self._named:
            return self._named[varies][1]
        row = {
            "v": LOOP,
            "seed": rollout.seed,
            "limits": asdict(rollout.limits),
            "rules": {field.name: getattr(episode.rules, field.name) for field in fields(EnvRules)},
            "max_turns": episode.max_turns,
            "stop": self._stop,
            "history": self._history,
            "sanity": rollout.sanity.settings,
            "context": getattr(rollout.engine, "context", None),
            "want": sorted(rollout.want),
            "blank": blank,
            "play": episode.play is not None,
            "group": not alone,
        }
        name = self._journal.named("settings", row)
        self._named[varies] = episode.rules, name  # kept, so that no other rules get this id
        return name
