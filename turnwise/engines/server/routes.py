"""vLLM and SGLang routes: sampling, weight transfer, sleep."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from turnwise import __version__
from turnwise.engines.base import Generation, Request, StopText
from turnwise.engines.server.bodies import (
    Abort,
    Aborts,
    Body,
    Bucket,
    BucketInfo,
    Completion,
    Finish,
    FromDisk,
    Generate,
    Init,
    LeaveGroup,
    Meeting,
    Pause,
    Reload,
    Rename,
    Settings,
    Tags,
    Tensors,
    TokensIn,
    Update,
)
from turnwise.engines.server.http import MAX_WEIGHTS, Call, Endpoint, HttpError, Table
from turnwise.errors import EngineError, UsageError
from turnwise.types import Sampling

DEFAULT_GROUP = "weight_update_group"
"""Name that SGLang gives an unnamed group."""


class WeightReceiver(Protocol):
    """Receives a trainer's weights and applies them completely or not at all; implemented where torch is available."""

    async def join(self, address: str, port: int, rank: int, world: int, name: str, backend: str) -> None:
        """Join a trainer's process group; the trainer is rank 0.

        Raises:
            SyncError: when the trainer does not connect, or the group is invalid.
        """

    async def receive(self, group: str | None, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Any]) -> None:
        """Receive a bucket.

        Args:
            group: name of the group; None for the only one.

        Raises:
            SyncError: for weights that the model lacks, an unknown group, or a lost trainer.
        """

    async def decode_request(self, text: str) -> None:
        """Decode weights from a request body.

        Raises:
            SyncError: for weights that the model lacks, or an invalid body.
        """

    @property
    def complete(self) -> bool:
        """Whether all weights of the model have arrived."""

    async def apply(self) -> None:
        """Load the received weights into the engine.

        Raises:
            SyncError: when some are missing.
        """

    def leave(self, group: str | None) -> bool:
        """Leave a group (all for None) and discard unapplied weights. Return False for an unknown group."""


class NamedWeights(Protocol):
    """Holder of the weights' name and of the lock for changing them."""

    name: str
    changing: asyncio.Lock


def sglang_groups(served: NamedWeights, receiver: WeightReceiver) -> Table:
    """Return SGLang's routes. SGLang has no end-of-update request: weights are applied once all have arrived."""

    async def join(call: Call) -> Any:
        info: Meeting = call.body
        name, backend = info.group_name or DEFAULT_GROUP, info.backend or "nccl"
        await receiver.join(info.master_address, info.master_port, info.rank_offset, info.world_size, name, backend)
        return {"success": True, "message": ""}

    async def update(call: Call) -> Any:
        info: Bucket = call.body
        await receiver.receive(info.group_name or DEFAULT_GROUP, info.names, info.dtypes, info.shapes)
        return await apply_if_complete(info.weight_version)

    async def read(call: Call) -> Any:
        await receiver.decode_request(call.body.serialized_named_tensors[0])
        return await apply_if_complete(call.body.weight_version)

    async def apply_if_complete(version: Any) -> Any:
        async with served.changing:
            if version is not None or receiver.complete:
                await receiver.apply()
            served.name = str(version) if version is not None else served.name
        return {"success": True, "message": ""}

    async def leave(call: Call) -> Any:
        left = receiver.leave(call.body.group_name or DEFAULT_GROUP)
        return {"success": left, "message": "" if left else "unknown group"}

    return {
        ("POST", "/init_weights_update_group"): Endpoint(join, Meeting, changes=True),
        ("POST", "/update_weights_from_distributed"): Endpoint(update, Bucket, changes=True),
        ("POST", "/destroy_weights_update_group"): Endpoint(leave, LeaveGroup, changes=True),
        ("POST", "/update_weights_from_tensor"): Endpoint(read, Tensors, changes=True, max_bytes=MAX_WEIGHTS),
    }


