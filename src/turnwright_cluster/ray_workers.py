"""Workers on the nodes of a Ray cluster.

Ray places them, restarts them and reports their death at once. Groups, turns and engine calls
travel between worker and run as with `turnwright worker`: no object of Ray holds any of them, so
none is lost with its owner.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from turnwright.config import ScaleConfig
from turnwright.errors import ConfigError
from turnwright_cluster.server import TOKEN_VARIABLE
from turnwright_cluster.worker import WorkerProcess

ROOM = 16
"""Groups that a worker plays at once, as `turnwright worker --groups`."""
NODES_S = 2.0
"""Seconds between looks at the nodes of the cluster."""
AGAIN_S = 0.5
"""Seconds between attempts to reach an actor that Ray restarts."""


def connect(scale: ScaleConfig) -> None:
    """Connect this process to the cluster, unless it is; raise `ConfigError` when there is none."""
    try:
        ray.init(address=scale.ray, log_to_driver=False, ignore_reinit_error=True)
    except (ConnectionError, RayError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"scale.ray = {scale.ray}: no Ray cluster answers ({reason}); start one with ray start "
            "--head, or name the address of its head"
        ) from None


class _Actor:
    """Process of one worker; Ray makes an actor of it."""

    async def run(self, url: str, token: str, name: str, patience_s: float) -> str:
        """Play for a run until it ends; return on which node."""
        os.environ[TOKEN_VARIABLE] = token
        worker = WorkerProcess(url, name=name, room=ROOM, note=partial(print, flush=True))
        await worker.run(patience_s=patience_s)
        return str(ray.get_runtime_context().get_node_id())


async def cancel(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancel tasks and wait for their end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _nodes() -> set[str]:
    """Return the ids of the cluster's nodes."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def end(actor: Any) -> None:
    """End an actor that there may be."""
    # Without a connection the call would start a cluster.
    if actor is None or not ray.is_initialized():
        return
    # The actor may be gone, and the cluster too.
    with suppress(Exception):
        ray.kill(actor)


def _name(node: str) -> str:
    return f"ray-{node[:8]}"


class RayWorkers:
    """Actors of a run, each kept running until the run ends."""

    def __init__(
        self,
        scale: ScaleConfig,
        *,
        on_death: Callable[[str, str], None],
        note: Callable[[str], None],
        shared: bool = False,
    ) -> None:
        """Connect to the cluster; `on_death` receives a worker's name and why it is lost, and a
        `shared` connection stays open.

        Raises `ConfigError` when there is none.
        """
        self._scale = scale
        self._on_death = on_death
        self._note = note
        self._shared = shared
        connect(scale)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def host(self) -> str:
        """Address of this node, at which the workers reach the run."""
        return str(ray.util.get_node_ip_address())

    def start(self, url: str, token: str) -> None:
        """Start the workers of the run at a URL."""
        nodes = _nodes()
        free = ray.available_resources().get("CPU", 0.0)
        count = self._scale.ray_workers or len(nodes)
        self._note(f"Ray: {count} workers on {len(nodes)} nodes")
        if free < count * self._scale.ray_cpus:
            self._note(
                f"Ray has {free:g} free CPUs: some of the workers wait for more "
                "(scale.ray_workers, scale.ray_cpus)"
            )

        if self._scale.ray_workers is None:
            self._tasks = [asyncio.create_task(self._follow_nodes(url, token))]
        else:
            self._tasks = [
                asyncio.create_task(self._keep(f"ray-{number}", url, token, "SPREAD"))
                for number in range(count)
            ]

    async def _follow_nodes(self, url: str, token: str) -> None:
        """Keep one worker running on each node of the cluster, while nodes join and leave."""
        kept: dict[str, asyncio.Task[None]] = {}
        nodes: set[str] = set()
        noted = ""
        try:
            while True:
                fault = ""
                try:
                    nodes = await asyncio.to_thread(_nodes)
                except Exception as error:
                    # The workers that there are play on.
                    fault = f"Ray does not list its nodes: {type(error).__name__}: {error}"
                if fault and fault != noted:
                    self._note(
                        f"{fault}. Until it does, nodes that join get no worker; see ray status"
                    )
                noted = fault

                for node in nodes - kept.keys():
                    place = NodeAffinitySchedulingStrategy(node, soft=False)
                    kept[node] = asyncio.create_task(self._keep(_name(node), url, token, place))
                for node in kept.keys() - nodes:
                    kept.pop(node).cancel()
                    self._on_death(_name(node), "Ray: its node left")
                await asyncio.sleep(NODES_S)
        finally:
            await cancel(kept.values())

    async def _keep(self, name: str, url: str, token: str, place: Any) -> None:
        """Keep one worker running until the run ends or refuses it; `place` is a scheduling
        strategy of Ray."""
        actor = None
        noted = ""
        try:
            while True:
                fault = ""
                try:
                    actor = actor or self._actor(place)
                    await actor.run.remote(url, token, name, self._scale.wait_s)
                    return
                except RayTaskError as error:
                    self._note(f"worker {name} ended: {error.cause}")
                    return
                except ActorUnavailableError as error:
                    self._on_death(name, f"Ray: {type(error).__name__}")
                except Exception as error:
                    # Nothing unexpected may end the keeping without a word.
                    if not isinstance(error, ActorDiedError):
                        fault = f"worker {name}: unexpected {type(error).__name__}: {error}"
                    self._on_death(name, f"Ray: {type(error).__name__}")
                    # Ray may not restart it.
                    end(actor)
                    actor = None
                if fault and fault != noted:
                    self._note(f"{fault}. It is started again every {AGAIN_S:g} s; see ray status")
                noted = fault
                await asyncio.sleep(AGAIN_S)
        finally:
            end(actor)

    def _actor(self, place: Any) -> Any:
        # Retries of Ray's own would hide attempts: the pool counts each, and asks again itself.
        actor_class = ray.remote(_Actor).options(
            num_cpus=self._scale.ray_cpus,
            max_restarts=-1,
            max_task_retries=0,
            scheduling_strategy=place,
        )
        return actor_class.remote()

    async def close(self) -> None:
        """End the workers and the connection to the cluster."""
        await cancel(self._tasks)
        if not self._shared:
            ray.shutdown()
