"""OpenAI's Responses API (https://platform.openai.com/docs/api-reference/responses)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from turnwright.types import ContentPart, join_texts
from turnwright_serve.proxy.chat import ChatCompletions
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
    text_of,
    tool_choice,
    tool_schema,
    unsupported,
)

_KNOWN_FIELDS = """
model input instructions tools tool_choice parallel_tool_calls max_output_tokens max_tool_calls
stream stream_options store include reasoning text truncation metadata user service_tier
prompt_cache_key prompt_cache_retention safety_identifier client_metadata access_programs
background_options context_management image moderation prompt_cache_options
"""
FIELDS = frozenset(_KNOWN_FIELDS.split())
_ROLES = ("system", "developer", "user", "assistant")


class Responses:
    """The dialect of `/v1/responses`, without state: every request has the complete input."""

    name = "responses"
    end_status = 400
    heartbeat = b": waiting\n\n"
    rows = "input"

    def read(self, body: RequestBody, cache: RequestCache) -> WireRequest:
        """Read a request's body; raise `RequestFault`."""
        counts: Counter[str] = Counter()
        fields = body.fields
        check_fields(fields, FIELDS, counts)
        text_format = object_of(fields.get("text"), "text").get("format")
        kind = object_of(text_format, "text.format").get("type", "text")
        if kind != "text":
            raise RequestFault(
                f"text.format: {kind!r:.40} is not supported, since nothing constrains sampling"
            )

        opening = None
        instructions = fields.get("instructions")
        if instructions:
            opening = {"role": "system", "content": text_of(instructions, "instructions")}
        text = fields.get("input")
        if isinstance(text, str):
            body = replace(body, fields={**fields, "input": [{"role": "user", "content": text}]})
        messages = cache.messages(
            body,
            lambda items: _Input(cache, counts).read(items),
            opening=opening,
            joins=_is_of_model,
        )
        schemas = _tools(fields.get("tools"), counts)
        tools, needs_call = tool_choice(fields.get("tool_choice"), schemas)
        return WireRequest(
            messages=messages,
            tools=tools,
            model=text_of(fields.get("model", ""), "model"),
            max_tokens=positive(fields.get("max_output_tokens"), "max_output_tokens"),
            stream=bool(fields.get("stream")),
            needs_call=needs_call,
            counts=counts,
        )

    def answer(self, request: WireRequest, reply: WireReply) -> dict[str, Any]:
        """Return the body of a reply that is not streamed."""
        status = "incomplete" if reply.finish == "length" else "completed"
        items = [item | {"status": status} for item in _items(reply)]
        return self._response(request, reply, status, items)

    def _response(
        self, request: WireRequest, reply: WireReply, status: str, output: list[dict[str, Any]]
    ) -> dict[str, Any]:
        is_incomplete = status == "incomplete"
        usage = {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "total_tokens": reply.prompt_tokens + reply.sampled_tokens,
            "output_tokens": reply.sampled_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
        }
        return {
            "id": f"resp_{reply.uid}",
            "object": "response",
            "created_at": int(time.time()),
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_incomplete else None,
            "instructions": None,
            "metadata": {},
            "model": request.model,
            "output": output,
            "parallel_tool_calls": True,
            "temperature": None,
            "tool_choice": "auto",
            "tools": [],
            "top_p": None,
            "usage": None if status == "in_progress" else usage,
        }

    def events(self, request: WireRequest, reply: WireReply) -> Iterator[bytes]:
        """Return the pieces of a streamed reply."""
        for number, (kind, data) in enumerate(self._events(request, reply)):
            yield sse({"type": kind, "sequence_number": number} | data, kind)

    def _events(
        self, request: WireRequest, reply: WireReply
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        begun = {"response": self._response(request, reply, "in_progress", [])}
        yield "response.created", begun
        yield "response.in_progress", begun

        done = self.answer(request, reply)
        for index, item in enumerate(done["output"]):
            yield from _item_events(item, index)
        yield f"response.{done['status']}", {"response": done}

    def error(self, status: int, text: str) -> dict[str, Any]:
        """Return the body of an error."""
        return ChatCompletions().error(status, text)

    def error_event(self, status: int, text: str) -> bytes:
        """Return the piece of a stream that is an error."""
        failed: dict[str, Any] = {
            "id": "resp_failed",
            "object": "response",
            "status": "failed",
            "output": [],
            "error": {"code": "invalid_prompt", "message": text},
        }
        return sse({"type": "response.failed", "response": failed}, "response.failed")


def _tools(value: Any, counts: Counter[str]) -> list[dict[str, Any]]:
    """Return the schemas of functions.

    Those of a namespace are `NAMESPACE.NAME`, a name that no function can have itself.
    """
    schemas = []
    for tool in rows_of(value or [], "tools"):
        prefix = ""
        members: list[Mapping[str, Any]] = [tool]
        if tool.get("type") == "namespace":
            prefix = f"{text_of(tool.get('name'), 'the name of a namespace')}."
            members = rows_of(tool.get("tools") or [], "the tools of a namespace")

        for member in members:
            if member.get("type") != "function":
                counts["tools_left_out"] += 1
                continue
            schema = tool_schema(
                member.get("name"), member.get("description"), member.get("parameters")
            )
            schema["function"]["name"] = prefix + schema["function"]["name"]
            schemas.append(schema)
    return schemas


def _items(reply: WireReply) -> list[dict[str, Any]]:
    """Return the items of a reply, complete."""
    items: list[dict[str, Any]] = []
    if reply.reasoning:
        reasoning = {
            "type": "reasoning",
            "id": f"rs_{reply.uid}",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": reply.reasoning}],
            "encrypted_content": reply.signature,
        }
        items.append(reasoning)

    if reply.text or not reply.calls:
        text = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": []}
        message = {
            "type": "message",
            "id": f"msg_{reply.uid}",
            "role": "assistant",
            "content": [text],
        }
        items.append(message)

    for number, call in enumerate(reply.calls):
        namespace, _, name = call.name.rpartition(".")
        row = {
            "type": "function_call",
            "id": f"fc_{reply.uid}_{number}",
            "call_id": call.id,
            "name": name,
            "arguments": call.arguments,
        }
        if namespace:
            row["namespace"] = namespace
        items.append(row)
    return items


def _item_events(item: dict[str, Any], index: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the kinds and the data of the events that send one complete item."""
    open_item = item | {"status": "in_progress"}
    if item["type"] == "function_call":
        open_item["arguments"] = ""
    else:
        open_item["content"] = []
    yield "response.output_item.added", {"output_index": index, "item": open_item}

    here = {"item_id": item["id"], "output_index": index}
    if item["type"] == "message":
        part = item["content"][0]
        place = here | {"content_index": 0}
        yield "response.content_part.added", place | {"part": part | {"text": ""}}
        yield "response.output_text.delta", place | {"delta": part["text"], "logprobs": []}
        yield "response.output_text.done", place | {"text": part["text"], "logprobs": []}
        yield "response.content_part.done", place | {"part": part}
    elif item["type"] == "reasoning":
        text = item["content"][0]["text"]
        yield "response.reasoning_text.delta", here | {"content_index": 0, "delta": text}
        yield "response.reasoning_text.done", here | {"content_index": 0, "text": text}
    else:
        yield "response.function_call_arguments.delta", here | {"delta": item["arguments"]}
        call = {"arguments": item["arguments"], "name": item["name"]}
        yield "response.function_call_arguments.done", here | call

    yield "response.output_item.done", {"output_index": index, "item": item}


def _is_of_model(item: Mapping[str, Any]) -> bool:
    kind = item.get("type") or "message"
    if kind == "message":
        return item.get("role") == "assistant"
    return kind in ("reasoning", "function_call")


class _Input:
    """Reader of input items.

    Items of the model up to the next item of another author are one message.
    """

    def __init__(self, cache: RequestCache, counts: Counter[str]) -> None:
        self._cache = cache
        self._counts = counts
        self._messages: list[WireMessage] = []
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[WireCall] = []
        self._marks: list[str] = []

    def read(self, items: Any) -> list[WireMessage]:
        """Return the messages of the items."""
        for item in rows_of(items, "input"):
            kind = item.get("type") or "message"
            if kind == "message" and item.get("role") == "assistant":
                self._texts.append(_text(self._parts(item.get("content"))))
                self._mark(item)
            elif kind == "reasoning":
                for part in rows_of(item.get("content") or [], "content"):
                    self._reasoning.append(str(part.get("text", "")))
                self._mark(item)
            elif kind == "function_call":
                self._calls.append(_call(item))
                self._mark(item)
            else:
                self._end_reply()
                self._other(kind, item)
        self._end_reply()
        return self._messages

    def _other(self, kind: Any, item: Mapping[str, Any]) -> None:
        """Read an item of another author than the model."""
        if kind == "message":
            role = item.get("role")
            if role not in _ROLES:
                raise RequestFault(f"a message of role {role!r:.40}; roles are {', '.join(_ROLES)}")
            content = join_parts(self._parts(item.get("content")))
            self._messages.append(WireMessage(role, content))
        elif kind == "function_call_output":
            content = join_parts(self._parts(item.get("output")))
            call_id = text_of(item.get("call_id"), "call_id")
            self._messages.append(WireMessage("tool", content, tool_call_id=call_id))
        elif kind == "item_reference":
            raise RequestFault("item_reference: nothing is stored here; send the complete input")
        else:
            self._counts["items_left_out"] += 1

    def _mark(self, item: Mapping[str, Any]) -> None:
        """Keep the names by which an item of the model was sent."""
        for name in ("id", "encrypted_content"):
            if isinstance(item.get(name), str):
                self._marks.append(item[name])

    def _end_reply(self) -> None:
        """Make a message of the items of the model since the last one, if there are any."""
        if not (self._texts or self._calls or self._reasoning or self._marks):
            return
        message = WireMessage(
            "assistant",
            "\n".join(self._texts),
            reasoning="\n".join(self._reasoning) or None,
            calls=tuple(self._calls),
            marks=tuple(self._marks),
        )
        self._messages.append(message)
        self._texts = []
        self._reasoning = []
        self._calls = []
        self._marks = []

    def _parts(self, value: Any) -> list[ContentPart]:
        if value is None or isinstance(value, str):
            return [value or ""]
        parts: list[ContentPart] = []
        for part in rows_of(value, "content"):
            if part.get("type") in ("input_text", "output_text", "text"):
                parts.append(text_of(part.get("text"), "the text of a content part"))
            elif part.get("type") == "input_image":
                parts.append(self._cache.of_url(part.get("image_url")))
            elif part.get("type") == "refusal":
                parts.append(text_of(part.get("refusal"), "a refusal"))
            else:
                raise unsupported(part)
        return parts


def _call(item: Mapping[str, Any]) -> WireCall:
    name = text_of(item.get("name"), "the name of a call")
    namespace = item.get("namespace")
    if namespace:
        name = f"{namespace}.{name}"
    arguments = str(item.get("arguments") or "{}")
    return WireCall(str(item.get("call_id") or ""), name, arguments)


def _text(parts: list[ContentPart]) -> str:
    """Return the text of a message of the assistant."""
    if not all(isinstance(part, str) for part in parts):
        raise RequestFault("an image in a message of the assistant is not supported")
    return join_texts([part for part in parts if isinstance(part, str)])
