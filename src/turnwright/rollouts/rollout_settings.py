"""How the episodes of a rollout are played, whatever their tasks and environments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from turnwright.config import EvalConfig, Limits, RolloutConfig, RunConfig
from turnwright.config.schema import SanityShare
from turnwright.config.values import check_section
from turnwright.engines import Sampling
from turnwright.engines.protocols import MAX_ALTERNATIVES
from turnwright.errors import UsageError
from turnwright.renderers.history import History
from turnwright.rollouts.engine_extras import parse_extras
from turnwright.rollouts.render_check import SHARE, Sanity


def sampling_of(config: RolloutConfig | EvalConfig) -> Sampling:
    """Return the sampling settings of training episodes or of an evaluation."""
    return Sampling(config.temperature, config.top_p, config.top_k, min_p=config.min_p)


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """Settings of a `Rollout`; the defaults are those of `turnwright.rollout`, which explains them.

    Example::

        >>> settings = tw.RolloutSettings(limits=tw.Limits(turns=4), seed=3)
        >>> settings.sampling.temperature
        1.0

    Raises:
        ConfigError: for limits out of range.
        UsageError: for a concurrency or a number of environments under 1, or an unknown extra,
            or a number of alternatives that is not 0 to 20.
    """

    limits: Limits = field(default_factory=Limits)
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    concurrency: int = 256
    """Maximum number of concurrent engine calls."""
    environments: int | None = None
    """Maximum number of environments alive at once; None starts as many as keep the engine busy."""
    stop: Sequence[str] = ()
    """Texts that end a reply."""
    history: History = "append"
    """A mode or a policy by name, or a policy as an object."""
    want: Sequence[str] = ()
    """Engine extras to ask for."""
    alternatives: int = 0
    """Most likely ids to record with each sampled id, at most 20."""
    sanity: Sanity = "strict"
    sanity_share: SanityShare = SHARE
    """Share of episodes to check at their last turn; `turns` checks each turn of each episode."""
    stop_on_bugs: bool = False
    """Whether the same bug in user code, in several tasks, stops the rollout; else every failed
    episode is recorded."""
    watchdog_s: float = 120.0
    """Seconds without progress before pending episodes are printed to standard error."""

    def __post_init__(self) -> None:
        check_section(self.limits, "limits")
        parse_extras(self.want)
        if self.concurrency < 1:
            raise UsageError(f"concurrency must be at least 1, not {self.concurrency}")
        if self.environments is not None and self.environments < 1:
            raise UsageError(f"environments must be at least 1, or None, not {self.environments}")
        if not 0 <= self.alternatives <= MAX_ALTERNATIVES:
            raise UsageError(
                f"alternatives must be 0 to {MAX_ALTERNATIVES}, not {self.alternatives}"
            )

    @classmethod
    def of(cls, config: RunConfig, **changes: Any) -> RolloutSettings:
        """Return the settings of a run, with changes by name."""
        rollout = config.rollout
        settings = cls(
            limits=config.limits,
            sampling=sampling_of(rollout),
            seed=config.seed,
            concurrency=rollout.concurrency,
            environments=rollout.environments,
            stop=rollout.stop,
            history=rollout.history,
            sanity=rollout.sanity,
            sanity_share=rollout.sanity_share,
            watchdog_s=rollout.watchdog_s,
            alternatives=rollout.alternatives,
        )
        return replace(settings, **changes)
