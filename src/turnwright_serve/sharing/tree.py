"""Trainer's side of weights to many: one reader per node, and two trees of nodes.

`WeightTree.share` describes a directory of weights and serves its chunks to the first nodes;
`TreeWeights.send_to` has a node fetch them and a server load them. The nodes' side is `relay`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import orjson

from turnwright.engines.remote.http import HttpClient
from turnwright.engines.remote.remote_engine import UPDATE_S
from turnwright.engines.remote.weight_sync import OnDisk, UpdatedServer
from turnwright.errors import EngineError, SyncError
from turnwright_serve.server.http import JsonHttpServer
from turnwright_serve.sharing.manifest import CHUNK, Manifest
from turnwright_serve.sharing.relay import WeightRelay, own_token


def parents(nodes: Sequence[str]) -> dict[str, list[list[str]]]:
    """Return the ancestors of each node in two binary trees, nearest first; those without any are
    children of the trainer.

    The second tree has the nodes in reverse, so a node that has children in one has none in the
    other. Each tree carries half of the chunks, so every node receives the weights once and sends
    them at most once, as the trainer does.
    """
    ancestors: dict[str, list[list[str]]] = {node: [] for node in nodes}
    for order in (nodes, nodes[::-1]):
        for place, node in enumerate(order):
            above = list[str]()
            while place:
                place = (place - 1) // 2
                above.append(order[place])
            ancestors[node].append(above)
    return ancestors


class WeightTree:
    """Sends directories of weights to the nodes of a fleet over HTTP.

    Args:
        host: address of this process that nodes reach.
        relay_port: port of the relay on each node (`turnwright engines relay`); None where
            the servers relay themselves, as `turnwright serve` does: then the first server
            of a node reads for all.
        chunk: bytes of a chunk.
        relays: returns the URL of the relay by host, where they come and go; in place of
            `relay_port`.
        token: that of the relays; by default the value of `TURNWRIGHT_SERVE_TOKEN`.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        *,
        relay_port: int | None = None,
        chunk: int = CHUNK,
        relays: Callable[[], Mapping[str, str]] | None = None,
        token: str | None = None,
    ) -> None:
        self._host = host
        self._relay_port = relay_port
        self._chunk = chunk
        self._relays = relays
        self.token = own_token(token)
        self._relay = WeightRelay(Path(os.devnull), token=self.token)
        """Only `offer` gives it chunks: its directory is never written to."""
        self._server: JsonHttpServer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]()

    async def share(
        self, source: OnDisk, urls: Sequence[str], *, base: bool = False
    ) -> TreeWeights:
        """Return a source that sends a directory through the nodes of the servers at these URLs.

        A `base` model stays there.
        """
        manifest = await asyncio.to_thread(
            Manifest.of, source.directory, source.version, self._chunk, base=base
        )
        self._relay.offer(source.directory, manifest)

        nodes = dict(self.relays)
        if self._relays is None:
            for url in urls:
                nodes.setdefault(node_of(url), self.relay_of(url))
        return TreeWeights(
            source=source,
            manifest=manifest.model_dump_json(exclude_defaults=True).encode(),
            nodes=nodes,
            ancestors=parents(list(nodes.values())),
            tree=self,
        )

    @property
    def relays(self) -> Mapping[str, str]:
        """Relays that come and go, by host."""
        return {} if self._relays is None else self._relays()

    def relay_of(self, url: str) -> str:
        """Return the URL of the relay that reads for a server."""
        if self._relays is not None:
            return self.relays.get(node_of(url), "")
        if self._relay_port is None:
            return url
        return f"{urlsplit(url).scheme}://{node_of(url)}:{self._relay_port}"

    async def close(self) -> None:
        """Stop serving chunks."""
        if self._server is not None and self._loop is asyncio.get_running_loop():
            await self._server.close()
        self._server = None

    async def start(self) -> str:
        """Serve chunks from the running event loop, unless it does already; return the URL."""
        loop = asyncio.get_running_loop()
        async with self._starting.setdefault(loop, asyncio.Lock()):
            if self._server is None or self._loop is not loop:
                server = JsonHttpServer(
                    self._relay.routes(), host=self._host, port=0, token=self.token
                )
                try:
                    await server.start()
                except OSError as error:
                    raise SyncError(
                        f"{self._host}: cannot serve weights there ({error}); set engine.group_host"
                    ) from None
                self._server = server
                self._loop = loop
        return self._server.url


def node_of(url: str) -> str:
    """Return the host of a server."""
    return urlsplit(url).hostname or url


@dataclass(frozen=True, slots=True)
class TreeWeights:
    """Weights of one policy that reach each node once, through other nodes."""

    source: OnDisk
    manifest: bytes
    """As JSON."""
    nodes: dict[str, str]
    """Relay of each host."""
    ancestors: dict[str, list[list[str]]]
    tree: WeightTree

    @property
    def version(self) -> int:
        """Policy version."""
        return self.source.version

    @property
    def is_adapter(self) -> bool:
        return self.source.is_adapter

    async def send_to(self, engine: UpdatedServer) -> None:
        """Have the node of a server fetch the weights, and the server load them from its node's
        disk."""
        host = node_of(engine.url)
        self.nodes.setdefault(host, self.tree.relay_of(engine.url))
        directory = await self.directory_on(host)
        await replace(self.source, directory=directory).send_to(engine)

    async def directory_on(self, host: str) -> Path:
        """Have a node fetch the weights; return their directory there."""
        relay = self.tree.relays.get(host) or self.nodes.get(host)
        if not relay:
            raise SyncError(
                f"{host}: nothing there fetches the weights of policy {self.version}; its server "
                "is started again"
            )

        root = await self.tree.start()
        ancestors = self.ancestors.get(relay)
        if not ancestors:
            # A node that joined later is a leaf: it asks a few others, and the trainer last.
            others = list(self.ancestors)[:2]
            ancestors = [others, others[::-1]]
        sources = [[*above, root] for above in ancestors]

        http = HttpClient(relay, token=self.tree.token)
        try:
            order = {"manifest": orjson.Fragment(self.manifest), "sources": sources}
            done = await http.post("/weights/fetch", order, UPDATE_S)
        except EngineError as error:
            raise SyncError(
                f"{host} did not get the weights of policy {self.version}: {error}"
            ) from error
        finally:
            await http.close()
        return Path(done["directory"])
