"""What one episode is played with: limits, sampling, rules."""

from __future__ import annotations

from dataclasses import dataclass, field

from turnwright.config import EnvRules, Limits
from turnwright.engines import Sampling, StopText
from turnwright.renderers.history import History


@dataclass(frozen=True, slots=True)
class EpisodeSettings:
    """Settings of one episode, those of its rollout and of its environment."""

    limits: Limits = field(default_factory=Limits)
    sampling: Sampling = field(default_factory=Sampling)
    rules: EnvRules = field(default_factory=EnvRules)
    """Handling of invalid actions and of failures."""
    history: History = "append"
    stop: StopText | None = None
    """Texts that end a reply."""
    max_turns: int | None = None
    """Turn limit of the environment; applies in addition to `limits`."""
    context: int | None = None
    """Maximum ids of prompt and reply in the engine; applies in addition to `limits`."""
    want: frozenset[str] = frozenset()
    """Engine extras to ask for."""
    alternatives: int = 0
    """Most likely ids to ask for with each sampled id."""
    min_version: int = 0
    """Oldest policy version that may sample."""
    blank: bool = False
    """Whether every image becomes a gray one of its size."""
