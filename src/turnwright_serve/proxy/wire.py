"""Data that all dialects share: requests as read, replies as sent, what a request may ask for.

The dialects themselves are `chat`, `responses` and `anthropic`.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwright.errors import TurnwrightError
from turnwright.types import ContentPart, Message, join_texts

IGNORED = frozenset(["temperature", "top_p", "top_k", "seed"])
"""Fields that the run's own sampling settings replace; they are counted."""
_REFUSED_FIELDS = """
logit_bias frequency_penalty presence_penalty repetition_penalty length_penalty min_p min_tokens
ignore_eos best_of use_beam_search stop_token_ids bad_words logits_processors structured_outputs
guided_json guided_regex guided_choice guided_grammar logprobs top_logprobs functions function_call
audio prediction previous_response_id conversation background prompt web_search_options thread
compaction
"""
REFUSED = frozenset(_REFUSED_FIELDS.split())
"""Fields that change what is sampled or returned, and that no reply here obeys; 0, false and
empty values are accepted."""
UNMET_CHOICE = "tool_choice_unmet"
"""Count of replies without a call where the request required one: nothing constrains sampling."""


class RequestFault(TurnwrightError):
    """A request that cannot be answered; the message is for its author."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class WireCall:
    """A tool call as a program sees it."""

    id: str
    name: str
    arguments: str
    """JSON text."""


@dataclass(frozen=True, slots=True)
class WireMessage(Message):
    """A message of a request."""

    calls: tuple[WireCall, ...] = ()
    """Its calls as the program sends them; `tool_calls` is empty."""
    marks: tuple[str, ...] = ()
    """Names by which the reply was sent: ids of items, a signature."""


@dataclass(frozen=True, slots=True)
class WireRequest:
    """A request for one reply."""

    messages: list[WireMessage]
    tools: list[dict[str, Any]]
    """OpenAI schemas."""
    model: str
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    with_usage: bool = False
    """Whether a stream ends with the usage (chat completions)."""
    needs_call: bool = False
    """Whether the request requires a tool call."""
    counts: Counter[str] = field(default_factory=Counter)
    """What was left out or ignored, by name."""


@dataclass(frozen=True, slots=True)
class WireReply:
    """A reply as it is sent to the program."""

    uid: str
    """Unique in the episode; every id that the program sees is made from it."""
    text: str
    reasoning: str | None
    calls: tuple[WireCall, ...]
    finish: str
    """`stop` or `length`."""
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    stop_text: str = ""
    """The stop text that ended it, which is sampled and not sent; some programs put it back."""

    @property
    def signature(self) -> str:
        """Opaque text that is sent with the reasoning, and replaces it where a program returns
        only that."""
        return base64.b64encode(f"turnwright:{self.uid}".encode()).decode()


def check_fields(body: Mapping[str, Any], known: frozenset[str], counts: Counter[str]) -> None:
    """Count ignored and unknown fields; raise `RequestFault` for one that changes what is
    sampled."""
    if body.get("n", 1) not in (None, 1):
        raise RequestFault("n: one reply for each request; send the request again for another")
    for name, value in body.items():
        if name in IGNORED:
            counts[f"ignored_{name}"] += value is not None
        elif name in REFUSED:
            if value:
                fault = "not supported, since it changes what is sampled or returned; remove it"
                raise RequestFault(f"{name}: {fault}")
        elif name not in known and name != "n":
            counts["unknown_fields"] += 1


def join_parts(parts: Sequence[ContentPart]) -> str | tuple[ContentPart, ...]:
    """Return the content of a message: a text if all parts are texts."""
    texts = [part for part in parts if isinstance(part, str)]
    return join_texts(texts) if len(texts) == len(parts) else tuple(parts)


def tool_schema(name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    """Return the OpenAI schema of a tool."""
    if not isinstance(name, str) or not name:
        raise RequestFault("tools: every tool needs a name")
    function: dict[str, Any] = {"name": name}
    if isinstance(description, str) and description:
        function["description"] = description
    if not isinstance(parameters, Mapping):
        parameters = {"type": "object", "properties": {}}
    function["parameters"] = parameters
    return {"type": "function", "function": function}


def rows_of(value: Any, what: str) -> list[Mapping[str, Any]]:
    """Return a list of objects; raise `RequestFault` for anything else."""
    if not isinstance(value, list):
        raise RequestFault(f"{what} must be a list, not {type(value).__name__}")
    # At each call, for all of a long history: a set of types costs a microsecond.
    if set(map(type, value)) <= {dict}:
        return value
    for number, row in enumerate(value):
        if not isinstance(row, dict):
            raise RequestFault(f"{what}[{number}] must be an object, not {type(row).__name__}")
    return value


def object_of(value: Any, what: str) -> Mapping[str, Any]:
    """Return an object, empty where it is not given; raise `RequestFault` for anything else."""
    if value is not None and not isinstance(value, Mapping):
        raise RequestFault(f"{what} must be an object, not {type(value).__name__}")
    return value or {}


def text_of(value: Any, what: str) -> str:
    """Return a text; raise `RequestFault` for anything else."""
    if not isinstance(value, str):
        raise RequestFault(f"{what} must be a text, not {type(value).__name__}")
    return value


def positive(value: Any, what: str) -> int | None:
    """Return a number of tokens, None where it is not given."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RequestFault(f"{what} must be a number of tokens, at least 1, not {value!r:.40}")
    return value


def tool_choice(choice: Any, tools: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], bool]:
    """Apply `tool_choice`: return the tools that are offered, and whether a call is required.

    Nothing can force a call; a reply without a required one is counted.
    """
    if isinstance(choice, Mapping):
        choice = choice.get("type")
    return ([] if choice == "none" else tools), choice not in (None, "auto", "none")


def stop_texts(value: Any, what: str) -> tuple[str, ...]:
    """Return the stop texts of a request, which names one or lists several."""
    if value is None:
        return ()
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise RequestFault(f"{what} must be a text, or a list of texts that are not empty")
    return tuple(texts)


def unsupported(part: Mapping[str, Any]) -> RequestFault:
    """Return the fault of a content part that no model here reads."""
    return RequestFault(
        f"a content part of type {part.get('type')!r:.60}: only text and images are supported"
    )


def sse(data: Mapping[str, Any], event: str = "") -> bytes:
    """Return one server-sent event."""
    head = f"event: {event}\n" if event else ""
    body = json.dumps(data, ensure_ascii=False)
    return f"{head}data: {body}\n\n".encode("utf-8", "surrogatepass")
