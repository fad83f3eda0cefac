"""Requests of user code: those for the rollout servers go to the engine of the episode."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from typing import Any

from turnwright_compat.slime.engine import server_of


async def post(url: str, payload: Any, max_retries: int = 60, headers: Any = None, **_: Any) -> Any:
    """Send JSON and return the JSON of the answer; the address of the servers is the engine of this episode."""
    if (server := server_of(url)) is not None:
        return await server.answer(url, payload)
    return await asyncio.to_thread(_send, url, payload, headers)


async def get(url: str, **_: Any) -> Any:
    """Return the JSON at an address."""
    return await asyncio.to_thread(_send, url, None, None)


def _send(url: str, payload: Any, headers: Any) -> Any:
    body = None if payload is None else json.dumps(payload).encode()
    asked = urllib.request.Request(url, body, {"Content-Type": "application/json", **(headers or {})})
    if asked.type not in ("http", "https"):
        raise ValueError(f"{url}: neither http nor https")
    with urllib.request.urlopen(asked, timeout=600) as answer:
        return json.load(answer)
