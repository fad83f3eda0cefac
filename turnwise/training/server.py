"""A model directory behind HTTP: the local engine, and what its weights say of ids that are given."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from turnwise.config import ModelConfig
from turnwise.engines.local import LocalEngine
from turnwise.engines.tokens import LOOPBACK, path_of
from turnwise.errors import ConfigError, SyncError
from turnwise.training.model.models import device_and_dtype, load
from turnwise.training.setup import load_model_and_renderer, score_with_model, unique_weights
from turnwise.training.weight_transfer import GroupWeightReceiver, Rows

if TYPE_CHECKING:
    from turnwise.engines.server import EngineService, Formats


def make_service(
    source: Path, *, context: int | None = None, device: str = "auto", speculate: int = 0
) -> tuple[EngineService, LocalEngine]:
    """A model as what answers requests, and its engine, which is to be closed.

    Its weights change by the routes of the formats, from a directory or a process group, and take effect whole or not at all.

    Args:
        context, speculate: as of `LocalEngine`.

    Raises:
        ModelError, TemplateError, ConfigError, EngineError: when it cannot be used.
    """
    try:
        from turnwise.engines.server import EngineService
    except ImportError as error:
        raise ConfigError(
            f"turnwise serve needs starlette and uvicorn ({error.name} is missing): pip install 'turnwise[serve]'"
        ) from None
    config = ModelConfig(path=str(source), device=device)
    model, renderer = load_model_and_renderer(source, source, config)
    engine = LocalEngine(model, renderer=renderer, context=context, speculate=speculate)
    own, held = model.state_dict(), threading.Lock()  # the model scores and takes weights in threads of their own

    def score(ids: Sequence[int]) -> list[float]:
        with held:
            found: list[float] = score_with_model(model)(ids)
            return found

    async def take(directory: Path) -> None:
        def read() -> None:
            fresh, _ = load(directory, *device_and_dtype(config))
            weights = fresh.state_dict()
            for name in sorted(own.keys() | weights.keys()):
                if name not in own or name not in weights or own[name].shape != weights[name].shape:
                    raise SyncError(f"{directory}: {name} does not fit the model that is served")
            with held:
                model.load_state_dict(weights)

        try:
            await asyncio.to_thread(read)
        except SyncError:
            raise
        except Exception as error:  # whatever stands there: safetensors, transformers and torch have errors of their own
            raise SyncError(f"{directory}: {error}") from error
        await engine.update(list(unique_weights(model)), engine.version + 1)

    async def took(rows: Rows) -> None:
        def put() -> None:
            with held:
                model.load_state_dict(dict(rows), strict=False)

        await asyncio.to_thread(put)
        await engine.update(list(unique_weights(model)), engine.version + 1)

    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}

    app = EngineService(
        engine,
        model=str(source),
        score=score,
        load=take,
        receiver=GroupWeightReceiver(
            shapes, frozenset(name for name, _ in unique_weights(model)), took, next(model.parameters()).device
        ),
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
        told: hears a line that begins with the URL, once it answers.
        token: what callers have to send in every request; needed where others than this machine can call. Without one, the
            server asks for a token of its own where something is changed, and keeps it where this user's clients find it.
        context, device, speculate: as of `served`.

    Raises:
        ConfigError: for an address beyond this machine without a token, or one that cannot be had.
    """
    if host not in LOOPBACK and not token:
        raise ConfigError(f"--host {host}: others could change the weights; set TURNWISE_SERVE_TOKEN, which they have to send")
    app, engine = make_service(source, context=context, device=device, speculate=speculate)
    from turnwise.engines.server import JsonHttpServer

    server = JsonHttpServer(app.routes(formats), host=host, port=port, token=token)
    try:
        try:
            await server.start()
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"{host}:{port} cannot be had ({getattr(error, 'strerror', None) or error}); choose another --port, 0 takes a "
                "free one"
            ) from None
        kept = f"; what changes anything takes the token in {path_of(server.port)}" if server.published else ""
        told(f"{server.url}  ({'this machine' if server.published else 'who knows the token'} alone{kept}; Ctrl-C ends it)")
        await server.run()
    finally:
        await server.close()
        await engine.close()
