"""vLLM and SGLang routes: sampling, weight transfer, sleep.

Each method of `EngineService` under a decorator is a route of one format or both; the bodies are in
`bodies.py`. `_sample` is one reply, whichever the format: its request becomes one of the engine,
which `Replies` samples, pauses and aborts. New weights go through a `WeightReceiver`.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from base64 import b64encode
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from starlette.responses import Response

from turnwright._version import __version__
from turnwright.engines.protocols import Generation, Request, StopText
from turnwright.engines.scoring import IdScores, ScoreRequest
from turnwright.errors import EngineError, MediaError, UsageError
from turnwright.types import ROUTES, MediaPlacement, Sampling
from turnwright_serve.server import bodies
from turnwright_serve.server.http import MAX_WEIGHTS, Call, Endpoint, Table
from turnwright_serve.server.intake import HttpError
from turnwright_serve.server.replies import PAUSES, Replies, Span

if TYPE_CHECKING:
    from turnwright_serve.weight_receiver import WeightReceiver

DEFAULT_GROUP = "weight_update_group"
"""Name that SGLang gives an unnamed group."""
PARTS = ("weights", "kv_cache")
Formats = Literal["vllm", "sglang"]
PlaceImages = Callable[[Sequence[int], Sequence[str]], tuple[list[int], tuple[MediaPlacement, ...]]]
"""Returns the ids, with each placeholder expanded, and the blocks of the images. Raises
`MediaError`."""
ServiceHandler = Callable[["EngineService", Call], Awaitable[Any]]
_ROUTES: list[tuple[tuple[Formats, ...], str, str, Callable[..., Endpoint]]] = []
"""Formats, method, path, and what makes the endpoint of a handler."""


def _route(
    formats: tuple[Formats, ...],
    path: str,
    body: type[bodies.Body] | None = None,
    *,
    method: str = "POST",
    **rules: Any,
) -> Callable[[ServiceHandler], ServiceHandler]:
    """Serve a path by a method of `EngineService`; `rules` as in `Endpoint`."""

    def register(handler: ServiceHandler) -> ServiceHandler:
        def endpoint_of(service: EngineService) -> Endpoint:
            return Endpoint(partial(handler, service), body, **rules)

        _ROUTES.append((formats, method, path, endpoint_of))
        return handler

    return register


_both = partial(_route, ("vllm", "sglang"))
_vllm = partial(_route, ("vllm",))
_sglang = partial(_route, ("sglang",))


@dataclass(eq=False)
class EngineService:
    """One engine as a vLLM or SGLang server: requests, pauses and the name of its weights."""

    engine: Any
    """`generate`, `abort`, `check`, `context`, `vocabulary`, `queue_lengths`, `slots`; not shared
    with other callers."""
    _: KW_ONLY
    model: str
    score: Callable[[ScoreRequest], IdScores]
    """Scores given ids under the current weights."""
    load: Callable[[Path], Awaitable[None]]
    """Loads the weights of a directory."""
    receiver: WeightReceiver
    decode: Callable[[Sequence[int]], str]
    end_ids: frozenset[int]
    """Stop ids unless a request sets others."""
    place: PlaceImages | None = None
    """Finds images, given as data URLs, among ids; None where the model takes no images."""
    experts: bool = False
    """Whether the model is a mixture of experts, whose choices replies can hold."""
    released: set[str] = field(default_factory=set, init=False)
    """Parts whose memory is released: `weights`, `kv_cache`."""
    changing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    """Held during weight changes."""

    def __post_init__(self) -> None:
        self.replies = Replies(self.engine)

    def routes(self, formats: Formats) -> Table:
        """Return the routes of a format."""
        table: Table = {}
        for served, method, path, endpoint_of in _ROUTES:
            if formats in served:
                table[method, path] = endpoint_of(self)
        if formats == "vllm":
            paths: dict[str, dict[str, str]] = {path: {} for _, path in table}

            async def page(call: Call) -> Any:
                return {"paths": paths}

            table["GET", "/openapi.json"] = Endpoint(page)
        return table

    @_both("/health", method="GET")
    async def _health(self, call: Call) -> Any:
        try:
            self.engine.check()
        except EngineError as error:
            raise HttpError(503, str(error)) from None
        return {}

    # One reply

    async def _sample(
        self,
        name: str,
        ids: list[int],
        settings: bodies.Settings | None,
        max_tokens: int | None,
        session: str,
        media: tuple[MediaPlacement, ...] = (),
        routes_from: int | None = None,
        *,
        alternatives: int = 0,
        scored: bool = False,
    ) -> tuple[Generation, list[Span]]:
        """Sample one reply, with its experts from `routes_from` on and so many `alternatives` of
        each id; return it with the names of the weights of its ids.

        With `max_tokens` 0 nothing is sampled, so that the scores of a `scored` prompt wait for no
        pass of the engine.
        """
        if max_tokens == 0:
            if not scored:
                raise HttpError(
                    400,
                    "max_tokens: 0 asks for no id, and no logprobs of the prompt are asked for "
                    "either",
                )
            nothing = Generation([], [], "length", 0)
            return nothing, [{"version": self.replies.weights, "start": 0, "end": 0}]

        settings = settings or bodies.Settings()
        space = self._reply_space(ids)
        stop_ids = frozenset(settings.stop_token_ids or ())
        if not settings.ignore_eos:
            stop_ids |= self.end_ids
        seed = settings.sampling_seed if settings.seed is None else settings.seed
        stop_text = self._stop_text(settings, ids)
        request = Request(
            ids,
            min(max_tokens or 16, space),
            stop_ids,
            random.getrandbits(64) if seed is None else seed,
            session or name,
            sampling=_sampling_of(settings),
            banned_ids=frozenset(settings.logit_bias or ()),
            stop_text=stop_text,
            reply_position=settings.reply_position,
            media=media,
            extras=frozenset() if routes_from is None else frozenset([ROUTES]),
            routes_from=routes_from or 0,
            alternatives=alternatives,
        )
        return await self.replies.sample(request, name)

    def _stop_text(self, settings: bodies.Settings, ids: list[int]) -> StopText | None:
        """Return the texts that end a reply, of which the last ids of a context may be a part."""
        sampled = settings.reply_position
        if sampled >= len(ids):
            raise HttpError(
                400, f"reply_position: {sampled} of {len(ids)} ids, which leaves no prompt"
            )
        texts = [settings.stop] if isinstance(settings.stop, str) else settings.stop
        if not texts:
            return None
        try:
            return StopText(texts, self.decode).continued_after(ids[len(ids) - sampled :])
        except UsageError as error:
            raise HttpError(400, str(error)) from None

    async def _place(
        self, ids: list[int], urls: Sequence[str]
    ) -> tuple[list[int], tuple[MediaPlacement, ...]]:
        """Return ids with their images, whose placeholders are expanded."""
        if not urls:
            return ids, ()
        if self.place is None:
            raise HttpError(400, f"{len(urls)} images, and a model without vision")
        try:
            return await asyncio.to_thread(self.place, ids, urls)
        except MediaError as error:
            raise HttpError(400, str(error)) from None

    def _reply_space(self, ids: list[int]) -> int:
        """Return how many new ids fit after a context; reject an invalid context."""
        space: int = self.engine.context - len(ids)
        if not ids:
            raise HttpError(400, "no ids")
        if space < 1:
            raise HttpError(400, f"{len(ids)} ids fill the context of {self.engine.context}")
        if max(ids) >= self.engine.vocabulary:
            raise HttpError(
                400, f"id {max(ids)} is not in the vocabulary of {self.engine.vocabulary} ids"
            )
        return space

    def _check(self, body: bodies.Body, model: str | None = None) -> None:
        if model not in (None, self.model):
            raise HttpError(404, f"this server serves {self.model!r}, not {model!r}")
        for fault in body.unsupported():
            raise HttpError(400, fault)
        body.drop_unknown()

    async def _score_ids(
        self,
        ids: list[int],
        settings: bodies.Settings | None,
        media: tuple[MediaPlacement, ...] = (),
        top: int = 0,
    ) -> IdScores:
        self._reply_space(ids)
        settings = settings or bodies.Settings()
        temperature = 1.0 if settings.score_temperature is None else settings.score_temperature
        banned = frozenset(settings.score_banned_ids or ())
        if banned and len(banned) >= self.engine.vocabulary:
            raise HttpError(400, "score_banned_ids: every id of the vocabulary is banned")
        request = ScoreRequest(ids, media, temperature, banned, top)
        return await asyncio.to_thread(self.score, request)

    async def _prompt_rows(
        self, ids: list[int], settings: bodies.Settings, media: tuple[MediaPlacement, ...] = ()
    ) -> list[dict[str, Any] | None] | None:
        """Return vLLM's `prompt_logprobs`, or None where they are not requested."""
        if settings.prompt_logprobs is None:
            return None

        scores = await self._score_ids(ids, settings, media, settings.prompt_logprobs)
        tops = scores.top or [{}] * len(scores.logprobs)
        # The first id has no score.
        rows: list[dict[str, Any] | None] = [None]
        for id, logprob, top in zip(ids[1:], scores.logprobs, tops, strict=True):
            logprobs = {**top, id: logprob}
            rows.append({str(key): {"logprob": value} for key, value in logprobs.items()})
        return rows

    def _load(self) -> tuple[int, int, float]:
        """Return requests that are computed, requests that wait, and the fraction of the cache that
        the former use."""
        running, waiting = self.engine.queue_lengths
        return running, waiting, running / self.engine.slots

    # vLLM

    @_vllm("/metrics", method="GET")
    async def _vllm_metrics(self, call: Call) -> Any:
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        rows = (f"vllm:{name} {value}\n" for name, value in zip(names, self._load(), strict=True))
        return Response("".join(rows), media_type="text/plain; version=0.0.4")

    @property
    def _all_experts(self) -> int | None:
        """First position whose experts replies hold: no request asks for them, and a server that
        has them sends all."""
        return 0 if self.experts else None

    @_vllm("/version", method="GET")
    async def _vllm_version(self, call: Call) -> Any:
        return {"version": f"turnwright-{__version__}"}

    @_vllm("/v1/models", method="GET")
    async def _vllm_models(self, call: Call) -> Any:
        modalities = ["text", "image"] if self.place else ["text"]
        row = {
            "id": self.model,
            "parent": None,
            "max_model_len": self.engine.context,
            "modalities": modalities,
        }
        return {"data": [row]}

    @_vllm("/weight_info", method="GET")
    async def _vllm_weights(self, call: Call) -> Any:
        return {"weight_version": self.replies.weights}

    @_vllm("/v1/completions", bodies.Completion)
    async def _vllm_completions(self, call: Call) -> Any:
        body: bodies.Completion = call.body
        self._check(body, body.model)
        ids = body.prompt
        scored = await self._prompt_rows(ids, body)
        name = f"cmpl-{call.headers.get('x-request-id') or uuid.uuid4().hex}"
        session = call.headers.get("x-session-id", "")
        sampling = []
        for number, settings in enumerate(_settings_of_each(body)):
            sampling.append(
                self._sample(
                    f"{number}_{name}" if number else name,
                    ids,
                    settings,
                    body.max_tokens,
                    session,
                    routes_from=self._all_experts,
                    alternatives=body.logprobs or 0,
                    scored=scored is not None,
                )
            )
        replies = [reply for reply, _ in await asyncio.gather(*sampling)]

        choices: list[dict[str, Any]] = []
        for index, reply in enumerate(replies):
            logprobs: dict[str, Any] = {"token_logprobs": reply.logprobs}
            if reply.alternatives:
                logprobs["top_logprobs"] = [
                    {f"token_id:{id}": logprob for id, logprob in likeliest}
                    for likeliest in reply.alternatives
                ]
            choice = {
                "index": index,
                "text": self.decode(reply.ids),
                "token_ids": reply.ids,
                "prompt_token_ids": ids,
                "finish_reason": reply.finish,
                "stop_reason": None,
                "logprobs": logprobs,
                "prompt_logprobs": scored,
            }
            choices.append(choice | _npy_experts(reply))
        return {"id": name, "model": self.model, "choices": choices} | _usage(ids, *replies)

    @_vllm("/inference/v1/generate", bodies.TokensIn)
    async def _vllm_generate(self, call: Call) -> Any:
        body: bodies.TokensIn = call.body
        self._check(body, body.model)
        settings = body.sampling_params
        name = body.request_id or uuid.uuid4().hex
        ids, media = await self._place(body.token_ids, body.take_urls())
        scored = await self._prompt_rows(ids, settings, media)
        reply, spans = await self._sample(
            name,
            ids,
            settings,
            settings.max_tokens,
            call.headers.get("x-session-id", ""),
            media,
            self._all_experts,
            alternatives=settings.logprobs or 0,
            scored=scored is not None,
        )

        content: list[dict[str, Any]] = [
            {"token_id": id, "logprob": logprob}
            for id, logprob in zip(reply.ids, reply.logprobs, strict=True)
        ]
        for row, likeliest in zip(content, reply.alternatives, strict=False):
            row["top_logprobs"] = [
                {"token_id": id, "logprob": logprob, "rank": rank}
                for rank, (id, logprob) in enumerate(likeliest, 1)
            ]
        choice = {
            "index": 0,
            "token_ids": reply.ids,
            "finish_reason": reply.finish,
            "logprobs": {"content": content},
            "weight_versions": spans,
        }
        choice |= _npy_experts(reply)
        answer = {"request_id": name, "prompt_token_ids": ids, "choices": [choice]}
        answer |= _usage(ids, reply)
        if scored is not None:
            answer["prompt_logprobs"] = scored
        return answer

    @_vllm("/inference/v1/abort_requests", bodies.Aborts, changes=True)
    async def _vllm_abort(self, call: Call) -> Any:
        for name in call.body.request_ids:
            self.replies.cancel(name.removeprefix("generate-tokens-"))
        return {}

    @_vllm("/collective_rpc", bodies.Reload, changes=True)
    async def _vllm_reload(self, call: Call) -> Any:
        async with self.changing:
            await self.load(Path(call.body.kwargs.weights_path))
        return {"results": [None]}

    @_vllm("/get_world_size", method="GET")
    async def _vllm_world(self, call: Call) -> Any:
        return {"world_size": 1}

    @_vllm("/init_weight_transfer_engine", bodies.Init, changes=True)
    async def _vllm_join(self, call: Call) -> Any:
        info: bodies.Meeting = call.body.init_info
        if not info.group_name or not info.backend:
            raise HttpError(400, "init_info: group_name and backend are required")
        await self._join(info, info.group_name, info.backend)
        return {"message": "Weight transfer initialized"}

    @_vllm("/start_weight_update", changes=True)
    async def _vllm_begin(self, call: Call) -> Any:
        return {"message": "Weight update started"}

    @_vllm("/update_weights", bodies.Update, changes=True)
    async def _vllm_bucket(self, call: Call) -> Any:
        info: bodies.BucketInfo = call.body.update_info
        await self.receiver.receive(None, info.names, info.dtype_names, info.shapes)
        return {"message": "Weights updated"}

    @_vllm("/finish_weight_update", bodies.Finish, changes=True)
    async def _vllm_finish(self, call: Call) -> Any:
        async with self.changing:
            await self.receiver.apply()
            self.replies.rename(call.body.weight_version or self.replies.weights)
        return {"message": "Weight update finished"}

    @_vllm("/shutdown_weight_transfer_engine", changes=True)
    async def _vllm_leave(self, call: Call) -> Any:
        self.receiver.leave(None)
        return {"message": "Weight transfer shut down"}

    @_vllm("/sleep", changes=True)
    async def _vllm_sleep(self, call: Call) -> Any:
        level = call.query.get("level") or "1"
        if level not in ("1", "2"):
            raise HttpError(400, f"level must be 1 or 2, not {level!r:.80}")
        if not self.released:
            await self._sleep()
        return {"status": "sleeping", "level": int(level)}

    @_vllm("/wake_up", changes=True)
    async def _vllm_wake(self, call: Call) -> Any:
        tag = call.query.get("tags")
        if tag and tag not in PARTS:
            raise HttpError(400, f"tags must be {' or '.join(PARTS)}, not {tag!r:.80}")
        for part in [tag] if tag else sorted(self.released):
            if part in self.released:
                await self._wake(part)
        if not self.released:
            self.replies.resume()
        return {"status": "sleeping" if self.released else "awake", "tags": tag}

    @_vllm("/is_sleeping", method="GET")
    async def _vllm_sleeps(self, call: Call) -> Any:
        return {"is_sleeping": bool(self.released) or self.replies.paused}

    # SGLang

    @_sglang("/v1/loads", method="GET")
    async def _sglang_load(self, call: Call) -> Any:
        running, waiting, cache = self._load()
        row = {
            "dp_rank": 0,
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "token_usage": cache,
        }
        return {"loads": [row]}

    @_sglang("/model_info", method="GET")
    async def _sglang_model(self, call: Call) -> Any:
        return {
            "model_path": self.model,
            "served_model_name": self.model,
            "weight_version": self.replies.weights,
            "has_image_understanding": self.place is not None,
        }

    @_sglang("/server_info", method="GET")
    async def _sglang_server(self, call: Call) -> Any:
        return {"version": f"turnwright-{__version__}", "context_length": self.engine.context}

    @_sglang("/generate", bodies.Generate)
    async def _sglang_generate(self, call: Call) -> Any:
        body: bodies.Generate = call.body
        self._check(body)
        settings = body.sampling_params
        name = body.rid or uuid.uuid4().hex
        ids, media = await self._place(body.input_ids, body.take_urls())
        if body.return_routed_experts and not self.experts:
            raise HttpError(400, "return_routed_experts: the model is no mixture of experts")
        if body.routed_experts_start_len >= len(ids) > 0:
            raise HttpError(
                400, f"routed_experts_start_len = {body.routed_experts_start_len} of {len(ids)} ids"
            )

        is_scored = body.logprob_start_len == 0
        meta: dict[str, Any] = {}
        if is_scored:
            # The first id has no score.
            scores = await self._score_ids(ids, settings, media, body.top_logprobs_num)
            logprobs = [None, *scores.logprobs]
            meta["input_token_logprobs"] = [
                [logprob, id, None] for id, logprob in zip(ids, logprobs, strict=True)
            ]
            if body.top_logprobs_num:
                tops = [[[logprob, id, None] for id, logprob in top.items()] for top in scores.top]
                meta["input_top_logprobs"] = [None, *tops]

        reply, spans = await self._sample(
            name,
            ids,
            settings,
            settings.max_new_tokens if settings else None,
            call.headers.get("x-smg-routing-key", ""),
            media,
            body.routed_experts_start_len if body.return_routed_experts else None,
            alternatives=body.top_logprobs_num,
            scored=is_scored,
        )
        experts = _experts_of(reply)
        if experts is not None:
            meta["routed_experts"] = b64encode(experts.astype("<i4").tobytes()).decode()
        meta |= {
            "id": name,
            "finish_reason": {"type": reply.finish},
            "prompt_tokens": len(ids),
            "completion_tokens": len(reply.ids),
            "cached_tokens": reply.cached_tokens,
            "weight_version": spans[-1]["version"],
            "weight_versions": spans,
            "output_token_logprobs": [
                [logprob, id, None] for id, logprob in zip(reply.ids, reply.logprobs, strict=True)
            ],
        }
        if reply.alternatives:
            meta["output_top_logprobs"] = [
                [[logprob, id, None] for id, logprob in likeliest]
                for likeliest in reply.alternatives
            ]
        if reply.drafted:
            meta |= {
                "spec_num_proposed_drafts": reply.drafted,
                "spec_num_correct_drafts": reply.accepted,
                "spec_accept_rate": reply.accepted / reply.drafted,
            }
        return {"text": self.decode(reply.ids), "output_ids": reply.ids, "meta_info": meta}

    @_sglang("/abort_request", bodies.Abort, changes=True)
    async def _sglang_abort(self, call: Call) -> Any:
        names = self.replies.names if call.body.abort_all else [call.body.rid]
        for name in names:
            self.replies.cancel(name)
        return {}

    @_sglang("/update_weights_from_disk", bodies.FromDisk, changes=True)
    async def _sglang_update(self, call: Call) -> Any:
        async with self.changing:
            await self.load(Path(call.body.model_path))
            self.replies.rename(call.body.weight_version or self.replies.weights)
        return {"success": True, "message": ""}

    @_sglang("/init_weights_update_group", bodies.Meeting, changes=True)
    async def _sglang_join(self, call: Call) -> Any:
        info: bodies.Meeting = call.body
        await self._join(info, info.group_name or DEFAULT_GROUP, info.backend or "nccl")
        return {"success": True, "message": ""}

    @_sglang("/update_weights_from_distributed", bodies.Bucket, changes=True)
    async def _sglang_bucket(self, call: Call) -> Any:
        info: bodies.Bucket = call.body
        await self.receiver.receive(
            info.group_name or DEFAULT_GROUP, info.names, info.dtypes, info.shapes
        )
        return await self._apply_if_complete(info.weight_version)

    @_sglang("/update_weights_from_tensor", bodies.Tensors, changes=True, max_bytes=MAX_WEIGHTS)
    async def _sglang_tensors(self, call: Call) -> Any:
        await self.receiver.decode_request(call.body.serialized_named_tensors[0])
        return await self._apply_if_complete(call.body.weight_version)

    async def _apply_if_complete(self, version: Any) -> Any:
        """Apply weights once all have arrived: SGLang has no end-of-update request."""
        async with self.changing:
            if version is not None or self.receiver.complete:
                await self.receiver.apply()
            self.replies.rename(self.replies.weights if version is None else version)
        return {"success": True, "message": ""}

    @_sglang("/destroy_weights_update_group", bodies.LeaveGroup, changes=True)
    async def _sglang_leave(self, call: Call) -> Any:
        left = self.receiver.leave(call.body.group_name or DEFAULT_GROUP)
        return {"success": left, "message": "" if left else "unknown group"}

    @_sglang("/release_memory_occupation", bodies.Tags, changes=True)
    async def _sglang_sleep(self, call: Call) -> Any:
        # Releasing while busy or resuming what is not released ends SGLang; here it is refused.
        if self.released or not self.replies.paused:
            raise HttpError(400, "already released" if self.released else "pause first")
        await self._sleep()
        return {}

    @_sglang("/resume_memory_occupation", bodies.Tags, changes=True)
    async def _sglang_wake(self, call: Call) -> Any:
        for part in call.body.tags or sorted(self.released):
            if part not in self.released:
                raise HttpError(400, f"{part} was not released")
            await self._wake(part)
        return {}

    # Both

    @_both("/update_weight_version", bodies.Rename, changes=True)
    async def _rename(self, call: Call) -> Any:
        self.replies.rename(call.body.new_version)
        return {"success": True, "new_version": self.replies.weights}

    @_vllm("/reset_prefix_cache", changes=True)
    @_sglang("/flush_cache", changes=True)
    async def _no_op(self, call: Call) -> Any:
        return {}

    @_vllm("/pause", bodies.Pause, changes=True)
    @_sglang("/pause_generation", bodies.Pause, changes=True)
    async def _pause(self, call: Call) -> Any:
        mode = call.query.get("mode") or call.body.mode or "abort"
        if mode not in PAUSES:
            raise HttpError(400, f"mode must be {', '.join(PAUSES)}, not {mode!r:.80}")
        await self.replies.pause(PAUSES[mode])
        return {"status": "paused"}

    @_vllm("/resume", changes=True)
    @_sglang("/continue_generation", changes=True)
    async def _resume(self, call: Call) -> Any:
        if self.released:
            raise HttpError(400, f"asleep: {', '.join(sorted(self.released))}")
        self.replies.resume()
        return {"status": "resumed"}

    async def _join(self, info: bodies.Meeting, name: str, backend: str) -> None:
        await self.receiver.join(
            info.master_address, info.master_port, info.rank_offset, info.world_size, name, backend
        )

    async def _sleep(self) -> None:
        await self.replies.pause("abort")
        await self.engine.sleep()
        self.released = set(PARTS)

    async def _wake(self, part: str) -> None:
        self.released.discard(part)
        if part == "weights":
            await self.engine.wake()


