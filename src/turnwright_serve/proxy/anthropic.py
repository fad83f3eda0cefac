"""Anthropic's Messages API (https://docs.anthropic.com/en/api/messages)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import groupby
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
model messages system tools tool_choice max_tokens stop_sequences stream metadata thinking
service_tier container context_management mcp_servers output_config betas speed diagnostics
cache_control inference_geo user_profile_id workspace_id billing_policy fallbacks
fallback_credit_token
"""
FIELDS = frozenset(_KNOWN_FIELDS.split())
_BILLING = "x-anthropic-billing-header:"
"""Beginning of a system text that differs in each conversation of a program, and means nothing to
the model."""


class AnthropicMessages:
    """The dialect of `/v1/messages`."""

    name = "messages"
    end_status = 403
    heartbeat = sse({"type": "ping"}, "ping")
    rows = "messages"

    def read(self, body: RequestBody, cache: RequestCache) -> WireRequest:
        """Read a request's body; raise `RequestFault`."""
        counts: Counter[str] = Counter()
        fields = body.fields
        check_fields(fields, FIELDS, counts)

        system = [text for text in _texts(fields.get("system")) if not text.startswith(_BILLING)]
        opening = {"role": "system", "content": "\n".join(system)} if system else None
        messages = cache.messages(
            body,
            lambda rows: [message for row in rows for message in _messages(row, cache)],
            opening=opening,
        )
        schemas = _tools(fields.get("tools"), counts)
        tools, needs_call = tool_choice(fields.get("tool_choice"), schemas)
        return WireRequest(
            messages=messages,
            tools=tools,
            model=text_of(fields.get("model", ""), "model"),
            max_tokens=positive(fields.get("max_tokens"), "max_tokens"),
            stop=stop_texts(fields.get("stop_sequences"), "stop_sequences"),
            stream=bool(fields.get("stream")),
            needs_call=needs_call,
            counts=counts,
        )

    def answer(self, request: WireRequest, reply: WireReply) -> dict[str, Any]:
        """Return the body of a reply that is not streamed."""
        return _message(request, reply, _blocks(reply)) | _stop(reply) | {"usage": _usage(reply)}

    def events(self, request: WireRequest, reply: WireReply) -> Iterator[bytes]:
        """Return the pieces of a streamed reply."""
        begun = {"type": "message_start", "message": _message(request, reply, [])}
        yield sse(begun, "message_start")

        for index, block in enumerate(_blocks(reply)):
            empty, deltas = _block_deltas(block)
            start = {"type": "content_block_start", "index": index, "content_block": block | empty}
            yield sse(start, "content_block_start")
            for delta in deltas:
                piece = {"type": "content_block_delta", "index": index, "delta": delta}
                yield sse(piece, "content_block_delta")
            yield sse({"type": "content_block_stop", "index": index}, "content_block_stop")

        end = {"type": "message_delta", "delta": _stop(reply), "usage": _usage(reply)}
        yield sse(end, "message_delta")
        yield sse({"type": "message_stop"}, "message_stop")

    def error(self, status: int, text: str) -> dict[str, Any]:
        """Return the body of an error."""
        kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
        return {
            "type": "error",
            "error": {"type": kinds.get(status, "invalid_request_error"), "message": text},
        }

    def error_event(self, status: int, text: str) -> bytes:
        """Return the piece of a stream that is an error."""
        return sse(self.error(status, text), "error")


def _tools(value: Any, counts: Counter[str]) -> list[dict[str, Any]]:
    """Return the schemas of a request's own tools.

    Those without a schema are run by Anthropic's servers: they are left out.
    """
    tools = []
    for row in rows_of(value or [], "tools"):
        if "input_schema" not in row:
            counts["tools_left_out"] += 1
            continue
        tools.append(tool_schema(row.get("name"), row.get("description"), row["input_schema"]))
    return tools


