"""A small HTTP/1.1 server for JSON: one handler per request, cancelled when its client goes away."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

import orjson

from turnwise.errors import TurnwiseError

MOST_BODY = 2**30
"""Bytes of a request's body, which may hold weights."""
HEAD_S = 75.0
"""How long a connection may be idle, and how long the head of a request may take."""
WORDS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 413: "Content Too Large", 500: "Server Error"}

Handler = Callable[[str, Any, Mapping[str, str]], Awaitable[Any]]
"""(path without its query, JSON body or None, headers in small letters and the query's values as `?name`) -> JSON."""


class Refused(Exception):
    """A request that is answered with an HTTP status of its own."""

    def __init__(self, status: int, told: str) -> None:
        super().__init__(told)
        self.status = status


class Server:
    """Answers requests on one address.

    Args:
        routes: by `(method, path)`.
        token: what `authorization: Bearer ...` has to hold; empty asks for none.
    """

    def __init__(self, routes: Mapping[tuple[str, str], Handler], *, host: str, port: int, token: str = "") -> None:
        self._routes, self._host, self._port, self._token = routes, host, port, token
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Where it answers, once it was started."""
        assert self._server is not None
        return f"http://{self._host}:{self._server.sockets[0].getsockname()[1]}"

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: when the address cannot be had.
        """
        self._server = await asyncio.start_server(self._connection, self._host, self._port, limit=2**16, backlog=1024)

    async def run(self) -> None:
        """Answer until cancelled."""
        assert self._server is not None
        await self._server.serve_forever()

    async def close(self) -> None:
        """Listen no more and end every connection."""
        if self._server is not None:
            self._server.close()
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            early = b""
            while True:
                async with asyncio.timeout(HEAD_S):
                    head = early + await reader.readuntil(b"\r\n\r\n")
                method, path, headers = _parse(head)
                status, body, early, last = await self._request(method, path, headers, reader)
                content = orjson.dumps(body)
                writer.write(
                    b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%s\r\n"
                    % (status, WORDS.get(status, "Error").encode(), len(content), b"connection: close\r\n" if last else b"")
                    + content
                )
                await writer.drain()
                if last or headers.get("connection", "").lower() == "close":
                    return
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError, OSError, ValueError):
            pass
        except asyncio.CancelledError:
            pass  # by `close`: asyncio would print it, and the task ends here anyway
        finally:
            self._open.discard(task)
            writer.close()

    async def _request(
        self, method: str, path: str, headers: dict[str, str], reader: asyncio.StreamReader
    ) -> tuple[int, Any, bytes, bool]:
        """Status, JSON, what came early of the next request, and whether the connection ends."""
        size = int(headers.get("content-length") or 0)
        if "transfer-encoding" in headers or not 0 <= size <= MOST_BODY:
            return 413, {"error": f"send a content-length of at most {MOST_BODY} bytes"}, b"", True
        if self._token and not hmac.compare_digest(headers.get("authorization", "").encode(), f"Bearer {self._token}".encode()):
            return 401, {"error": "the token is wrong or missing (authorization: Bearer ...)"}, b"", True
        raw = await reader.readexactly(size)
        handler = self._routes.get((method, path))
        if handler is None:
            return 404, {"detail": "Not Found"}, b"", False
        try:
            body = orjson.loads(raw) if raw.strip() else None
        except orjson.JSONDecodeError as error:
            return 400, {"error": f"the body is no JSON: {error}"}, b"", False
        work = asyncio.ensure_future(_answer(handler(path, body, headers)))
        gone = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if gone.done() and not work.done() and not gone.result():
                raise OSError("the client went away")
            status, found = await work
        finally:
            work.cancel()
            early = gone.result() if gone.done() and not gone.cancelled() and gone.exception() is None else b""
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        return status, found, early, False


async def _answer(work: Awaitable[Any]) -> tuple[int, Any]:
    try:
        return 200, await work
    except Refused as error:
        return error.status, {"error": str(error)}
    except (KeyError, TypeError, ValueError, IndexError) as error:
        return 400, {"error": f"the request is not understood: {type(error).__name__}: {error}"}
    except TurnwiseError as error:
        return 500, {"error": str(error)}


def _parse(head: bytes) -> tuple[str, str, dict[str, str]]:
    first, *rest = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ", 2)
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in rest) if name}
    parts = urlsplit(target)
    return method, parts.path, headers | {f"?{name}": values[-1] for name, values in parse_qs(parts.query).items()}