def _experts_of(reply: Generation) -> Any:
    """Return the experts of a reply, an array [positions, layers, k]; None where it has none."""
    from numpy import asarray

    if ROUTES not in reply.extras:
        return None
    _, routes = reply.extras[ROUTES]
    return asarray(routes)


def _npy_experts(reply: Generation) -> dict[str, str]:
    """Return the field of a vLLM choice with the experts of a reply, an .npy file in base64;
    empty where it has none."""
    from numpy import save

    experts = _experts_of(reply)
    if experts is None:
        return {}
    file = BytesIO()
    save(file, experts, allow_pickle=False)
    return {"routed_experts": b64encode(file.getvalue()).decode()}


def _sampling_of(settings: bodies.Settings) -> Sampling:
    temperature = 1.0 if settings.temperature is None else settings.temperature
    top_p = 1.0 if settings.top_p is None else settings.top_p
    return Sampling(temperature, top_p, max(0, settings.top_k or 0), min_p=settings.min_p or 0.0)


def _settings_of_each(body: bodies.Completion) -> list[bodies.Completion]:
    """Return the settings of each of `n` replies: seeds that follow the given one, as vLLM's do."""
    seeds = [None if body.seed is None else body.seed + number for number in range(body.n or 1)]
    return [body.model_copy(update={"seed": seed}) for seed in seeds]


def _usage(ids: Sequence[int], *replies: Generation) -> dict[str, Any]:
    """Return the fields of a vLLM response that count ids."""
    count = sum(len(reply.ids) for reply in replies)
    usage = {
        "prompt_tokens": len(ids),
        "completion_tokens": count,
        "total_tokens": len(ids) + count,
        "prompt_tokens_details": {"cached_tokens": replies[0].cached_tokens},
    }
    fields: dict[str, Any] = {"usage": usage}
    drafted = sum(reply.drafted for reply in replies)
    if drafted:
        drafts = {
            "num_draft_tokens": drafted,
            "num_accepted_draft_tokens": sum(reply.accepted for reply in replies),
        }
        fields["metrics"] = {"speculative_decoding": drafts}
    return fields
