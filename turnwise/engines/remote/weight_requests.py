"""Weight-update requests of SGLang and vLLM.

A process group lives for one update. A permanent one would be server state that a restart changes unnoticed, and SGLang exits
when it receives the name of an unknown group.
"""

from __future__ import annotations

import asyncio
from typing import Any

from turnwise.engines.remote.base import CONTROL_S, RemoteEngine
from turnwise.engines.remote.weight_sync import GroupTransfer, RequestTransfer, WeightGroup, run_together, suppress_errors
from turnwise.errors import EngineError, SyncError

UNFINISHED = "{}-unfinished"
"""Name of weights during a transfer: no request expects it, so responses from partial weights are rejected."""
TRANSFER = "start it with `turnwise engines start vllm --group`, which enables weights by process group"
SPARE_S = 10.0
"""Seconds that a server's response may arrive after our side timed out; it is the more informative error."""


async def send_group_to_sglang(engine: RemoteEngine, transfer: GroupTransfer, ranks: int) -> None:
    """Send weights to a paused SGLang server.

    Raises:
        SyncError, EngineError: when the transfer is incomplete; the server then reports its weights as unfinished.
    """
    http, seconds = engine.http, transfer.seconds + SPARE_S
    group = transfer.group(engine.url, ranks)
    try:
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
                    body |= {"flush_cache": True, "weight_version": str(transfer.version)}
                asked = http.post("/update_weights_from_distributed", body, seconds)
                check_success(await run_together(asked, group.send(index), group), engine)
        finally:
            await suppress_errors(http.post("/destroy_weights_update_group", {"group_name": group.name}, CONTROL_S))
    finally:
        group.close()


def _rendezvous(group: WeightGroup) -> dict[str, Any]:
    """Return where and how a server's ranks join a group."""
    where = {"master_address": group.address, "master_port": group.port, "rank_offset": 1, "world_size": group.world}
    return where | {"group_name": group.name, "backend": group.backend}


def check_success(response: Any, engine: RemoteEngine) -> None:
    """Check the response of an SGLang server.

    Raises:
        SyncError: when it reports no success.
    """
    if not (isinstance(response, dict) and response.get("success")):
        raise SyncError(f"{engine.display_name} reports failure: {response}")


async def send_group_to_vllm(engine: RemoteEngine, transfer: GroupTransfer, ranks: int) -> None:
    """Send weights to a paused vLLM server.

    Raises:
        SyncError, EngineError: when the transfer is incomplete; the server then reports its weights as unfinished.
    """
    http, seconds = engine.http, transfer.seconds + SPARE_S
    group = transfer.group(engine.url, ranks)
    try:
        await http.post("/update_weight_version", {"new_version": UNFINISHED.format(transfer.version)}, CONTROL_S)
        meeting = _rendezvous(group)
        await run_together(http.post("/init_weight_transfer_engine", {"init_info": meeting}, seconds), group.connect(), group)
        try:
            await _start_update(engine, seconds)
            for index, bucket in enumerate(transfer.buckets):
                body = {"names": bucket.names, "dtype_names": bucket.dtypes, "shapes": bucket.shapes}
                await run_together(http.post("/update_weights", {"update_info": body}, seconds), group.send(index), group)
            await http.post("/finish_weight_update", {"weight_version": str(transfer.version)}, seconds)
        finally:
            await suppress_errors(http.post("/shutdown_weight_transfer_engine", {}, CONTROL_S))
    finally:
        group.close()


async def _start_update(engine: RemoteEngine, seconds: float) -> None:
    """Start an update; first end an interrupted one."""
    try:
        await engine.http.post("/start_weight_update", {}, seconds)
    except EngineError:
        await suppress_errors(engine.http.post("/finish_weight_update", {}, seconds))
        await engine.http.post("/start_weight_update", {}, seconds)


async def send_requests_to_sglang(engine: RemoteEngine, transfer: RequestTransfer, ranks: int) -> None:
    """Send weights to a paused SGLang server in request bodies.

    Each of its ranks reads its own copy of a body and keeps its part of the tensors.

    Raises:
        SyncError, EngineError: when the transfer is incomplete; the server then reports its weights as unfinished.
    """
    name = UNFINISHED.format(transfer.version)
    check_success(await engine.http.post("/update_weight_version", {"new_version": name}, CONTROL_S), engine)
    for index in range(transfer.request_count):
        text = await asyncio.to_thread(transfer.encode_body, index)
        body: dict[str, Any] = {"serialized_named_tensors": [text] * ranks, "flush_cache": False}
        if index == transfer.request_count - 1:
            body |= {"flush_cache": True, "weight_version": str(transfer.version)}
        check_success(await engine.http.post("/update_weights_from_tensor", body, transfer.seconds), engine)
