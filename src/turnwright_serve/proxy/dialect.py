"""A chat API on the wire."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from turnwright_serve.proxy.request_cache import RequestBody, RequestCache
from turnwright_serve.proxy.wire import WireReply, WireRequest


class Dialect(Protocol):
    """A chat API on the wire."""

    name: str
    end_status: int
    """HTTP status after which the programs that use this API end instead of trying again."""
    heartbeat: bytes
    """Bytes that keep a stream open and mean nothing."""
    rows: str
    """Field of a request with its history."""

    def read(self, body: RequestBody, cache: RequestCache) -> WireRequest:
        """Read a request's body; raise `RequestFault`."""

    def answer(self, request: WireRequest, reply: WireReply) -> dict[str, Any]:
        """Return the body of a reply that is not streamed."""

    def events(self, request: WireRequest, reply: WireReply) -> Iterable[bytes]:
        """Return the pieces of a streamed reply."""

    def error(self, status: int, text: str) -> dict[str, Any]:
        """Return the body of an error."""

    def error_event(self, status: int, text: str) -> bytes:
        """Return the piece of a stream that is an error."""
