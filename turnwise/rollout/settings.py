"""An episode to be played, and its settings, in the journal once for all that are alike: to be played again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from turnwise.config import EnvRules, Limits
from turnwise.config.schema import HISTORY_OBJECT
from turnwise.engine import Sampling, StopText
from turnwise.env import Env
from turnwise.render.history import History, policy_name
from turnwise.rollout.play import AgentFunction
from turnwise.rollout.siblings import GroupReward
from turnwise.trace.record import LOOP
from turnwise.trace.run import JsonLines
from turnwise.types import EpisodeKey, Task


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """One episode to be played."""

    task: Task
    key: EpisodeKey
    make: Callable[[], Env] | None = None
    """Makes its environment; None where `play` is given."""
    play: AgentFunction | None = None
    max_turns: int | None = None
    """A limit of the environment's own."""
    rules: EnvRules = field(default_factory=EnvRules)
    """What becomes of the model's mistakes and the world's failures."""
    group_reward: GroupReward | None = None
    """Compares all episodes of its task, once the last of them is over."""


class EpisodeSettings:
    """Writes the settings of episodes down, and names them."""

    def __init__(
        self,
        journal: JsonLines,
        history: History,
        stop: StopText | None,
        seed: int,
        limits: Limits,
        sanity: Sequence[Any],
    ) -> None:
        """
        Args:
            journal: where they go.
            history: as the rollout was given it.
            sanity: level, how often, and the share of episodes.
        """
        self._journal = journal
        self._common = {
            "v": LOOP,
            "seed": seed,
            "limits": asdict(limits),
            "stop": list(stop.texts) if stop is not None else [],
            "history": history if isinstance(history, str) else f"{HISTORY_OBJECT}{policy_name(history)}",
            "sanity": sanity,
        }
        self._named: dict[tuple[Any, ...], tuple[EnvRules, str]] = {}

    def name(self, episode: EpisodeSpec, *, context: int | None, want: frozenset[str], blank: bool, sampling: Sampling) -> str:
        """The name under which the journal has what an episode is played by.

        Args:
            context: most ids that the engine takes.
            want: what the engine is asked for beside ids and logprobs.
            blank: whether images are shown in one grey.
            sampling: the distribution to sample from.
        """
        alone, rules = episode.group_reward is None, episode.rules
        varies = id(rules), episode.max_turns, context, want, blank, sampling, episode.play is None, alone
        if varies in self._named:
            return self._named[varies][1]
        row = self._common | {
            "rules": {one.name: getattr(rules, one.name) for one in fields(EnvRules)},
            "max_turns": episode.max_turns,
            "context": context,
            "want": sorted(want),
            "blank": blank,
            "sampling": asdict(sampling),
            "play": episode.play is not None,
            "group": not alone,
        }
        name = self._journal.append_definition("settings", row)
        self._named[varies] = rules, name  # kept, so that no other rules get this id
        return name
