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
        body = self._request_body(request)
        self.counts["requests"] += 1
        raw = await self.http.post("/chat/completions", body, self._seconds(request))
        choice = only_choice(raw, self.breach)
        text, has_calls = self._reply(choice)

        # The text as ids, which end where a model's would have.
        ids = list(self.renderer.encode_reply(text))[: request.max_tokens]
        if has_calls and not self.renderer.parse(ids, request.tools).tool_calls:
            raise EngineError(
                f"{self.display_name} returned tool calls of the API, and the renderer does not "
                "read them: leave out model.path"
            )
        end = 0
        if request.stop_text is not None:
            end = request.stop_text.first_completion(ids)
        if end:
            ids = ids[:end]
        # The renderer ends every reply; this one was cut.
        if choice["finish_reason"] == "length":
            while ids and ids[-1] in request.stop_ids:
                ids.pop()
        if not ids:
            raise self.breach("choices.0.message.content", "is empty; a reply has at least one id")

        stopped = bool(end) or ids[-1] in request.stop_ids
        generation = Generation(
            ids,
            [None] * len(ids),
            "stop" if stopped else "length",
            self.version,
            missing_logprobs="mask",
        )
        self._count(generation, 0, len(request.ids))
        return generation

    def _request_body(self, request: Request) -> dict[str, Any]:
        """Return the body of a request; raise `EngineError` for what the API does not have."""
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

        messages = [_plain(message.to_dict(), who) for message in request.messages]
        body: dict[str, Any] = {
            "model": self.model,
            "messages": _with_call_ids(messages),
            "max_tokens": request.max_tokens,
            "temperature": request.sampling.temperature,
            "top_p": request.sampling.top_p,
        }
        if request.tools:
            body["tools"] = [dict(tool) for tool in request.tools]
        return body

    def _reply(self, choice: dict[str, Any]) -> tuple[str, bool]:
        """Return the text of a reply, with its calls as a model writes them, and whether it has
        any."""
        message = field_of(choice, "message", self.breach)
        if not isinstance(message, dict):
            raise self.breach("choices.0.message", f"is {message!r:.80}, not an object")
        calls = message.get("tool_calls")
        text = message.get("content")
        if calls and not text:
            text = ""
        if not isinstance(text, str):
            raise self.breach("choices.0.message.content", f"is {text!r}, not text")
        if choice.get("finish_reason") not in ("stop", "length", "tool_calls"):
            raise self.breach(
                "choices.0.finish_reason",
                f"is {choice.get('finish_reason')!r}; expected stop or length",
            )
        if not calls:
            return text, False

        parts = [text] if text else []
        for call in calls if isinstance(calls, list) else [calls]:
            parts.append(self._call_text(call))
        return "\n".join(parts), True

    def _call_text(self, call: Any) -> str:
        """Return a call of the API as a model of the built-in renderer writes it."""
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise self.breach(
                "choices.0.message.tool_calls", f"has {call!r:.80}, not a call of a function"
            )
        arguments = function.get("arguments") or "{}"
        if isinstance(arguments, str):
            with suppress(ValueError):  # else as written, for the program to see
                arguments = json.loads(arguments)
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
    """Make ids of calls unique in a conversation, which services require.

    Those of a renderer count from 0 in each reply. Arguments become text, as the API has them.
    """
    # Those of the last reply with calls, by the renderer's ids.
    unique_ids: dict[str, str] = {}
    for message_number, row in enumerate(rows):
        calls = row.get("tool_calls") or ()
        reply_ids: dict[str, str] = {}
        for number, call in enumerate(calls):
            if call.get("id"):
                reply_ids[call["id"]] = f"call_{message_number}_{number}"
        if reply_ids:
            unique_ids = reply_ids
        if calls:
            row["tool_calls"] = [_api_call(call, unique_ids) for call in calls]
        if row.get("tool_call_id") in unique_ids:
            row["tool_call_id"] = unique_ids[row["tool_call_id"]]
    return rows


def _api_call(call: dict[str, Any], unique_ids: dict[str, str]) -> dict[str, Any]:
    arguments = call["function"].get("arguments", {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return call | {
        "id": unique_ids.get(call.get("id", ""), call.get("id")),
        "function": call["function"] | {"arguments": arguments},
    }


def _plain(row: dict[str, Any], who: str) -> dict[str, Any]:
    """Return a message with its parts joined to a text; raise `EngineError` for an image."""
    content = row.get("content")
    if isinstance(content, list):
        if any(part.get("type") != "text" for part in content):
            raise EngineError(f"{who}: chat endpoints take no images; use a vLLM or SGLang server")
        row["content"] = join_texts([part["text"] for part in content])
    return row
