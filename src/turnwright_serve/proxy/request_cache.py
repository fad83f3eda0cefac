"""What the requests of an episode repeat, parsed, read and decoded once.

A program sends its complete history with every request, nearly always the same bytes and some more.
A body is split in two: the rows of its history, and the object without them. Rows that an earlier
request began with are found by comparing bytes; the others and the rest of the object are parsed. A
body that cannot be split is parsed as one.

Where a body is split does not have to be trusted: if the new rows are a list, and the body with a
random text in place of its list is an object that has this text as its history, then the body is
that object with those rows. Everything else fails.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import groupby
from typing import Any

import orjson

from turnwright.types import Image
from turnwright_serve.proxy.wire import RequestFault, WireMessage, rows_of, text_of

KEPT_CONVERSATIONS = 8
"""Conversations of an episode whose messages are kept for requests that continue them; others are
read again."""
_TOKENS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[][{}]', re.DOTALL)
"""Strings and brackets of JSON. A string without an end is one too: looking for its end again and
again would take long."""
_SPACE = b" \t\n\r"
_PLACE = secrets.token_hex(16)
"""In place of the rows of a body while the rest of it is parsed."""
_QUOTE = ord('"')
_OPEN = ord("{")
_OPENS = b"{["
_CLOSES = ord("]")

Row = Mapping[str, Any]


class _Conversation:
    """Rows of a request, and the messages that were read from them."""

    def __init__(
        self, opening: Row | None, earlier: _Conversation | None, rows: int, size: int
    ) -> None:
        """Begin with the first rows of an earlier one, which are `size` messages."""
        self.opening = opening
        """The row before them that another field of the request gives."""
        self.raw = b""
        """The rows, from the bracket of their list to the end of the last one."""
        self.ends: list[int] = [] if earlier is None else earlier.ends[:rows]
        """Where each row ends."""
        self.hashes: list[int] = [] if earlier is None else earlier.hashes[:rows]
        """Hash of the rows up to each."""
        self.sizes: list[int] = [] if earlier is None else earlier.sizes[:rows]
        """Number of messages up to each row; -1 if they may change with the next row."""
        self.messages: list[WireMessage] = [] if earlier is None else earlier.messages[:size]

    def go_on(
        self, rows: int, size: int, body: RequestBody, sizes: list[int], messages: list[WireMessage]
    ) -> None:
        """Keep the first rows, which are `size` messages, and add those of a body that begins with
        them."""
        self.ends[rows:] = body.ends or []
        self.hashes[rows:] = body.hashes
        self.sizes[rows:] = sizes
        self.messages[size:] = messages
        self.raw = body.raw[body.start : body.start + self.ends[-1]] if self.ends else b""

    def shared(self, raw: bytes, start: int) -> int:
        """Return the number of first rows with which the rows of a body at `start` begin."""
        numbers = range(1, len(self.ends) + 1)
        rows = bisect_left(numbers, True, key=lambda number: not self._begins(raw, start, number))
        while rows and self.sizes[rows - 1] < 0:
            rows -= 1
        return rows

    def continued(self, raw: bytes, start: int) -> int:
        """Return the same if a body begins with all rows, or all but the last, in which programs
        change marks; else 0."""
        most = len(self.ends)
        for rows in (most, most - 1):
            if rows > 0 and self._begins(raw, start, rows):
                return rows
        return 0

    def _begins(self, raw: bytes, start: int, rows: int) -> bool:
        # All of them are not copied.
        prefix = self.raw if rows == len(self.ends) else self.raw[: self.ends[rows - 1]]
        return raw.startswith(prefix, start)


@dataclass(slots=True)
class RequestBody:
    """The body of a request."""

    fields: Mapping[str, Any]
    """Its object; of a list of rows only the new ones."""
    name: str
    """Field with the rows."""
    key: Hashable
    """Equal for equal bodies."""
    raw: bytes
    earlier: _Conversation | None = None
    """The conversation that it begins with."""
    known: int = 0
    """Number of rows of that one."""
    start: int = 0
    """Where the rows begin."""
    ends: list[int] | None = None
    """Where each new row ends, counted from there; None if the body was parsed as one."""
    hashes: list[int] = field(default_factory=list)
    """Hash of the rows up to each new one."""


class RequestCache:
    """The requests of one episode."""

    def __init__(self) -> None:
        self._images: dict[bytes, Image] = {}
        self._conversations: list[_Conversation] = []

    def parse(self, raw: bytes, name: str) -> RequestBody:
        """Parse a body whose rows are in the field `name`; raise `RequestFault` if it is not an
        object."""
        opening = re.search(rb'"%s"\s*:\s*\[' % name.encode(), raw)
        body = self._split(raw, name, opening.end()) if opening else None
        return body or RequestBody(parse_object(raw), name, hash(raw), raw)

    def _split(self, raw: bytes, name: str, start: int) -> RequestBody | None:
        """Parse the new rows of a body, and the rest of it; None where that cannot be proven."""
        # Where the rows end that an earlier request had, and where the list ends.
        earlier, known = self._longest(raw, start)
        begin = start + (earlier.ends[known - 1] if earlier else 0)
        ends, close = _row_ends(raw, begin)
        if close < 0:
            return None
        text = raw[begin:close].lstrip(_SPACE)
        if text and earlier is not None and text[:1] != b",":
            return None

        try:
            rows = orjson.loads(b"[%b]" % (text if earlier is None else text[1:]))
            fields = orjson.loads(
                b'%b"%b"%b' % (raw[: start - 1], _PLACE.encode(), raw[close + 1 :])
            )
        except orjson.JSONDecodeError:
            return None
        if not isinstance(fields, dict) or fields.get(name) != _PLACE:
            return None
        # A comma without a row after it is no list.
        if len(rows) != len(ends) or (text and not rows):
            return None
        fields[name] = rows

        hashes: list[int] = []
        last = earlier.hashes[known - 1] if earlier else 0
        for row_begin, row_end in zip((begin, *ends), ends, strict=False):
            last = hash((last, raw[row_begin:row_end]))
            hashes.append(last)
        key = last, hash(raw[:start]), hash(raw[close:])
        return RequestBody(
            fields, name, key, raw, earlier, known, start, [end - start for end in ends], hashes
        )

    def _longest(self, raw: bytes, start: int) -> tuple[_Conversation | None, int]:
        """Return the conversation with most rows that a body begins with, and their number."""
        candidates: list[tuple[int, _Conversation]] = []
        for conversation in self._conversations:
            rows = conversation.continued(raw, start)
            if rows and conversation.sizes[rows - 1] >= 0:
                candidates.append((rows, conversation))
        if not candidates:
            for conversation in self._conversations:
                candidates.append((conversation.shared(raw, start), conversation))
        if not candidates:
            return None, 0
        rows, longest = max(candidates, key=lambda pair: pair[0])
        return (longest, rows) if rows else (None, 0)

    def messages(
        self,
        body: RequestBody,
        read: Callable[[list[Row]], list[WireMessage]],
        *,
        opening: Row | None = None,
        joins: Callable[[Row], bool] = lambda row: False,
    ) -> list[WireMessage]:
        """Return the messages of a body that was parsed last; a message is the object of an earlier
        request that began with the same rows.

        Args:
            read: reads consecutive rows.
            opening: a row before them.
            joins: whether a row is read together with neighbors for which this is true too.
        """
        earlier = body.earlier
        known = body.known
        if earlier is not None and earlier.opening != opening:
            # Another opening may change what the same rows mean.
            body = RequestCache().parse(body.raw, body.name)
            earlier = None
            known = 0

        size = 0 if earlier is None else earlier.sizes[known - 1]
        messages = read([opening]) if earlier is None and opening is not None else []
        sizes: list[int] = []
        for joined, group in groupby(rows_of(body.fields.get(body.name), body.name), joins):
            for rows in [list(group)] if joined else [[row] for row in group]:
                messages += read(rows)
                sizes += [-1] * len(rows) if joined else [size + len(messages)]

        if earlier is not None and known >= len(earlier.ends) - 1:
            conversation = earlier
            self._conversations.remove(conversation)
        else:
            conversation = _Conversation(opening, earlier, known, size)
        conversation.go_on(known, size, body, sizes, messages)
        if body.ends is not None:
            self._conversations = [*self._conversations[-KEPT_CONVERSATIONS + 1 :], conversation]
        return list(conversation.messages)

    def of_url(self, url: Any) -> Image:
        """Return the image of a data URL; nothing is fetched and no file is read."""
        if not isinstance(url, str) or not url.startswith("data:image/"):
            raise RequestFault(
                "an image must be a data URL, data:image/png;base64,...; other URLs are not fetched"
            )
        key = blake2b(url.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        return self._images.setdefault(key, Image(url))

    def of_base64(self, data: Any) -> Image:
        """Return the image of a file's bytes in base64."""
        return self.of_url(f"data:image/png;base64,{text_of(data, 'the data of an image')}")


def parse_object(raw: bytes) -> Mapping[str, Any]:
    """Parse a body; raise `RequestFault` if it is not an object."""
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestFault(f"the body is not JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise RequestFault(f"the body must be an object, not {type(value).__name__}")
    return value


def _row_ends(raw: bytes, start: int) -> tuple[Sequence[int], int]:
    """Return where the objects of a list end, from a place between two of them, and where the list
    ends: -1 if unknown."""
    ends: list[int] = []
    depth = 0
    for token in _TOKENS.finditer(raw, start):
        first = raw[token.start()]
        if first == _QUOTE:
            if not depth:
                break
        elif first in _OPENS:
            if not depth and first != _OPEN:
                break
            depth += 1
        elif depth:
            depth -= 1
            if not depth:
                ends.append(token.end())
        else:
            return ends, token.start() if first == _CLOSES else -1
    return ends, -1
