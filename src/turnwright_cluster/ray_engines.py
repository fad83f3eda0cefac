"""Servers of a run on the nodes of a Ray cluster.

A placement group reserves one bundle per server, on different nodes where it can. An actor in each
bundle starts the server as the run would on its own machine. Servers that answer are in the fleet's
list, so the fleet adds, verifies and removes them. Where nodes do not see the run's directories
(`engine.tree`), each actor is also a relay of weights, and one per node is used.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from turnwright.config import ScaleConfig
from turnwright.engines.remote.capabilities import KINDS
from turnwright.engines.remote.engine_list import EngineList
from turnwright.engines.remote.managed import MAX_RESTARTS, ServerProcess, wait_until_up
from turnwright.engines.remote.placed import PlacedServers
from turnwright.errors import EngineError
from turnwright_cluster.ray_workers import AGAIN_S, cancel, connect, end
from turnwright_serve.server.http import JsonHttpServer
from turnwright_serve.sharing import WeightRelay

ENDED_S = 0.2
"""Seconds between looks at a server's process."""
CLOSE_S = 15.0
"""Seconds for an actor to end its server and delete what it stored."""


class _EngineActor:
    """Process that starts a server on its node; Ray makes an actor of it."""

    def __init__(self, servers: PlacedServers, number: int, token: str) -> None:
        self._servers = servers
        self._number = number
        self._token = token
        self._server: ServerProcess | None = None
        self._http: JsonHttpServer | None = None
        self._relay: WeightRelay | None = None

    async def locate(self) -> tuple[str, str]:
        """Return the address of this node and the URL of its relay, if there is to be one."""
        host = str(ray.util.get_node_ip_address())
        if not self._servers.relays:
            return host, ""
        if self._http is None:
            # What an actor before this one left.
            await asyncio.to_thread(shutil.rmtree, self._own, ignore_errors=True)
            self._own.mkdir(mode=0o700, parents=True)
            self._relay = WeightRelay(self._own / "weights", token=self._token)
            http = JsonHttpServer(self._relay.routes(), host=host, port=0, token=self._token)
            await http.start()
            self._http = http
        return host, self._http.url

    @property
    def _own(self) -> Path:
        """Directory of this actor on its node, the same after a restart."""
        run = hashlib.sha256(os.fsencode(self._servers.logs)).hexdigest()[:12]
        return Path(tempfile.gettempdir()) / f"turnwright-{os.getuid()}-{run}-{self._number}"

    async def start(self, directory: Path) -> str:
        """Start the server with a model directory; return its URL once it answers."""
        self.stop()
        host = str(ray.util.get_node_ip_address())
        servers = self._servers
        if not directory.is_dir():
            why = "set engine.tree = true, or engine.weights to a directory of a shared disk"
            raise EngineError(f"node {host} does not see {directory}: {why}")

        logs = self._own if servers.relays else servers.logs
        log = logs / f"{servers.kind}-{self._number}.log"
        server = ServerProcess(servers.kind, servers.home, log, host=host, **servers.settings)
        self._server = server
        # Not in a thread: Linux ends the server with the thread that started it.
        server.start(directory)
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

    async def close(self) -> None:
        """End the server and the relay, and delete what it stored."""
        self.stop()
        if self._http is not None and self._relay is not None:
            await self._http.close()
            await self._relay.close()
            await asyncio.to_thread(shutil.rmtree, self._own, ignore_errors=True)


