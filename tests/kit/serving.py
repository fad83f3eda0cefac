"""`turnwright serve` of a model in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from turnwright.engines.remote import SglangEngine, VllmEngine
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


TEXTS = [
    f"code of amber {n}\nlookup birch\nsee cedar {n * 7 % 10}\nanswer {n % 10}" for n in range(60)
]
PROMPT = list(range(10, 30))
CLIENTS = {"vllm": VllmEngine, "sglang": SglangEngine}


def run(directory, kind, work, token="", speculate=0, context=200, **options):
    """Do work(client, app, url) beside a server."""

    async def all_of_it():
        async with served(directory, kind, context=context, token=token, speculate=speculate) as (
            app,
            url,
        ):
            client = CLIENTS[kind](url, **options)
            try:
                async with asyncio.timeout(100):
                    return await work(client, app, url)
            finally:
                await client.close()

    return asyncio.run(all_of_it())


def beginning(app, count=1):
    """An event that is set as the next replies begin, together: a poll could find that
    they are over already."""
    begun, generate, coming = asyncio.Event(), app.engine.generate, []

    async def noted(request):
        coming.append(request)
        if len(coming) == count:
            begun.set()
        await begun.wait()
        return await generate(request)

    app.engine.generate = noted
    return begun
