"""Data that all dialects share: requests as read, replies as sent, and what a request may ask for."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

from turnwise.errors import TurnwiseError
from turnwise.types import ContentPart, Image, Message

IGNORED = frozenset(["temperature", "top_p", "top_k", "seed"])
"""Fields that the run's own sampling settings replace; they are counted."""
_REFUSED_FIELDS = """
logit_bias frequency_penalty presence_penalty repetition_penalty length_penalty min_p min_tokens ignore_eos best_of
use_beam_search stop_token_ids bad_words logits_processors structured_outputs guided_json guided_regex guided_choice
guided_grammar logprobs top_logprobs functions function_call audio prediction previous_response_id conversation background
prompt
"""
REFUSED = frozenset(_REFUSED_FIELDS.split())
"""Fields that change what is sampled or returned, and that no reply here obeys; 0, false and empty values are accepted."""
UNMET_CHOICE = "tool_choice_unmet"
"""Count of replies without a call where the request required one: nothing constrains sampling."""


KEPT_CONVERSATIONS = 8
"""Conversations of an episode whose messages are kept for requests that continue them; others are read again."""


class RequestFault(TurnwiseError):
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
        """Opaque text that is sent with the reasoning, and replaces it where a program returns only that."""
        return base64.b64encode(f"turnwise:{self.uid}".encode()).decode()


class Dialect(Protocol):
    """A chat API on the wire."""

    name: str
    end_status: int
    """HTTP status after which the programs that use this API end instead of trying again."""
    heartbeat: bytes
    """Bytes that keep a stream open and mean nothing."""

    def read(self, body: Mapping[str, Any], images: ImageCache) -> WireRequest:
        """Read a request's body; raise `RequestFault`."""

    def answer(self, request: WireRequest, reply: WireReply) -> dict[str, Any]:
        """Return the body of a reply that is not streamed."""

    def events(self, request: WireRequest, reply: WireReply) -> Iterable[bytes]:
        """Return the pieces of a streamed reply."""

    def error(self, status: int, text: str) -> dict[str, Any]:
        """Return the body of an error."""

    def error_event(self, status: int, text: str) -> bytes:
        """Return the piece of a stream that is an error."""


@dataclass(slots=True)
class _Conversation:
    """Rows of a request, and the messages that were read from them."""

    rows: list[Any] = field(default_factory=list)
    messages: list[WireMessage] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """Number of messages up to each row, itself included."""
    typed: list[tuple[int, str]] = field(default_factory=list)
    """Rows with other values than texts, and their JSON: for Python `true` and `1` are equal, which matters in calls."""

    def shared(self, rows: list[Any]) -> int:
        """Return the number of first rows that are equal."""
        most = min(len(self.rows), len(rows))
        # Nearly all requests repeat the rows of an earlier one, but for marks in its last row.
        size = next((size for size in (most, most - 1) if self.rows[:size] == rows[:size]), None) if most else 0
        if size is None:
            size = next(at for at in range(most) if self.rows[at] != rows[at])
        return next((at for at, text in self.typed if at < size and json.dumps(rows[at]) != text), size)

    def add(self, row: Any, messages: list[WireMessage]) -> None:
        """Add a row and its messages."""
        if _has_other_than_text(row):
            self.typed.append((len(self.rows), json.dumps(row)))
        self.rows.append(row)
        self.messages += messages
        self.ends.append(len(self.messages))


def _has_other_than_text(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_other_than_text, value.values()))
    return any(map(_has_other_than_text, value)) if isinstance(value, list) else not isinstance(value, str)


