"""Weights of a policy on their way to servers: the forms in which they are sent.

A packer makes a policy's weights ready once, as a source, which is then sent to each server, and to
those that come later: a directory of whole weights or of an adapter (`weight_files`), or copies in
memory, for a process group or for requests (`turnwright.training.weight_transfer`). What a kind of
server is told is in its client (`vllm`, `sglang`, `llamacpp`; adapters in `server_adapters`).

A process group lives for one update. A permanent one would be server state that a restart changes
unnoticed, and SGLang exits when it receives the name of an unknown group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from turnwright.errors import EngineError, SyncError

CLEANUP_TIMEOUT_S = 10.0
FINAL_REQUEST_TIMEOUT_S = 5.0
"""Seconds for a server to report why it left a group after our side failed."""
UNFINISHED = "{}-unfinished"
"""Name of weights during a transfer: no request expects it, so responses from partial weights are
rejected."""
SPARE_S = 10.0
"""Seconds that a server's response may arrive after our side timed out; it is the more informative
error."""


class UpdatedServer(Protocol):
    """What an update of weights needs of a server's client."""

    url: str

    async def load_from_disk(self, directory: Path, version: int) -> None:
        """Let the server read its weights from a directory."""

    async def use_adapter(self, directory: Path, version: int) -> None:
        """Let the server use the adapter of a directory."""

    async def load_from_group(self, transfer: GroupTransfer) -> None:
        """Let the server take weights from a process group."""

    async def load_from_requests(self, transfer: RequestTransfer) -> None:
        """Send weights to the server in requests."""


class WeightsSource(Protocol):
    """Weights of one policy, which can be sent to a server repeatedly."""

    @property
    def version(self) -> int:
        """Policy version."""

    @property
    def is_adapter(self) -> bool:
        """Whether the server loads them beside its own weights, which other calls go on using."""

    async def send_to(self, engine: UpdatedServer) -> None:
        """Send the weights to a server. Raises `SyncError` when it does not take them."""


@dataclass(frozen=True, slots=True)
class DiskWeights:
    """Weights in a directory that servers see under the same path."""

    directory: Path
    version: int
    is_adapter: ClassVar[bool] = False

    async def send_to(self, engine: UpdatedServer) -> None:
        await engine.load_from_disk(self.directory, self.version)

    async def directory_on(self, host: str) -> Path:
        return self.directory.absolute()


@dataclass(frozen=True, slots=True)
class DiskAdapter:
    """LoRA adapter in a directory that servers see under the same path; servers keep their base
    model."""

    directory: Path
    version: int
    is_adapter: ClassVar[bool] = True

    async def send_to(self, engine: UpdatedServer) -> None:
        await engine.use_adapter(self.directory, self.version)


OnDisk = DiskWeights | DiskAdapter
"""What a packer that writes directories makes, and what a tree carries."""


class SharedWeights(WeightsSource, Protocol):
    """Weights in a directory that nodes have or fetch."""

    async def directory_on(self, host: str) -> Path:
        """Return the directory on a node, once it is there."""


class WeightSharing(Protocol):
    """Sends directories of weights to the nodes of servers."""

    async def share(
        self, source: OnDisk, urls: Sequence[str], *, base: bool = False
    ) -> SharedWeights:
        """Return a source that sends a directory through the nodes of the servers at these URLs.

        A `base` model stays there.
        """

    async def close(self) -> None:
        """Stop."""


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """Tensors sent together, in order: parallel tuples of names, dtypes and shapes."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    """torch names, such as `float32` or `bfloat16`."""
    shapes: tuple[tuple[int, ...], ...]


class WeightGroup(Protocol):
    """Process group of this process (rank 0) and the ranks of one server, for one update."""

    name: str
    address: str
    port: int
    world: int
    """Number of ranks including this one."""
    backend: str
    """`gloo` or `nccl`."""

    async def connect(self) -> None:
        """Wait for the server's ranks."""

    async def send(self, index: int) -> None:
        """Send a bucket to all ranks."""

    def close(self) -> None:
        """Leave the group in any state; pending operations end with an error."""


class GroupTransfer(WeightsSource, Protocol):
    """Weights sent by process group, kept for servers that come back."""

    @property
    def buckets(self) -> Sequence[WeightBucket]:
        """Buckets in sending order."""

    seconds: float
    """Deadline in seconds of each step: connecting, or sending a bucket."""

    def group(self, url: str, ranks: int) -> WeightGroup:
        """Create a group with the ranks of the server at a URL."""


class RequestTransfer(WeightsSource, Protocol):
    """Weights sent in request bodies, kept for servers that come back."""

    @property
    def request_count(self) -> int:
        """Number of requests."""

    seconds: float
    """Deadline of each request in seconds."""

    def encode_body(self, index: int) -> str:
        """Return one body in base64.

        It is a pickle that `torch.storage._load_from_bytes` turns into a list of (name, tensor).
        """


class WeightPacker(Protocol):
    """Makes the weights of a policy ready to be sent: as a directory, or as copies in memory."""

    def pack(self, weights: Iterable[tuple[str, Any]], version: int) -> tuple[WeightsSource, str]:
        """Return a source of the weights, (Hugging Face name, torch tensor) pairs, and their
        fingerprint.

        The source does not change with the weights.
        """


async def run_together(
    request: Awaitable[Any], transfer: Awaitable[None], group: WeightGroup
) -> Any:
    """Run a request to a server and our side of its group transfer concurrently.

    Return the response when both are done. Raises `SyncError` when our side failed, with the
    server's error if one arrives soon; else as the request.
    """
    server_task = asyncio.ensure_future(request)
    own_task = asyncio.ensure_future(transfer)
    try:
        await asyncio.wait((server_task, own_task), return_when=asyncio.FIRST_EXCEPTION)
        own_failed = (
            own_task.done() and not own_task.cancelled() and own_task.exception() is not None
        )
        if own_failed and not server_task.done():
            await asyncio.wait((server_task,), timeout=FINAL_REQUEST_TIMEOUT_S)

        if server_task.done() and server_task.exception() is None:
            await own_task
            return server_task.result()
        own_error = own_task.exception() if own_task.done() else None
        if isinstance(own_error, SyncError):
            server_error = f"; {server_task.exception()}" if server_task.done() else ""
            raise SyncError(f"{own_error}{server_error}") from own_error
        return await server_task
    finally:
        # Whoever still waits for the other side is released.
        if not (server_task.done() and own_task.done()):
            group.close()
        for task in (server_task, own_task):
            task.cancel()
        await asyncio.gather(server_task, own_task, return_exceptions=True)


async def suppress_errors(work: Awaitable[Any]) -> None:
    """Await cleanup that may fail without harm, for at most `CLEANUP_TIMEOUT_S`."""
    with suppress(EngineError, SyncError, TimeoutError):
        async with asyncio.timeout(CLEANUP_TIMEOUT_S):
            await work


def rendezvous(group: WeightGroup) -> dict[str, Any]:
    """Return where the ranks of a server meet this process, in the fields of both formats."""
    return {
        "master_address": group.address,
        "master_port": group.port,
        "rank_offset": 1,
        "world_size": group.world,
        "group_name": group.name,
        "backend": group.backend,
    }
