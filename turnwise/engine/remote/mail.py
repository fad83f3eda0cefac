"""New weights in the bodies of requests: what SGLang is told."""

from __future__ import annotations

import asyncio
from typing import Any

from turnwise.engine.remote.base import CONTROL_S, RemoteEngine
from turnwise.engine.remote.groups import UNFINISHED, check_success
from turnwise.engine.remote.ways import RequestTransfer


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
