"""Servers of a run on the nodes of a Ray cluster.

A placement group reserves one bundle per server, on different nodes where it can. An actor in each bundle starts the server as
the run would on its own machine. Servers that answer are in the fleet's list, so the fleet adds, verifies and removes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from turnwise.config import ScaleConfig
from turnwise.engines.remote.capabilities import KINDS
from turnwise.engines.remote.engine_list import EngineList
from turnwise.engines.remote.managed import MAX_RESTARTS, PlacedServers, ServerProcess, wait_until_up
from turnwise.errors import EngineError
from turnwise.scale.ray_workers import AGAIN_S, cancel, connect

ENDED_S = 0.2
"""Seconds between looks at a server's process."""


class _EngineActor:
    """Process that starts a server on its node; Ray makes an actor of it."""

    def __init__(self) -> None:
        self._server: ServerProcess | None = None

    async def start(self, servers: PlacedServers, number: int, directory: Path) -> str:
        """Start the server with a model directory; return its URL once it answers."""
        self.stop()
        host = str(ray.util.get_node_ip_address())
        log = servers.logs / f"{servers.kind}-{number}.log"
        self._server = server = ServerProcess(servers.kind, servers.home, log, host=host, **servers.settings)
        server.start(directory)  # not in a thread: Linux ends the server with the thread that started it
        engine = KINDS[servers.kind](server.url, key_env=servers.key_env)
        try:
            await wait_until_up(server, engine, servers.start_s)
        finally:
            await engine.close()
        return server.url

    async def ended(self) -> str:
        """Wait until the server exits; return the end of its output."""
        assert self._server is not None
        while not self._server.ended:
            await asyncio.sleep(ENDED_S)
        return self._server.output_tail()

    def stop(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.stop()


class RayEngines:
    """Servers of a run, each kept running until the run ends. Placement group and actors end with the run's process."""

    def __init__(self, scale: ScaleConfig, *, note: Callable[[str], None]) -> None:
        """Connect to the cluster; raises `ConfigError` when there is none."""
        self._scale, self._note = scale, note
        connect(scale)
        self._group: PlacementGroup | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._starting = asyncio.Lock()

    async def start(self, servers: PlacedServers, directory: Callable[[], Path], listed: EngineList) -> None:
        """Start the servers, unless they are; return once one is listed. `directory` has the weights to start with.

        Raises:
            EngineError: when none answers in time.
        """
        async with self._starting:  # policies share the servers
            if not self._tasks:
                await self._start(servers, directory, listed)

    async def _start(self, servers: PlacedServers, directory: Callable[[], Path], listed: EngineList) -> None:
        for url in listed.urls():  # of a killed run
            listed.remove(url)
        scale = self._scale
        needs = {"CPU": scale.ray_engine_cpus} | ({"GPU": scale.ray_engine_gpus} if scale.ray_engine_gpus else {})
        self._group = placement_group([needs] * servers.count, strategy="SPREAD")
        what = ", ".join(f"{amount:g} {name}" for name, amount in needs.items())
        self._note(f"Ray: {servers.count} {servers.kind} servers of {what}")
        try:
            async with asyncio.timeout(servers.start_s):
                await self._group.ready()
        except TimeoutError:
            await self.close()
            why = f"Ray has no room for {servers.count} servers of {what} after {servers.start_s:g} s (engine.start_s)"
            raise EngineError(f"{why}; lower engine.servers, scale.ray_engine_cpus or scale.ray_engine_gpus") from None
        first = asyncio.Event()
        keep = (self._keep(number, servers, directory, listed, first.set) for number in range(servers.count))
        self._tasks = [asyncio.create_task(work) for work in keep]
        up = asyncio.create_task(first.wait())
        await asyncio.wait((up, asyncio.gather(*self._tasks)), return_when=asyncio.FIRST_COMPLETED)
        if not up.done():
            up.cancel()
            await self.close()
            raise EngineError(f"none of {servers.count} servers started on the Ray cluster; see {servers.logs} on its nodes")

    async def _keep(
        self, number: int, servers: PlacedServers, directory: Callable[[], Path], listed: EngineList, on_up: Callable[[], None]
    ) -> None:
        """Keep one server running; each start is a new server, at a URL of its own."""
        assert self._group is not None
        options = {
            "num_cpus": self._scale.ray_engine_cpus,
            "num_gpus": self._scale.ray_engine_gpus,
            "max_restarts": -1,
            "max_task_retries": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number),
        }
        actor, failed = ray.remote(_EngineActor).options(**options).remote(), 0
        try:
            while failed < MAX_RESTARTS:
                url = ""
                try:
                    url = await actor.start.remote(servers, number, directory())
                    listed.add(url)
                    on_up()
                    failed = 0
                    fault = f"it exited: {await actor.ended.remote()}"
                except (ActorDiedError, ActorUnavailableError) as error:
                    fault = f"Ray: {type(error).__name__}"
                except RayTaskError as error:
                    fault, failed = str(error.cause), failed + 1
                if url:
                    listed.remove(url)
                self._note(f"server {number} ({url or 'not up'}) is started again: {fault}")
                await asyncio.sleep(AGAIN_S)
            self._note(f"server {number} failed to start {failed} times and is not started again")
        finally:
            ray.kill(actor)

    async def close(self) -> None:
        """End the servers, their placement group and the connection to the cluster."""
        await cancel(self._tasks)
        self._tasks = []
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
        ray.shutdown()
