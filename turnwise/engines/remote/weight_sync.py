"""How new weights reach a server: from a disk, whole or an adapter alone; by process group; or in requests."""

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
"""For a server to say why it left a group, once our side of it broke."""


class WeightReceiverClient(Protocol):
    """A server's client, as far as new weights go; each raises SyncError where it does not take them."""

    async def load_from_disk(self, directory: str | Path, version: int) -> None:
        """Have the server read weights from a directory."""

    async def load_from_group(self, shipment: GroupTransfer) -> None:
        """Have it take what a process group brings."""

    async def load_from_requests(self, mail: RequestTransfer) -> None:
        """Have it take what stands in requests."""

    async def use_adapter(self, directory: Path, version: int) -> None:
        """Have it answer by a LoRA adapter in a directory."""


class WeightsSource(Protocol):
    """The weights of one policy, to be given to a server as often as one needs them."""

    @property
    def version(self) -> int:
        """Policy version."""

    async def send_to(self, engine: WeightReceiverClient) -> None:
        """Have a server take them.

        Raises:
            SyncError: when it does not.
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
    """A LoRA adapter in a directory that servers see under the same path; the model that they were started with stays."""

    directory: Path
    version: int

    async def send_to(self, engine: WeightReceiverClient) -> None:
        """As `WeightsSource.send_to`."""
        await engine.use_adapter(self.directory, self.version)


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """What is sent at once; the three run side by side, in the order in which tensors are sent."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    """As torch calls them, `float32` or `bfloat16`."""
    shapes: tuple[tuple[int, ...], ...]


class WeightGroup(Protocol):
    """A process group of this process, rank 0, and the ranks of one server behind it; it lives for one update."""

    name: str
    address: str
    port: int
    world: int
    """Ranks, ours included."""
    backend: str
    """`gloo` or `nccl`."""

    async def connect(self) -> None:
        """Wait for the server's ranks.

        Raises:
            SyncError: when they do not come in time.
        """

    async def send(self, index: int) -> None:
        """Send a bucket to all of them.

        Raises:
            SyncError: when they do not take it in time, or are gone.
        """

    def close(self) -> None:
        """Leave the group, whatever state it is in; what still waits in it ends with an error."""


class GroupTransfer(WeightsSource, Protocol):
    """Weights that are sent by process group, held here for servers that come back."""

    @property
    def buckets(self) -> Sequence[WeightBucket]:
        """What is sent, in this order."""

    @property
    def seconds(self) -> float:
        """Deadline of one step of an update: to meet, or to send a bucket."""

    def group(self, url: str, ranks: int) -> WeightGroup:
        """A new group with the ranks of the server at a URL."""


class RequestTransfer(WeightsSource, Protocol):
    """Weights that go in the bodies of requests, held here for servers that come back."""

    @property
    def request_count(self) -> int:
        """How many requests they take."""

    @property
    def seconds(self) -> float:
        """Deadline of each."""

    def encode_body(self, index: int) -> str:
        """What stands in one of them, in base64: what `torch.storage._load_from_bytes` makes a list of (name, tensor) of, as a
        pickle."""


class WeightPacker(Protocol):
    """Packs weights that no disk carries."""

    def pack(self, weights: Iterable[tuple[str, Any]], version: int) -> tuple[WeightsSource, str]:
        """New weights in parts, and their fingerprint.

        Args:
            weights: (Hugging Face name, torch tensor) pairs; what is kept of them are copies.
        """


async def run_together(said: Awaitable[Any], ours: Awaitable[None], group: WeightGroup) -> Any:
    """A request to a server beside our side of it in a group: neither returns before the other has done its part.

    Returns:
        What the server answered.

    Raises:
        SyncError: when our side failed, with what the server had to say, should it say something soon.
        TurnwiseError: as the request.
    """
    asked, sent = asyncio.ensure_future(said), asyncio.ensure_future(ours)
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
    """Await what may fail without harm, and not for long: clearing up behind what counts."""
    with suppress(EngineError, SyncError, TimeoutError):
        async with asyncio.timeout(CLEANUP_TIMEOUT_S):
            await work
