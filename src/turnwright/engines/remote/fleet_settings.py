"""What a fleet of servers is made with: its limits, its weights, and servers that come and go."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from turnwright.engines.remote.engine_list import EngineList
from turnwright.engines.remote.remote_engine import RemoteEngine
from turnwright.engines.remote.replica import LogprobFunction
from turnwright.engines.remote.weight_files import WeightDirectories
from turnwright.engines.remote.weight_sync import WeightPacker, WeightSharing
from turnwright.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """How many calls the servers take, and how their failures are found.

    Raises `ConfigError` for an invalid setting.
    """

    most: int = 256
    """Maximum number of concurrent calls per server."""
    most_waiting: int = 65_536
    """Maximum number of waiting calls; one more is an error."""
    attempts: int = 16
    """Maximum number of attempts per call."""
    patience_s: float = 120.0
    """Seconds a call waits for an available server before failing."""
    check_s: float = 2.0
    """Seconds between checks."""
    health_s: float = 5.0
    """Deadline of a health check in seconds; ten times as long for a check of the weights."""
    misses: int = 3
    """Consecutive failed checks before a server's calls are moved."""

    def __post_init__(self) -> None:
        positive = min(self.check_s, self.health_s, self.patience_s) > 0
        if min(self.most, self.attempts, self.misses) < 1 or not positive:
            raise ConfigError(
                "a fleet's most, attempts and misses must be at least 1; check_s, health_s and "
                "patience_s over 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightDelivery:
    """How new weights reach the servers, and how their arrival is proven."""

    directories: WeightDirectories | None = None
    """Where new weights are written for the servers; `update` needs it, or a packer."""
    tree: WeightSharing | None = None
    """Sends those directories to the nodes of the servers, each once; without it, servers see them
    under their path."""
    packer: WeightPacker | None = None
    """Sends new weights by process group (one per server) or in requests, in place of
    directories."""
    expected_logprobs: LogprobFunction | None = None
    """The trainer's logprobs of ids, which prove an update; without it, only a change is
    checked."""
    tolerance: float = 1e-3
    """Maximum difference from those, in nats; 1e-3 suits float32."""
    first: Callable[[], Iterable[tuple[str, Any]]] | None = None
    """Weights sent to the servers before the first call unless `update` ran before."""


@dataclass(frozen=True, slots=True)
class ListedServers:
    """Further servers, which join and leave by a list while the fleet is open."""

    file: EngineList
    """Read every half second."""
    connect: Callable[[str], Awaitable[RemoteEngine]]
    """Returns the client of a URL in the list."""
