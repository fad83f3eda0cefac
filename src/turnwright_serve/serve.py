"""Serve a model directory over HTTP: the local engine, and the model's logprobs of given ids.

`make_service` builds both around one model, `serve` answers requests until it is cancelled. The
routes are in `server/routes.py`; weights that arrive by a process group or in requests are
collected by a `WeightReceiver`, in chunks by a `WeightRelay`.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from turnwright.config import ModelConfig, RunConfig
from turnwright.engines.local import LocalEngine
from turnwright.engines.scoring import IdScores, ScoreRequest
from turnwright.engines.tokens import LOOPBACK, path_of
from turnwright.errors import ConfigError, SyncError
from turnwright.media import MediaStore
from turnwright.renderers.vision import PixelCache, VisionProcessor
from turnwright.training.forward.forward import ForwardPass
from turnwright.training.model.models import device_and_dtype, load
from turnwright.training.model.packed import quant_of
from turnwright.training.model.quantize import (
    OnGrid,
    grid_of,
    quantize_for_sampling,
    quantized_names,
)
from turnwright.training.model.weight_export import unique_weights
from turnwright.training.score_ids import score_ids
from turnwright.training.setup import load_model_and_renderer, model_config
from turnwright.training.weight_transfer import Rows
from turnwright.types import Image, MediaPlacement
from turnwright_serve.weight_receiver import WeightReceiver

if TYPE_CHECKING:
    from turnwright_serve.server import EngineService, Formats, JsonHttpServer
    from turnwright_serve.server.routes import PlaceImages


CACHE_GIB = 4.0
"""Memory for keys and values in GiB, unless another one is given."""


def make_service(
    source: Path,
    *,
    context: int | None = None,
    device: str = "auto",
    speculate: int = 0,
    cache_gib: float = CACHE_GIB,
) -> tuple[EngineService, LocalEngine]:
    """Build the service of a model and its engine, which the caller closes.

    Weights change through the formats' routes, from a directory or a process group; an update
    applies completely or not at all.
    """
    try:
        from turnwright_serve.server import EngineService
    except ImportError as error:
        raise ConfigError(
            f"turnwright serve needs starlette and uvicorn ({error.name} is missing): pip install "
            "'turnwright[serve]'"
        ) from None

    # The model as the run that wrote it samples from it.
    quant = quant_of(source)
    grid = grid_of(quant)
    config = model_config(
        RunConfig(model=ModelConfig(path=str(source), device=device), quant=quant)
    )
    model, renderer = load_model_and_renderer(source, source, config)
    on_grid = None if grid is None else OnGrid(grid, quantized_names(model, quant))
    model = quantize_for_sampling(model, quant)
    engine = LocalEngine(
        model, renderer=renderer, context=context, speculate=speculate, cache_gib=cache_gib
    )
    pixels = None if renderer.vision is None else _pixels(engine, renderer.vision)
    own_weights = model.state_dict()
    unique = frozenset(name for name, _ in unique_weights(model))
    forward = ForwardPass(model)
    # Scoring and weight updates run in threads.
    lock = threading.Lock()

    def score(request: ScoreRequest) -> IdScores:
        with lock:
            return score_ids(forward, request, pixels)

    async def load_rows(rows: Rows) -> None:
        def put() -> None:
            with lock:
                # Another checkpoint of the run has full-precision weights.
                weights = dict(rows if on_grid is None else on_grid(iter(rows)))
                model.load_state_dict(weights, strict=False)

        await asyncio.to_thread(put)
        await engine.update(list(unique_weights(model)), engine.version + 1)

    async def load_directory(directory: Path) -> None:
        def read() -> Rows:
            rows = stored_rows(directory, own_weights, unique)
            if rows is not None:
                return rows

            other, _ = load(directory, *device_and_dtype(config))
            weights = other.state_dict()
            for name in sorted(own_weights.keys() | weights.keys()):
                in_both = name in own_weights and name in weights
                if not in_both or own_weights[name].shape != weights[name].shape:
                    raise SyncError(f"{directory}: {name} does not fit the served model")
            return list(weights.items())

        try:
            rows = await asyncio.to_thread(read)
        except SyncError:
            raise
        except Exception as error:
            # safetensors, transformers and torch have their own errors.
            raise SyncError(f"{directory}: {error}") from error
        await load_rows(rows)

    app = EngineService(
        engine,
        model=str(source),
        score=score,
        load=load_directory,
        receiver=WeightReceiver(
            {name: tensor.shape for name, tensor in own_weights.items()},
            unique,
            load_rows,
            next(model.parameters()).device,
        ),
        decode=renderer.decode,
        end_ids=frozenset(renderer.stop_ids),
        place=None if pixels is None else _image_finder(pixels),
        experts=engine.records_experts,
    )
    return app, engine


def stored_rows(directory: Path, own: Mapping[str, Tensor], unique: frozenset[str]) -> Rows | None:
    """Read the weights of a directory that holds a model's tensors under their own names, `unique`
    ones at least, without building a second model; None for any other layout: an adapter, packed
    weights, other names or shapes."""
    stored: dict[str, Tensor] = {}
    try:
        for file in directory.glob("model*.safetensors"):
            stored |= load_file(file)
    except (OSError, SafetensorError):
        return None  # named where the directory is loaded as a model

    if not unique <= stored.keys() <= own.keys():
        return None
    if any(stored[name].shape != own[name].shape for name in stored):
        return None
    return list(stored.items())


def _pixels(engine: LocalEngine, vision: VisionProcessor) -> PixelCache:
    """Give an engine a store of images: a temporary directory, since replies may wait for longer
    than any cache holds."""
    directory = Path(tempfile.mkdtemp(prefix="turnwright-images-"))
    weakref.finalize(engine, shutil.rmtree, directory, ignore_errors=True)
    pixels = PixelCache(vision, MediaStore(directory))
    engine.add_pixel_source(pixels)
    return pixels


def _image_finder(pixels: PixelCache) -> PlaceImages:
    """Return what stores data URLs and finds them among ids."""

    def place(
        ids: Sequence[int], urls: Sequence[str]
    ) -> tuple[list[int], tuple[MediaPlacement, ...]]:
        return pixels.vision.place(ids, [pixels.store.put(Image(url)) for url in urls])

    return place


async def serve(
    source: Path,
    formats: Formats,
    on_start: Callable[[str], None],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str = "",
    context: int | None = None,
    device: str = "auto",
    speculate: int = 0,
    weights_dir: Path | None = None,
    cache_gib: float = CACHE_GIB,
    keyless: bool = False,
) -> None:
    """Answer requests until cancelled; once the server answers, `on_start` receives a line that
    starts with the URL.

    Every request needs the `token`. Without it, other machines cannot connect (`ConfigError`), and
    the server creates a token, and stores it where this user's clients find it; with `keyless`,
    requests that change nothing do not need it. Weights that arrive in chunks (`engine.tree`) are
    kept in `weights_dir`, by default a temporary directory.
    """
    if host not in LOOPBACK and not token:
        raise ConfigError(
            f"--host {host}: other machines could change the weights; set TURNWRIGHT_SERVE_TOKEN, "
            "required of clients"
        )
    if token and keyless:
        raise ConfigError(
            "--no-key: TURNWRIGHT_SERVE_TOKEN is set, which every request needs; unset it, or "
            "leave out --no-key"
        )

    app, engine = make_service(
        source, context=context, device=device, speculate=speculate, cache_gib=cache_gib
    )
    from turnwright_serve.server import JsonHttpServer
    from turnwright_serve.sharing import WeightRelay

    temporary = tempfile.TemporaryDirectory(
        prefix="turnwright-weights-", ignore_cleanup_errors=True
    )
    relay = WeightRelay(weights_dir or Path(temporary.name))
    routes = app.routes(formats) | relay.routes()
    server = JsonHttpServer(routes, host=host, port=port, token=token, keyless=keyless)
    try:
        try:
            await server.start()
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"{host}:{port} is not available ({getattr(error, 'strerror', None) or error}); "
                "choose another --port, or 0 for a free one"
            ) from None
        on_start(f"{server.url}  ({_access(server, keyless)}; press Ctrl-C to stop)")
        await server.run()
    finally:
        await server.close()
        await relay.close()
        await engine.close()
        temporary.cleanup()


def _access(server: JsonHttpServer, keyless: bool) -> str:
    """Return how requests to a server get access."""
    if not server.published:
        return "every request needs the key of TURNWRIGHT_SERVE_TOKEN"
    file = path_of(server.port)
    if keyless:
        return f"any local user may sample; changes need the key in {file}"
    key = f"authorization: Bearer {server.token}"
    return f"local connections only; {key}, which is also in {file} for this user's clients"