class ImageCache:
    """What an episode's requests repeat, read once: equal image data becomes one `Image` object, which is decoded once, and
    messages with equal ones before them become the same objects."""

    def __init__(self) -> None:
        self._images: dict[bytes, Image] = {}
        self._conversations: list[_Conversation] = []

    def read_rows(self, rows: list[Any], read: Callable[[Any], list[WireMessage]]) -> list[WireMessage]:
        """Return the messages of rows; a message is the object of an earlier request that began with the same rows."""
        shared = [(one.shared(rows), -number, one) for number, one in enumerate(self._conversations)]
        known, _, best = max(shared, default=(0, 0, _Conversation()))
        ends = best.ends[:known]
        messages, typed = best.messages[: ends[-1] if ends else 0], [one for one in best.typed if one[0] < known]
        now = _Conversation(best.rows[:known], messages, ends, typed)
        for row in rows[known:]:
            now.add(row, read(row))
        if known and known >= len(best.rows) - 1:  # it goes on; programs change marks of the last row
            self._conversations.remove(best)
        self._conversations = [*self._conversations[-KEPT_CONVERSATIONS + 1 :], now]
        return list(now.messages)

    def of_url(self, url: Any) -> Image:
        """Return the image of a data URL; nothing is fetched and no file is read."""
        if not isinstance(url, str) or not url.startswith("data:image/"):
            raise RequestFault("an image must be a data URL, data:image/png;base64,...; other URLs are not fetched")
        key = blake2b(url.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        return self._images.setdefault(key, Image(url))

    def of_base64(self, data: Any) -> Image:
        """Return the image of a file's bytes in base64."""
        return self.of_url(f"data:image/png;base64,{text_of(data, 'the data of an image')}")


def check_fields(body: Mapping[str, Any], known: frozenset[str], counts: Counter[str]) -> None:
    """Count ignored and unknown fields; raise `RequestFault` for one that changes what is sampled."""
    if body.get("n", 1) not in (None, 1):
        raise RequestFault("n: one reply for each request; send the request again for another")
    for name, value in body.items():
        if name in IGNORED:
            counts[f"ignored_{name}"] += value is not None
        elif name in REFUSED:
            if value:
                raise RequestFault(f"{name}: not supported, since it changes what is sampled or returned; remove it")
        elif name not in known and name != "n":
            counts["unknown_fields"] += 1


def join_parts(parts: Sequence[ContentPart]) -> str | tuple[ContentPart, ...]:
    """Return the content of a message: a text if all parts are texts, joined by line breaks."""
    if all(isinstance(part, str) for part in parts):
        return "\n".join(parts)  # type: ignore[arg-type]
    return tuple(parts)


def tool_schema(name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    """Return the OpenAI schema of a tool."""
    if not isinstance(name, str) or not name:
        raise RequestFault("tools: every tool needs a name")
    function: dict[str, Any] = {"name": name}
    if isinstance(description, str) and description:
        function["description"] = description
    function["parameters"] = parameters if isinstance(parameters, Mapping) else {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def rows_of(value: Any, what: str) -> list[Mapping[str, Any]]:
    """Return a list of objects; raise `RequestFault` for anything else."""
    if not isinstance(value, list):
        raise RequestFault(f"{what} must be a list, not {type(value).__name__}")
    if not set(map(type, value)) <= {dict}:  # a long history costs a microsecond, at each call
        number, wrong = next((number, one) for number, one in enumerate(value) if not isinstance(one, dict))
        raise RequestFault(f"{what}[{number}] must be an object, not {type(wrong).__name__}")
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
    """Apply `tool_choice`: return the tools that are offered, none for `none`, and whether a call is required.

    Nothing can force a call; a reply without a required one is counted.
    """
    if isinstance(choice, Mapping):
        choice = choice.get("type")
    return ([] if choice == "none" else tools), choice not in (None, "auto", "none")


def stop_texts(value: Any, what: str) -> tuple[str, ...]:
    """Return stop texts."""
    texts = () if value is None else (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else None
    if texts is None or not all(isinstance(one, str) and one for one in texts):
        raise RequestFault(f"{what} must be a text, or a list of texts that are not empty")
    return texts


def unsupported(part: Mapping[str, Any]) -> RequestFault:
    """Return the fault of a content part that no model here reads."""
    return RequestFault(f"a content part of type {part.get('type')!r:.60}: only text and images are supported")


def sse(data: Mapping[str, Any], event: str = "") -> bytes:
    """Return one server-sent event."""
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False)}\n\n".encode("utf-8", "surrogatepass")
