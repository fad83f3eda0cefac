"""vLLM and SGLang routes: sampling, weight transfer, sleep."""

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
"""Returns the ids, with each placeholder expanded, and the blocks of the
images. Raises `MediaError`."""
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
        _ROUTES.append(
            (
                formats,
                method,
                path,
                lambda service: Endpoint(partial(handler, service), body, **rules),
            )
        )
        return handler

    return register


_both = partial(_route, ("vllm", "sglang"))
_vllm = partial(_route, ("vllm",))
_sglang = partial(_route, ("sglang",))


@dataclass(eq=False)
class EngineService:
    """One engine as a vLLM or SGLang server: requests, pauses and the name of its weights."""

    engine: Any
    """`generate`, `abort`, `check`, `context`, `vocabulary`, `queue_lengths`, `slots`; not
    shared with other callers."""
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
        table = {
            (method, path): endpoint(self)
            for kinds, method, path, endpoint in _ROUTES
            if formats in kinds
        }
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
        given: bodies.Settings | None,
        max_tokens: int | None,
        session: str,
        media: tuple[MediaPlacement, ...] = (),
        routes_from: int | None = None,
        *,
        scored: bool = False,
    ) -> tuple[Generation, list[Span]]:
        """Sample one reply, with its experts from `routes_from` on; return it with the
        names of the weights of its ids.

        With `max_tokens` 0 nothing is sampled, so that the scores of a `scored` prompt wait
        for no pass of the engine.
        """
        if max_tokens == 0:
            if not scored:
                raise HttpError(
                    400,
                    "max_tokens: 0 asks for no id, and no logprobs of the prompt are asked for "
                    "either",
                )
            return Generation([], [], "length", 0), [
                {"version": self.replies.weights, "start": 0, "end": 0}
            ]
        given, space = given or bodies.Settings(), self._reply_space(ids)
        stops = frozenset(given.stop_token_ids or ()) | (
            frozenset() if given.ignore_eos else self.end_ids
        )
        seed = given.seed if given.seed is not None else given.sampling_seed
        temperature = 1.0 if given.temperature is None else given.temperature
        texts = [given.stop] if isinstance(given.stop, str) else given.stop
        sampled = given.reply_position
        if sampled >= len(ids):
            raise HttpError(
                400, f"reply_position: {sampled} of {len(ids)} ids, which leaves no prompt"
            )
        try:
            stop_text = (
                StopText(texts, self.decode).continued_after(ids[len(ids) - sampled :])
                if texts
                else None
            )
        except UsageError as error:
            raise HttpError(400, str(error)) from None
        request = Request(
            ids,
            min(max_tokens or 16, space),
            stops,
            random.getrandbits(64) if seed is None else seed,
            session or name,
            sampling=Sampling(
                temperature,
                1.0 if given.top_p is None else given.top_p,
                max(0, given.top_k or 0),
                min_p=given.min_p or 0.0,
            ),
            banned_ids=frozenset(given.logit_bias or ()),
            stop_text=stop_text,
            reply_position=sampled,
            media=media,
            extras=frozenset() if routes_from is None else frozenset([ROUTES]),
            routes_from=routes_from or 0,
        )
        return await self.replies.sample(request, name)

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
        if not ids or space < 1:
            raise HttpError(
                400,
                f"{len(ids)} ids fill the context of {self.engine.context}" if ids else "no ids",
            )
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
        given: bodies.Settings | None,
        media: tuple[MediaPlacement, ...] = (),
        top: int = 0,
    ) -> IdScores:
        self._reply_space(ids)
        temperature = (
            1.0 if given is None or given.score_temperature is None else given.score_temperature
        )
        banned = frozenset(
            () if given is None or given.score_banned_ids is None else given.score_banned_ids
        )
        if banned and len(banned) >= self.engine.vocabulary:
            raise HttpError(400, "score_banned_ids: every id of the vocabulary is banned")
        return await asyncio.to_thread(
            self.score, ScoreRequest(ids, media, temperature, banned, top)
        )

    async def _prompt_rows(
        self, ids: list[int], given: bodies.Settings, media: tuple[MediaPlacement, ...] = ()
    ) -> list[dict[str, Any] | None] | None:
        """Return vLLM's `prompt_logprobs`, or None where they are not requested."""
        if given.prompt_logprobs is None:
            return None
        found = await self._score_ids(ids, given, media, given.prompt_logprobs)
        tops = found.top or [{}] * len(found.logprobs)
        every = (
            {**top, one: logprob}
            for one, logprob, top in zip(ids[1:], found.logprobs, tops, strict=True)
        )
        return [
            None,
            *({str(one): {"logprob": logprob} for one, logprob in row.items()} for row in every),
        ]

    def _load(self) -> tuple[int, int, float]:
        """Return requests that are computed, requests that wait, and the fraction of the
        cache that the former use."""
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
        """First position whose experts replies hold: no request asks for them, and a server
        that has them sends all."""
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
        sampled = await asyncio.gather(
            *(
                self._sample(
                    name if not at else f"{at}_{name}",
                    ids,
                    settings,
                    body.max_tokens,
                    session,
                    routes_from=self._all_experts,
                    scored=scored is not None,
                )
                for at, settings in enumerate(_settings_of_each(body))
            )
        )
        choices = [
            {
                "index": index,
                "text": self.decode(reply.ids),
                "token_ids": reply.ids,
                "prompt_token_ids": ids,
                "finish_reason": reply.finish,
                "stop_reason": None,
                "logprobs": {"token_logprobs": reply.logprobs},
                "prompt_logprobs": scored,
            }
            | _npy_experts(reply)
            for index, (reply, _) in enumerate(sampled)
        ]
        return {"id": name, "model": self.model, "choices": choices} | _usage(
            ids, *(reply for reply, _ in sampled)
        )

    @_vllm("/inference/v1/generate", bodies.TokensIn)
    async def _vllm_generate(self, call: Call) -> Any:
        body: bodies.TokensIn = call.body
        self._check(body, body.model)
        given, name = body.sampling_params, body.request_id or uuid.uuid4().hex
        ids, media = await self._place(body.token_ids, body.take_urls())
        session = call.headers.get("x-session-id", "")
        scored = await self._prompt_rows(ids, given, media)
        parts = name, ids, given, given.max_tokens, session, media, self._all_experts
        reply, spans = await self._sample(*parts, scored=scored is not None)
        content = [
            {"token_id": one, "logprob": p}
            for one, p in zip(reply.ids, reply.logprobs, strict=True)
        ]
        choice = {
            "index": 0,
            "token_ids": reply.ids,
            "finish_reason": reply.finish,
            "logprobs": {"content": content},
        }
        choice["weight_versions"] = spans
        choice |= _npy_experts(reply)
        row = {"request_id": name, "prompt_token_ids": ids, "choices": [choice]} | _usage(
            ids, reply
        )
        return row if scored is None else row | {"prompt_logprobs": scored}

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
        model = {
            "model_path": self.model,
            "served_model_name": self.model,
            "weight_version": self.replies.weights,
        }
        return model | {"has_image_understanding": self.place is not None}

    @_sglang("/server_info", method="GET")
    async def _sglang_server(self, call: Call) -> Any:
        return {"version": f"turnwright-{__version__}", "context_length": self.engine.context}

    @_sglang("/generate", bodies.Generate)
    async def _sglang_generate(self, call: Call) -> Any:
        body: bodies.Generate = call.body
        self._check(body)
        given, name = body.sampling_params, body.rid or uuid.uuid4().hex
        ids, media = await self._place(body.input_ids, body.take_urls())
        if body.return_routed_experts and not self.experts:
            raise HttpError(400, "return_routed_experts: the model is no mixture of experts")
        if body.routed_experts_start_len >= len(ids) > 0:
            raise HttpError(
                400, f"routed_experts_start_len = {body.routed_experts_start_len} of {len(ids)} ids"
            )
        meta: dict[str, Any] = {}
        if body.logprob_start_len == 0:
            scored = await self._score_ids(ids, given, media, body.top_logprobs_num)
            scores = [None, *scored.logprobs]
            meta["input_token_logprobs"] = [
                [score, one, None] for one, score in zip(ids, scores, strict=True)
            ]
            if body.top_logprobs_num:
                meta["input_top_logprobs"] = [
                    None,
                    *([[p, one, None] for one, p in row.items()] for row in scored.top),
                ]
        session, max_tokens = (
            call.headers.get("x-smg-routing-key", ""),
            given.max_new_tokens if given else None,
        )
        routes_from = body.routed_experts_start_len if body.return_routed_experts else None
        parts = name, ids, given, max_tokens, session, media, routes_from
        reply, spans = await self._sample(*parts, scored=body.logprob_start_len == 0)
        if (found := _experts_of(reply)) is not None:
            meta["routed_experts"] = b64encode(found.astype("<i4").tobytes()).decode()
        meta |= {
            "id": name,
            "finish_reason": {"type": reply.finish},
            "prompt_tokens": len(ids),
            "completion_tokens": len(reply.ids),
            "cached_tokens": reply.cached_tokens,
            "weight_version": spans[-1]["version"],
            "weight_versions": spans,
            "output_token_logprobs": [
                [p, one, None] for one, p in zip(reply.ids, reply.logprobs, strict=True)
            ],
        }
        if reply.drafted:
            meta |= {
                "spec_num_proposed_drafts": reply.drafted,
                "spec_num_correct_drafts": reply.accepted,
            }
            meta["spec_accept_rate"] = reply.accepted / reply.drafted
        return {"text": self.decode(reply.ids), "output_ids": reply.ids, "meta_info": meta}

    @_sglang("/abort_request", bodies.Abort, changes=True)
    async def _sglang_abort(self, call: Call) -> Any:
        for name in self.replies.names if call.body.abort_all else [call.body.rid]:
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
        await self._join(
            call.body, call.body.group_name or DEFAULT_GROUP, call.body.backend or "nccl"
        )
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

    return asarray(reply.extras[ROUTES][1]) if ROUTES in reply.extras else None


def _npy_experts(reply: Generation) -> dict[str, str]:
    """Return the field of a vLLM choice with the experts of a reply, an .npy file in base64;
    empty where it has none."""
    from numpy import save

    if (experts := _experts_of(reply)) is None:
        return {}
    file = BytesIO()
    save(file, experts, allow_pickle=False)
    return {"routed_experts": b64encode(file.getvalue()).decode()}


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
    }
    found: dict[str, Any] = {
        "usage": usage | {"prompt_tokens_details": {"cached_tokens": replies[0].cached_tokens}}
    }
    if drafted := sum(reply.drafted for reply in replies):
        drafts = {
            "num_draft_tokens": drafted,
            "num_accepted_draft_tokens": sum(reply.accepted for reply in replies),
        }
        found["metrics"] = {"speculative_decoding": drafts}
    return found
