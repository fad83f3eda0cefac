"""How new weights reach a server: from a disk, whole or an adapter alone; by process group; or in requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from turnwise.errors import EngineError, SyncError

QUIETLY_S = 10.0
LAST_WORD_S = 5.0
"""For a server to say why it left a group, once our side of it broke."""


class Taker(Protocol):
    """A server's client, as far as new weights go; each raises SyncError where it does not take them."""

    async def load(self, directory: str | Path, version: int) -> None:
        """Have the server read weights from a directory."""

    async def receive(self, shipment: Shipment) -> None:
        """Have it take what a process group brings."""

    async def accept(self, mail: Mail) -> None:
        """Have it take what stands in requests."""

    async def adopt(self, directory: Path, version: int) -> None:
        """Have it answer by a LoRA adapter in a directory."""


class Parcel(Protocol):
    """The weights of one policy, to be given to a server as often as one needs them."""

    @property
    def version(self) -> int:
        """Policy version."""

    async def give(self, engine: Taker) -> None:
        """Have a server take them.

        Raises:
            SyncError: when it does not.
        """


@dataclass(frozen=True, slots=True)
class OnDisk:
    """Weights in a directory that servers see under the same path."""

    directory: Path
    version: int

    async def give(self, engine: Taker) -> None:
        """As `Parcel.give`."""
        await engine.load(self.directory, self.version)


@dataclass(frozen=True, slots=True)
class AsAdapter:
    """A LoRA adapter in a directory that servers see under the same path; the model that they were started with stays."""

    directory: Path
    version: int

    async def give(self, engine: Taker) -> None:
        """As `Parcel.give`."""
        await engine.adopt(self.directory, self.version)


@dataclass(frozen=True, slots=True)
class Bucket:
    """What is sent at once; the three run side by side, in the order in which tensors are sent."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    """As torch calls them, `float32` or `bfloat16`."""
    shapes: tuple[tuple[int, ...], ...]


class Group(Protocol):
    """A process group of this process, rank 0, and the ranks of one server behind it; it lives for one update."""

    name: str
    address: str
    port: int
    world: int
    """Ranks, ours included."""
    backend: str
    """`gloo` or `nccl`."""

    async def meet(self) -> None:
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


class Shipment(Parcel, Protocol):
    """Weights that are sent by process group, held here for servers that come back."""

    @property
    def buckets(self) -> Sequence[Bucket]:
        """What is sent, in this order."""

    @property
    def seconds(self) -> float:
        """Deadline of one step of an update: to meet, or to send a bucket."""

    def group(self, url: str, ranks: int) -> Group:
        """A new group with the ranks of the server at a URL."""


class Mail(Parcel, Protocol):
    """Weights that go in the bodies of requests, held here for servers that come back."""

    @property
    def letters(self) -> int:
        """How many requests they take."""

    @property
    def seconds(self) -> float:
        """Deadline of each."""

    def write(self, index: int) -> str:
        """What stands in one of them, in base64: what `torch.storage._load_from_bytes` makes a list of (name, tensor) of, as a
        pickle."""


class Courier(Protocol):
    """Packs weights that no disk carries."""

    def pack(self, weights: Iterable[tuple[str, Any]], version: int) -> tuple[Parcel, str]:
        """New weights in parts, and their fingerprint.

        Args:
            weights: (Hugging Face name, torch tensor) pairs; what is kept of them are copies.
        """


async def both(said: Awaitable[Any], ours: Awaitable[None], group: Group) -> Any:
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
            await asyncio.wait((asked,), timeout=LAST_WORD_S)
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


async def quietly(work: Awaitable[Any]) -> None:
    """Await what may fail without harm, and not for long: clearing up behind what counts."""
    with suppress(EngineError, SyncError, TimeoutError):
        async with asyncio.timeout(QUIETLY_S):
            await work