def vllm_groups(served: NamedWeights, receiver: WeightReceiver) -> Table:
    """Return vLLM's routes, with the group name and torch backend that `vllm_plugin` takes."""

    async def world(call: Call) -> Any:
        return {"world_size": 1}

    async def join(call: Call) -> Any:
        info: Meeting = call.body.init_info
        if not info.group_name or not info.backend:
            raise HttpError(400, "init_info: group_name and backend are required")
        await receiver.join(
            info.master_address, info.master_port, info.rank_offset, info.world_size, info.group_name, info.backend
        )
        return {"message": "Weight transfer initialized"}

    async def begin(call: Call) -> Any:
        return {"message": "Weight update started"}

    async def update(call: Call) -> Any:
        info: BucketInfo = call.body.update_info
        await receiver.receive(None, info.names, info.dtype_names, info.shapes)
        return {"message": "Weights updated"}

    async def finish(call: Call) -> Any:
        async with served.changing:
            await receiver.apply()
            served.name = str(call.body.weight_version or served.name)
        return {"message": "Weight update finished"}

    async def leave(call: Call) -> Any:
        receiver.leave(None)
        return {"message": "Weight transfer shut down"}

    return {
        ("GET", "/get_world_size"): Endpoint(world),
        ("POST", "/init_weight_transfer_engine"): Endpoint(join, Init, changes=True),
        ("POST", "/start_weight_update"): Endpoint(begin, changes=True),
        ("POST", "/update_weights"): Endpoint(update, Update, changes=True),
        ("POST", "/finish_weight_update"): Endpoint(finish, Finish, changes=True),
        ("POST", "/shutdown_weight_transfer_engine"): Endpoint(leave, changes=True),
    }


PARTS = ("weights", "kv_cache")


class SleepControl(Protocol):
    """Releases and restores memory."""

    released: set[str]
    """Parts whose memory is released: `weights`, `kv_cache`."""

    async def sleep(self) -> None:
        """End the running calls and release all memory."""

    async def wake(self, part: str) -> None:
        """Restore the memory of a part."""

    def resume(self) -> None:
        """Resume sampling."""

    @property
    def paused(self) -> bool:
        """Whether sampling is paused."""


def vllm_sleep(served: SleepControl) -> Table:
    """Return vLLM's routes; sampling resumes once all memory is restored."""

    async def sleep(call: Call) -> Any:
        level = call.query.get("level") or "1"
        if level not in ("1", "2"):
            raise HttpError(400, f"level must be 1 or 2, not {level!r:.80}")
        if not served.released:
            await served.sleep()
        return {"status": "sleeping", "level": int(level)}

    async def wake(call: Call) -> Any:
        tag = call.query.get("tags")
        if tag and tag not in PARTS:
            raise HttpError(400, f"tags must be {' or '.join(PARTS)}, not {tag!r:.80}")
        for part in [tag] if tag else sorted(served.released):
            if part in served.released:
                await served.wake(part)
        if not served.released:
            served.resume()
        return {"status": "sleeping" if served.released else "awake", "tags": tag}

    async def sleeps(call: Call) -> Any:
        return {"is_sleeping": bool(served.released) or served.paused}

    return {
        ("POST", "/sleep"): Endpoint(sleep, changes=True),
        ("POST", "/wake_up"): Endpoint(wake, changes=True),
        ("GET", "/is_sleeping"): Endpoint(sleeps),
    }


def sglang_sleep(served: SleepControl) -> Table:
    """Return SGLang's routes. Releasing while busy or resuming what is not released ends SGLang; here it is refused."""

    async def release(call: Call) -> Any:
        if served.released or not served.paused:
            raise HttpError(400, "already released" if served.released else "pause first")
        await served.sleep()
        return {}

    async def resume(call: Call) -> Any:
        for part in call.body.tags or sorted(served.released):
            if part not in served.released:
                raise HttpError(400, f"{part} was not released")
            await served.wake(part)
        return {}

    return {
        ("POST", "/release_memory_occupation"): Endpoint(release, Tags, changes=True),
        ("POST", "/resume_memory_occupation"): Endpoint(resume, Tags, changes=True),
    }


Formats = Literal["vllm", "sglang"]
MODES = ("abort", "wait", "keep", "retract", "in_place")


