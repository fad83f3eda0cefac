"""Transfer of new weights to a server: from disk (full weights or an adapter), by process group, or in requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from turnwise.errors import EngineError, SyncError

CLEANUP_TIMEOUT_S = 10.0
FINAL_REQUEST_TIMEOUT_S = 5.0
"""Seconds for a server to report why it left a group after our side failed."""


class WeightReceiverClient(Protocol):
    """Server client as seen by weight updates; methods raise SyncError where the server does not support them."""

    async def load_from_disk(self, directory: str | Path, version: int) -> None:
        """Load weights from a directory."""

    async def load_from_group(self, transfer: GroupTransfer) -> None:
        """Receive weights over a process group."""

    async def load_from_requests(self, transfer: RequestTransfer) -> None:
        """Receive weights in request bodies."""

    async def use_adapter(self, directory: Path, version: int) -> None:
        """Use the LoRA adapter in a directory."""


class WeightsSource(Protocol):
    """Weights of one policy, which can be sent to a server repeatedly."""

    @property
    def version(self) -> int:
        """Policy version."""

    async def send_to(self, engine: WeightReceiverClient) -> None:
        """Send the weights to a server.

        Raises:
            SyncError: when it does not take them.
        """


@dataclass(frozen=True, slots=True)
class DiskWeights:
    """Weights in a directory that servers see under the same path."""

    directory: Path
    version: int

    async def send_to(self, engine: WeightReceiverClient) -> None:
        """As `WeightsSource.send_to`."""
        await engine.load_from_disk(self.directory, self.version)


@dataclass(frozen=True, slots=True)
class DiskAdapter:
    """LoRA adapter in a directory that servers see under the same path; servers keep their base model."""

    directory: Path
    version: int

    async def send_to(self, engine: WeightReceiverClient) -> None:
        """As `WeightsSource.send_to`."""
        await engine.use_adapter(self.directory, self.version)


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
        """Wait for the server's ranks.

        Raises:
            SyncError: when they do not connect in time.
        """

    async def send(self, index: int) -> None:
        """Send a bucket to all ranks.

        Raises:
            SyncError: when they do not receive it in time, or have ended.
        """

    def close(self) -> None:
        """Leave the group in any state; pending operations end with an error."""


class GroupTransfer(WeightsSource, Protocol):
    """Weights sent by process group, kept for servers that come back."""

    @property
    def buckets(self) -> Sequence[WeightBucket]:
        """Buckets in sending order."""

    @property
    def seconds(self) -> float:
        """Deadline in seconds of each step: connecting, or sending a bucket."""

    def group(self, url: str, ranks: int) -> WeightGroup:
        """Create a group with the ranks of the server at a URL."""


class RequestTransfer(WeightsSource, Protocol):
    """Weights sent in request bodies, kept for servers that come back."""

    @property
    def request_count(self) -> int:
        """Number of requests."""

    @property
    def seconds(self) -> float:
        """Deadline of each request in seconds."""

    def encode_body(self, index: int) -> str:
        """Return one body in base64: a pickle that `torch.storage._load_from_bytes` turns into a list of (name, tensor)."""


class WeightPacker(Protocol):
    """Packs weights that are sent without a disk."""

    def pack(self, weights: Iterable[tuple[str, Any]], version: int) -> tuple[WeightsSource, str]:
        """Return a source of the new weights and their fingerprint.

        Args:
            weights: (Hugging Face name, torch tensor) pairs; the source keeps copies.
        """


async def run_together(request: Awaitable[Any], transfer: Awaitable[None], group: WeightGroup) -> Any:
    """Run a request to a server and our side of its group transfer concurrently; return when both are done.

    Returns:
        The server's response.

    Raises:
        SyncError: when our side failed, with the server's error if one arrives soon.
        TurnwiseError: as the request.
    """
    asked, sent = asyncio.ensure_future(request), asyncio.ensure_future(transfer)
    try:
        await asyncio.wait((asked, sent), return_when=asyncio.FIRST_EXCEPTION)
        if sent.done() and not sent.cancelled() and sent.exception() is not None and not asked.done():
            await asyncio.wait((asked,), timeout=FINAL_REQUEST_TIMEOUT_S)
        if asked.done() and asked.exception() is None:
            await sent
            return asked.result()
        if sent.done() and isinstance(ours_failed := sent.exception(), SyncError):
            theirs = f"; {asked.exception()}" if asked.done() else ""
            raise SyncError(f"{ours_failed}{theirs}") from ours_failed
        return await asked
    finally:
        if not (asked.done() and sent.done()):
            group.close()
        for task in (asked, sent):
            task.cancel()
        await asyncio.gather(asked, sent, return_exceptions=True)


async def suppress_errors(work: Awaitable[Any]) -> None:
    """Await cleanup that may fail without harm, for at most `CLEANUP_TIMEOUT_S`."""
    with suppress(EngineError, SyncError, TimeoutError):
        async with asyncio.timeout(CLEANUP_TIMEOUT_S):
            await work
