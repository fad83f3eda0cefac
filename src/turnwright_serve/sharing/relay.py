"""Relay of weights on a node: fetches chunks from peers, verifies them and passes them on at once.

`WeightRelay.fetch` gets one policy, `_serve` answers a peer. What a policy consists of is in
`manifest`, which peers a node asks in `tree`, how few bytes tell a chunk from its former one in
`difference`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from turnwright.engines.remote.http import HttpClient
from turnwright.engines.tokens import LOOPBACK
from turnwright.errors import ConfigError, EngineError, SyncError
from turnwright_serve.server.http import Call, Endpoint, JsonHttpServer, Table
from turnwright_serve.server.intake import HttpError
from turnwright_serve.sharing.difference import apply_difference, encode_difference
from turnwright_serve.sharing.manifest import BASE, Chunk, Manifest, read

TOKEN = "TURNWRIGHT_SERVE_TOKEN"
"""Environment variable with the token of peers; without it, they are this machine's."""
CHUNK_S = 60.0
"""Deadline for a chunk, including the time until the peer has it."""
PARALLEL = 4
"""Chunks fetched at a time."""
AHEAD_S = 5.0
"""Seconds that a peer may take to learn of an update that its own peers know of already."""
FROM = "from"
"""Parameter of a request for a chunk: the digest of the bytes at its place that the asking node
has."""
MAX_MANIFEST = 64 * 2**20
Url = Annotated[str, Field(pattern="^https?://", max_length=2000)]


class Fetch(BaseModel):
    """Order to fetch a policy."""

    model_config = ConfigDict(strict=True, extra="forbid")

    manifest: Manifest
    sources: Annotated[list[list[Url]], Field(min_length=1, max_length=64)]
    """Peers to ask, in order, per tree; chunk n comes by tree n modulo their number."""


class StoredChunk(NamedTuple):
    """A chunk that is on this node's disk."""

    path: Path
    chunk: Chunk

    def read(self) -> bytes:
        """Return its bytes."""
        return read(self.path, self.chunk.start, self.chunk.size)


