"""What vLLM and SGLang would be asked, answered by an engine of this process."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from turnwise import __version__
from turnwise.engine.base import Generation, Request
from turnwise.engine.serve.bodies import (
    Abort,
    Aborts,
    Body,
    Completion,
    FromDisk,
    Generate,
    Pause,
    Reload,
    Rename,
    Settings,
    TokensIn,
)
from turnwise.engine.serve.groups import WeightReceiver, sglang_groups, vllm_groups
from turnwise.engine.serve.http import Call, Endpoint, HttpError, Table
from turnwise.engine.serve.sleep import sglang_sleep, vllm_sleep
from turnwise.engine.stops import StopText
from turnwise.errors import EngineError, UsageError
from turnwise.types import Sampling

Formats = Literal["vllm", "sglang"]
MODES = ("abort", "wait", "keep", "retract", "in_place")


class EngineService:
    """One engine, and what stands between it and its callers: pauses, the name of its weights, ids in and out.

    Args:
        engine: `generate`, `abort`, `check`, `context`, `vocabulary`; not shared with other callers.
        model: the name that it is called by.
        score: log p(ids[i] | ids[:i]) for i from 1 on, of the weights that answer.
        load: makes the weights of a directory the engine's.
        receiver: does the same with weights that come by process group.
        decode: the text of ids, for stop texts.
        end_ids: what ends a reply unless a request says otherwise.
    """

    def __init__(
        self,
        engine: Any,
        *,
        model: str,
        score: Callable[[Sequence[int]], Sequence[float]],
        load: Callable[[Path], Awaitable[None]],
        receiver: WeightReceiver,
        decode: Callable[[Sequence[int]], str],
        end_ids: frozenset[int],
    ) -> None:
        self.engine, self.model, self.name = engine, model, "default"
        self._score, self._load, self._decode, self._end_ids = score, load, decode, end_ids
        self._receiver = receiver
        self.released: set[str] = set()
        """Whose memory was given back: `weights`, `kv_cache`."""
        self.changing = asyncio.Lock()
        """Held while weights are changed."""
        self._running: dict[str, asyncio.Task[Generation]] = {}
        self._going = asyncio.Event()
        self._going.set()

    def routes(self, formats: Formats) -> Table:
        """What is answered."""
        common: Table = {("GET", "/health"): Endpoint(self._health)}
        if formats == "sglang":
            return (
                common
                | {
                    ("GET", "/model_info"): Endpoint(self._sglang_model),
                    ("GET", "/server_info"): Endpoint(self._sglang_server),
                    ("POST", "/generate"): Endpoint(self._sglang_generate, Generate),
                    ("POST", "/abort_request"): Endpoint(self._sglang_abort, Abort, changes=True),
                    ("POST", "/pause_generation"): Endpoint(self._pause, Pause, changes=True),
                    ("POST", "/continue_generation"): Endpoint(self._resume, changes=True),
                    ("POST", "/flush_cache"): Endpoint(self._nothing, changes=True),
                    ("POST", "/update_weights_from_disk"): Endpoint(self._sglang_update, FromDisk, changes=True),
                    ("POST", "/update_weight_version"): Endpoint(self._rename, Rename, changes=True),
                }
                | sglang_groups(self, self._receiver)
                | sglang_sleep(self)
            )
        table: Table = (
            common
            | {
                ("GET", "/version"): Endpoint(self._vllm_version),
                ("GET", "/v1/models"): Endpoint(self._vllm_models),
                ("GET", "/weight_info"): Endpoint(self._vllm_weights),
                ("POST", "/v1/completions"): Endpoint(self._vllm_completions, Completion),
                ("POST", "/inference/v1/generate"): Endpoint(self._vllm_generate, TokensIn),
                ("POST", "/inference/v1/abort_requests"): Endpoint(self._vllm_abort, Aborts, changes=True),
                ("POST", "/pause"): Endpoint(self._pause, Pause, changes=True),
                ("POST", "/resume"): Endpoint(self._resume, changes=True),
                ("POST", "/collective_rpc"): Endpoint(self._vllm_reload, Reload, changes=True),
                ("POST", "/reset_prefix_cache"): Endpoint(self._nothing, changes=True),
                ("POST", "/update_weight_version"): Endpoint(self._rename, Rename, changes=True),
            }
            | vllm_groups(self, self._receiver)
            | vllm_sleep(self)
        )
        paths: dict[str, dict[str, str]] = {path: {} for _, path in table}

        async def page(call: Call) -> Any:
            return {"paths": paths}

        return table | {("GET", "/openapi.json"): Endpoint(page)}

    # One reply

    async def _sample(
        self, name: str, ids: list[int], given: Settings | None, most: int | None, session: str
    ) -> tuple[Generation, str]:
        """One reply, and the name of the weights that sampled it."""
        request = self._request(ids, given or Settings(), most, session or name)
        await self._going.wait()
        if name in self._running:
            raise HttpError(400, f"a request {name!r} runs already")
        task = asyncio.ensure_future(self.engine.generate(request))
        self._running[name] = task
        weights = self.name
        try:
            return await task, weights
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            return Generation([], [], "abort", 0), weights
        finally:
            task.cancel()
            del self._running[name]

    def _request(self, ids: list[int], given: Settings, most: int | None, session: str) -> Request:
        room = self._room(ids)
        stops = frozenset(given.stop_token_ids or ()) | (frozenset() if given.ignore_eos else self._end_ids)
        seed = given.seed if given.seed is not None else given.sampling_seed
        texts = [given.stop] if isinstance(given.stop, str) else given.stop
        try:
            stop_text = StopText(texts, self._decode) if texts else None
        except UsageError as error:
            raise HttpError(400, str(error)) from None
        return Request(
            ids,
            min(most or 16, room),
            stops,
            random.getrandbits(64) if seed is None else seed,
            session,
            sampling=Sampling(
                1.0 if given.temperature is None else given.temperature,
                1.0 if given.top_p is None else given.top_p,
                max(0, given.top_k or 0),
            ),
            banned_ids=frozenset(given.logit_bias or ()),
            stop_text=stop_text,
        )

    def _room(self, ids: list[int]) -> int:
        """How many new ids fit behind a context that can be read."""
        room: int = self.engine.context - len(ids)
        if not ids or room < 1:
            raise HttpError(400, f"{len(ids)} ids leave no room in a context of {self.engine.context}" if ids else "no ids")
        if max(ids) >= self.engine.vocabulary:
            raise HttpError(400, f"id {max(ids)} is not in the vocabulary of {self.engine.vocabulary} ids")
        return room

    def _check(self, body: Body, model: str | None = None) -> None:
        if model not in (None, self.model):
            raise HttpError(404, f"this server has {self.model!r}, not {model!r}")
        for fault in body.beyond():
            raise HttpError(400, fault)

    async def _scored(self, ids: list[int]) -> list[float]:
        self._room(ids)
        return list(await asyncio.to_thread(self._score, ids))

    # vLLM

    async def _vllm_version(self, call: Call) -> Any:
        return {"version": f"turnwise-{__version__}"}

    async def _vllm_models(self, call: Call) -> Any:
        return {"data": [{"id": self.model, "parent": None, "max_model_len": self.engine.context}]}

    async def _vllm_weights(self, call: Call) -> Any:
        return {"weight_version": self.name}

    async def _vllm_completions(self, call: Call) -> Any:
        body: Completion = call.body
        self._check(body, body.model)
        ids, scored = body.prompt, None
        if body.prompt_logprobs is not None:
            scores = await self._scored(ids)
            scored = [None, *({str(one): {"logprob": score}} for one, score in zip(ids[1:], scores, strict=True))]
        name = f"cmpl-{call.headers.get('x-request-id') or uuid.uuid4().hex}"
        made, _ = await self._sample(name, ids, body, body.max_tokens, call.headers.get("x-session-id", ""))
        choice = {
            "index": 0,
            "text": self._decode(made.ids),
            "token_ids": made.ids,
            "prompt_token_ids": ids,
            "finish_reason": made.finish,
            "stop_reason": None,
            "logprobs": {"token_logprobs": made.logprobs},
            "prompt_logprobs": scored,
        }
        return {"id": name, "model": self.model, "choices": [choice], "usage": _usage(ids, made)} | _vllm_drafts(made)

    async def _vllm_generate(self, call: Call) -> Any:
        body: TokensIn = call.body
        self._check(body, body.model)
        ids, given, name = body.token_ids, body.sampling_params, body.request_id or uuid.uuid4().hex
        made, weights = await self._sample(name, ids, given, given.max_tokens, call.headers.get("x-session-id", ""))
        content = [{"token_id": one, "logprob": p} for one, p in zip(made.ids, made.logprobs, strict=True)]
        choice = {"index": 0, "token_ids": made.ids, "finish_reason": made.finish, "logprobs": {"content": content}}
        choice["weight_versions"] = [{"version": weights, "start": 0, "end": len(made.ids)}]
        told = {"request_id": name, "prompt_token_ids": ids, "choices": [choice], "usage": _usage(ids, made)}
        return told | _vllm_drafts(made)

    async def _vllm_abort(self, call: Call) -> Any:
        for name in call.body.request_ids:
            self._end(name)
        return {}

    async def _vllm_reload(self, call: Call) -> Any:
        async with self.changing:
            await self._load(Path(call.body.kwargs.weights_path))
        return {"results": [None]}

    # SGLang

    async def _sglang_model(self, call: Call) -> Any:
        return {"model_path": self.model, "served_model_name": self.model, "weight_version": self.name}

    async def _sglang_server(self, call: Call) -> Any:
        return {"version": f"turnwise-{__version__}", "context_length": self.engine.context}

    async def _sglang_generate(self, call: Call) -> Any:
        body: Generate = call.body
        self._check(body)
        ids, given, name = body.input_ids, body.sampling_params, body.rid or uuid.uuid4().hex
        meta: dict[str, Any] = {}
        if body.logprob_start_len == 0:
            scores = [None, *(await self._scored(ids))]
            meta["input_token_logprobs"] = [[score, one, None] for one, score in zip(ids, scores, strict=True)]
        session, most = call.headers.get("x-smg-routing-key", ""), given.max_new_tokens if given else None
        made, weights = await self._sample(name, ids, given, most, session)
        meta |= {
            "id": name,
            "finish_reason": {"type": made.finish},
            "prompt_tokens": len(ids),
            "completion_tokens": len(made.ids),
            "cached_tokens": made.cached_tokens,
            "weight_version": weights,
            "output_token_logprobs": [[p, one, None] for one, p in zip(made.ids, made.logprobs, strict=True)],
        }
        if made.drafted:
            meta |= {"spec_num_proposed_drafts": made.drafted, "spec_num_correct_drafts": made.accepted}
            meta["spec_accept_rate"] = made.accepted / made.drafted
        return {"text": self._decode(made.ids), "output_ids": made.ids, "meta_info": meta}

    async def _sglang_abort(self, call: Call) -> Any:
        for name in list(self._running) if call.body.abort_all else [call.body.rid]:
            self._end(name)
        return {}

    async def _sglang_update(self, call: Call) -> Any:
        async with self.changing:
            await self._load(Path(call.body.model_path))
            self.name = str(call.body.weight_version or self.name)
        return {"success": True, "message": ""}

    # Both

    async def _rename(self, call: Call) -> Any:
        self.name = str(call.body.new_version)
        return {"success": True, "new_version": self.name}

    async def _health(self, call: Call) -> Any:
        try:
            self.engine.check()
        except EngineError as error:
            raise HttpError(503, str(error)) from None
        return {}

    async def _nothing(self, call: Call) -> Any:
        return {}

    async def sleep(self) -> None:
        """End what runs, and have the engine give its memory back."""
        await self._stop("abort")
        await self.engine.sleep()
        self.released = {"weights", "kv_cache"}

    async def wake(self, part: str) -> None:
        """Take the memory of a part back."""
        self.released.discard(part)
        if part == "weights":
            await self.engine.wake()

    def resume(self) -> None:
        """Sample again."""
        self._going.set()

    @property
    def paused(self) -> bool:
        """Whether nothing is sampled."""
        return not self._going.is_set()

    async def _pause(self, call: Call) -> Any:
        mode = call.query.get("mode") or call.body.mode or "abort"
        if mode not in MODES:
            raise HttpError(400, f"mode is {mode!r:.80}: {', '.join(MODES)}")
        await self._stop(mode)
        return {"status": "paused"}

    async def _stop(self, mode: str) -> None:
        """No new replies; those in flight end with what they have, or (`wait`) in their own time."""
        self._going.clear()
        if mode == "abort":
            self.engine.abort()
        if self._running:
            await asyncio.wait(list(self._running.values()))

    async def _resume(self, call: Call) -> Any:
        if self.released:
            raise HttpError(400, f"asleep: {', '.join(sorted(self.released))}")
        self._going.set()
        return {"status": "resumed"}

    def _end(self, name: str) -> None:
        task = self._running.get(name.removeprefix("generate-tokens-"))
        if task is not None:
            task.cancel()


def _vllm_drafts(made: Generation) -> dict[str, Any]:
    """What speculative decoding came to, where there was any."""
    if not made.drafted:
        return {}
    told = {"num_draft_tokens": made.drafted, "num_accepted_draft_tokens": made.accepted}
    return {"metrics": {"speculative_decoding": told}}


def _usage(ids: Sequence[int], made: Generation) -> dict[str, Any]:
    usage = {"prompt_tokens": len(ids), "completion_tokens": len(made.ids), "total_tokens": len(ids) + len(made.ids)}
    return usage | {"prompt_tokens_details": {"cached_tokens": made.cached_tokens}}