class RayEngines:
    """Servers of a run, each kept running until the run ends.

    Placement group and actors end with the run's process.
    """

    def __init__(self, scale: ScaleConfig, *, note: Callable[[str], None]) -> None:
        """Connect to the cluster; raises `ConfigError` when there is none."""
        self._scale = scale
        self._note = note
        connect(scale)
        self.token = secrets.token_urlsafe(24)
        self._group: PlacementGroup | None = None
        self._actors: list[Any] = []
        self._relays: dict[int, tuple[str, str]] = {}
        """Host and URL of each actor's relay."""
        self._tasks: list[asyncio.Task[None]] = []
        self._faults: dict[int, str] = {}
        """Why each server was started again the last time."""
        self._starting = asyncio.Lock()

    @property
    def host(self) -> str:
        return str(ray.util.get_node_ip_address())

    def relays(self) -> Mapping[str, str]:
        """Return the URL of the oldest relay on each node, by host."""
        return dict(reversed(self._relays.values()))

    async def place(self, servers: PlacedServers) -> None:
        """Reserve room for the servers and start the relays, unless that is done.

        Raises:
            EngineError: when the cluster has no room in time, or fails.
        """
        # Policies share the servers.
        async with self._starting:
            if self._group is None:
                await self._place(servers)

    async def _place(self, servers: PlacedServers) -> None:
        scale = self._scale
        needs = {"CPU": scale.ray_engine_cpus}
        if scale.ray_engine_gpus:
            needs["GPU"] = scale.ray_engine_gpus
        self._group = placement_group([needs] * servers.count, strategy="SPREAD")
        what = ", ".join(f"{amount:g} {name}" for name, amount in needs.items())
        self._note(f"Ray: {servers.count} {servers.kind} servers of {what}")
        try:
            async with asyncio.timeout(servers.start_s):
                await self._group.ready()
                self._actors = [self._actor(servers, number) for number in range(servers.count)]
                await asyncio.gather(
                    *map(self._locate, range(servers.count)), return_exceptions=True
                )
        except TimeoutError:
            await self.close()
            raise EngineError(
                f"Ray has no room for {servers.count} servers of {what} after "
                f"{servers.start_s:g} s (engine.start_s); lower engine.servers, "
                "scale.ray_engine_cpus or scale.ray_engine_gpus"
            ) from None
        except RayError as error:
            await self.close()
            raise EngineError(
                f"Ray places no servers of {what}: {error}; see ray status"
            ) from error

    def _actor(self, servers: PlacedServers, number: int) -> Any:
        strategy = PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=number
        )
        actor_class = ray.remote(_EngineActor).options(
            num_cpus=self._scale.ray_engine_cpus,
            num_gpus=self._scale.ray_engine_gpus,
            max_restarts=-1,
            max_task_retries=0,
            scheduling_strategy=strategy,
        )
        return actor_class.remote(servers, number, self.token)

    async def _locate(self, number: int) -> str:
        """Return the node of an actor, and remember its relay."""
        host, relay = await self._actors[number].locate.remote()
        if relay:
            self._relays[number] = host, relay
        return str(host)

    async def start(
        self,
        servers: PlacedServers,
        directory: Callable[[str], Awaitable[Path]],
        listed: EngineList,
    ) -> None:
        """Place the servers and keep them running, unless they are; return once one is listed.

        Raises:
            EngineError: when none answers in time.
        """
        await self.place(servers)
        async with self._starting:
            if not self._tasks:
                await self._start(servers, directory, listed)

    async def _start(
        self,
        servers: PlacedServers,
        directory: Callable[[str], Awaitable[Path]],
        listed: EngineList,
    ) -> None:
        # What is listed is of a killed run.
        for url in listed.urls():
            listed.remove(url)

        # Waits until one is up, or until none is tried any more.
        decided = asyncio.Event()
        tasks: list[asyncio.Task[None]] = []
        for number in range(servers.count):
            keeping = self._keep(number, servers, directory, listed, decided.set)
            tasks.append(asyncio.create_task(keeping))
        self._tasks = tasks

        def check(_: asyncio.Task[None]) -> None:
            if all(task.done() for task in tasks):
                decided.set()

        for task in tasks:
            task.add_done_callback(check)
        await decided.wait()
        if all(task.done() for task in tasks):
            await self.close()
            why = next(iter(self._faults.values()), "")
            raise EngineError(
                f"none of {servers.count} servers started on the Ray cluster {self._scale.ray}: "
                f"{why}"
            )

    async def _keep(
        self,
        number: int,
        servers: PlacedServers,
        directory: Callable[[str], Awaitable[Path]],
        listed: EngineList,
        on_up: Callable[[], None],
    ) -> None:
        """Keep one server running; each start is a new server, at a URL of its own."""
        failed = 0
        noted = ""
        while failed < MAX_RESTARTS:
            url = ""
            try:
                host = await self._locate(number)
                url = await self._actors[number].start.remote(await directory(host))
                listed.add(url)
                on_up()
                failed = 0
                fault = f"it exited: {await self._actors[number].ended.remote()}"
            except (ActorDiedError, ActorUnavailableError) as error:
                # No fault of the server, so it does not count.
                self._relays.pop(number, None)
                fault = f"Ray: {type(error).__name__}"
                if isinstance(error, ActorDiedError):
                    # Ray may not restart it.
                    self._replace(servers, number)
            except RayTaskError as error:
                fault = str(error.cause)
                failed += 1
            except Exception as error:
                # Nothing unexpected may end the keeping without a word.
                fault = f"unexpected {type(error).__name__}: {error}"
                failed += 1

            if url:
                # If it stays listed, the fleet notices by its checks.
                with suppress(Exception):
                    listed.remove(url)
            line = f"server {number} ({url or 'not up'}) is started again: {fault}"
            if line != noted:
                self._note(line)
            noted = line
            self._faults[number] = fault
            await asyncio.sleep(AGAIN_S)
        self._note(
            f"server {number} failed to start {failed} times and is not started again, the last "
            f"time: {fault}. Fix the cause, then resume the run"
        )

    def _replace(self, servers: PlacedServers, number: int) -> None:
        """Make another actor in the bundle of one that died."""
        end(self._actors[number])
        self._actors[number] = self._actor(servers, number)

    async def close(self) -> None:
        """End the servers, their placement group and the connection to the cluster."""
        await cancel(self._tasks)
        self._tasks = []
        # Only relays leave files.
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                ends = [self._actors[number].close.remote() for number in self._relays]
                await asyncio.gather(*ends, return_exceptions=True)
        for actor in self._actors:
            end(actor)
        self._actors = []
        self._relays = {}
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
        ray.shutdown()
