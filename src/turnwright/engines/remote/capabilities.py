"""Probe what a server supports: kind, routes, versions, and a few tokens with echo and logprobs.

`connect` returns the client of a server of unknown kind; `probe_server` finds what it supports,
which `turnwright check` shows. What training needs is `ServerCapabilities.trainable`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from turnwright.engines.protocols import Request
from turnwright.engines.remote.http import CONTROL_S, HttpClient
from turnwright.engines.remote.llamacpp import LlamaCppEngine
from turnwright.engines.remote.remote_engine import CANARY, RemoteEngine
from turnwright.engines.remote.sglang import SglangEngine
from turnwright.engines.remote.vllm import GENERATE, VllmEngine
from turnwright.errors import EngineError, EngineUnavailable, SyncError
from turnwright.types import Sampling

KINDS: dict[str, type[RemoteEngine]] = {
    "vllm": VllmEngine,
    "sglang": SglangEngine,
    "llamacpp": LlamaCppEngine,
}
PROBE_TEMPERATURE = 2.0
"""Temperature of the single-id draws that determine which distribution logprobs are of."""
PROBE_DRAWS = 8
"""Number of these draws."""


@dataclass(slots=True)
class ServerCapabilities:
    """Measured capabilities of one server."""

    url: str
    kind: str
    server_version: str = ""
    model: str | None = None
    context: int | None = None
    routes: list[str] = field(default_factory=list)
    """Supported routes among those used here."""
    ids_in: bool = False
    """Whether it takes ids and echoes them or their count."""
    ids_out: bool = False
    logprobs: bool = False
    """Whether every sampled id has one."""
    distribution: str = "unknown"
    """Distribution of the logprobs: `sampled` (temperature and bans included), `model` (before
    them), or `unknown`."""
    logprob_error: float | None = None
    """Largest |sampled logprob - server's score of the same id| in nats, at temperature 1; None
    without scores."""
    weights: str | None = None
    """The server's name for its weights."""
    updates: bool = False
    """Whether it can load new weights from a disk."""
    aborts: bool = False
    lora: bool = False
    images: bool = False
    drafts: list[int] | None = None
    """Total drafted and accepted ids since the server started; None without speculative decoding or
    totals."""
    faults: list[str] = field(default_factory=list)

    @property
    def trainable(self) -> bool:
        """Whether its samples are trainable."""
        has_tokens = self.ids_in and self.ids_out and self.logprobs
        return has_tokens and self.distribution == "sampled" and not self.faults

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self) | {"trainable": self.trainable}

    def findings(self) -> Iterator[tuple[bool | None, str]]:
        """Yield lines as (passed, text); passed is None for information."""
        version = self.server_version or "(version unknown)"
        yield None, f"{self.kind} {version} at {self.url}, model {self.model}"
        routes = ", ".join(self.routes) or "unknown"
        yield None, f"context {self.context or 'unknown'}; routes {routes}"

        # What training needs.
        yield self.ids_in, "ids in: the echoed prompt matches the prompt sent"
        yield self.ids_out, "ids out: sampled ids are returned as ids"
        yield self.logprobs, "logprobs: one finite value per sampled id"
        descriptions = {
            "sampled": "the sampling distribution",
            "model": "the model, before temperature and bans",
        }
        distribution = descriptions.get(self.distribution, "an unknown distribution")
        yield self.distribution == "sampled", f"logprobs are of {distribution}"
        if self.logprob_error is not None:
            error = f"{self.logprob_error:.2g}"
            yield None, f"sampled logprobs are within {error} nats of the server's own scores"

        # What else it can do.
        if self.weights is None:
            yield None, "weights: the server has no name for them"
        else:
            yield None, f"weights: named {self.weights!r}"
        abilities = {
            "new weights from a disk": self.updates,
            "aborts": self.aborts,
            "LoRA": self.lora,
            "images": self.images,
        }
        yield (
            None,
            "; ".join(f"{what}: {'yes' if can else 'no'}" for what, can in abilities.items()),
        )
        if self.drafts is not None:
            drafted, accepted = self.drafts
            yield (
                None,
                f"speculative decoding: {accepted} of {drafted} drafted ids accepted since the "
                "start",
            )
        for fault in self.faults:
            yield False, fault


async def kind_of(url: str, *, key_env: str | None = None) -> str:
    """Detect the kind of server at a URL, `vllm`, `sglang` or `llamacpp`.

    Raises `EngineError` when it is none of these.
    """
    http = HttpClient(url, key_env=key_env)
    try:
        faults: list[EngineError] = []
        for kind, path, mark in (
            ("llamacpp", "/props", "default_generation_settings"),
            ("sglang", "/model_info", "model_path"),
            ("sglang", "/get_model_info", "model_path"),
            ("vllm", "/version", "version"),
        ):
            try:
                page = await http.get(path, CONTROL_S)
            except EngineError as error:
                faults.append(error)
                continue
            if isinstance(page, dict) and mark in page:
                return kind
    finally:
        await http.close()

    # The server may be of the kind that did not respond.
    for fault in faults:
        if isinstance(fault, EngineUnavailable) and "HTTP status" not in str(fault):
            raise fault
    raise EngineError(
        f"{url} responds, but is not vLLM, SGLang or llama.cpp; an OpenAI-style chat endpoint "
        "works for evaluation only (ChatEngine)"
    )


