"""HTTP server for JSON: starlette routes on uvicorn, a schema per body, and access checks before the body is read."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import uvicorn
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from turnwise.engines import tokens
from turnwise.errors import BackendContractError, ConfigError, TurnwiseError

_log = logging.getLogger(__name__)
MAX_BODY = 64 * 2**20
"""Maximum request body in bytes: a context of some million ids."""
MAX_WEIGHTS = 2**30
"""Maximum bytes of a body with weights."""
MAX_HEAD = 2**16
"""Maximum bytes of a request's headers."""
HEAD_S = 75
"""Seconds that a connection may be idle, and maximum seconds for its first headers."""
MAX_REPORTED = 3
"""Maximum number of schema faults that a response names."""


class HttpError(Exception):
    """Request failure with its own HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Call:
    """One request as a handler receives it."""

    body: Any
    """Parsed by the endpoint's schema; None for an endpoint without one."""
    headers: Mapping[str, str]
    """By lower-case name."""
    query: Mapping[str, str]
    path: Mapping[str, str] = field(default_factory=dict)
    """Parameters of the path."""


Handler = Callable[[Call], Awaitable[Any]]
"""Returns JSON or a starlette `Response`, such as a stream."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Handler of a path, with its body schema and access rules."""

    handler: Handler
    body: type[BaseModel] | type[bytes] | None = None
    """Schema of its body; `bytes` hands it over unread."""
    changes: bool = False
    """Whether it changes state of other clients: it then requires the token, and completes even if its client disconnects."""
    max_bytes: int = MAX_BODY
    """Maximum bytes of its body."""


Table = dict[tuple[str, str], Endpoint]
"""By method and path."""


class JsonHttpServer:
    """Serves requests on one address.

    A web page in a browser on this machine could send requests here too. So a request must name this server as its host, carry
    no `Origin` or cross-site `Sec-Fetch-Site`, and declare its body as JSON. It must carry the token if it changes anything.
    With a token from the caller, every request must carry it and may name any host.

    Args:
        routes: endpoints by `(method, path)`.
        token: required value of `authorization: Bearer ...` in every request. By default the server generates one for requests
            that change anything and writes it to a file for this user's clients (`turnwise.engines.tokens`). None: the
            endpoints check access themselves.
        unix: path of a Unix socket to serve too. Every user of this machine who reaches the path may connect.
        listener: bound socket to serve in place of one of `host` and `port`; `close` closes it.
    """

    def __init__(
        self,
        routes: Mapping[tuple[str, str], Endpoint],
        *,
        host: str,
        port: int,
        token: str | None = "",
        unix: Path | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        self._host, self._port, self._unix, self._listener = host, port, unix, listener
        self.token = token or secrets.token_urlsafe(24)
        """Token required by requests that change anything."""
        self.published = token == ""
        """Whether the token is in a file."""
        made = [Route(path, _make_endpoint(end, self.token), methods=[method]) for (method, path), end in routes.items()]
        app = Starlette(routes=made, exception_handlers={HTTPException: _no_route})
        self._app = _Gate(app, self.token, every=bool(token))
        self._socket: socket.socket | None = None
        self._server: _Uvicorn | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """Port, after `start`."""
        assert self._socket is not None
        return int(self._socket.getsockname()[1])

    @property
    def url(self) -> str:
        """URL, after `start`."""
        return f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{self.port}"

    async def start(self) -> None:
        """Start listening: OSError for an unavailable address, ConfigError when the token cannot be written."""
        config = uvicorn.Config(
            self._app,
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            backlog=1024,
            timeout_keep_alive=HEAD_S,
            timeout_graceful_shutdown=0,
            h11_max_incomplete_event_size=MAX_HEAD,
        )
        self._server = _Uvicorn(config)
        self._socket = self._listener or self._bound()
        try:
            if self.published:
                tokens.publish(self.port, self.token)
        except (OSError, ConfigError):
            self._socket.close()
            raise
        self._task = asyncio.create_task(self._server.serve([self._socket, *self._unix_sockets()]))
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.001)

    def _bound(self) -> socket.socket:
        kinds = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, proto, _, address = kinds[0]
        made = socket.socket(family, kind, proto)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
            made.setblocking(False)
        except OSError:
            made.close()
            raise
        return made

    def _unix_sockets(self) -> list[socket.socket]:
        if self._unix is None:
            return []
        made = socket.socket(socket.AF_UNIX)
        made.bind(str(self._unix))
        self._unix.chmod(0o666)
        made.setblocking(False)
        return [made]

    async def run(self) -> None:
        """Serve until cancelled."""
        assert self._task is not None
        await asyncio.shield(self._task)

    async def close(self) -> None:
        """Stop listening and end every connection."""
        if self._server is None or self._task is None:
            return
        if self.published:
            tokens.withdraw(self.port, self.token)
        self._server.should_exit = True
        await asyncio.gather(self._task, return_exceptions=True)


