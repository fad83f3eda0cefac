"""OpenAI's chat completions (https://platform.openai.com/docs/api-reference/chat)."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from turnwright.types import ContentPart
from turnwright_serve.proxy.request_cache import RequestBody, RequestCache
from turnwright_serve.proxy.wire import (
    RequestFault,
    WireCall,
    WireMessage,
    WireReply,
    WireRequest,
    check_fields,
    join_parts,
    object_of,
    positive,
    rows_of,
    sse,
    stop_texts,
    text_of,
    tool_choice,
    tool_schema,
    unsupported,
)

_KNOWN_FIELDS = """
model messages tools tool_choice parallel_tool_calls max_tokens max_completion_tokens stop stream
stream_options user metadata store service_tier reasoning_effort verbosity prompt_cache_key
prompt_cache_options prompt_cache_retention safety_identifier response_format modalities moderation
"""
FIELDS = frozenset(_KNOWN_FIELDS.split())
_ROLES = ("system", "developer", "user", "assistant", "tool")


class ChatCompletions:
    """The dialect of `/v1/chat/completions`."""

    name = "chat"
    end_status = 400
    heartbeat = b": waiting\n\n"
    rows = "messages"

    def read(self, body: RequestBody, cache: RequestCache) -> WireRequest:
        """Read a request's body; raise `RequestFault`."""
        counts: Counter[str] = Counter()
        fields = body.fields
        check_fields(fields, FIELDS, counts)
        kind = object_of(fields.get("response_format"), "response_format").get("type", "text")
        if kind != "text":
            raise RequestFault(
                f"response_format: {kind!r:.40} is not supported, since nothing constrains sampling"
            )

        messages = cache.messages(body, lambda rows: [_message(row, cache) for row in rows])
        schemas = _tools(fields.get("tools"), counts)
        tools, needs_call = tool_choice(fields.get("tool_choice"), schemas)
        names = ("max_tokens", "max_completion_tokens")
        limits = [positive(fields.get(name), name) for name in names]
        return WireRequest(
            messages=messages,
            tools=tools,
            model=text_of(fields.get("model", ""), "model"),
            max_tokens=min((limit for limit in limits if limit is not None), default=None),
            stop=stop_texts(fields.get("stop"), "stop"),
            stream=bool(fields.get("stream")),
            with_usage=bool(
                object_of(fields.get("stream_options"), "stream_options").get("include_usage")
            ),
            needs_call=needs_call,
            counts=counts,
        )

    def answer(self, request: WireRequest, reply: WireReply) -> dict[str, Any]:
        """Return the body of a reply that is not streamed."""
        message: dict[str, Any] = {"role": "assistant", "content": reply.text}
        if not reply.text and reply.calls:
            message["content"] = None
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.calls:
            message["tool_calls"] = [_call_row(call) for call in reply.calls]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish(reply)}
        return self._head(request, reply, "chat.completion") | {
            "choices": [choice],
            "usage": _usage(reply),
        }

    def events(self, request: WireRequest, reply: WireReply) -> Iterator[bytes]:
        """Return the pieces of a streamed reply."""
        head = self._head(request, reply, "chat.completion.chunk")
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        if reply.reasoning:
            deltas.append({"reasoning_content": reply.reasoning})
        if reply.text:
            deltas.append({"content": reply.text})
        for number, call in enumerate(reply.calls):
            deltas.append({"tool_calls": [{"index": number} | _call_row(call)]})

        for delta in deltas:
            yield sse(head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        yield sse(head | {"choices": [{"index": 0, "delta": {}, "finish_reason": _finish(reply)}]})
        if request.with_usage:
            yield sse(head | {"choices": [], "usage": _usage(reply)})
        yield b"data: [DONE]\n\n"

    def error(self, status: int, text: str) -> dict[str, Any]:
        """Return the body of an error."""
        code = {401: "invalid_api_key", 404: "model_not_found"}.get(status)
        error = {"message": text, "type": "invalid_request_error", "param": None, "code": code}
        return {"error": error}

    def error_event(self, status: int, text: str) -> bytes:
        """Return the piece of a stream that is an error."""
        return sse(self.error(status, text))

    def _head(self, request: WireRequest, reply: WireReply, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{reply.uid}",
            "object": kind,
            "created": int(time.time()),
            "model": request.model,
        }


def _tools(value: Any, counts: Counter[str]) -> list[dict[str, Any]]:
    tools = []
    for tool in rows_of(value or [], "tools"):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, Mapping):
            counts["tools_left_out"] += 1
            continue
        parameters = function.get("parameters")
        tools.append(tool_schema(function.get("name"), function.get("description"), parameters))
    return tools


def _message(row: Mapping[str, Any], cache: RequestCache) -> WireMessage:
    role = row.get("role")
    if role not in _ROLES:
        raise RequestFault(f"a message of role {role!r:.40}; roles are {', '.join(_ROLES)}")
    content = _content(row.get("content"), cache)
    if role == "tool":
        call_id = text_of(row.get("tool_call_id"), "tool_call_id")
        return WireMessage("tool", content, tool_call_id=call_id)
    if role != "assistant":
        return WireMessage(role, content)

    calls = []
    for call in rows_of(row.get("tool_calls") or [], "tool_calls"):
        function = call.get("function")
        if not isinstance(function, Mapping):
            raise RequestFault("tool_calls: only calls of functions are supported")
        arguments = function.get("arguments") or "{}"
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments)
        name = text_of(function.get("name"), "the name of a call")
        calls.append(WireCall(str(call.get("id") or ""), name, arguments))

    reasoning = row.get("reasoning_content") or row.get("reasoning")
    if not isinstance(reasoning, str):
        reasoning = None
    return WireMessage(role, content, calls=tuple(calls), reasoning=reasoning)


def _content(value: Any, cache: RequestCache) -> str | tuple[ContentPart, ...]:
    if value is None or isinstance(value, str):
        return value or ""
    parts: list[ContentPart] = []
    for part in rows_of(value, "content"):
        if part.get("type") == "text":
            parts.append(text_of(part.get("text"), "the text of a content part"))
        elif part.get("type") == "image_url":
            url = part.get("image_url")
            parts.append(cache.of_url(url.get("url") if isinstance(url, Mapping) else url))
        elif part.get("type") == "refusal":
            parts.append(text_of(part.get("refusal"), "a refusal"))
        else:
            raise unsupported(part)
    return join_parts(parts)


def _call_row(call: WireCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _finish(reply: WireReply) -> str:
    if reply.finish == "length":
        return "length"
    return "tool_calls" if reply.calls else "stop"


def _usage(reply: WireReply) -> dict[str, int]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.sampled_tokens,
        "total_tokens": reply.prompt_tokens + reply.sampled_tokens,
    }
