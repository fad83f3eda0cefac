"""OpenAI-style chat endpoint as an engine for evaluation: text in, text out, nothing trainable."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from turnwright.engines.protocols import Generation, Request
from turnwright.engines.remote.remote_engine import RemoteEngine
from turnwright.engines.remote.response import field_of, only_choice
from turnwright.errors import EngineError, NotTrainable
from turnwright.types import join_texts


class ChatEngine(RemoteEngine):
    """Client of `URL/chat/completions`, for evaluation, judges and simulated users.

    It sends messages and encodes the returned text with the renderer. Those ids were not sampled as
    such and have no logprobs, so every id of a reply is untrained (reason `no_logprob`), and weight
    updates raise `NotTrainable`.
    """

    kind = "chat endpoint"

    def __init__(self, url: str, model: str, **options: Any) -> None:
        """
        Args:
            url: base URL of the API including its version: `https://host/v1`.
            model: model name known to the endpoint.
            options: as of `RemoteEngine`.
        """
        super().__init__(url, model=model, **options | {"missing_logprobs": "mask"})

    async def _identify(self) -> None:
        """Do nothing: a chat endpoint does not describe itself."""

    async def check_health(self, seconds: float) -> None:
        await self.http.text("/models", seconds)

    async def generate(self, request: Request) -> Generation:
        who = self.display_name
        if self.renderer is None:
            raise EngineError(
                f"{who}: a chat endpoint needs a renderer: pass renderer= or use it through a "
                "rollout"
            )
        if not request.messages:
            raise EngineError(f"{who}: a chat endpoint needs messages, and this call has only ids")
        if request.sampling.min_p:
            raise EngineError(
                f"{who}: the API of chat endpoints has no min_p; set it to 0, or use an engine "
                "that returns ids"
            )
        messages = _with_call_ids([_plain(message.to_dict(), who) for message in request.messages])
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": request.max_tokens,
            "temperature": request.sampling.temperature,
            "top_p": request.sampling.top_p,
        }
        if request.tools:
            body["tools"] = [dict(tool) for tool in request.tools]
        self.counts["requests"] += 1
        raw = await self.http.post("/chat/completions", body, self._seconds(request))
        choice = only_choice(raw, self.breach)
        text, calls = self._reply(choice)
        ids = list(self.renderer.encode_reply(text))[: request.max_tokens]
        if calls and not self.renderer.parse(ids, request.tools).tool_calls:
            raise EngineError(
                f"{who} returned tool calls of the API, and the renderer does not read them: leave "
                "out model.path"
            )
        end = request.stop_text.first_completion(ids) if request.stop_text is not None else 0
        ids = ids[:end] if end else ids
        if choice["finish_reason"] == "length":
            while ids and ids[-1] in request.stop_ids:
                ids.pop()
        if not ids:
            raise self.breach("choices.0.message.content", "is empty; a reply has at least one id")
        stopped = bool(end) or ids[-1] in request.stop_ids
        made = Generation(
            ids,
            [None] * len(ids),
            "stop" if stopped else "length",
            self.version,
            missing_logprobs="mask",
        )
        self._count(made, 0, len(request.ids))
        return made

    def _reply(self, choice: dict[str, Any]) -> tuple[str, bool]:
        """Return the text of a reply, with its calls as a model writes them,
        and whether it has any."""
        message = field_of(choice, "message", self.breach)
        if not isinstance(message, dict):
            raise self.breach("choices.0.message", f"is {message!r:.80}, not an object")
        calls = message.get("tool_calls")
        text = message.get("content") or ("" if calls else message.get("content"))
        if not isinstance(text, str):
            raise self.breach("choices.0.message.content", f"is {text!r}, not text")
        if choice.get("finish_reason") not in ("stop", "length", "tool_calls"):
            raise self.breach(
                "choices.0.finish_reason",
                f"is {choice.get('finish_reason')!r}; expected stop or length",
            )
        if calls:
            text = "\n".join(
                filter(
                    None, (text, *map(self._written, calls if isinstance(calls, list) else [calls]))
                )
            )
        return text, bool(calls)

    def _written(self, call: Any) -> str:
        """Return a call of the API as a model of the built-in renderer writes it."""
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise self.breach(
                "choices.0.message.tool_calls", f"has {call!r:.80}, not a call of a function"
            )
        arguments = function.get("arguments") or "{}"
        with suppress(ValueError):  # else as written, for the program to see
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        row = {"name": function["name"], "arguments": arguments}
        return f"<tool_call>\n{json.dumps(row, ensure_ascii=False)}\n</tool_call>"

    async def score(self, ids: Sequence[int]) -> list[float]:
        raise self._refusal()

    async def update(self, weights: Any, version: int) -> str:
        """Raise `NotTrainable`: a chat endpoint takes no weights."""
        raise self._refusal()

    async def _load_from_disk(self, directory: Path, version: int) -> None:
        raise self._refusal()

    def _refusal(self) -> NotTrainable:
        return NotTrainable(
            f"{self.display_name} cannot be trained with: it returns text, and training needs "
            "sampled ids with their logprobs; use a vLLM, SGLang or llama.cpp server or the local "
            "engine, and this endpoint for evaluation only"
        )


def _with_call_ids(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make ids of calls unique in a conversation, which services require; those of a renderer count
    from 0 in each reply. Arguments become text, as the API has them."""
    ids: dict[str, str] = {}
    for number, row in enumerate(rows):
        calls = row.get("tool_calls") or ()
        ids = {
            call["id"]: f"call_{number}_{at}" for at, call in enumerate(calls) if call.get("id")
        } or ids
        if calls:
            row["tool_calls"] = [_api_call(call, ids) for call in calls]
        if row.get("tool_call_id") in ids:
            row["tool_call_id"] = ids[row["tool_call_id"]]
    return rows


def _api_call(call: dict[str, Any], ids: dict[str, str]) -> dict[str, Any]:
    arguments = call["function"].get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return call | {
        "id": ids.get(call.get("id", ""), call.get("id")),
        "function": call["function"] | {"arguments": text},
    }


def _plain(row: dict[str, Any], who: str) -> dict[str, Any]:
    content = row.get("content")
    if isinstance(content, list):
        if any(part.get("type") != "text" for part in content):
            raise EngineError(f"{who}: chat endpoints take no images; use a vLLM or SGLang server")
        row["content"] = join_texts([part["text"] for part in content])
    return row
