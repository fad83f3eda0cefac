"""Transfer of new weights to a server: from disk (full weights or an adapter), by process group, or in requests.

A process group lives for one update. A permanent one would be server state that a restart changes unnoticed, and SGLang exits
when it receives the name of an unknown group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from turnwright.config.schema import InFlight
from turnwright.engines.remote.http import CONTROL_S, HttpClient
from turnwright.errors import EngineError, SyncError

CLEANUP_TIMEOUT_S = 10.0
FINAL_REQUEST_TIMEOUT_S = 5.0
"""Seconds for a server to report why it left a group after our side failed."""
UNFINISHED = "{}-unfinished"
"""Name of weights during a transfer: no request expects it, so responses from partial weights are rejected."""
TRANSFER = "start it with `turnwright engines start vllm --group`, which enables weights by process group"
SPARE_S = 10.0
"""Seconds that a server's response may arrive after our side timed out; it is the more informative error."""


class UpdatedServer(Protocol):
    """What an update of weights needs of a server's client."""

    http: HttpClient
    url: str
    in_flight: InFlight

    @property
    def display_name(self) -> str:
        """Name of the server in messages."""

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
    """LoRA adapter in a directory that servers see under the same path; servers keep their base model."""

    directory: Path
    version: int
    is_adapter: ClassVar[bool] = True

    async def send_to(self, engine: UpdatedServer) -> None:
        await engine.use_adapter(self.directory, self.version)


class SharedWeights(WeightsSource, Protocol):
    """Weights in a directory that nodes have or fetch."""

    async def directory_on(self, host: str) -> Path:
        """Return the directory on a node, once it is there."""


class WeightSharing(Protocol):
    """Sends directories of weights to the nodes of servers."""

    async def share(self, source: DiskWeights | DiskAdapter, urls: Sequence[str], *, base: bool = False) -> SharedWeights:
        """Return a source that sends a directory through the nodes of the servers at these URLs; a `base` model stays there."""

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
        """Return one body in base64: a pickle that `torch.storage._load_from_bytes` turns into a list of (name, tensor)."""


class WeightPacker(Protocol):
    """Packs weights that are sent without a disk."""

    def pack(self, weights: Iterable[tuple[str, Any]], version: int) -> tuple[WeightsSource, str]:
        """Return a source that keeps copies of the weights, (Hugging Face name, torch tensor) pairs, and their fingerprint."""


async def run_together(request: Awaitable[Any], transfer: Awaitable[None], group: WeightGroup) -> Any:
    """Run a request to a server and our side of its group transfer concurrently; return the response when both are done.

    Raises `SyncError` when our side failed, with the server's error if one arrives soon; else as the request.
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


async def send_group_to_sglang(engine: UpdatedServer, transfer: GroupTransfer, ranks: int) -> None:
    """Send weights to a paused SGLang server."""
    http, seconds = engine.http, transfer.seconds + SPARE_S
    with closing(transfer.group(engine.url, ranks)) as group:
        name = UNFINISHED.format(transfer.version)
        check_success(await http.post("/update_weight_version", {"new_version": name}, CONTROL_S), engine)
        meeting = _rendezvous(group)
        check_success(
            await run_together(http.post("/init_weights_update_group", meeting, seconds), group.connect(), group), engine
        )
        try:
            for index, bucket in enumerate(transfer.buckets):
                body: dict[str, Any] = {"names": bucket.names, "dtypes": bucket.dtypes, "shapes": bucket.shapes}
                body |= {"group_name": group.name, "flush_cache": False}
                if index == len(transfer.buckets) - 1:
                    body |= {"flush_cache": engine.in_flight == "recompute", "weight_version": str(transfer.version)}
                asked = http.post("/update_weights_from_distributed", body, seconds)
                check_success(await run_together(asked, group.send(index), group), engine)
        finally:
            await suppress_errors(http.post("/destroy_weights_update_group", {"group_name": group.name}, CONTROL_S))


def _rendezvous(group: WeightGroup) -> dict[str, Any]:
    where = {"master_address": group.address, "master_port": group.port, "rank_offset": 1, "world_size": group.world}
    return where | {"group_name": group.name, "backend": group.backend}


def check_success(response: Any, engine: UpdatedServer) -> None:
    """Check the response of an SGLang server."""
    if not (isinstance(response, dict) and response.get("success")):
        raise SyncError(f"{engine.display_name} reports failure: {response}")


async def send_group_to_vllm(engine: UpdatedServer, transfer: GroupTransfer, ranks: int) -> None:
    """Send weights to a paused vLLM server."""
    http, seconds = engine.http, transfer.seconds + SPARE_S
    with closing(transfer.group(engine.url, ranks)) as group:
        await http.post("/update_weight_version", {"new_version": UNFINISHED.format(transfer.version)}, CONTROL_S)
        meeting = _rendezvous(group)
        await run_together(http.post("/init_weight_transfer_engine", {"init_info": meeting}, seconds), group.connect(), group)
        try:
            try:
                await http.post("/start_weight_update", {}, seconds)
            except EngineError:  # an interrupted update is ended first
                await suppress_errors(http.post("/finish_weight_update", {}, seconds))
                await http.post("/start_weight_update", {}, seconds)
            for index, bucket in enumerate(transfer.buckets):
                body = {"names": bucket.names, "dtype_names": bucket.dtypes, "shapes": bucket.shapes}
                await run_together(http.post("/update_weights", {"update_info": body}, seconds), group.send(index), group)
            await http.post("/finish_weight_update", {"weight_version": str(transfer.version)}, seconds)
        finally:
            await suppress_errors(http.post("/shutdown_weight_transfer_engine", {}, CONTROL_S))


async def send_requests_to_sglang(engine: UpdatedServer, transfer: RequestTransfer, ranks: int) -> None:
    """Send weights to a paused SGLang server in requests; each rank reads its own copy and keeps its part of the tensors."""
    name = UNFINISHED.format(transfer.version)
    check_success(await engine.http.post("/update_weight_version", {"new_version": name}, CONTROL_S), engine)
    for index in range(transfer.request_count):
        text = await asyncio.to_thread(transfer.encode_body, index)
        body: dict[str, Any] = {"serialized_named_tensors": [text] * ranks, "flush_cache": False}
        if index == transfer.request_count - 1:
            body |= {"flush_cache": engine.in_flight == "recompute", "weight_version": str(transfer.version)}
        check_success(await engine.http.post("/update_weights_from_tensor", body, transfer.seconds), engine)
