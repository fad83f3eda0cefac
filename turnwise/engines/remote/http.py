"""JSON over HTTP to one server: a pool of connections, a deadline for every request, and faults told apart."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import orjson

from turnwise.engines import tokens
from turnwise.errors import BackendContractError, ConfigError, EngineError, EngineUnavailable
from turnwise.types.retry import retry_after

MOST_BYTES = 256 * 2**20
"""Of one answer; a longer one is given up."""
KEEPALIVE_S = 3.0
"""An idle connection is dropped after this long: uvicorn and llama.cpp drop theirs after 5 s, and whoever writes into a
connection at the moment its server closes it gets no answer."""
SPARE = 8
"""Connections beyond the calls': a look at a server's health never waits behind them."""
SHARE = 32
"""Connections of one client of the library: its pool looks at each of them at every request, so one of 256 spends more time on
itself than on the requests."""
CONNECT_S = 5.0
"""For a connection to be made."""
RETRYABLE_STATUS = frozenset((404, 408, 409, 425, 429, *range(500, 600)))
"""HTTP statuses that another server, or the same one later, may not have; 404 is a model or a route that is not loaded."""


class HttpClient:
    """One server. Connections belong to the event loop that made them; `close` closes those of the running one."""

    def __init__(self, url: str, *, key_env: str | None = None, most: int = 256) -> None:
        """
        Args:
            url: of the server, with a path where its routes stand behind one.
            key_env: the environment variable that holds an API key; it is read at each call and written down nowhere.
            most: most calls at once; others wait for a connection.

        Raises:
            ConfigError: for what is no URL, a variable that is not set, or without `httpx2`.
        """
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"engine URL {url!r}: it begins with http:// or https://, as in http://localhost:8000")
        if key_env is not None and key_env not in os.environ:
            raise ConfigError(f"{url}: the environment variable {key_env} is not set; it holds the server's API key")
        try:
            import httpx2  # noqa: F401
        except ImportError:
            raise ConfigError("engines behind HTTP need httpx2: pip install 'turnwise[servers]'") from None
        self.url = url.rstrip("/")
        self._key_env = key_env
        self._token = ""
        """Of a server of this user's on this machine, where it has asked for one."""
        self._most = most
        self._pools: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[_Pool, AsyncGenerator[_Pool, None]]] = (
            WeakKeyDictionary()
        )

    def __repr__(self) -> str:
        return self.url

    async def post(self, path: str, body: Any, seconds: float, headers: Mapping[str, str] | None = None) -> Any:
        """The JSON that the server answers to a JSON body; None for an empty answer.

        Raises:
            EngineUnavailable: no answer: no connection, the deadline, a cut-off answer, a status that may pass.
            EngineError: the server refuses the request (any other status); asking again does not help.
            BackendContractError: the answer is no JSON.
        """
        return self._json(path, await self._ask("POST", path, orjson.dumps(body), seconds, headers))

    async def post_status(self, path: str, body: Any, seconds: float) -> None:
        """Post a JSON body where the answer's status is all that counts: some routes answer with a sentence.

        Raises:
            EngineUnavailable, EngineError: as `post`.
        """
        await self._ask("POST", path, orjson.dumps(body), seconds)

    async def get(self, path: str, seconds: float) -> Any:
        """The JSON at a path.

        Raises:
            EngineUnavailable, EngineError, BackendContractError: as `post`.
        """
        return self._json(path, await self._ask("GET", path, b"", seconds))

    async def page(self, path: str, seconds: float) -> dict[str, Any]:
        """The JSON object at a path; an empty one for an empty answer.

        Raises:
            EngineUnavailable, EngineError, BackendContractError: as `post`; the last for what is no object, too.
        """
        found = await self.get(path, seconds)
        if found is not None and not isinstance(found, dict):
            raise BackendContractError(f"{self.url}{path} answered what is no JSON object: {found!r:.120}")
        return found or {}

    async def text(self, path: str, seconds: float) -> str:
        """The text at a path.

        Raises:
            EngineUnavailable, EngineError: as `post`.
        """
        return (await self._ask("GET", path, b"", seconds)).decode("utf-8", "replace")

    async def alive(self, path: str, seconds: float) -> None:
        """See that the server answers at a path, whatever it says.

        Raises:
            EngineUnavailable, EngineError: as `post`.
        """
        await self._ask("GET", path, b"", seconds)

    async def close(self) -> None:
        """Close the connections of the running event loop; requests in flight on them fail."""
        held = self._pools.pop(asyncio.get_running_loop(), None)
        if held is not None:
            await held[1].aclose()

    async def _ask(
        self, method: str, path: str, content: bytes, seconds: float, headers: Mapping[str, str] | None = None
    ) -> bytes:
        try:
            return await self._ask_once(method, path, content, seconds, headers)
        except EngineError as error:
            token = tokens.found(self.url) if error.status == 401 and self._key_env is None else ""
            if not token or token == self._token:
                raise
            self._token = token
        return await self._ask_once(method, path, content, seconds, headers)

    async def _ask_once(
        self, method: str, path: str, content: bytes, seconds: float, headers: Mapping[str, str] | None
    ) -> bytes:
        import httpx2

        key = os.environ.get(self._key_env, "") if self._key_env is not None else self._token
        sent = {"content-type": "application/json"} if content else {}
        sent |= {"authorization": f"Bearer {key}"} if key else {}
        try:
            # A request that is cancelled closes its connection, which all three kinds of server take as the end of it.
            async with asyncio.timeout(seconds):
                pool = await self._pool()
                with pool.one() as client:
                    async with client.stream(
                        method, self.url + path, content=content, headers=sent | dict(headers or {})
                    ) as response:
                        raw = await _read(response, f"{self.url}{path}")
        except TimeoutError:
            raise EngineUnavailable(f"{self.url}{path} did not answer in {seconds:g} s") from None
        except (httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL, OSError) as error:
            raise EngineUnavailable(f"{self.url}{path}: {type(error).__name__}: {error}") from error
        except RuntimeError as error:
            if "client has been closed" not in str(error):
                raise
            raise EngineUnavailable(f"{self.url}{path}: the connection pool was closed") from error
        if response.status_code >= 300:
            said = raw[:300].decode("utf-8", "replace")
            kind = EngineUnavailable if response.status_code in RETRYABLE_STATUS else EngineError
            told = said.replace(key, "***") if key else said
            refused = kind(f"{self.url}{path} answered with the HTTP status {response.status_code}: {told}")
            refused.status, refused.retry_after = response.status_code, retry_after(response.headers.get("retry-after"))
            raise refused
        return raw

    def _json(self, path: str, raw: bytes) -> Any:
        if not raw.strip():
            return None
        try:
            return orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise BackendContractError(f"{self.url}{path} answered what is no JSON ({error}): {raw[:120]!r}") from None

    async def _pool(self) -> _Pool:
        loop = asyncio.get_running_loop()
        held = self._pools.get(loop)
        if held is None:
            holder = _pool(self._most + SPARE, self.url.startswith("https:"))
            held = self._pools[loop] = (await anext(holder), holder)
        return held[0]