async def connect(url: str, *, kind: str | None = None, **options: Any) -> RemoteEngine:
    """Return an opened engine for the server at a URL, detecting its kind.

    Args:
        kind: `vllm`, `sglang` or `llamacpp`, if known.
        options: as of the engine.

    Raises `EngineError` when the server does not respond or is of an unknown kind.
    """
    kind = kind or await kind_of(url, key_env=options.get("key_env"))
    if kind not in KINDS:
        raise EngineError(f"unknown kind of server {kind!r}; expected one of {', '.join(KINDS)}")
    engine = KINDS[kind](url, **options)
    await engine.open()
    return engine


async def probe_server(engine: RemoteEngine) -> ServerCapabilities:
    """Probe a server with a few short requests.

    Raises `EngineUnavailable` when it does not respond.
    """
    await engine.open()
    server = ServerCapabilities(
        engine.url, engine.kind, engine.server_version, engine.model, engine.context
    )
    server.weights = await _or_none(engine.weights_name())
    server.aborts = engine.kind in ("vLLM", "SGLang")
    await _ask_abilities(engine, server)
    totals = await _or_none(engine.draft_totals())
    server.drafts = None if totals is None else list(totals)

    # A reply shows whether ids and logprobs come back; `generate` verifies them.
    try:
        reply = await engine.generate(_question(engine, 1.0, 8))
    except EngineError as error:
        server.faults.append(str(error))
        return server
    server.ids_in = True
    server.ids_out = True
    server.logprobs = None not in reply.logprobs
    if isinstance(engine, LlamaCppEngine):
        # Requested after the samplers wherever that differs from the model's.
        server.distribution = "sampled"
        return server

    with suppress(EngineError, SyncError):
        scores = await engine.score([*CANARY, *reply.ids])
        differences: list[float] = []
        for logprob, score in zip(reply.logprobs, scores[-len(reply.ids) :], strict=True):
            if logprob is not None:
                differences.append(abs(logprob - score))
        server.logprob_error = max(differences, default=None)
    server.distribution = await _distribution(engine, server)
    return server


async def _ask_abilities(engine: RemoteEngine, server: ServerCapabilities) -> None:
    """Ask which routes a server has, and whether it takes new weights, adapters and images."""
    if isinstance(engine, VllmEngine):
        used_routes = [
            GENERATE,
            "/v1/completions",
            "/pause",
            "/resume",
            "/collective_rpc",
            "/weight_info",
            "/update_weight_version",
            engine.lora_api.load,
            "/reset_prefix_cache",
        ]
        server.routes = [route for route in used_routes if route in engine.routes]
        server.updates = {"/collective_rpc", "/pause"} <= engine.routes
        server.lora = engine.lora_api.load in engine.routes
        server.images = bool(await _or_none(engine.images.supports_images()))

    elif isinstance(engine, SglangEngine):
        server.routes = [
            "/generate",
            "/update_weights_from_disk",
            "/pause_generation",
            "/abort_request",
        ]
        server.updates = True
        info = await _or_none(engine._info("server")) or {}
        server.lora = bool(info.get("enable_lora"))
        model = await _or_none(engine._info("model")) or {}
        server.images = bool(model.get("has_image_understanding"))

    else:
        server.routes = ["/completion"]


async def _distribution(engine: RemoteEngine, server: ServerCapabilities) -> str:
    """Determine which distribution logprobs are of, from single ids drawn at temperature 2 after
    the same context.

    With l(x) the server's score of an id at temperature 1, logprobs equal l(x) if they are the
    model's. If they are the sampling distribution's, they equal l(x) / 2 plus a constant.
    """
    # Logprob and score of each id that was drawn.
    scored: dict[int, tuple[float, float]] = {}
    questions = [_question(engine, PROBE_TEMPERATURE, 1, seed) for seed in range(PROBE_DRAWS)]
    try:
        replies = await asyncio.gather(*map(engine.generate, questions))
        for reply in replies:
            if not reply.ids or reply.ids[0] in scored:
                continue
            id_ = reply.ids[0]
            logprob = reply.logprobs[0]
            if logprob is not None:
                scores = await engine.score([*CANARY, id_])
                scored[id_] = (logprob, scores[-1])
    except (EngineError, SyncError) as error:
        server.faults.append(str(error))
        return "unknown"

    if len(scored) < 2:
        return "unknown"
    pairs = list(scored.values())
    if all(abs(logprob - score) < 1e-2 for logprob, score in pairs):
        return "model"
    constants = [logprob - score / PROBE_TEMPERATURE for logprob, score in pairs]
    return "sampled" if max(constants) - min(constants) < 5e-2 else "unknown"


def _question(engine: RemoteEngine, temperature: float, tokens: int, seed: int = 1) -> Request:
    return Request(
        list(CANARY),
        tokens,
        frozenset(),
        seed,
        f"probe-{id(engine)}",
        sampling=Sampling(temperature),
    )


async def _or_none(work: Any) -> Any:
    try:
        return await work
    except (EngineError, TimeoutError):
        return None
