"""Servers that a run starts on other machines: what it asks for, who starts them, and the fleet
that they join."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from turnwright.engines.remote.engine_list import EngineList
from turnwright.engines.remote.fleet import Fleet
from turnwright.engines.remote.fleet_settings import FleetSettings, ListedServers, WeightDelivery
from turnwright.engines.remote.weight_sync import DiskWeights, SharedWeights, WeightsSource
from turnwright.errors import EngineError


@dataclass(frozen=True, slots=True)
class PlacedServers:
    """Servers of a run to start on other machines."""

    kind: str
    count: int
    home: Path
    """Parent directory of the server environments, on every machine."""
    logs: Path
    start_s: float
    settings: dict[str, Any]
    """Further arguments of `ServerProcess`."""
    key_env: str | None = None
    """Environment variable with the servers' API key, on every machine."""
    relays: bool = False
    """Whether each machine gets a relay of weights, since it does not see the directories of the
    run."""


class ServerPlacer(Protocol):
    """Starts servers on other machines and lists those that answer."""

    token: str
    """Required by the relays of weights, and sent by them."""

    @property
    def host(self) -> str:
        """Address at which the machines reach this process."""

    def relays(self) -> Mapping[str, str]:
        """Return the URL of the relay of weights by host."""

    async def place(self, servers: PlacedServers) -> None:
        """Reserve room for the servers, and start the relays."""

    async def start(
        self,
        servers: PlacedServers,
        directory: Callable[[str], Awaitable[Path]],
        listed: EngineList,
    ) -> None:
        """Place the servers and keep them running from now on; return once one is listed.

        `directory` returns the weights to start with on a host.
        """

    async def close(self) -> None:
        """End the servers."""


class PlacedFleet(Fleet):
    """Fleet of servers that this run starts on other machines.

    These see the weights' directory under its path or get it through a tree. A server that died is
    replaced by a new one, which joins as any other: with the latest weights, verified.
    """

    def __init__(
        self,
        placer: ServerPlacer,
        servers: PlacedServers,
        settings: FleetSettings | None = None,
        *,
        delivery: WeightDelivery,
        listed: ListedServers,
        base: Path | None = None,
        owner: bool = True,
    ) -> None:
        """Take what places the servers, and the list of those that answer.

        `delivery` has directories; `base` and `owner` are as in `ManagedFleet`.
        """
        super().__init__([], settings, delivery=delivery, listed=listed)
        self._placer = placer
        self._servers = servers
        self._servers_list = listed.file
        self._owner = owner
        self._base = base
        self._weights: SharedWeights | None = None if base is None else DiskWeights(base, 0)
        """Those that servers start with."""

    async def update(self, weights: Iterable[tuple[str, Any]], version: int) -> str:
        """Update as `Fleet.update`; the tree of the machines needs to know them first."""
        tree = self.delivery.tree
        if tree is not None:
            await self._placer.place(self._servers)
            if isinstance(self._weights, DiskWeights):
                self._weights = await tree.share(self._weights, (), base=True)
        return await super().update(weights, version)

    async def update_from(self, source: WeightsSource, *, changed: bool = True) -> None:
        """Update as `Fleet.update_from`; servers that start from now on start with these weights if
        they are a model."""
        if self._base is None:
            self._weights = cast(SharedWeights, source)
        await super().update_from(source, changed=changed)

    async def close(self) -> None:
        """Close the connections and end the servers."""
        await super().close()
        if self._owner:
            await self._placer.close()

    async def _start_servers(self) -> None:
        if self._weights is None:
            raise EngineError(
                "the servers start with the first weights; call update before generate"
            )
        await self._placer.start(self._servers, self._directory_on, self._servers_list)

    async def _directory_on(self, host: str) -> Path:
        assert self._weights is not None
        return await self._weights.directory_on(host)
