"""JSON over HTTP to one server: a deadline per request, and classified errors.

`HttpClient` adds to `HttpSessions` what engines need: the server's token, errors that say whether
another server may help, and the echo of a prompt that is compared without being parsed. What is
asked is in the client of each kind of server, such as `VllmEngine`; nothing is retried here but a
request that lacked a token.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from turnwright.engines import tokens
from turnwright.engines.ids import ids_json
from turnwright.engines.protocols import Request
from turnwright.errors import BackendContractError, ConfigError, EngineError, EngineUnavailable
from turnwright.http_sessions import (
    PASSING_STATUSES,
    HttpResponse,
    HttpSessions,
    NoResponse,
    ResponseTooLong,
)

MAX_RESPONSE_BYTES = 256 * 2**20
"""Longer responses are aborted."""
KEEPALIVE_S = 3.0
"""Seconds before an idle connection is dropped. uvicorn and llama.cpp drop theirs after 5 s, and a
request written to a connection while its server closes it gets no response."""
SPARE_CONNECTIONS = 8
"""Connections beyond those for calls, so that health checks never queue."""
CONTROL_S = 10.0
"""Deadline for requests without computation: health, versions, aborts."""
CONNECT_S = 5.0
"""Timeout for establishing a connection."""
RETRYABLE_STATUS = PASSING_STATUSES | {404}
"""HTTP statuses that may differ on another server or later; 404 is a model or route that is not
loaded."""
Headers = Mapping[str, str] | None


@dataclass(frozen=True, slots=True)
class Echo:
    """Ids of a request that its response repeats."""

    text: bytes
    """Their JSON, as sent."""
    count: int

    def strip(self, raw: bytes) -> bytes:
        """Replace the repeated ids by their count, if they have the very bytes that were sent.

        Comparing bytes costs a hundredth of parsing them and comparing ids. The key cannot be part
        of a string, where its quotation marks would be escaped.
        """
        key_start = raw.find(ECHO_KEY)
        start = key_start + len(ECHO_KEY)
        if key_start < 0 or not raw.startswith(self.text, start):
            return raw
        return b"%b%d%b" % (raw[:start], self.count, raw[start + len(self.text) :])


ECHO_KEY = b'"prompt_token_ids":'


def encode_ids(request: Request) -> tuple[orjson.Fragment, Echo]:
    """Return the context of a request as JSON for its body, and as the echo that its response may
    have."""
    text = ids_json(request.ids)
    return orjson.Fragment(text), Echo(text, len(request.ids))


class HttpClient:
    """HTTP client of one server.

    Connections belong to an event loop; `close` closes those of the running loop.
    """

    def __init__(
        self, url: str, *, key_env: str | None = None, most: int = 256, token: str = ""
    ) -> None:
        """Take a base URL, the variable of an API key or a token, and the limit of calls at once.

        The key is read at each call and never stored. Raises `ConfigError` for an invalid URL, an
        unset variable, or without `aiohttp`.
        """
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"engine URL {url!r}: must start with http:// or https://, as in "
                "http://localhost:8000"
            )
        if key_env is not None and key_env not in os.environ:
            raise ConfigError(
                f"{url}: set the environment variable {key_env} to the server's API key"
            )
        try:
            import aiohttp  # noqa: F401
        except ImportError:
            raise ConfigError(
                "HTTP engines need aiohttp: pip install 'turnwright[servers]'"
            ) from None

        self.url = url.rstrip("/")
        self._key_env = key_env
        self._token = token
        """Also that of a local server of this user, once the server asked for one."""
        # Proxies of the environment do not apply to engines.
        self._sessions = HttpSessions(
            most + SPARE_CONNECTIONS,
            connect_s=CONNECT_S,
            keepalive_s=KEEPALIVE_S,
            headers={"accept-encoding": "identity"},
            # With the default, receiving a long echo stops and goes on every 128 kilobytes.
            read_bufsize=2**22,
        )
        self._addresses: dict[str, Any] = {}
        """Parsed URLs by path: parsing one costs as much as a tenth of a request."""

    async def post(
        self,
        path: str,
        body: Any,
        seconds: float,
        headers: Headers = None,
        echo: Echo | None = None,
    ) -> Any:
        """Post a JSON body and return the JSON response; None for an empty one.

        In the response, `echo` is replaced by its count.

        Raises:
            EngineUnavailable: no response: connection error, deadline, truncated response, or a
                retryable status.
            EngineError: the server rejects the request (any other status); retrying does not help.
            BackendContractError: the response is not JSON.
        """
        raw = await self._ask("POST", path, orjson.dumps(body), seconds, headers)
        if echo is not None:
            raw = echo.strip(raw)
        return self._json(path, raw)

    async def post_status(self, path: str, body: Any, seconds: float) -> None:
        """Post a JSON body and ignore the response body; raises as `post`."""
        await self._ask("POST", path, orjson.dumps(body), seconds)

    async def get(self, path: str, seconds: float) -> Any:
        """Return the JSON at a path; raises as `post`."""
        return self._json(path, await self._ask("GET", path, b"", seconds))

    async def page(self, path: str, seconds: float) -> dict[str, Any]:
        """Return the JSON object at a path; an empty one for an empty response; raises as
        `post`."""
        page = await self.get(path, seconds)
        if page is not None and not isinstance(page, dict):
            raise BackendContractError(
                f"{self.url}{path} returned JSON that is not an object: {page!r:.120}"
            )
        return page or {}

    async def text(self, path: str, seconds: float) -> str:
        """Return the text at a path; raises as `post`."""
        return (await self._ask("GET", path, b"", seconds)).decode("utf-8", "replace")

    async def pieces(self, path: str, seconds: float) -> list[bytes]:
        """Return the bytes at a path in pieces, since joining megabytes takes as long as receiving
        them; raises as `post`."""
        received: list[bytes] = []
        await self._ask("GET", path, b"", seconds, pieces=received)
        return received

    async def close(self) -> None:
        """Close the connections of the running event loop; requests in flight on them fail."""
        await self._sessions.close()

    async def _ask(
        self,
        method: str,
        path: str,
        content: bytes,
        seconds: float,
        headers: Headers = None,
        pieces: list[bytes] | None = None,
    ) -> bytes:
        """Ask, and once more with its token where a local server of this user wants one."""
        sent_token = self._token  # another request may learn the token while this one is under way
        try:
            return await self._ask_once(method, path, content, seconds, headers, pieces)
        except EngineError as error:
            if error.status != 401 or self._key_env is not None:
                raise
            token = tokens.lookup(self.url)
            if not token or token == sent_token:
                raise
            self._token = token
        return await self._ask_once(method, path, content, seconds, headers, pieces)

    async def _ask_once(
        self,
        method: str,
        path: str,
        content: bytes,
        seconds: float,
        headers: Headers,
        pieces: list[bytes] | None,
    ) -> bytes:
        key = os.environ.get(self._key_env, "") if self._key_env is not None else self._token
        sent_headers = {"content-type": "application/json"} if content else {}
        if key:
            sent_headers["authorization"] = f"Bearer {key}"
        if headers:
            sent_headers.update(headers)
        address = self._addresses.get(path)
        if address is None:
            address = _address(f"{self.url}{path}")
            self._addresses[path] = address

        try:
            response = await self._sessions.ask(
                method,
                address,
                content,
                sent_headers,
                seconds=seconds,
                most_bytes=MAX_RESPONSE_BYTES,
                pieces=pieces,
            )
        except TimeoutError:
            raise EngineUnavailable(f"{self.url}{path} did not answer in {seconds:g} s") from None
        except NoResponse as error:
            raise EngineUnavailable(f"{self.url}{path}: {error}") from error
        except ResponseTooLong:
            text = f"{address} returned more than {MAX_RESPONSE_BYTES} bytes"
            raise EngineUnavailable(text) from None
        if response.status >= 300:
            raise self._refusal(path, response, key)
        return response.body

    def _refusal(self, path: str, response: HttpResponse, key: str) -> EngineError:
        """Return the error for a response without success; the API key is left out of it."""
        error_class = EngineUnavailable if response.status in RETRYABLE_STATUS else EngineError
        excerpt = response.excerpt(300, key)
        refused = error_class(f"{self.url}{path} returned HTTP status {response.status}: {excerpt}")
        refused.status = response.status
        refused.retry_after = response.retry_after
        return refused

    def _json(self, path: str, raw: bytes) -> Any:
        if not raw.strip():
            return None
        try:
            return orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise BackendContractError(
                f"{self.url}{path} returned invalid JSON ({error}): {raw[:120]!r}"
            ) from None


def _address(url: str) -> Any:
    from yarl import URL

    try:
        return URL(url, encoded=True)
    except ValueError as error:
        raise EngineUnavailable(f"{url}: {error}") from None
