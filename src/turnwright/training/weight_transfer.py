"""Weights that reach servers without a disk: packed here, sent over a process group or in requests
(`engine.update = "group"` and `"tensors"`).

Every update begins in `turnwright.training.policies.Policy.send`; by default servers read a
directory. The other end is SGLang, vLLM with a plugin (`turnwright.engines.remote.vllm_plugin`), or
`turnwright serve` (`turnwright_serve.weight_receiver`).

A process group connects the trainer (rank 0) with the ranks of one server and carries the weights
in buckets. torch's process groups are used directly, besides any group that trains. Nothing is
registered, so they exist only during an update, and so does their store, which listens where the
server can reach it.

`GroupWeightPacker` and `RequestWeightPacker` are the two ways. `clone_weights` and `split_buckets`
are common to both; `encode_tensors` and `decode_tensors` are the two ends of a request.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

import torch
import torch.distributed as dist

from turnwright.engines.local.weights import fingerprint
from turnwright.engines.remote.weight_files import add_output_head
from turnwright.engines.remote.weight_sync import UpdatedServer, WeightBucket
from turnwright.errors import SyncError

BUCKET = 256 * 2**20
"""Bytes per bucket; the server holds twice as much."""
LOOPBACK = "127.0.0.1"
T = TypeVar("T")
Rows = list[tuple[str, torch.Tensor]]


class GroupWeightPacker:
    """Splits new weights into buckets and sends them to servers over process groups.

    A copy stays in this process's memory (not the GPU's) until the next policy, for servers that
    come back.

    Args:
        host: address under which servers reach this process; None uses its address on the route to
            each server.
        seconds: deadline to connect, or to send a bucket.
        bucket: bytes of a bucket, which a larger tensor has alone.
        device: rank 0's with `nccl`; the sending threads have no current device.
        source: model directory, if servers were started from one with an added output matrix
            (`ModelDirectories(untie=True)`).
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
        self.backend = backend
        self.host = host
        self.seconds = seconds
        self.bucket = bucket
        self.source = source
        self.device = torch.device(device if backend == "nccl" else "cpu")

    def pack(
        self, weights: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> tuple[GroupWeights, str]:
        """Split weights into buckets in their own order; return them and the fingerprint of the
        given weights."""
        rows, digest = clone_weights(weights, self.source)
        return GroupWeights(split_buckets(rows, self.bucket), version, self), digest


def clone_weights(
    weights: Iterable[tuple[str, torch.Tensor]], source: Path | None
) -> tuple[Rows, str]:
    """Copy weights to this process's memory; return them and their fingerprint.

    Then `source` adds the output matrix of a tied model, without a part in the fingerprint.
    """
    rows = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in weights}
    digest = fingerprint(rows.items())
    if source is not None:
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        add_output_head(config, rows)
    return list(rows.items()), digest


def split_buckets(rows: Rows, max_bytes: int) -> list[Rows]:
    """Split weights, in their own order, into buckets of at most `max_bytes` or of a single
    tensor."""
    buckets: list[Rows] = []
    size = max_bytes
    for name, tensor in rows:
        if size + tensor.nbytes > max_bytes or not buckets:
            buckets.append([])
            size = 0
        buckets[-1].append((name, tensor))
        size += tensor.nbytes
    return buckets


class GroupWeights:
    """The weights of one policy."""

    is_adapter: ClassVar[bool] = False

    def __init__(self, rows: list[Rows], version: int, packer: GroupWeightPacker) -> None:
        self.version = version
        self.seconds = packer.seconds
        self.rows = rows
        self._packer = packer
        self.buckets: list[WeightBucket] = []
        for bucket in rows:
            names = tuple(name for name, _ in bucket)
            dtypes = tuple(str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket)
            shapes = tuple(tuple(tensor.shape) for _, tensor in bucket)
            self.buckets.append(WeightBucket(names, dtypes, shapes))

    async def send_to(self, engine: UpdatedServer) -> None:
        """Have a server load them."""
        await engine.load_from_group(self)

    def group(self, url: str, ranks: int) -> GroupConnection:
        """Create a group with the ranks of the server at a URL."""
        return GroupConnection(self.rows, url, ranks, self._packer)


class GroupConnection:
    """Process group of this process and one server's ranks."""

    def __init__(
        self, rows: Sequence[Rows], url: str, ranks: int, packer: GroupWeightPacker
    ) -> None:
        self.name = f"turnwright-{uuid4().hex}"
        self.backend = packer.backend
        self.world = ranks + 1
        self._url = url
        self._rows = rows
        self._seconds = packer.seconds
        self._device = packer.device
        try:
            self.address = packer.host or _address_towards(url)
            listening = socket.create_server(("" if packer.host else self.address, 0))
        except OSError as error:
            raise SyncError(
                f"no address for a process group with {url} ({error}); set engine.group_host"
            ) from error
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
        """Wait for the server's ranks."""
        store = self._store

        def join() -> Any:
            return join_process_group(store, self.name, 0, self.world, self.backend, self._seconds)

        self._group = await self._step("to connect", join)

    async def send(self, index: int) -> None:
        """Send a bucket."""
        group = self._group
        rows = self._rows[index]

        def send() -> None:
            broadcast(group, [tensor.to(self._device) for _, tensor in rows], self._seconds)

        await self._step(f"to send bucket {index + 1} of {len(self._rows)}", send)

    def close(self) -> None:
        """Leave the group in any state."""
        release_groups(self._group, self._store)
        self._group = self._store = None

    async def _step(self, doing: str, work: Callable[[], T]) -> T:
        try:
            return await run_detached(work)
        except (RuntimeError, ValueError) as error:
            # torch raises these for any failure of a group.
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise SyncError(
                f"the process group with {self._url} failed {doing} (within {self._seconds:g} s): "
                f"{reason}"
            ) from error


