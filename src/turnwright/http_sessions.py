"""Connections over HTTP: one session of aiohttp for each event loop, closed with the loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any
from weakref import WeakKeyDictionary


class HttpSessions:
    """Sessions of one client.

    A session belongs to the event loop in which it was opened: notebooks and threads have their own.
    Deadlines are the caller's; cookies are never kept. Pickling leaves the sessions behind.
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

    async def get(self) -> Any:
        """Return the session of the running event loop; open it if there is none."""
        loop = asyncio.get_running_loop()
        known = self._open.get(loop)
        if known is None:
            holder = self._hold()
            known = self._open[loop] = (await anext(holder), holder)
        return known[0]

    async def close(self) -> None:
        """Close the session of the running event loop; its requests in flight fail."""
        known = self._open.pop(asyncio.get_running_loop(), None)
        if known is not None:
            await known[1].aclose()

    async def _hold(self) -> AsyncGenerator[Any, None]:
        """Yield a session and close it. An event loop that ends closes the generators that are left."""
        import aiohttp

        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._connections, keepalive_timeout=self._keepalive_s),
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


def _by_loop() -> WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[Any, AsyncGenerator[Any, None]]]:
    return WeakKeyDictionary()
