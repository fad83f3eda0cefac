"""Weight-update requests of SGLang and vLLM.

New weights by process group: what SGLang and vLLM are told while they are sent.

A group is made for one update and ended with it. Kept, it would be the one thing about a server that a restart changes
unseen, and SGLang ends itself when it is told of a group that it does not know.
"""

from __future__ import annotations

import asyncio
from typing import Any

from turnwise.engines.remote.base import CONTROL_S, RemoteEngine
from turnwise.engines.remote.weight_sync import GroupTransfer, RequestTransfer, run_together, suppress_errors
from turnwise.errors import EngineError, SyncError

UNFINISHED = "{}-unfinished"
"""What weights are called while they are on their way: no request is meant for them, so no answer of theirs is taken."""
TRANSFER = "start it as `turnwise engines start vllm` does, which tells it how to take weights by process group"
SPARE_S = 10.0
"""A server's answer may come so much later than our side of a group gives up, which tells more."""


async def send_group_to_sglang(engine: RemoteEngine, shipment: GroupTransfer, ranks: int) -> None:
    """Send weights to an SGLang server, which is paused.

    Raises:
        SyncError, EngineError: when they did not all arrive; the server then calls what it has unfinished.
    """
    http, seconds = engine.http, shipment.seconds + SPARE_S
    group = shipment.group(engine.url, ranks)
    try:
        name = UNFINISHED.format(shipment.version)
        check_success(await http.post("/update_weight_version", {"new_version": name}, CONTROL_S), engine)
        meeting = {"master_address": group.address, "master_port": group.port, "rank_offset": 1, "world_size": group.world}
        meeting |= {"group_name": group.name, "backend": group.backend}
        check_success(
            await run_together(http.post("/init_weights_update_group", meeting, seconds), group.connect(), group), engine
        )
        try:
            for index, bucket in enumerate(shipment.buckets):
                body: dict[str, Any] = {"names": bucket.names, "dtypes": bucket.dtypes, "shapes": bucket.shapes}
                body |= {"group_name": group.name, "flush_cache": False}
                if index == len(shipment.buckets) - 1:
                    body |= {"flush_cache": True, "weight_version": str(shipment.version)}
                asked = http.post("/update_weights_from_distributed", body, seconds)
                check_success(await run_together(asked, group.send(index), group), engine)
        finally:
            await suppress_errors(http.post("/destroy_weights_update_group", {"group_name": group.name}, CONTROL_S))
    finally:
        group.close()


def check_success(said: Any, engine: RemoteEngine) -> None:
    """See that an SGLang server did what it was asked.

    Raises:
        SyncError: when it says otherwise.
    """
    if not (isinstance(said, dict) and said.get("success")):
        raise SyncError(f"{engine.display_name} answered {said}")


async def send_group_to_vllm(engine: RemoteEngine, shipment: GroupTransfer, ranks: int) -> None:
    """Send weights to a vLLM server, which is paused.

    Raises:
        SyncError, EngineError: when they did not all arrive; the server then calls what it has unfinished.
    """
    http, seconds = engine.http, shipment.seconds + SPARE_S
    group = shipment.group(engine.url, ranks)
    try:
        await http.post("/update_weight_version", {"new_version": UNFINISHED.format(shipment.version)}, CONTROL_S)
        meeting = {"master_address": group.address, "master_port": group.port, "rank_offset": 1, "world_size": group.world}
        meeting |= {"group_name": group.name, "backend": group.backend}
        await run_together(http.post("/init_weight_transfer_engine", {"init_info": meeting}, seconds), group.connect(), group)
        try:
            await _begin(engine, seconds)
            for index, bucket in enumerate(shipment.buckets):
                body = {"names": bucket.names, "dtype_names": bucket.dtypes, "shapes": bucket.shapes}
                await run_together(http.post("/update_weights", {"update_info": body}, seconds), group.send(index), group)
            await http.post("/finish_weight_update", {"weight_version": str(shipment.version)}, seconds)
        finally:
            await suppress_errors(http.post("/shutdown_weight_transfer_engine", {}, CONTROL_S))
    finally:
        group.close()


async def _begin(engine: RemoteEngine, seconds: float) -> None:
    """Begin an update; one that broke off is ended first."""
    try:
        await engine.http.post("/start_weight_update", {}, seconds)
    except EngineError:
        await suppress_errors(engine.http.post("/finish_weight_update", {}, seconds))
        await engine.http.post("/start_weight_update", {}, seconds)


async def send_requests_to_sglang(engine: RemoteEngine, mail: RequestTransfer, ranks: int) -> None:
    """Send weights to an SGLang server, which is paused.

    Each of its ranks reads a text of its own and keeps its part of the tensors, so every text is sent as often.

    Raises:
        SyncError, EngineError: when they did not all arrive; the server then calls what it has unfinished.
    """
    name = UNFINISHED.format(mail.version)
    check_success(await engine.http.post("/update_weight_version", {"new_version": name}, CONTROL_S), engine)
    for index in range(mail.request_count):
        text = await asyncio.to_thread(mail.encode_body, index)
        body: dict[str, Any] = {"serialized_named_tensors": [text] * ranks, "flush_cache": False}
        if index == mail.request_count - 1:
            body |= {"flush_cache": True, "weight_version": str(mail.version)}
        check_success(await engine.http.post("/update_weights_from_tensor", body, mail.seconds), engine)