def join_process_group(
    store: Any, name: str, rank: int, world: int, backend: str, seconds: float
) -> Any:
    """Create a standalone process group, as `torch.distributed` would under this name in SGLang and
    vLLM.

    Raises:
        RuntimeError: when not all ranks join in time.
        ValueError: for a backend that torch lacks.
    """
    device = "cuda" if backend == "nccl" else "cpu"
    store = dist.PrefixStore(name, store)
    store = dist.PrefixStore(f"{name}/", store)
    store = dist.PrefixStore(f"{device}/", store)
    limit = timedelta(seconds=seconds)
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, world, limit)

    if backend != "nccl" or not dist.is_nccl_available():
        raise ValueError(
            f"this build of torch has no {backend!r}; weights are sent by gloo or nccl"
        )
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    with _raise_on_timeout():
        return dist.ProcessGroupNCCL(store, rank, world, options)


@contextmanager
def _raise_on_timeout() -> Iterator[None]:
    """Make groups created inside raise after a deadline; by default torch would end the process,
    and the run with it."""
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
    """Send tensors from rank 0, or receive them in place, in order; raise `RuntimeError` when late,
    or another rank is gone."""
    end = time.monotonic() + seconds
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0

    # All are started at once; the deadline is one for all.
    for work in [group.broadcast([tensor], options) for tensor in tensors]:
        work.wait(timedelta(seconds=max(0.001, end - time.monotonic())))
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)


async def run_detached(work: Callable[[], T]) -> T:
    """Run work that may hang in a thread that neither the event loop nor process exit waits for."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(done: Callable[[], None]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(lambda: None if future.done() else done())

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            failure = error
            settle(lambda: future.set_exception(failure))
        else:
            settle(lambda: future.set_result(result))

    threading.Thread(target=run, name="turnwright-group", daemon=True).start()
    return await future


def release_groups(*held: Any) -> None:
    """Release groups and stores in a thread, since a group's destructor waits for its running
    operations."""
    present = [item for item in held if item is not None]
    if present:
        threading.Thread(target=present.clear, name="turnwright-group-end", daemon=True).start()


def _address_towards(url: str) -> str:
    """Return this machine's address on the route to a URL's host."""
    parts = urlsplit(url)
    host = parts.hostname or LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # This sends nothing.
        probe.connect((host, parts.port or 80))
        return str(probe.getsockname()[0])


MAX_BODY_BYTES = 64 * 2**20
"""Bytes of weights per request; base64 adds a third, and a server of many ranks gets them for
each."""
OPENS = ("torch.storage", "_load_from_bytes")
"""The only function that a request's pickle may call."""


class RequestWeightPacker:
    """Splits new weights into bodies of at most `max_bytes` or a tensor; see `GroupWeightPacker`
    for the copy and `source`."""

    def __init__(
        self,
        *,
        seconds: float = 600.0,
        max_bytes: int = MAX_BODY_BYTES,
        source: Path | None = None,
    ) -> None:
        self.seconds = seconds
        self.max_bytes = max_bytes
        self.source = source

    def pack(
        self, weights: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> tuple[RequestWeights, str]:
        """Split weights into requests in their own order; return them and the fingerprint of the
        given weights."""
        rows, digest = clone_weights(weights, self.source)
        return RequestWeights(split_buckets(rows, self.max_bytes), version, self.seconds), digest


class RequestWeights:
    """The weights of one policy."""

    is_adapter: ClassVar[bool] = False

    def __init__(self, rows: list[Rows], version: int, seconds: float) -> None:
        self.version = version
        self.seconds = seconds
        self._rows = rows

    @property
    def request_count(self) -> int:
        """Number of requests."""
        return len(self._rows)

    def encode_body(self, index: int) -> str:
        """Encode one request's body, see `encode_tensors`."""
        return encode_tensors(self._rows[index])

    async def send_to(self, engine: UpdatedServer) -> None:
        """Have a server load them."""
        await engine.load_from_requests(self)


class _Saved:
    """Pickles as a call of `OPENS`, which SGLang's unpickler allows."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return torch.storage._load_from_bytes, (self.raw,)


def encode_tensors(rows: Rows) -> str:
    """Encode named tensors by value in base64, as SGLang's `/update_weights_from_tensor` reads
    them."""
    file = BytesIO()
    torch.save(rows, file)
    return b64encode(pickle.dumps(_Saved(file.getvalue()), protocol=4)).decode()


def decode_tensors(text: str) -> Rows:
    """Decode the result of `encode_tensors` without executing pickled code.

    Raises `SyncError` for anything else.
    """
    try:
        rows = _Reader(BytesIO(b64decode(text, validate=True))).load()
    except Exception as error:
        # Of a body that anyone may send, the unpickler can raise anything.
        raise SyncError(f"the request body has no tensors packed by Turnwright: {error}") from error
    if not isinstance(rows, list) or not all(_is_named(row) for row in rows):
        raise SyncError("the request body has no named tensors")
    return rows


def _is_named(row: Any) -> bool:
    return (
        isinstance(row, tuple)
        and len(row) == 2
        and isinstance(row[0], str)
        and isinstance(row[1], torch.Tensor)
    )


class _Reader(pickle.Unpickler):
    """Unpickler that allows only `OPENS`, and loads its argument with `weights_only`."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) != OPENS:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        return lambda raw: torch.load(BytesIO(raw), map_location="cpu", weights_only=True)
