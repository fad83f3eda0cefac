"""Servers that sleep while a trainer has the device: what is told of it, and asked before."""

from __future__ import annotations

import asyncio

from turnwise.engine.remote.http import HttpClient
from turnwise.errors import EngineError

ASLEEP = "asleep"
"""What SGLang is told to call its weights while it has none: it has no other word for that, and a server that was started again
meanwhile calls them otherwise."""
IDLE_S = 30.0
"""For a server that was paused to have nothing left to do."""


async def wait_until_idle(http: HttpClient) -> None:
    """Wait until an SGLang server has nothing to do: asked to release memory before, it ends itself.

    Raises:
        EngineError: when it still has, after `IDLE_S`.
    """
    fault: EngineError | None = None
    for _ in range(int(IDLE_S / 0.1)):
        try:
            await http.post_status("/flush_cache", {}, IDLE_S)  # refused while requests are left
        except EngineError as error:
            fault = error
        else:
            return
        await asyncio.sleep(0.1)
    raise EngineError(f"it is paused, and has requests still after {IDLE_S:g} s: {fault}")