def _messages(row: Mapping[str, Any], cache: RequestCache) -> list[WireMessage]:
    """Return the messages of a row.

    A row of the assistant is one message. One of another author has results of calls and texts,
    which become messages in their order.
    """
    role = row.get("role")
    content = row.get("content")
    blocks: list[Mapping[str, Any]]
    if isinstance(content, str):
        blocks = [{"type": "text", "text": content}]
    else:
        blocks = rows_of(content, "content")

    if role == "assistant":
        return [_assistant(blocks)]
    if role not in ("user", "system"):
        raise RequestFault(f"a message of role {role!r:.40}; roles are user, assistant and system")

    messages = []
    for is_result, run in groupby(blocks, lambda block: block.get("type") == "tool_result"):
        if is_result:
            messages += [_result(block, cache) for block in run]
        else:
            messages.append(WireMessage(role, join_parts([_part(block, cache) for block in run])))
    return messages


def _part(block: Mapping[str, Any], cache: RequestCache) -> ContentPart:
    if block.get("type") == "text":
        return text_of(block.get("text"), "the text of a content block")
    source = block.get("source")
    if block.get("type") != "image" or not isinstance(source, Mapping):
        raise unsupported(block)
    if source.get("type") == "base64":
        return cache.of_base64(source.get("data"))
    return cache.of_url(source.get("url"))


def _result(block: Mapping[str, Any], cache: RequestCache) -> WireMessage:
    content = block.get("content")
    if content is None or isinstance(content, str):
        parts: list[ContentPart] = [content or ""]
    else:
        parts = [_part(part, cache) for part in rows_of(content, "content")]
    call_id = text_of(block.get("tool_use_id"), "tool_use_id")
    return WireMessage("tool", join_parts(parts), tool_call_id=call_id)


def _assistant(blocks: list[Mapping[str, Any]]) -> WireMessage:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[WireCall] = []
    marks: list[str] = []
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            texts.append(text_of(block.get("text"), "the text of a content block"))
        elif kind in ("thinking", "redacted_thinking"):
            thoughts.append(str(block.get("thinking") or ""))
            for name in ("signature", "data"):
                if isinstance(block.get(name), str):
                    marks.append(block[name])
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            name = text_of(block.get("name"), "the name of a call")
            calls.append(WireCall(str(block.get("id") or ""), name, arguments))
        else:
            raise unsupported(block)

    return WireMessage(
        "assistant",
        "\n".join(texts),
        reasoning="\n".join(thoughts) or None,
        calls=tuple(calls),
        marks=tuple(marks),
    )


def _texts(system: Any) -> list[str]:
    if system is None or isinstance(system, str):
        return [system] if system else []
    return [text_of(block.get("text"), "a text of system") for block in rows_of(system, "system")]


def _blocks(reply: WireReply) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if reply.reasoning:
        blocks.append(
            {"type": "thinking", "thinking": reply.reasoning, "signature": reply.signature}
        )
    if reply.text or not reply.calls:
        blocks.append({"type": "text", "text": reply.text})
    for call in reply.calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call)})
    return blocks


def _input(call: WireCall) -> dict[str, Any]:
    """Return the arguments as an object; unreadable ones as the text of an argument, since this
    API carries objects alone."""
    try:
        arguments = json.loads(call.arguments)
    except ValueError:
        arguments = None
    return arguments if isinstance(arguments, dict) else {"__unparsed": call.arguments}


def _block_deltas(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the fields of a block that are empty at its start, and the deltas that fill them."""
    if block["type"] == "thinking":
        thought = {"type": "thinking_delta", "thinking": block["thinking"]}
        signature = {"type": "signature_delta", "signature": block["signature"]}
        return {"thinking": "", "signature": ""}, [thought, signature]
    if block["type"] == "text":
        text = block["text"]
        return {"text": ""}, [{"type": "text_delta", "text": text}] if text else []
    arguments = json.dumps(block["input"], ensure_ascii=False)
    return {"input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]


def _message(
    request: WireRequest, reply: WireReply, content: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "id": f"msg_{reply.uid}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(reply) | {"output_tokens": 1},
    }


def _usage(reply: WireReply) -> dict[str, int]:
    return {
        "input_tokens": reply.prompt_tokens,
        "output_tokens": reply.sampled_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _stop(reply: WireReply) -> dict[str, str | None]:
    if reply.stop_text:
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stop_text}
    if reply.finish == "length":
        reason = "max_tokens"
    else:
        reason = "tool_use" if reply.calls else "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}