class WeightRelay:
    """Weights of the latest policies on this node's disk, fetched from peers and served to peers.

    A chunk that another policy on this disk has is copied from there. Where that has other bytes at
    the chunk's place, only their difference is transferred, if it is shorter and the peer has both.

    Args:
        root: directory of the policies, which this node's servers see under the same path.
        keep: number of policies to keep, beside the base model.
        token: that of the peers; by default the value of `TURNWRIGHT_SERVE_TOKEN`.
    """

    def __init__(self, root: Path, keep: int = 2, *, token: str | None = None) -> None:
        self.root = root.absolute()
        self._keep = keep
        self._token = own_token(token)
        self.counts: Counter[str] = Counter()
        """`bytes_fetched`, `bytes_reused`, `bytes_served`, `differences`, `chunks_rejected`,
        `peers_failed`."""
        self._have: dict[str, dict[str, StoredChunk]] = {}
        """By name of a directory: the chunks that arrived, by digest."""
        self._arrival: dict[str, asyncio.Future[None]] = {}
        """Chunks under way; peers wait for them."""
        self._fetching: dict[str, tuple[Manifest, asyncio.Task[Path]]] = {}
        self._ordering = asyncio.Lock()
        self._peers: dict[str, HttpClient] = {}

    def routes(self) -> Table:
        """Return the routes for peers and for the trainer."""
        return {
            ("GET", "/weights/chunks/{digest}"): Endpoint(self._serve),
            ("GET", "/weights/counts"): Endpoint(self._count),
            ("POST", "/weights/fetch"): Endpoint(
                self._order, Fetch, changes=True, max_bytes=MAX_MANIFEST, bounded=False
            ),
        }

    def offer(self, directory: Path, manifest: Manifest) -> None:
        """Serve the chunks of a complete directory, as the first of all peers does."""
        self._have[manifest.name] = {
            chunk.digest: StoredChunk(directory / chunk.file, chunk) for chunk in manifest.chunks()
        }
        self._forget()

    async def fetch(self, manifest: Manifest, sources: Sequence[Sequence[str]]) -> Path:
        """Fetch a policy unless this node has it; return its directory.

        Concurrent calls share one transfer.

        Raises:
            SyncError: when a chunk cannot be had from any source.
        """
        fault = manifest.fault()
        if fault:
            raise SyncError(f"the manifest of policy {manifest.version} {fault}")

        async with self._ordering:
            fetched, task = self._fetching.get(manifest.name, (None, None))
            # Another manifest of this name is of an earlier run.
            if task is None or _has_failed(task) or fetched != manifest:
                await cancel([] if task is None else [task])
                task = asyncio.create_task(self._fetch(manifest, sources))
                self._fetching[manifest.name] = manifest, task
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Stop transfers and close the connections."""
        await cancel([task for _, task in self._fetching.values()])
        await asyncio.gather(*(peer.close() for peer in self._peers.values()))

    async def _order(self, call: Call) -> Any:
        order: Fetch = call.body
        return {"directory": str(await self.fetch(order.manifest, order.sources))}

    async def _count(self, call: Call) -> Any:
        return dict(self.counts)

    async def _serve(self, call: Call) -> Any:
        """Answer a peer with a chunk, once it is here."""
        digest = call.path["digest"]
        arrival = self._arrival.get(digest)
        if arrival is not None:
            try:
                async with asyncio.timeout(CHUNK_S):
                    await asyncio.shield(arrival)
            except (TimeoutError, SyncError) as error:
                raise HttpError(503, f"chunk {digest:.16} did not arrive here: {error}") from None

        for pause in (0.0, 0.01, 0.1):
            await asyncio.sleep(pause)
            stored = self._find(digest)
            if stored is None:
                break
            old = self._find(call.query.get(FROM, ""))
            # The file may have been renamed or deleted a moment ago.
            with suppress(FileNotFoundError):
                data = await asyncio.to_thread(_to_send, stored, old)
                self.counts["bytes_served"] += len(data)
                return Response(data, media_type="application/octet-stream")
        raise HttpError(404, f"no chunk {digest:.80} here")

    def _places(self) -> dict[tuple[str, int], str]:
        """Return the digest of the chunk at each place of a file, of the latest policy that has
        one."""
        return {
            (stored.chunk.file, stored.chunk.start): digest
            for have in self._have.values()
            for digest, stored in have.items()
        }

    def _find(self, digest: str) -> StoredChunk | None:
        """Return a chunk of any policy here, the latest first."""
        for have in reversed(self._have.values()):
            if digest in have:
                return have[digest]
        return None

    async def _fetch(self, manifest: Manifest, sources: Sequence[Sequence[str]]) -> Path:
        """Write a policy to a hidden directory, which takes its name once it is complete.

        Each chunk is served as soon as it is written.
        """
        name = manifest.name
        final = self.root / name
        draft = self.root / f".{name}.{os.getpid()}.writing"
        chunks = list(manifest.chunks())

        # From here on, peers that ask for a chunk wait until it arrives.
        loop = asyncio.get_running_loop()
        missing = {
            chunk.digest: loop.create_future()
            for chunk in chunks
            if self._find(chunk.digest) is None
        }
        self._arrival.update(missing)
        former = self._places()
        self._have.pop(name, None)
        have = self._have[name] = dict[str, StoredChunk]()
        numbered = iter(enumerate(chunks))

        async def work() -> None:
            """Take chunks of those that are left, and write each."""
            for number, chunk in numbered:
                stored = have.get(chunk.digest) or self._find(chunk.digest)
                if stored is not None:
                    pieces = [await asyncio.to_thread(stored.read)]
                    self.counts["bytes_reused"] += chunk.size
                else:
                    old = former.get((chunk.file, chunk.start), "")
                    pieces = await self._from_peers(chunk, sources[number % len(sources)], old)

                path = draft / chunk.file
                await asyncio.to_thread(_write, path, chunk.start, pieces)
                have[chunk.digest] = StoredChunk(path, chunk)
                arrival = missing.get(chunk.digest)
                if arrival is not None and not arrival.done():
                    arrival.set_result(None)

        try:
            sizes = {file.name: file.size for file in manifest.files}
            await asyncio.to_thread(_make_files, draft, sizes)
            async with asyncio.TaskGroup() as group:
                for _ in range(PARALLEL):
                    group.create_task(work())
            await asyncio.to_thread(_replace, draft, final)
            self._have[name] = {
                digest: StoredChunk(final / stored.chunk.file, stored.chunk)
                for digest, stored in have.items()
            }
        except BaseException as error:
            self._have.pop(name, None)
            shutil.rmtree(draft, ignore_errors=True)
            if isinstance(error, BaseExceptionGroup):
                raise SyncError(f"{name}: {error.exceptions[0]}") from error
            if isinstance(error, OSError):
                raise SyncError(f"{final}: cannot be written: {error}") from error
            raise
        finally:
            self._end_arrivals(missing, name)
        self._forget()
        return final

    def _end_arrivals(self, arrivals: Mapping[str, asyncio.Future[None]], name: str) -> None:
        """Let nobody wait any longer for the chunks of a transfer, whether it ended well or not."""
        for digest, arrival in arrivals.items():
            if self._arrival.get(digest) is arrival:
                del self._arrival[digest]
            if not arrival.done():
                arrival.set_exception(SyncError(f"the transfer of {name} ended"))
            # Retrieved here: asyncio would log an exception for which no peer waits.
            arrival.exception()

    async def _from_peers(self, chunk: Chunk, sources: Sequence[str], old: str) -> list[bytes]:
        """Fetch and verify a chunk from the first source that has it.

        A source may send its difference from chunk `old`, if that is here.
        """
        loop = asyncio.get_running_loop()
        faults = list[str]()
        for url in sources:
            peer = self._peer(url)
            until = loop.time() + AHEAD_S
            while True:
                query = f"?{FROM}={old}" if old else ""
                try:
                    pieces = await peer.pieces(f"/weights/chunks/{chunk.digest}{query}", CHUNK_S)
                except EngineError as error:
                    if error.status == 404 and loop.time() < until:
                        # It does not know of the policy yet.
                        await asyncio.sleep(0.02)
                        continue
                    self.counts["peers_failed"] += 1
                    faults.append(str(error))
                    break

                size = sum(map(len, pieces))
                self.counts["bytes_fetched"] += size
                # A difference is always shorter than its chunk.
                is_difference = bool(old) and size != chunk.size
                base = self._find(old) if is_difference else None
                restored = await asyncio.to_thread(_restored, chunk, pieces, base)
                if restored is not None:
                    self.counts["differences"] += is_difference
                    return restored

                self.counts["chunks_rejected"] += 1
                if not old:
                    faults.append(f"{url} sent other bytes than chunk {chunk.digest[:16]}")
                    break
                # The old bytes on this disk may have changed: ask for all of the new ones.
                old = ""
        raise SyncError(
            f"{chunk.file}: no peer has the bytes at {chunk.start}: {'; '.join(faults)}"
        )

    def _peer(self, url: str) -> HttpClient:
        if url not in self._peers:
            self._peers[url] = HttpClient(url, token=self._token)
        return self._peers[url]

    def _forget(self) -> None:
        """Delete the oldest policies."""
        policies = [name for name in self._have if name != BASE]
        for name in policies[: -self._keep]:
            del self._have[name]
            self._fetching.pop(name, None)
            shutil.rmtree(self.root / name, ignore_errors=True)


async def cancel(tasks: Sequence[asyncio.Task[Path]]) -> None:
    """Cancel tasks and wait for their end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def own_token(token: str | None) -> str:
    """Return the token of peers: the given one, or that of the environment."""
    return os.environ.get(TOKEN, "") if token is None else token


