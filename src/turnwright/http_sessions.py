"""Requests over HTTP: one session for each event loop, closed with the loop, and one way to ask."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any
from weakref import WeakKeyDictionary

from turnwright.types.retry import retry_after

PASSING_STATUSES = frozenset((408, 409, 425, 429, *range(500, 600)))
"""HTTP statuses of a server that may answer the same request later."""
MAX_DIRECT_BYTES = 2**20
"""Bytes of a body that is written at once; aiohttp warns of the time that longer writes take."""


class NoResponse(Exception):
    """The connection failed before the response was complete; the text says how."""


class ResponseTooLong(Exception):
    """A response has more bytes than the client takes."""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """Response of a server, whatever its status."""

    status: int
    body: bytes
    """Empty where the pieces of the body were asked for."""
    retry_after: float
    """Seconds of its header `Retry-After`; 0 without one."""

    def excerpt(self, most: int, key: str) -> str:
        """Return the start of the body as text for an error, without the API key of the request."""
        # The key goes first: a cut could leave the beginning of it.
        body = self.body.replace(key.encode(), b"***") if key else self.body
        return body[:most].decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class _OpenSession:
    session: Any
    """An `aiohttp.ClientSession`."""
    holder: AsyncGenerator[Any, None]
    """What yielded it, and closes it."""


class HttpSessions:
    """Sessions of one client.

    A session belongs to the event loop in which it was opened: notebooks and threads have their
    own. Cookies are never kept, redirections never followed. Pickling leaves the sessions behind.

    Example::

        sessions = HttpSessions(connections=8)
        response = await sessions.ask("GET", url, b"", {}, seconds=5.0, most_bytes=2**20)
        await sessions.close()
    """

    def __init__(
        self,
        connections: int,
        *,
        proxies: bool = False,
        connect_s: float | None = None,
        keepalive_s: float = 15.0,
        **options: Any,
    ) -> None:
        """Allow so many connections at once.

        Args:
            connections: maximum number of connections of a session.
            proxies: whether the proxies of the environment apply.
            connect_s: timeout for establishing a connection, in seconds; None sets none.
            keepalive_s: seconds before an idle connection is dropped.
            options: further ones of `aiohttp.ClientSession`.
        """
        self._connections = connections
        self._proxies = proxies
        self._connect_s = connect_s
        self._keepalive_s = keepalive_s
        self._options = options
        self._open = _by_loop()

    async def ask(
        self,
        method: str,
        url: Any,
        content: bytes,
        headers: Mapping[str, str],
        *,
        seconds: float,
        most_bytes: int,
        pieces: list[bytes] | None = None,
    ) -> HttpResponse:
        """Send a request and return its response, whatever the status.

        Args:
            url: text, or a `yarl.URL`, which saves parsing it.
            seconds: deadline of the complete response.
            most_bytes: maximum size of its body.
            pieces: gets the body of a success, in pieces, in place of the response: joining
                megabytes takes as long as receiving them.

        Raises:
            TimeoutError: when the response is not complete by the deadline.
            NoResponse: when the connection fails before.
            ResponseTooLong: when the body has more than `most_bytes`.
        """
        import aiohttp

        data: Any = content if len(content) < MAX_DIRECT_BYTES else BytesIO(content)
        try:
            # Cancelling a request closes its connection, which ends the request on vLLM, SGLang
            # and llama.cpp.
            async with asyncio.timeout(seconds):
                session = await self._session()
                request = session.request(
                    method, url, data=data, headers=headers, allow_redirects=False
                )
                async with request as response:
                    succeeded = response.status < 300
                    body = await _read(response, most_bytes, pieces if succeeded else None)
        except (aiohttp.ClientError, OSError) as error:
            # The deadline is a TimeoutError too; those of aiohttp are about the connection.
            if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
                raise
            raise NoResponse(f"{type(error).__name__}: {error}") from error
        except RuntimeError as error:
            if "is closed" not in str(error):
                raise
            raise NoResponse("the connection pool was closed") from error

        wait = retry_after(response.headers.get("retry-after"))
        return HttpResponse(response.status, body, wait)

    async def close(self) -> None:
        """Close the session of the running event loop; its requests in flight fail."""
        opened = self._open.pop(asyncio.get_running_loop(), None)
        if opened is not None:
            await opened.holder.aclose()

    async def _session(self) -> Any:
        """Return the session of the running event loop; open it if there is none."""
        loop = asyncio.get_running_loop()
        opened = self._open.get(loop)
        if opened is None:
            holder = self._hold()
            opened = _OpenSession(await anext(holder), holder)
            self._open[loop] = opened
        return opened.session

    async def _hold(self) -> AsyncGenerator[Any, None]:
        """Yield a session and close it.

        An event loop that ends closes the generators that are left.
        """
        import aiohttp

        connector = aiohttp.TCPConnector(
            limit=self._connections, keepalive_timeout=self._keepalive_s
        )
        async with aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_s),
            trust_env=self._proxies,
            **self._options,
        ) as session:
            yield session

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_open"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _open=_by_loop())


async def _read(response: Any, most: int, pieces: list[bytes] | None) -> bytes:
    """Return the body of a response, or append its pieces to a list."""
    announced = response.content_length
    # The header of a compressed body says nothing of its size.
    is_plain = "content-encoding" not in response.headers
    if pieces is None and is_plain and announced is not None and announced <= most:
        content: bytes = await response.read()  # one call in place of one per piece
        return content

    received: list[bytes] = [] if pieces is None else pieces
    size = 0
    async for piece in response.content.iter_any():
        size += len(piece)
        if size > most:
            raise ResponseTooLong
        received.append(piece)
    return b"".join(received) if pieces is None else b""


def _by_loop() -> WeakKeyDictionary[asyncio.AbstractEventLoop, _OpenSession]:
    return WeakKeyDictionary()
