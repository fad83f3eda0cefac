"""Process groups between a trainer and the servers that it samples from: weights go out in buckets, rank 0 is the trainer.

torch's process groups are used by themselves, beside whatever group trains: nothing is registered anywhere, so they come and
go with an update. Their store listens where the server can reach it, for as long as the update takes.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

import torch
import torch.distributed as dist

from turnwise.engine.local.fingerprint import fingerprint
from turnwise.engine.remote.shelf import add_output_head
from turnwise.engine.remote.ways import WeightBucket, WeightReceiverClient
from turnwise.errors import SyncError

BUCKET = 256 * 2**20
"""Bytes that are sent at a time; the server holds as much twice."""
LOOPBACK = "127.0.0.1"
T = TypeVar("T")
Rows = list[tuple[str, torch.Tensor]]


class GroupWeightPacker:
    """Cuts new weights into buckets and sends them to servers by process group.

    A copy is kept in this process's memory (not the GPU's) until the next policy comes, for servers that come back.

    Args:
        backend: `gloo`, or `nccl` where trainer and servers are on GPUs.
        host: the address under which servers reach this process; none finds the one on the way to each.
        seconds: deadline of one step of an update: to meet, or to send a bucket.
        bucket: bytes that are sent at a time; one tensor at least.
        device: of rank 0 with `nccl`; the threads that send have no current one.
        source: a model directory whose servers were started from one with an output matrix of its own
            (`Shelf(untie=True)`); none where they were not.
    """

    def __init__(
        self,
        backend: str = "gloo",
        *,
        host: str | None = None,
        seconds: float = 600.0,
        bucket: int = BUCKET,
        device: str = "cuda:0",
        source: Path | None = None,
    ) -> None:
        self.backend, self.host, self.seconds, self.bucket = backend, host, seconds, bucket
        self.source = source
        self.device = torch.device(device if backend == "nccl" else "cpu")

    def pack(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> tuple[GroupWeights, str]:
        """New weights in buckets, in their own order, and their fingerprint."""
        rows, told = clone_weights(weights, self.source)
        return GroupWeights(split_buckets(rows, self.bucket), version, self), told


def clone_weights(weights: Iterable[tuple[str, torch.Tensor]], source: Path | None) -> tuple[Rows, str]:
    """Copies of weights in this process's memory, and the fingerprint of what was given.

    Args:
        source: as of `GroupWeightPacker`: the output matrix is added that a tied model's servers have.
    """
    rows = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in weights}
    told = fingerprint(rows.items())
    if source is not None:
        add_output_head(json.loads((source / "config.json").read_text(encoding="utf-8")), rows)
    return list(rows.items()), told


def split_buckets(rows: Rows, most: int) -> list[Rows]:
    """Weights in parts of at most so many bytes, or of one that is larger, in their own order."""
    cuts: list[Rows] = []
    size = most
    for name, tensor in rows:
        if size + tensor.nbytes > most or not cuts:
            cuts.append([])
            size = 0
        cuts[-1].append((name, tensor))
        size += tensor.nbytes
    return cuts


class GroupWeights:
    """The weights of one policy."""

    def __init__(self, cuts: list[Rows], version: int, courier: GroupWeightPacker) -> None:
        self.version, self.seconds, self._courier = version, courier.seconds, courier
        self.cuts = cuts
        self.buckets = [
            WeightBucket(
                tuple(name for name, _ in cut),
                tuple(str(tensor.dtype).removeprefix("torch.") for _, tensor in cut),
                tuple(tuple(tensor.shape) for _, tensor in cut),
            )
            for cut in self.cuts
        ]

    async def send_to(self, engine: WeightReceiverClient) -> None:
        """Have a server take them.

        Raises:
            SyncError: when it does not.
        """
        await engine.load_from_group(self)

    def group(self, url: str, ranks: int) -> GroupConnection:
        """A new group with the ranks of the server at a URL.

        Raises:
            SyncError: when no address can be had.
        """
        return GroupConnection(self.cuts, url, ranks, self._courier)


class GroupConnection:
    """A process group of this process and one server's ranks."""

    def __init__(self, cuts: Sequence[Rows], url: str, ranks: int, courier: GroupWeightPacker) -> None:
        self.name = f"turnwise-{uuid4().hex}"
        self.backend, self.world = courier.backend, ranks + 1
        self._url, self._cuts, self._seconds, self._device = url, cuts, courier.seconds, courier.device
        try:
            self.address = courier.host or _address_towards(url)
            listening = socket.create_server(("" if courier.host else self.address, 0))
        except OSError as error:
            raise SyncError(f"no address for a process group with {url} ({error}); set engine.group_host") from error
        self.port = int(listening.getsockname()[1])
        self._store: Any = dist.TCPStore(
            self.address,
            self.port,
            self.world,
            True,
            timedelta(seconds=self._seconds),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        self._group: Any = None

    async def connect(self) -> None:
        """Wait for the server's ranks.

        Raises:
            SyncError: when they do not come in time.
        """
        store = self._store
        self._group = await self._step(
            "to meet", lambda: join_process_group(store, self.name, 0, self.world, self.backend, self._seconds)
        )

    async def send(self, index: int) -> None:
        """Send a bucket.

        Raises:
            SyncError: when the server's ranks do not take it in time, or are gone.
        """
        group, cut = self._group, self._cuts[index]
        await self._step(
            f"to send bucket {index + 1} of {len(self._cuts)}",
            lambda: broadcast(group, [tensor.to(self._device) for _, tensor in cut], self._seconds),
        )

    def close(self) -> None:
        """Leave the group, whatever state it is in."""
        release_groups(self._group, self._store)
        self._group = self._store = None

    async def _step(self, doing: str, work: Callable[[], T]) -> T:
        try:
            return await run_detached(work)
        except (RuntimeError, ValueError) as error:  # what torch raises for all that can happen in a group
            raise SyncError(
                f"the process group with {self._url} failed {doing} (at most {self._seconds:g} s): {_first_line(error)}"
            ) from error


def join_process_group(store: Any, name: str, rank: int, world: int, backend: str, seconds: float) -> Any:
    """A process group by itself, as `torch.distributed` would make it under this name in SGLang and vLLM.

    Blocks until all ranks are there.

    Raises:
        RuntimeError: when they are not in time.
        ValueError: for a backend that is not built in.
    """
    device = "cuda" if backend == "nccl" else "cpu"
    store = dist.PrefixStore(f"{device}/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
    limit = timedelta(seconds=seconds)
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, world, limit)
    if backend != "nccl" or not dist.is_nccl_available():
        raise ValueError(f"no {backend!r} in this build of torch; gloo and nccl are what weights are sent by")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    with _own_errors():
        return dist.ProcessGroupNCCL(store, rank, world, options)


@contextmanager
def _own_errors() -> Iterator[None]:
    """A group that is made now raises where a deadline is missed: torch would end the process, and the run with it."""
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def broadcast(group: Any, tensors: Sequence[torch.Tensor], seconds: float) -> None:
    """Send tensors from rank 0, or receive them into these, one after another.

    Raises:
        RuntimeError: when it takes too long, or another rank is gone.
    """
    end = time.monotonic() + seconds
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    for work in [group.broadcast([tensor], options) for tensor in tensors]:
        work.wait(timedelta(seconds=max(0.001, end - time.monotonic())))
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)


async def run_detached(work: Callable[[], T]) -> T:
    """Run what may hang on a thread that neither the event loop nor the end of the process waits for."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(done: Callable[[], None]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(lambda: None if future.done() else done())

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            told = error
            settle(lambda: future.set_exception(told))
        else:
            settle(lambda: future.set_result(result))

    threading.Thread(target=run, name="turnwise-group", daemon=True).start()
    return await future


def release_groups(*held: Any) -> None:
    """Drop groups and stores where it may take its time: a group waits in its end for what still runs in it."""
    kept = [one for one in held if one is not None]
    if kept:
        threading.Thread(target=kept.clear, name="turnwise-group-end", daemon=True).start()


def _address_towards(url: str) -> str:
    """The address of this machine from which a URL's host is reached."""
    parts = urlsplit(url)
    host = parts.hostname or LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, parts.port or 80))  # sends nothing
        return str(probe.getsockname()[0])


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
