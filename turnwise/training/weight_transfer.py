"""Send and receive weights by process group or HTTP.

Process groups between a trainer and the servers that it samples from: weights go out in buckets, rank 0 is the trainer.

torch's process groups are used by themselves, beside whatever group trains: nothing is registered anywhere, so they come and
go with an update. Their store listens where the server can reach it, for as long as the update takes.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import socket
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

import torch
import torch.distributed as dist

from turnwise.engines.local.weights import fingerprint
from turnwise.engines.remote.weight_files import add_output_head
from turnwise.engines.remote.weight_sync import WeightBucket, WeightReceiverClient
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


MAX_BODY_BYTES = 64 * 2**20
"""Bytes of weights in a request; base64 makes a third more of them, and a server of many ranks gets them for each."""
OPENS = ("torch.storage", "_load_from_bytes")


class RequestWeightPacker:
    """Cuts new weights into the bodies of requests.

    A copy is kept in this process's memory (not the GPU's) until the next policy comes, for servers that come back.

    Args:
        seconds: deadline of one request.
        letter: bytes of weights in a request; one tensor at least.
        source: as of `Courier`.
    """

    def __init__(self, *, seconds: float = 600.0, letter: int = MAX_BODY_BYTES, source: Path | None = None) -> None:
        self.seconds, self.letter, self.source = seconds, letter, source

    def pack(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> tuple[RequestWeights, str]:
        """New weights in parts, in their own order, and their fingerprint."""
        rows, told = clone_weights(weights, self.source)
        return RequestWeights(split_buckets(rows, self.letter), version, self.seconds), told


class RequestWeights:
    """The weights of one policy."""

    def __init__(self, cuts: list[Rows], version: int, seconds: float) -> None:
        self.version, self.seconds, self._cuts = version, seconds, cuts

    @property
    def request_count(self) -> int:
        """How many requests they take."""
        return len(self._cuts)

    def encode_body(self, index: int) -> str:
        """What stands in one of them: see `encode_tensors`."""
        return encode_tensors(self._cuts[index])

    async def send_to(self, engine: WeightReceiverClient) -> None:
        """Have a server take them.

        Raises:
            SyncError: when it does not.
        """
        await engine.load_from_requests(self)


class _Saved:
    """Pickled, it is a call of `OPENS`: nothing but names of torch, which is what SGLang lets in."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return torch.storage._load_from_bytes, (self.raw,)


def encode_tensors(rows: Rows) -> str:
    """Named tensors as SGLang's `/update_weights_from_tensor` reads them, in base64: by value, so from any machine."""
    file = BytesIO()
    torch.save(rows, file)
    return b64encode(pickle.dumps(_Saved(file.getvalue()), protocol=4)).decode()


def decode_tensors(text: str) -> Rows:
    """What `encode_tensors` wrote, read without running anything that it says.

    Raises:
        SyncError: for anything else.
    """
    try:
        rows = _Reader(BytesIO(b64decode(text, validate=True))).load()
    except Exception as error:  # what a text of others makes of a pickle's reader has no bounds
        raise SyncError(f"these are no tensors that Turnwise packed: {error}") from error
    if not isinstance(rows, list) or not all(_named(row) for row in rows):
        raise SyncError("these are no named tensors")
    return rows


def _named(row: Any) -> bool:
    return isinstance(row, tuple) and len(row) == 2 and isinstance(row[0], str) and isinstance(row[1], torch.Tensor)


class _Reader(pickle.Unpickler):
    """Knows one name, and reads what stands behind it as weights alone."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) != OPENS:
            raise pickle.UnpicklingError(f"{module}.{name} is not read here")
        return lambda raw: torch.load(BytesIO(raw), map_location="cpu", weights_only=True)


SECONDS = 600.0
"""For a trainer to come, and for each of its buckets."""


class GroupWeightReceiver:
    """Collects weights until all have come.

    Args:
        shapes: of every weight that the model knows, by name.
        needed: those that have to come; of tied ones, one.
        take: makes a whole set the engine's.
        device: of the model, where `nccl` brings weights to.
        seconds: for a trainer to come, and for each of its buckets.
    """

    def __init__(
        self,
        shapes: Mapping[str, torch.Size],
        needed: frozenset[str],
        take: Callable[[Rows], Awaitable[None]],
        device: torch.device,
        seconds: float = SECONDS,
    ) -> None:
        self._shapes, self._needed, self._take, self._seconds = shapes, needed, take, seconds
        self._device = device
        self._groups: dict[str, tuple[Any, Any, torch.device]] = {}
        self._came: dict[str, torch.Tensor] = {}

    @property
    def complete(self) -> bool:
        """Whether all weights of the model have come."""
        return self._needed <= self._came.keys()

    async def join(self, address: str, port: int, rank: int, world: int, name: str, backend: str) -> None:
        """Meet a trainer, which is rank 0.

        Raises:
            SyncError: when nobody comes, or the group cannot be.
        """
        if name in self._groups:
            raise SyncError(f"there is a group {name!r} already")
        limit = timedelta(seconds=self._seconds)

        def meet() -> tuple[Any, Any]:
            store = dist.TCPStore(address, port, world, False, limit, wait_for_workers=False)
            return store, join_process_group(store, name, rank, world, backend, self._seconds)

        try:
            store, group = await run_detached(meet)
        except (RuntimeError, ValueError) as error:
            raise SyncError(f"no process group with {address}:{port}: {error}") from error
        self._came.clear()
        self._groups[name] = store, group, self._device if backend == "nccl" else torch.device("cpu")

    async def receive(self, group: str | None, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Any]) -> None:
        """Receive a bucket.

        Raises:
            SyncError: for weights that the model has not, an unknown group, or a trainer that is gone.
        """
        name = group if group is not None else next(iter(self._groups), "")
        if name not in self._groups:
            raise SyncError(f"there is no group {name!r}")
        _, members, device = self._groups[name]
        rows: Rows = []
        for weight, dtype, shape in zip(names, dtypes, shapes, strict=True):
            kind = getattr(torch, dtype, None)
            if self._shapes.get(weight) != torch.Size(shape) or not isinstance(kind, torch.dtype):
                raise SyncError(f"{weight} {dtype} {list(shape)} does not fit the model that is served")
            rows.append((weight, torch.empty(self._shapes[weight], dtype=kind, device=device)))
        try:
            await run_detached(lambda: broadcast(members, [tensor for _, tensor in rows], self._seconds))
        except RuntimeError as error:
            raise SyncError(f"the trainer did not send what it said: {error}") from error
        self._came |= dict(rows)

    async def decode_request(self, text: str) -> None:
        """Read weights that stand in a request.

        Raises:
            SyncError: for weights that the model has not, or what is none.
        """
        rows = await asyncio.to_thread(decode_tensors, text)
        for weight, tensor in rows:
            if self._shapes.get(weight) != tensor.shape:
                raise SyncError(f"{weight} {list(tensor.shape)} does not fit the model that is served")
        self._came |= dict(rows)

    async def apply(self) -> None:
        """Make what has come the engine's weights.

        Raises:
            SyncError: when some are missing.
        """
        came, self._came = self._came, {}
        if missing := sorted(self._needed - came.keys()):
            raise SyncError(f"{len(missing)} weights did not come, the first is {missing[0]!r}; nothing was changed")
        await self._take(list(came.items()))

    def leave(self, group: str | None) -> bool:
        """Leave a group, None all; what came and was not taken is forgotten."""
        names = list(self._groups) if group is None else [group] if group in self._groups else []
        for name in names:
            store, members, _ = self._groups.pop(name)
            release_groups(members, store)
        self._came.clear()
        return bool(names)
