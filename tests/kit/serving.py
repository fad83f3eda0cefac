"""`turnwright serve` of a model in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from turnwright_serve import make_service
from turnwright_serve.server import JsonHttpServer


@asynccontextmanager
async def served(
    directory: Path, kind: str, *, context: int, token: str = "", speculate: int = 0
) -> AsyncIterator[Any]:
    """Yield the application of a server and its address."""
    app, engine = make_service(directory, context=context, device="cpu", speculate=speculate)
    server = JsonHttpServer(app.routes(kind), host="127.0.0.1", port=0, token=token)
    await server.start()
    try:
        yield app, server.url
    finally:
        await server.close()
        await engine.close()