class _Uvicorn(uvicorn.Server):
    """Leaves signal handling to the owner of the event loop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Protocol(H11Protocol):
    """Closes connections that send no request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(HEAD_S, self._close_if_silent)

    def _close_if_silent(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.close()


class _Gate:
    """Checks access by the headers only."""

    def __init__(self, app: ASGIApp, token: str, *, every: bool) -> None:
        self._app, self._token, self._every = app, token, every

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Request(scope).headers
        host, fault = headers.get("host", "").lower(), ""
        name = host.rpartition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
        if not self._every and name not in tokens.LOOPBACK:  # a page whose domain resolves to this machine sends its own domain
            fault = "the Host is not this machine; set TURNWISE_SERVE_TOKEN for other names"
        if headers.get("origin") is not None:
            fault = "requests from web pages are refused (they carry an Origin)"
        elif headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            fault = "requests from web pages are refused (Sec-Fetch-Site)"
        answer: ASGIApp = self._app
        if fault:
            answer = _error_response(403, fault, close=True)
        elif self._every and not _has_token(headers, self._token):
            answer = _error_response(401, "the token is wrong or missing (authorization: Bearer ...)", close=True)
        await answer(scope, receive, send)


def _has_token(headers: Mapping[str, str], token: str) -> bool:
    given = headers.get("authorization", "")
    return hmac.compare_digest(given.encode("latin-1", "replace"), f"Bearer {token}".encode("latin-1", "replace"))


NO_CHAT = (
    "turnwise serve has no chat API: it takes and returns token ids (/v1/completions), since messages that are rendered again "
    "can have other ids than those that were sampled; for a chat API run `turnwise engines start vllm --model DIR` on the same "
    "directory or checkpoint"
)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404 and request.url.path.rstrip("/").endswith(("/chat/completions", "/messages", "/responses")):
        return _error_response(404, NO_CHAT, name="detail")
    return _error_response(error.status_code, error.detail, name="detail", headers=error.headers)


def _make_endpoint(endpoint: Endpoint, token: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            if endpoint.changes and not _has_token(request.headers, token):
                raise HttpError(401, "this route needs the server's token (authorization: Bearer ...)")
            call = Call(await _read(request, endpoint), request.headers, request.query_params, request.path_params)
        except HttpError as error:
            return _error_response(error.status, str(error), close=True)
        except ClientDisconnect:
            return Response()
        work, gone = asyncio.ensure_future(_call_handler(endpoint.handler, call)), asyncio.ensure_future(request.receive())
        try:  # a request that changes nothing is cancelled when its client disconnects
            await asyncio.wait((work,) if endpoint.changes else (work, gone), return_when=asyncio.FIRST_COMPLETED)
            return work.result() if work.done() else Response()
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    return answer


async def _read(request: Request, endpoint: Endpoint) -> Any:
    pieces, size = [], int(request.headers.get("content-length") or 0)
    if size > endpoint.max_bytes:
        raise HttpError(413, f"the body has {size} bytes; at most {endpoint.max_bytes} are accepted")
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > endpoint.max_bytes:
            raise HttpError(413, f"the body has over {endpoint.max_bytes} bytes")
        pieces.append(piece)
    raw = b"".join(pieces)
    if raw and request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HttpError(415, "send JSON, and content-type: application/json")
    if endpoint.body is None:
        return None
    if issubclass(endpoint.body, bytes):
        return raw
    try:
        return endpoint.body.model_validate_json(raw if raw.strip() else b"{}")
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        messages = [f"{'.'.join(map(str, one['loc'])) or 'the body'}: {one['msg']}"[:300] for one in faults[:MAX_REPORTED]]
        more = f" (and {len(faults) - MAX_REPORTED} more)" if len(faults) > MAX_REPORTED else ""
        raise HttpError(400, f"invalid request: {'; '.join(messages)}{more}") from None


async def _call_handler(handler: Handler, call: Call) -> Response:
    try:
        found = await handler(call)
        return found if isinstance(found, Response) else Response(orjson.dumps(found), media_type="application/json")
    except HttpError as error:
        return _error_response(error.status, str(error))
    except BackendContractError as error:  # the request is at fault, not the engine
        return _error_response(400, str(error))
    except TurnwiseError as error:
        return _error_response(500, str(error))
    except Exception as error:
        _log.exception("a request failed")
        return _error_response(500, f"the server failed: {type(error).__name__}: {error}")


def _error_response(
    status: int, text: str, *, name: str = "error", close: bool = False, headers: Mapping[str, str] | None = None
) -> Response:
    more = dict(headers or {}) | ({"connection": "close"} if close else {})
    return Response(orjson.dumps({name: text[:2000]}), status, more, "application/json")