class _Pool:
    """Clients of the library that share the requests between them, the least busy first."""

    def __init__(self, clients: Sequence[Any]) -> None:
        self._clients = clients
        self._busy = [0] * len(clients)

    @contextmanager
    def one(self) -> Iterator[Any]:
        """A client for one request."""
        place = self._busy.index(min(self._busy))
        self._busy[place] += 1
        try:
            yield self._clients[place]
        finally:
            self._busy[place] -= 1


async def _pool(most: int, secure: bool) -> AsyncGenerator[_Pool, None]:
    """Clients for `most` requests, closed when the event loop ends: loops close generators that are left."""
    import httpx2

    limits = httpx2.Limits(max_connections=SHARE, max_keepalive_connections=SHARE, keepalive_expiry=KEEPALIVE_S)
    # Deadlines are ours, but for a connection; proxies are for the world outside, not for engines.
    deadlines = httpx2.Timeout(None, connect=CONNECT_S)
    verify: Any = httpx2.create_ssl_context() if secure else False
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(
                httpx2.AsyncClient(timeout=deadlines, limits=limits, trust_env=False, verify=verify)
            )
            for _ in range(-(-most // SHARE))
        ]
        yield _Pool(clients)


async def _read(response: Any, where: str) -> bytes:
    pieces: list[bytes] = []
    size = 0
    async for piece in response.aiter_bytes():
        size += len(piece)
        if size > MOST_BYTES:
            raise EngineUnavailable(f"{where} answered with more than {MOST_BYTES} bytes")
        pieces.append(piece)
    return b"".join(pieces)