def _has_failed(task: asyncio.Task[Path]) -> bool:
    if not task.done():
        return False
    return task.cancelled() or task.exception() is not None


def _to_send(stored: StoredChunk, old: StoredChunk | None) -> bytes:
    """Return the bytes of a chunk, or their difference from those of chunk `old`, if there is
    one and it is shorter."""
    data = stored.read()
    difference = None
    if old is not None:
        # The old file may have been deleted a moment ago.
        with suppress(OSError):
            difference = encode_difference(old.read(), data)
    return data if difference is None else difference


def _restored(chunk: Chunk, pieces: list[bytes], old: StoredChunk | None) -> list[bytes] | None:
    """Return the bytes of a chunk from what a peer sent, a difference from chunk `old` if that is
    given; None where they are others."""
    if old is not None:
        try:
            pieces = [apply_difference(old.read(), b"".join(pieces))]
        except (ValueError, OSError):
            return None
    if sum(map(len, pieces)) != chunk.size or _digest(pieces) != chunk.digest:
        return None
    return pieces


def _digest(pieces: Sequence[bytes]) -> str:
    digest = sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def _make_files(draft: Path, sizes: Mapping[str, int]) -> None:
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    for name, size in sizes.items():
        with (draft / name).open("wb") as file:
            file.truncate(size)


def _write(path: Path, start: int, pieces: Sequence[bytes]) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.writelines(pieces)


def _replace(draft: Path, final: Path) -> None:
    shutil.rmtree(final, ignore_errors=True)
    os.replace(draft, final)


async def relay(
    root: Path, on_start: Callable[[str], None], *, host: str, port: int, token: str
) -> None:
    """Run a relay until cancelled; once it listens, `on_start` receives its URL.

    Raises `ConfigError` as `turnwright serve`.
    """
    if host not in LOOPBACK and not token:
        raise ConfigError(
            f"--host {host}: other machines could write here; set {TOKEN}, which the trainer must "
            "send"
        )
    weights = WeightRelay(root)
    server = JsonHttpServer(weights.routes(), host=host, port=port, token=token)
    try:
        try:
            await server.start()
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"{host}:{port} is not available ({error}); choose another --port"
            ) from None
        on_start(server.url)
        await server.run()
    finally:
        await server.close()
        await weights.close()
