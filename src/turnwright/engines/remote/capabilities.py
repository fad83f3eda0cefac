"""Probe what a server supports: kind, routes, versions, and a few tokens with echo and logprobs."""

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
PROBE_TEMPERATURE, PROBE_DRAWS = 2.0, 8
"""Temperature and number of single-id draws that determine which distribution logprobs are of."""


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
    """Distribution of the logprobs: `sampled` (temperature and bans included), `model`
    (before them), or `unknown`."""
    logprob_error: float | None = None
    """Largest |sampled logprob - server's score of the same id| in nats, at temperature
    1; None without scores."""
    weights: str | None = None
    """The server's name for its weights."""
    updates: bool = False
    """Whether it can load new weights from a disk."""
    aborts: bool = False
    lora: bool = False
    images: bool = False
    drafts: list[int] | None = None
    """Total drafted and accepted ids since the server started; None without
    speculative decoding or totals."""
    faults: list[str] = field(default_factory=list)

    @property
    def trainable(self) -> bool:
        """Whether its samples are trainable."""
        return (
            self.ids_in
            and self.ids_out
            and self.logprobs
            and self.distribution == "sampled"
            and not self.faults
        )

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self) | {"trainable": self.trainable}

    def findings(self) -> Iterator[tuple[bool | None, str]]:
        """Yield lines as (passed, text); passed is None for information."""
        yield (
            None,
            f"{self.kind} {self.server_version or '(version unknown)'} at {self.url}, model "
            f"{self.model}",
        )
        yield (
            None,
            f"context {self.context or 'unknown'}; routes {', '.join(self.routes) or 'unknown'}",
        )
        yield self.ids_in, "ids in: the echoed prompt matches the prompt sent"
        yield self.ids_out, "ids out: sampled ids are returned as ids"
        yield self.logprobs, "logprobs: one finite value per sampled id"
        word = {
            "sampled": "the sampling distribution",
            "model": "the model, before temperature and bans",
        }
        yield (
            self.distribution == "sampled",
            f"logprobs are of {word.get(self.distribution, 'an unknown distribution')}",
        )
        if self.logprob_error is not None:
            yield (
                None,
                f"sampled logprobs are within {self.logprob_error:.2g} nats of the server's own "
                "scores",
            )
        yield (
            None,
            "weights: "
            f"{'the server has no name for them' if self.weights is None else f'named {self.weights!r}'}",  # noqa: E501
        )
        able = {
            "new weights from a disk": self.updates,
            "aborts": self.aborts,
            "LoRA": self.lora,
            "images": self.images,
        }
        yield None, "; ".join(f"{what}: {'yes' if can else 'no'}" for what, can in able.items())
        if self.drafts is not None:
            yield (
                None,
                f"speculative decoding: {self.drafts[1]} of {self.drafts[0]} drafted ids accepted "
                "since the start",
            )
        for fault in self.faults:
            yield False, fault


async def kind_of(url: str, *, key_env: str | None = None) -> str:
    """Detect the kind of server at a URL, `vllm`, `sglang` or `llamacpp`; raise `EngineError`
    when it is none of these."""
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
                found = await http.get(path, CONTROL_S)
            except EngineError as error:
                faults.append(error)
                continue
            if isinstance(found, dict) and mark in found:
                return kind
    finally:
        await http.close()
    silent = [
        fault
        for fault in faults
        if isinstance(fault, EngineUnavailable) and "HTTP status" not in str(fault)
    ]
    if silent:  # the server may be of the kind that did not respond
        raise silent[0]
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
    found = ServerCapabilities(
        engine.url, engine.kind, engine.server_version, engine.model, engine.context
    )
    found.weights = await _or_none(engine.weights_name())
    found.aborts = engine.kind in ("vLLM", "SGLang")
    if isinstance(engine, VllmEngine):
        used = [
            GENERATE,
            "/v1/completions",
            "/pause",
            "/resume",
            "/collective_rpc",
            "/weight_info",
            "/update_weight_version",
        ]
        used += [engine.lora_api.load, "/reset_prefix_cache"]
        found.routes = [route for route in used if route in engine.routes]
        found.updates = {"/collective_rpc", "/pause"} <= engine.routes
        found.lora = engine.lora_api.load in engine.routes
        found.images = bool(await _or_none(engine.images.supports_images()))
    elif isinstance(engine, SglangEngine):
        found.routes = [
            "/generate",
            "/update_weights_from_disk",
            "/pause_generation",
            "/abort_request",
        ]
        found.updates = True
        found.lora = bool((await _or_none(engine._info("server")) or {}).get("enable_lora"))
        found.images = bool(
            (await _or_none(engine._info("model")) or {}).get("has_image_understanding")
        )
    else:
        found.routes = ["/completion"]
    totals = await _or_none(engine.draft_totals())
    found.drafts = None if totals is None else list(totals)
    try:
        first = await engine.generate(_question(engine, 1.0, 8))
    except EngineError as error:
        found.faults.append(str(error))
        return found
    found.ids_in = found.ids_out = True
    found.logprobs = None not in first.logprobs
    if isinstance(engine, LlamaCppEngine):
        found.distribution = (
            "sampled"  # requested after the samplers wherever that differs from the model's
        )
        return found
    with suppress(EngineError, SyncError):
        scores = (await engine.score([*CANARY, *first.ids]))[-len(first.ids) :]
        differences = (
            abs(p - s) for p, s in zip(first.logprobs, scores, strict=True) if p is not None
        )
        found.logprob_error = max(differences, default=None)
    found.distribution = await _distribution(engine, found)
    return found


async def _distribution(engine: RemoteEngine, found: ServerCapabilities) -> str:
    """Determine which distribution logprobs are of, from single ids drawn at
    temperature 2 after the same context.

    With l(x) the server's score of an id at temperature 1, logprobs equal l(x) if they are the
    model's. If they are the sampling distribution's, they equal l(x) / 2 plus a constant.
    """
    rows: dict[int, tuple[float, float]] = {}
    try:
        for drawn in await asyncio.gather(
            *(
                engine.generate(_question(engine, PROBE_TEMPERATURE, 1, seed))
                for seed in range(PROBE_DRAWS)
            )
        ):
            if drawn.ids and drawn.ids[0] not in rows and drawn.logprobs[0] is not None:
                score = (await engine.score([*CANARY, drawn.ids[0]]))[-1]
                rows[drawn.ids[0]] = (drawn.logprobs[0], score)
    except (EngineError, SyncError) as error:
        found.faults.append(str(error))
        return "unknown"
    if len(rows) < 2:
        return "unknown"
    pairs = list(rows.values())
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