class EngineService:
    """One engine as a vLLM or SGLang server: requests, pauses and the name of its weights.

    Args:
        engine: `generate`, `abort`, `check`, `context`, `vocabulary`; not shared with other callers.
        model: served model name.
        score: returns log p(ids[i] | ids[:i]) for i >= 1 under the current weights.
        load: loads the weights of a directory.
        receiver: receives weights by process group or in requests.
        decode: decodes ids, for stop texts.
        end_ids: stop ids unless a request sets others.
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
        """Parts whose memory is released: `weights`, `kv_cache`."""
        self.changing = asyncio.Lock()
        """Held during weight changes."""
        self._running: dict[str, asyncio.Task[Generation]] = {}
        self._sampling_allowed = asyncio.Event()
        self._sampling_allowed.set()

    def routes(self, formats: Formats) -> Table:
        """Return the routes of a format."""
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
                    ("POST", "/flush_cache"): Endpoint(self._no_op, changes=True),
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
                ("POST", "/reset_prefix_cache"): Endpoint(self._no_op, changes=True),
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
        self, name: str, ids: list[int], given: Settings | None, max_tokens: int | None, session: str
    ) -> tuple[Generation, str]:
        """Sample one reply; return it with the name of the weights that sampled it."""
        request = self._request(ids, given or Settings(), max_tokens, session or name)
        await self._sampling_allowed.wait()
        if name in self._running:
            raise HttpError(400, f"request {name!r} is already running")
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

    def _request(self, ids: list[int], given: Settings, max_tokens: int | None, session: str) -> Request:
        space = self._reply_space(ids)
        stops = frozenset(given.stop_token_ids or ()) | (frozenset() if given.ignore_eos else self._end_ids)
        seed = given.seed if given.seed is not None else given.sampling_seed
        texts = [given.stop] if isinstance(given.stop, str) else given.stop
        try:
            stop_text = StopText(texts, self._decode) if texts else None
        except UsageError as error:
            raise HttpError(400, str(error)) from None
        return Request(
            ids,
            min(max_tokens or 16, space),
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

    def _reply_space(self, ids: list[int]) -> int:
        """Return how many new ids fit after a context; reject an invalid context."""
        space: int = self.engine.context - len(ids)
        if not ids or space < 1:
            raise HttpError(400, f"{len(ids)} ids fill the context of {self.engine.context}" if ids else "no ids")
        if max(ids) >= self.engine.vocabulary:
            raise HttpError(400, f"id {max(ids)} is not in the vocabulary of {self.engine.vocabulary} ids")
        return space

    def _check(self, body: Body, model: str | None = None) -> None:
        if model not in (None, self.model):
            raise HttpError(404, f"this server serves {self.model!r}, not {model!r}")
        for fault in body.unsupported():
            raise HttpError(400, fault)

    async def _score_ids(self, ids: list[int]) -> list[float]:
        self._reply_space(ids)
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
            scores = await self._score_ids(ids)
            scored = [None, *({str(one): {"logprob": score}} for one, score in zip(ids[1:], scores, strict=True))]
        name = f"cmpl-{call.headers.get('x-request-id') or uuid.uuid4().hex}"
        reply, _ = await self._sample(name, ids, body, body.max_tokens, call.headers.get("x-session-id", ""))
        choice = {
            "index": 0,
            "text": self._decode(reply.ids),
            "token_ids": reply.ids,
            "prompt_token_ids": ids,
            "finish_reason": reply.finish,
            "stop_reason": None,
            "logprobs": {"token_logprobs": reply.logprobs},
            "prompt_logprobs": scored,
        }
        return {"id": name, "model": self.model, "choices": [choice], "usage": _usage(ids, reply)} | _vllm_drafts(reply)

    async def _vllm_generate(self, call: Call) -> Any:
        body: TokensIn = call.body
        self._check(body, body.model)
        ids, given, name = body.token_ids, body.sampling_params, body.request_id or uuid.uuid4().hex
        reply, weights = await self._sample(name, ids, given, given.max_tokens, call.headers.get("x-session-id", ""))
        content = [{"token_id": one, "logprob": p} for one, p in zip(reply.ids, reply.logprobs, strict=True)]
        choice = {"index": 0, "token_ids": reply.ids, "finish_reason": reply.finish, "logprobs": {"content": content}}
        choice["weight_versions"] = [{"version": weights, "start": 0, "end": len(reply.ids)}]
        info = {"request_id": name, "prompt_token_ids": ids, "choices": [choice], "usage": _usage(ids, reply)}
        return info | _vllm_drafts(reply)

    async def _vllm_abort(self, call: Call) -> Any:
        for name in call.body.request_ids:
            self._cancel(name)
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
            scores = [None, *(await self._score_ids(ids))]
            meta["input_token_logprobs"] = [[score, one, None] for one, score in zip(ids, scores, strict=True)]
        session, max_tokens = call.headers.get("x-smg-routing-key", ""), given.max_new_tokens if given else None
        reply, weights = await self._sample(name, ids, given, max_tokens, session)
        meta |= {
            "id": name,
            "finish_reason": {"type": reply.finish},
            "prompt_tokens": len(ids),
            "completion_tokens": len(reply.ids),
            "cached_tokens": reply.cached_tokens,
            "weight_version": weights,
            "output_token_logprobs": [[p, one, None] for one, p in zip(reply.ids, reply.logprobs, strict=True)],
        }
        if reply.drafted:
            meta |= {"spec_num_proposed_drafts": reply.drafted, "spec_num_correct_drafts": reply.accepted}
            meta["spec_accept_rate"] = reply.accepted / reply.drafted
        return {"text": self._decode(reply.ids), "output_ids": reply.ids, "meta_info": meta}

    async def _sglang_abort(self, call: Call) -> Any:
        for name in list(self._running) if call.body.abort_all else [call.body.rid]:
            self._cancel(name)
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

    async def _no_op(self, call: Call) -> Any:
        return {}

    async def sleep(self) -> None:
        """End the running calls and release the engine's memory."""
        await self._pause_sampling("abort")
        await self.engine.sleep()
        self.released = {"weights", "kv_cache"}

    async def wake(self, part: str) -> None:
        """Restore the memory of a part."""
        self.released.discard(part)
        if part == "weights":
            await self.engine.wake()

    def resume(self) -> None:
        """Resume sampling."""
        self._sampling_allowed.set()

    @property
    def paused(self) -> bool:
        """Whether sampling is paused."""
        return not self._sampling_allowed.is_set()

    async def _pause(self, call: Call) -> Any:
        mode = call.query.get("mode") or call.body.mode or "abort"
        if mode not in MODES:
            raise HttpError(400, f"mode must be one of {', '.join(MODES)}, not {mode!r:.80}")
        await self._pause_sampling(mode)
        return {"status": "paused"}

    async def _pause_sampling(self, mode: str) -> None:
        """Block new replies; end those in flight (`abort`) or wait for them."""
        self._sampling_allowed.clear()
        if mode == "abort":
            self.engine.abort()
        if self._running:
            await asyncio.wait(list(self._running.values()))

    async def _resume(self, call: Call) -> Any:
        if self.released:
            raise HttpError(400, f"asleep: {', '.join(sorted(self.released))}")
        self._sampling_allowed.set()
        return {"status": "resumed"}

    def _cancel(self, name: str) -> None:
        task = self._running.get(name.removeprefix("generate-tokens-"))
        if task is not None:
            task.cancel()


def _vllm_drafts(reply: Generation) -> dict[str, Any]:
    """Return the counts of speculative decoding, if any."""
    if not reply.drafted:
        return {}
    info = {"num_draft_tokens": reply.drafted, "num_accepted_draft_tokens": reply.accepted}
    return {"metrics": {"speculative_decoding": info}}


def _usage(ids: Sequence[int], reply: Generation) -> dict[str, Any]:
    usage = {"prompt_tokens": len(ids), "completion_tokens": len(reply.ids), "total_tokens": len(ids) + len(reply.ids)}
    return usage | {"prompt_tokens_details": {"cached_tokens": reply.cached_tokens}}
