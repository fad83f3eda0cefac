"""A model directory behind HTTP: the local engine, and what its weights say of ids that are given."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from turnwise.config import ModelConfig
from turnwise.engine.local import LocalEngine
from turnwise.engine.serve import Formats, Served, Server
from turnwise.errors import ConfigError, SyncError, TurnwiseError
from turnwise.train.groups.receive import Receiver
from turnwise.train.groups.send import Rows
from turnwise.train.model.models import load, place
from turnwise.train.served import expected, unique
from turnwise.train.setup import load_both

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def served(source: Path, *, context: int | None = None, device: str = "auto", speculate: int = 0) -> tuple[Served, LocalEngine]:
    """A model as what answers requests, and its engine, which is to be closed.

    Its weights change by the routes of the formats, from a directory or a process group, and take effect whole or not at all.

    Args:
        context, speculate: as of `LocalEngine`.

    Raises:
        ModelError, TemplateError, ConfigError, EngineError: when it cannot be used.
    """
    config = ModelConfig(path=str(source), device=device)
    model, renderer = load_both(source, source, config)
    engine = LocalEngine(model, renderer=renderer, context=context, speculate=speculate)

    async def take(directory: Path) -> None:
        def read() -> None:
            fresh, _ = load(directory, *place(config))
            own = model.state_dict()
            for name, tensor in unique(fresh):
                if name not in own or own[name].shape != tensor.shape:
                    raise SyncError(f"{directory}: {name} does not fit the model that is served")
            model.load_state_dict(fresh.state_dict(), strict=False)

        try:
            await asyncio.to_thread(read)
        except SyncError:
            raise
        except TurnwiseError as error:
            raise SyncError(str(error)) from error
        await engine.update(list(unique(model)), engine.version + 1)

    async def took(rows: Rows) -> None:
        await asyncio.to_thread(model.load_state_dict, dict(rows), strict=False)
        await engine.update(list(unique(model)), engine.version + 1)

    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}

    app = Served(
        engine,
        model=str(source),
        score=expected(model),
        load=take,
        receiver=Receiver(shapes, frozenset(name for name, _ in unique(model)), took, next(model.parameters()).device),
        decode=renderer.decode,
        end_ids=frozenset(renderer.stop_ids),
    )
    return app, engine


async def serve(
    source: Path,
    formats: Formats,
    told: Callable[[str], None],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str = "",
    context: int | None = None,
    device: str = "auto",
    speculate: int = 0,
) -> None:
    """Answer requests until cancelled.

    Args:
        told: hears the URL once it answers.
        token: what callers have to send; needed where others than this machine can call.
        context, device, speculate: as of `served`.

    Raises:
        ConfigError: for an address beyond this machine without a token, or one that cannot be had.
    """
    if host not in LOOPBACK and not token:
        raise ConfigError(f"--host {host}: others could change the weights; set TURNWISE_SERVE_TOKEN, which they have to send")
    app, engine = served(source, context=context, device=device, speculate=speculate)
    server = Server(app.routes(formats), host=host, port=port, token=token)
    try:
        try:
            await server.start()
        except OSError as error:
            raise ConfigError(
                f"{host}:{port} cannot be had ({error.strerror}); choose another --port, 0 takes a free one"
            ) from None
        told(server.url)
        await server.run()
    finally:
        await server.close()
        await engine.close()
