"""VLLM and SGLang routes: sampling, weight transfer, sleep."""

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
    Group,
    Init,
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
from turnwise.engines.server.http import MOST_WEIGHTS, Call, Endpoint, HttpError, Table
from turnwise.errors import EngineError, UsageError
from turnwise.types import Sampling

GROUP = "weight_update_group"
"""What SGLang calls a group that is given no name."""


class WeightReceiver(Protocol):
    """Takes weights that a trainer sends; it lives where torch does. They take effect whole or not at all."""

    async def join(self, address: str, port: int, rank: int, world: int, name: str, backend: str) -> None:
        """Meet a trainer, which is rank 0.

        Raises:
            SyncError: when nobody comes, or the group cannot be.
        """

    async def receive(self, group: str | None, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Any]) -> None:
        """Receive a bucket.

        Args:
            group: its name; None is the one there is.

        Raises:
            SyncError: for weights that the model has not, an unknown group, or a trainer that is gone.
        """

    async def decode_request(self, text: str) -> None:
        """Read weights that stand in a request.

        Raises:
            SyncError: for weights that the model has not, or what is none.
        """

    @property
    def complete(self) -> bool:
        """Whether all weights of the model have come."""

    async def apply(self) -> None:
        """Make what has come the engine's weights.

        Raises:
            SyncError: when some are missing.
        """

    def leave(self, group: str | None) -> bool:
        """Leave a group, None all; what came and was not taken is forgotten. False where there is none of that name."""


class NamedWeights(Protocol):
    """Has a name for its weights, and lets one change of them be done at a time."""

    name: str
    changing: asyncio.Lock


def sglang_groups(served: NamedWeights, receiver: WeightReceiver) -> Table:
    """SGLang's. It has no word for the end of an update: weights take effect when all have come."""

    async def join(call: Call) -> Any:
        told: Meeting = call.body
        name, backend = told.group_name or GROUP, told.backend or "nccl"
        await receiver.join(told.master_address, told.master_port, told.rank_offset, told.world_size, name, backend)
        return {"success": True, "message": ""}

    async def update(call: Call) -> Any:
        told: Bucket = call.body
        await receiver.receive(told.group_name or GROUP, told.names, told.dtypes, told.shapes)
        return await took(told.weight_version)

    async def read(call: Call) -> Any:
        await receiver.decode_request(call.body.serialized_named_tensors[0])
        return await took(call.body.weight_version)

    async def took(version: Any) -> Any:
        async with served.changing:
            if version is not None or receiver.complete:
                await receiver.apply()
            served.name = str(version) if version is not None else served.name
        return {"success": True, "message": ""}

    async def leave(call: Call) -> Any:
        left = receiver.leave(call.body.group_name or GROUP)
        return {"success": left, "message": "" if left else "there is no such group"}

    return {
        ("POST", "/init_weights_update_group"): Endpoint(join, Meeting, changes=True),
        ("POST", "/update_weights_from_distributed"): Endpoint(update, Bucket, changes=True),
        ("POST", "/destroy_weights_update_group"): Endpoint(leave, Group, changes=True),
        ("POST", "/update_weights_from_tensor"): Endpoint(read, Tensors, changes=True, most=MOST_WEIGHTS),
    }


def vllm_groups(served: NamedWeights, receiver: WeightReceiver) -> Table:
    """vLLM's, with what Turnwise's own way into vLLM takes: a name and a backend of torch for the group."""

    async def world(call: Call) -> Any:
        return {"world_size": 1}

    async def join(call: Call) -> Any:
        told: Meeting = call.body.init_info
        if not told.group_name or not told.backend:
            raise HttpError(400, "init_info: group_name and backend are missing")
        await receiver.join(
            told.master_address, told.master_port, told.rank_offset, told.world_size, told.group_name, told.backend
        )
        return {"message": "Weight transfer initialized"}

    async def begin(call: Call) -> Any:
        return {"message": "Weight update started"}

    async def update(call: Call) -> Any:
        told: BucketInfo = call.body.update_info
        await receiver.receive(None, told.names, told.dtype_names, told.shapes)
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
    """Gives memory back and takes it again."""

    released: set[str]
    """Whose memory was given back: `weights`, `kv_cache`."""

    async def sleep(self) -> None:
        """End what runs, and give back all."""

    async def wake(self, part: str) -> None:
        """Take the memory of a part back."""

    def resume(self) -> None:
        """Sample again."""

    @property
    def paused(self) -> bool:
        """Whether nothing is sampled."""


def vllm_sleep(served: SleepControl) -> Table:
    """vLLM's: it samples again as soon as all memory is back."""

    async def sleep(call: Call) -> Any:
        level = call.query.get("level") or "1"
        if level not in ("1", "2"):
            raise HttpError(400, f"level is {level!r:.80}: 1 or 2")
        if not served.released:
            await served.sleep()
        return {"status": "sleeping", "level": int(level)}

    async def wake(call: Call) -> Any:
        tag = call.query.get("tags")
        if tag and tag not in PARTS:
            raise HttpError(400, f"tags is {tag!r:.80}: {' or '.join(PARTS)}")
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
    """SGLang's. It ends itself where it is told to release while it works, or to resume what it has: that is refused here."""

    async def release(call: Call) -> Any:
        if served.released or not served.paused:
            raise HttpError(400, "released already" if served.released else "pause first")
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
