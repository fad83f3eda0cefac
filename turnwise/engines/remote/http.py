"""JSON over HTTP to one server: connection pool, a deadline per request, and classified errors."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack
from typing import Any
from weakref import WeakKeyDictionary

import orjson

from turnwise.engines import tokens
from turnwise.errors import BackendContractError, ConfigError, EngineError, EngineUnavailable
from turnwise.types.retry import retry_after

MAX_RESPONSE_BYTES = 256 * 2**20
"""Longer responses are aborted."""
KEEPALIVE_S = 3.0
"""Seconds before an idle connection is dropped. uvicorn and llama.cpp drop theirs after 5 s, and a request written to a
connection while its server closes it gets no response."""
SPARE_CONNECTIONS = 8
"""Connections beyond those for calls, so that health checks never queue."""
CONNECTIONS_PER_CLIENT = 32
"""Connections per library client: its pool scans all of them for each request, so a pool of 256 costs more than the
requests."""
CONTROL_S = 10.0
"""Deadline for requests without computation: health, versions, aborts."""
CONNECT_S = 5.0
"""Timeout for establishing a connection."""
RETRYABLE_STATUS = frozenset((404, 408, 409, 425, 429, *range(500, 600)))
"""HTTP statuses that may differ on another server or later; 404 is a model or route that is not loaded."""
Headers = Mapping[str, str] | None


class HttpClient:
    """HTTP client of one server. Connections belong to an event loop; `close` closes those of the running loop."""

    def __init__(self, url: str, *, key_env: str | None = None, most: int = 256) -> None:
        """Take a base URL, the variable of an API key (read at each call, never stored) and the limit of concurrent calls.

        Raises `ConfigError` for an invalid URL, an unset variable, or without `httpx2`.
        """
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"engine URL {url!r}: must start with http:// or https://, as in http://localhost:8000")
        if key_env is not None and key_env not in os.environ:
            raise ConfigError(f"{url}: set the environment variable {key_env} to the server's API key")
        try:
            import httpx2  # noqa: F401
        except ImportError:
            raise ConfigError("HTTP engines need httpx2: pip install 'turnwise[servers]'") from None
        self.url = url.rstrip("/")
        self._key_env = key_env
        self._token = ""
        """Token of a local server of this user, once the server asked for one."""
        self._most = most
        self._pools = WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[_Clients, AsyncGenerator[_Clients, None]]]()

    async def post(self, path: str, body: Any, seconds: float, headers: Headers = None) -> Any:
        """Post a JSON body and return the JSON response; None for an empty one.

        Raises `EngineUnavailable`: no response: connection error, deadline, truncated response, or a retryable status;
        `EngineError`: the server rejects the request (any other status); retrying does not help; `BackendContractError`: the
        response is not JSON.
        """
        return self._json(path, await self._ask("POST", path, orjson.dumps(body), seconds, headers))

    async def post_status(self, path: str, body: Any, seconds: float) -> None:
        """Post a JSON body and ignore the response body; raises as `post`."""
        await self._ask("POST", path, orjson.dumps(body), seconds)

    async def get(self, path: str, seconds: float) -> Any:
        """Return the JSON at a path; raises as `post`."""
        return self._json(path, await self._ask("GET", path, b"", seconds))

    async def page(self, path: str, seconds: float) -> dict[str, Any]:
        """Return the JSON object at a path; an empty one for an empty response; raises as `post`."""
        found = await self.get(path, seconds)
        if found is not None and not isinstance(found, dict):
            raise BackendContractError(f"{self.url}{path} returned JSON that is not an object: {found!r:.120}")
        return found or {}

    async def text(self, path: str, seconds: float) -> str:
        """Return the text at a path; raises as `post`."""
        return (await self._ask("GET", path, b"", seconds)).decode("utf-8", "replace")

    async def close(self) -> None:
        """Close the connections of the running event loop; requests in flight on them fail."""
        cached = self._pools.pop(asyncio.get_running_loop(), None)
        if cached is not None:
            await cached[1].aclose()

    async def _ask(self, method: str, path: str, content: bytes, seconds: float, headers: Headers = None) -> bytes:
        try:
            return await self._ask_once(method, path, content, seconds, headers)
        except EngineError as error:
            token = tokens.found(self.url) if error.status == 401 and self._key_env is None else ""
            if not token or token == self._token:
                raise
            self._token = token
        return await self._ask_once(method, path, content, seconds, headers)

    async def _ask_once(self, method: str, path: str, content: bytes, seconds: float, headers: Headers) -> bytes:
        import httpx2

        where = f"{self.url}{path}"
        key = os.environ.get(self._key_env, "") if self._key_env is not None else self._token
        sent = {"content-type": "application/json"} if content else {}
        sent |= {"authorization": f"Bearer {key}"} if key else {}
        try:
            # Cancelling a request closes its connection, which ends the request on all three kinds of server.
            async with asyncio.timeout(seconds):
                in_flight = await self._clients()
                client = min(in_flight, key=in_flight.__getitem__)
                in_flight[client] += 1
                try:
                    asked = client.stream(method, where, content=content, headers=sent | dict(headers or {}))
                    async with asked as response:
                        raw = await _read(response, where)
                finally:
                    in_flight[client] -= 1
        except TimeoutError:
            raise EngineUnavailable(f"{where} did not answer in {seconds:g} s") from None
        except (httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL, OSError) as error:
            raise EngineUnavailable(f"{where}: {type(error).__name__}: {error}") from error
        except RuntimeError as error:
            if "client has been closed" not in str(error):
                raise
            raise EngineUnavailable(f"{where}: the connection pool was closed") from error
        if response.status_code >= 300:
            text = raw[:300].decode("utf-8", "replace")
            kind = EngineUnavailable if response.status_code in RETRYABLE_STATUS else EngineError
            text = text.replace(key, "***") if key else text
            refused = kind(f"{where} returned HTTP status {response.status_code}: {text}")
            refused.status, refused.retry_after = response.status_code, retry_after(response.headers.get("retry-after"))
            raise refused
        return raw

    def _json(self, path: str, raw: bytes) -> Any:
        if not raw.strip():
            return None
        try:
            return orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise BackendContractError(f"{self.url}{path} returned invalid JSON ({error}): {raw[:120]!r}") from None

    async def _clients(self) -> _Clients:
        loop = asyncio.get_running_loop()
        cached = self._pools.get(loop)
        if cached is None:
            holder = _open_clients(self._most + SPARE_CONNECTIONS, self.url.startswith("https:"))
            cached = self._pools[loop] = (await anext(holder), holder)
        return cached[0]


_Clients = dict[Any, int]
"""Requests in flight on each of the library clients that share them."""


async def _open_clients(most: int, secure: bool) -> AsyncGenerator[_Clients, None]:
    """Yield clients for `most` requests, closed with the event loop, which closes remaining generators."""
    import httpx2

    limits = httpx2.Limits(
        max_connections=CONNECTIONS_PER_CLIENT, max_keepalive_connections=CONNECTIONS_PER_CLIENT, keepalive_expiry=KEEPALIVE_S
    )
    # Deadlines are set per call, except for connecting. Proxies of the environment do not apply to engines.
    deadlines = httpx2.Timeout(None, connect=CONNECT_S)
    verify: Any = httpx2.create_ssl_context() if secure else False
    async with AsyncExitStack() as stack:
        options = {"timeout": deadlines, "limits": limits, "trust_env": False, "verify": verify}
        count = -(-most // CONNECTIONS_PER_CLIENT)
        yield {await stack.enter_async_context(httpx2.AsyncClient(**options)): 0 for _ in range(count)}


async def _read(response: Any, where: str) -> bytes:
    pieces: list[bytes] = []
    size = 0
    async for piece in response.aiter_bytes():
        size += len(piece)
        if size > MAX_RESPONSE_BYTES:
            raise EngineUnavailable(f"{where} returned more than {MAX_RESPONSE_BYTES} bytes")
        pieces.append(piece)
    return b"".join(pieces)
