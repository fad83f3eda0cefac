"""What vLLM and SGLang would be asked, answered by an engine of this process."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from turnwise import __version__
from turnwise.engine.base import Generation, Request
from turnwise.engine.serve.groups import Receiver, sglang_groups, vllm_groups
from turnwise.engine.serve.http import Handler, Refused
from turnwise.engine.serve.sleep import sglang_sleep, vllm_sleep
from turnwise.engine.stops import StopText
from turnwise.types import Sampling

Formats = Literal["vllm", "sglang"]
BAN = -50.0
"""Biases from here down ban an id; others are refused, since logprobs would be of another distribution than they say."""


class Served:
    """One engine, and what stands between it and its callers: pauses, the name of its weights, ids in and out.

    Args:
        engine: `generate`, `abort`, `context`; not shared with other callers.
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
        receiver: Receiver,
        decode: Callable[[Sequence[int]], str],
        end_ids: frozenset[int],
    ) -> None:
        self.engine, self.model, self.name = engine, model, "default"
        self._score, self._load, self._decode, self._end_ids = score, load, decode, end_ids
        self._receiver = receiver
        self.gone: set[str] = set()
        """Whose memory was given back: `weights`, `kv_cache`."""
        self._running: dict[str, asyncio.Task[Generation]] = {}
        self._going = asyncio.Event()
        self._going.set()

    def routes(self, formats: Formats) -> dict[tuple[str, str], Handler]:
        """What is answered, by `(method, path)`."""
        common: dict[tuple[str, str], Handler] = {("GET", "/health"): self._nothing}
        if formats == "sglang":
            return (
                common
                | {
                    ("GET", "/model_info"): self._sglang_model,
                    ("GET", "/server_info"): self._sglang_server,
                    ("POST", "/generate"): self._sglang_generate,
                    ("POST", "/abort_request"): self._sglang_abort,
                    ("POST", "/pause_generation"): self._pause,
                    ("POST", "/continue_generation"): self._resume,
                    ("POST", "/flush_cache"): self._nothing,
                    ("POST", "/update_weights_from_disk"): self._sglang_update,
                    ("POST", "/update_weight_version"): self._rename,
                }
                | sglang_groups(self, self._receiver)
                | sglang_sleep(self)
            )
        table: dict[tuple[str, str], Handler] = (
            common
            | {
                ("GET", "/version"): self._vllm_version,
                ("GET", "/v1/models"): self._vllm_models,
                ("GET", "/weight_info"): self._vllm_weights,
                ("POST", "/v1/completions"): self._vllm_completions,
                ("POST", "/inference/v1/generate"): self._vllm_generate,
                ("POST", "/inference/v1/abort_requests"): self._vllm_abort,
                ("POST", "/pause"): self._pause,
                ("POST", "/resume"): self._resume,
                ("POST", "/collective_rpc"): self._vllm_reload,
                ("POST", "/reset_prefix_cache"): self._nothing,
                ("POST", "/update_weight_version"): self._rename,
            }
            | vllm_groups(self, self._receiver)
            | vllm_sleep(self)
        )
        paths: dict[str, dict[str, str]] = {path: {} for _, path in table}

        async def page(path: str, body: Any, more: Mapping[str, str]) -> Any:
            return {"paths": paths}

        return table | {("GET", "/openapi.json"): page}

    # One reply

    async def _sample(
        self, name: str, ids: Sequence[int], given: Mapping[str, Any], most: str, session: str
    ) -> tuple[Generation, str]:
        """One reply, and the name of the weights that sampled it."""
        await self._going.wait()
        if name in self._running:
            raise Refused(400, f"a request {name!r} runs already")
        request = self._request(ids, given, most, session or name)
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

    def _request(self, ids: Sequence[int], given: Mapping[str, Any], most: str, session: str) -> Request:
        if not isinstance(ids, list) or not ids or not all(type(one) is int for one in ids):
            raise Refused(400, "the prompt has to be ids")
        room = self.engine.context - len(ids)
        if room < 1:
            raise Refused(400, f"{len(ids)} ids leave no room in a context of {self.engine.context}")
        neutral = {"min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "n": 1}
        for key, value in neutral.items():
            if given.get(key, value) != value:
                raise Refused(400, f"{key} = {given[key]}: this server samples without")
        bias = given.get("logit_bias") or {}
        if any(value > BAN for value in bias.values()):
            raise Refused(400, f"logit_bias: only bans, {BAN:g} and less")
        stops = frozenset(given.get("stop_token_ids") or ()) | (frozenset() if given.get("ignore_eos") else self._end_ids)
        texts = given.get("stop") or ()
        seed = given.get("seed", given.get("sampling_seed"))
        return Request(
            ids,
            min(int(given.get(most) or 16), room),
            stops,
            random.getrandbits(64) if seed is None else int(seed),
            session,
            sampling=Sampling(
                float(given.get("temperature", 1.0)), float(given.get("top_p", 1.0)), max(0, int(given.get("top_k") or 0))
            ),
            banned_ids=frozenset(int(key) for key in bias),
            stop_text=StopText(texts, self._decode) if texts else None,
        )

    async def _scored(self, ids: Sequence[int]) -> list[float]:
        return list(await asyncio.to_thread(self._score, ids))

    # vLLM

    async def _vllm_version(self, path: str, body: Any, more: Mapping[str, str]) -> Any:
        return {"version": f"turnwise-{__version__}"}

    async def _vllm_models(self, path: str, body: Any, more: Mapping[str, str]) -> Any:
        return {"data": [{"id": self.model, "parent": None, "max_model_len": self.engine.context}]}

    async def _vllm_weights(self, path: str, body: Any, more: Mapping[str, str]) -> Any:
        return {"weight_version": self.name}

    async def _vllm_completions(self, path: str, body: Any, more: Mapping[str, str]) -> Any:
        self._check_model(body)
        ids = body["prompt"]
        scored = None
        if body.get("prompt_logprobs") is not None:
            scores = await self._scored(ids)
            scored = [None, *({str(one): {"logprob": score}} for one, score in zip(ids[1:], scores, strict=True))]
        name = f"cmpl-{more.get('x-request-id') or uuid.uuid4().hex}"
        made, _ = await self._sample(name, ids, body, "max_tokens", more.get("x-session-id", ""))
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

    async def _vllm_generate(self, path: str, body: Any, more: Mapping[str, str]) -> Any:
        self._check_model(body)
        if body.get("features") or body.get("content_parts"):
            raise Refused(400, "this server shows no images")
        ids, name = body["token_ids"], body.get("request_id") or uuid.uuid4().hex
        made, weights = await self._sample(name, ids, body["sampling_params"], "max_tokens", more.get("x-session-id", ""))
        content = [{"token_id": one, "logprob": p} for one, p in zip(made.ids, made.logprobs, strict=True)]
        choice = {"index": 0, "token_ids": made.ids, "finish_reason": made.finish, "logprobs": {"content": content}}
        choice["weight_versions"] = [{"version": weights, "start": 0, "end": len(made.ids)}]
        told = {"request_id": name, "prompt_token_ids": ids, "choices": [choice], "usage": _usage(ids, made)}
        return told | _vllm_drafts(made)

    async def _vllm_abort(self, path: str, body: Any, more: Mapping[str, str]) -> Any:
        for name in body.get("request_ids", ()):
            self._end(name)
        return {}

    async def _vllm_reload(self, path: str, body: Any, more: Mapping[str, str]) -> Any:
        if body.get("method") != "reload_weights":
            raise Refused(400, f"collective_rpc: {body.get('method')!r}; this server knows reload_weights")
        await self._load(Path(body["kwargs"]["weights_path"]))
        return {"results": [None]}

    def _check_model(self, body: Any) -> None:
        if body.get("model") not in (None, self.model):
            raise Refused(404, f"this server has {self.model!r}, not {body['model']!r}")

    # SGLang

    async def _sglang_model(self, path: str, body: Any, more: Mapping[str, str]) -> Any:
        return {"model_path": self.model, "served_model_name": self.model, "weight_version": self.name}

    async def _sglang_server(self, path: str, body: Any, more: Mapping[str, str]) -> Any:
        return {"version": f"turnwise-{__version__}", "context_length": self.engine.context}

    async def _sglang_generate(self, path: str, body: Any, more: Mapping[str, str]) -> Any:
        if body.get("image_data"):
            raise Refused(400, "this server shows no images")
        ids, name = body["input_ids"], body.get("rid") or uuid.uuid4().hex
        meta: dict[str, Any] = {}
        if body.get("logprob_start_len") == 0:
            scores = [None, *(await self._scored(ids))]
            meta["input_token_logprobs"] = [[score, one, None] for one, score in zip(ids, scores, strict=True)]
        session = more.get("x-smg-routing-key", "")
        made, weights = await self._sample(name, ids, body.get("sampling_params") or {}, "max_new_tokens", session)
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

    async def _sglang_abort(self, path: str, body: Any, more: Mapping[str, str]) -> Any:
        for name in list(self._running) if body.get("abort_all") else [body["rid"]]:
            self._end(name)
        return {}

    async def _sglang_update(self, path: str, body: Any, more: Mapping[str, str]) -> Any:
        await self._load(Path(body["model_path"]))
        self.name = str(body.get("weight_version") or self.name)
        return {"success": True, "message": ""}

    # Both

    async def _rename(self, path: str, body: Any, more: Mapping[str, str]) -> Any:
        self.name = str(body["new_version"])
        return {"success": True, "new_version": self.name}

    async def _nothing(self, path: str, body: Any, more: Mapping[str, str]) -> Any:
        return {}

    async def sleep(self) -> None:
        """End what runs, and have the engine give its memory back."""
        await self._pause("", None, {})
        await self.engine.sleep()
        self.gone = {"weights", "kv_cache"}

    async def wake(self, part: str) -> None:
        """Take the memory of a part back."""
        self.gone.discard(part)
        if part == "weights":
            await self.engine.wake()

    def go_on(self) -> None:
        """Sample again."""
        self._going.set()

    @property
    def still(self) -> bool:
        """Whether nothing is sampled."""
        return not self._going.is_set()

    async def _pause(self, path: str, body: Any, more: Mapping[str, str]) -> Any:
        """No new replies; those in flight end with what they have, or (`wait`) in their own time."""
        self._going.clear()
        if (more.get("?mode") or (body or {}).get("mode") or "abort") == "abort":
            self.engine.abort()
        if self._running:
            await asyncio.wait(list(self._running.values()))
        return {"status": "paused"}

    async def _resume(self, path: str, body: Any, more: Mapping[str, str]) -> Any:
        if self.gone:
            raise Refused(400, f"asleep: {', '.join(sorted(self.gone))}")
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
