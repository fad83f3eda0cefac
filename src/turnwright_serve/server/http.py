"""HTTP server for JSON: starlette routes on uvicorn, a schema per body, and access checks before
the body is read.

`JsonHttpServer` serves endpoints. A request goes through `_Protocol` (how many connections, how
long a head may take), `_Gate` (host, origin, token) and the `_EndpointApp` of its route (owner,
body, handler, response). How much is taken in at once is bounded by `Intake` (`intake.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
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
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from turnwright.engines import tokens
from turnwright.errors import BackendContractError, ConfigError, TurnwrightError
from turnwright_serve.server.intake import (
    LINGER_BYTES,
    LINGER_S,
    HttpError,
    Intake,
    IntakeLimits,
    RawBody,
)

_log = logging.getLogger(__name__)
MAX_BODY = 64 * 2**20
"""Maximum request body in bytes: a context of some million ids."""
MAX_WEIGHTS = 2**30
"""Maximum bytes of a body with weights."""
MAX_HEAD = 2**16
"""Maximum bytes of a request's headers."""
IDLE_S = 75
"""Seconds that a connection may be idle between two requests."""
ACCEPTED_AT_ONCE = 64
"""Connections accepted in one pass of the event loop."""
BACKLOG = 4096
"""Connections that wait for it. A client whose connection finds no place there tries again after a
second."""
MAX_REPORTED = 3
"""Maximum number of schema faults that a response names."""


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
    parse: Callable[[Callable[[bytes], Any]], Awaitable[Any]] | None = None
    """Returns what a function makes of a body that is handed over unread, and takes the body's room
    back. What takes long runs in a thread, so the function touches nothing that others change
    meanwhile. None without such a body."""


Handler = Callable[[Call], Awaitable[Any]]
"""Returns JSON or a starlette `Response`, such as a stream."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Handler of a path, with its body schema and access rules."""

    handler: Handler
    body: type[BaseModel] | type[bytes] | type[RawBody] | None = None
    """Schema of its body; `bytes` hands it over unread, `RawBody` by `Call.parse`."""
    changes: bool = False
    """Whether it changes state of other clients: it then requires the token, and completes even if
    its client disconnects."""
    max_bytes: int = MAX_BODY
    """Maximum bytes of its body."""
    bounded: bool = True
    """Whether the number of values in its body is bounded too."""
    admits: Callable[[Call], str] | None = None
    """Decides access from the head of a request, before its body is read: returns its owner, who
    has a share of the room for bodies and of the requests in flight, or raises `HttpError`. By
    default all requests have one owner, who may use all."""


Table = dict[tuple[str, str], Endpoint]
"""By method and path."""


class JsonHttpServer:
    """Serves requests on one address.

    Every request must carry the token. A web page in a browser on this machine could send requests
    here too, so a request must also name this server as its host, carry no `Origin` or cross-site
    `Sec-Fetch-Site`, and declare its body as JSON. With a token from the caller, it may name any
    host.

    Args:
        routes: endpoints by `(method, path)`.
        token: required value of `authorization: Bearer ...`. By default the server generates one
            and writes it to a file for this user's clients (`turnwright.engines.tokens`). None: the
            endpoints check access themselves.
        keyless: whether requests that change nothing need no generated token.
        unix: path of a Unix socket to serve too. Every user of this machine who reaches the path
            may connect.
        listener: bound socket to serve in place of one of `host` and `port`; `close` closes it.
        limits: bounds of what is taken in at once.
    """

    def __init__(
        self,
        routes: Mapping[tuple[str, str], Endpoint],
        *,
        host: str,
        port: int,
        token: str | None = "",
        keyless: bool = False,
        unix: Path | None = None,
        listener: socket.socket | None = None,
        limits: IntakeLimits | None = None,
    ) -> None:
        self._host = host
        self._port = port
        self._unix = unix
        self._listener = listener
        self._limits = limits or IntakeLimits()
        self.token = token or secrets.token_urlsafe(24)
        """Token required by requests."""
        self.published = token == ""
        """Whether the token is in a file."""

        self.intake = Intake(self._limits)
        """What is taken in now."""

        apps: list[Route] = []
        for (method, path), endpoint in routes.items():
            app_of_route = _EndpointApp(endpoint, self.token, self.intake)
            apps.append(Route(path, app_of_route, methods=[method]))
        app = Starlette(routes=apps, exception_handlers={HTTPException: _no_route})
        every = bool(token) or (self.published and not keyless)
        self._app = _Gate(app, self.token, every=every, any_host=bool(token))
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
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.port}"

    async def start(self) -> None:
        """Start listening: OSError for an unavailable address, ConfigError when the token cannot be
        written."""
        config = _Config(
            self._app,
            self._limits,
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            backlog=ACCEPTED_AT_ONCE,
            timeout_keep_alive=IDLE_S,
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

        sockets = [self._socket, *self._unix_sockets()]
        self._task = asyncio.create_task(self._server.serve(sockets))
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.001)
        if not self._task.done():
            # asyncio takes one number for what is accepted at once and what waits.
            for listening in sockets:
                listening.listen(BACKLOG)

    def _bound(self) -> socket.socket:
        kinds = socket.getaddrinfo(
            self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, proto, _, address = kinds[0]
        bound = socket.socket(family, kind, proto)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.setblocking(False)
        except OSError:
            bound.close()
            raise
        return bound

    def _unix_sockets(self) -> list[socket.socket]:
        if self._unix is None:
            return []
        bound = socket.socket(socket.AF_UNIX)
        bound.bind(str(self._unix))
        self._unix.chmod(0o666)
        bound.setblocking(False)
        return [bound]

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


class _Config(uvicorn.Config):
    """Configuration that the connections read."""

    def __init__(self, app: ASGIApp, limits: IntakeLimits, **settings: Any) -> None:
        super().__init__(app, **settings)
        self.limits = limits

    @property
    def most_connections(self) -> int:
        """Number of connections, which leaves half of the files of this process to others."""
        return min(self.limits.connections, most_files() // 2)


class _Protocol(H11Protocol):
    """Bounds the connections, and the time of a request's head."""

    config: _Config

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_timer: asyncio.TimerHandle | None = None
        self._quiet_since = self.loop.time()
        self._watch_head()
        if len(self.connections) > self.config.most_connections:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_request:
            self._unwatch_head()
        elif self._head_timer is None and self.conn.trailing_data[0]:
            self._watch_head()

    def on_response_complete(self) -> None:
        self._quiet_since = self.loop.time()
        super().on_response_complete()

    @property
    def _in_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _watch_head(self) -> None:
        seconds = self.config.limits.head_s
        self._head_timer = self.loop.call_later(seconds, self._close_if_silent)

    def _unwatch_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _close_if_silent(self) -> None:
        self._head_timer = None
        if not self._in_request and not self.transport.is_closing():
            self.transport.close()

    def _make_room(self) -> None:
        """Close the connection that has been without a request for longest; this one, if each has a
        request."""
        quiet: list[_Protocol] = []
        for connection in self.connections:
            if not isinstance(connection, _Protocol) or connection is self:
                continue
            if not connection._in_request and not connection.transport.is_closing():
                quiet.append(connection)
        if quiet:
            min(quiet, key=lambda connection: connection._quiet_since).transport.close()
            return

        text = b'{"error": "too many connections are open; use fewer, or try again"}'
        head = (
            "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n"
            f"retry-after: 1\r\nconnection: close\r\ncontent-length: {len(text)}\r\n\r\n"
        )
        self.transport.write(head.encode() + text)
        self.transport.close()


def most_files() -> int:
    """Return how many files this process may open."""
    if sys.platform == "win32":
        return 1 << 13
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class _Gate:
    """Checks access by the headers only."""

    def __init__(self, app: ASGIApp, token: str, *, every: bool, any_host: bool) -> None:
        self._app = app
        self._token = token
        self._every = every
        self._any_host = any_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        headers = Request(scope).headers
        fault = ""
        # A page whose domain resolves to this machine sends its own domain.
        if not self._any_host and _host_name(headers) not in tokens.LOOPBACK:
            fault = "the Host is not this machine; set TURNWRIGHT_SERVE_TOKEN for other names"
        if headers.get("origin") is not None:
            fault = "requests from web pages are refused (they carry an Origin)"
        elif headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            fault = "requests from web pages are refused (Sec-Fetch-Site)"

        answer: ASGIApp = self._app
        if fault:
            answer = _Refusal(HttpError(403, fault))
        elif self._every and not _has_token(headers, self._token):
            answer = _Refusal(HttpError(401, NO_TOKEN))
        await answer(scope, receive, send)


def _host_name(headers: Mapping[str, str]) -> str:
    """Return the host that a request names, without its port."""
    host = headers.get("host", "").lower()
    if host.startswith("["):
        return host.rpartition("]")[0].removeprefix("[")
    return host.partition(":")[0]


NO_TOKEN = (
    "the token is wrong or missing (authorization: Bearer ...); its server prints it, and "
    "the file that it names has it"
)


def _has_token(headers: Mapping[str, str], token: str) -> bool:
    sent = headers.get("authorization", "").encode("latin-1", "replace")
    required = f"Bearer {token}".encode("latin-1", "replace")
    return hmac.compare_digest(sent, required)


NO_CHAT = (
    "turnwright serve has no chat API: it takes and returns token ids (/v1/completions), since "
    "messages that are rendered again can have other ids than those that were sampled; for a chat "
    "API run `turnwright engines start vllm --model DIR` on the same directory or checkpoint"
)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    is_chat = request.url.path.rstrip("/").endswith(
        ("/chat/completions", "/messages", "/responses")
    )
    if error.status_code == 404 and is_chat:
        return _error_response(HttpError(404, NO_CHAT, {"detail": NO_CHAT}))
    body = {"detail": error.detail}
    headers = dict(error.headers or {})
    return _error_response(HttpError(error.status_code, error.detail, body, headers))


class _Arrival:
    """Receives the messages of a request, and notes whether its body is complete."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.complete = False

    async def __call__(self) -> Message:
        message = await self._receive()
        self.complete = not message.get("more_body")
        return message


class _EndpointApp:
    """Answers the requests of one route: access, body, handler, response."""

    def __init__(self, endpoint: Endpoint, token: str, intake: Intake) -> None:
        self._endpoint = endpoint
        self._token = token
        self._intake = intake

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrival = _Arrival(receive)
        request = Request(scope, arrival)
        owner: str | None = None
        entered = False
        try:
            try:
                owner = self._admit(request)
                self._intake.enter(owner)
                entered = True
                response = await self._answer(request, owner)
            except HttpError as error:
                # The body may still be arriving.
                response = _Refusal(error)
            except ClientDisconnect:
                response = Response()
            await response(scope, arrival, send)
        finally:
            if entered:
                self._intake.leave(owner)

    def _admit(self, request: Request) -> str | None:
        """Return the owner of a request, by its head."""
        if self._endpoint.changes and not _has_token(request.headers, self._token):
            raise HttpError(401, "this route needs the server's token (authorization: Bearer ...)")
        if self._endpoint.admits is None:
            return None
        head = Call(None, request.headers, request.query_params, request.path_params)
        return self._endpoint.admits(head)

    async def _answer(self, request: Request, owner: str | None) -> Response:
        endpoint = self._endpoint
        intake = self._intake
        body = await intake.receive(request, endpoint.max_bytes, owner)
        try:
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if body.raw and kind != "application/json":
                raise HttpError(415, "send JSON, and content-type: application/json")

            def parse(work: Callable[[bytes], Any]) -> Awaitable[Any]:
                return intake.parse(body, owner, work, bounded=endpoint.bounded)

            async def handle() -> Response:
                parsed: Any = None
                if endpoint.body is bytes:
                    parsed = body.raw
                elif endpoint.body is not None and issubclass(endpoint.body, BaseModel):
                    parsed = await parse(partial(_validated, endpoint.body))
                call = Call(
                    parsed, request.headers, request.query_params, request.path_params, parse
                )
                return await _call_handler(endpoint.handler, call)

            return await self._unless_gone(request, handle())
        finally:
            body.release()

    async def _unless_gone(
        self, request: Request, response: Coroutine[Any, Any, Response]
    ) -> Response:
        """Return a response; work that changes nothing is cancelled when its client disconnects."""
        work = asyncio.ensure_future(response)
        gone = asyncio.ensure_future(request.receive())
        try:
            waited = (work,) if self._endpoint.changes else (work, gone)
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            return work.result() if work.done() else Response()
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)


def _validated(schema: type[BaseModel], raw: bytes) -> BaseModel:
    """Return a body by its schema."""
    try:
        return schema.model_validate_json(raw if raw.strip() else b"{}")
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        messages = []
        for fault in faults[:MAX_REPORTED]:
            where = ".".join(map(str, fault["loc"])) or "the body"
            messages.append(f"{where}: {fault['msg']}"[:300])
        more = f" (and {len(faults) - MAX_REPORTED} more)" if len(faults) > MAX_REPORTED else ""
        raise HttpError(400, f"invalid request: {'; '.join(messages)}{more}") from None


async def _call_handler(handler: Handler, call: Call) -> Response:
    try:
        answer = await handler(call)
        if isinstance(answer, Response):
            return answer
        return Response(orjson.dumps(answer), media_type="application/json")
    except HttpError as error:
        return _error_response(error)
    except BackendContractError as error:
        # The request is at fault, not the engine.
        return _error_response(HttpError(400, str(error)))
    except TurnwrightError as error:
        return _error_response(HttpError(500, str(error)))
    except Exception as error:
        _log.exception("a request failed")
        return _error_response(
            HttpError(500, f"the server failed: {type(error).__name__}: {error}")
        )


def _error_response(error: HttpError) -> Response:
    return Response(orjson.dumps(error.body), error.status, error.headers, "application/json")


class _Refusal(Response):
    """Error response to a request whose body may still be arriving.

    A connection that is closed with data unread is reset, and its client may lose the response with
    it. So what arrives is dropped for a while first.
    """

    def __init__(self, error: HttpError) -> None:
        headers = {"connection": "close"} | error.headers
        super().__init__(orjson.dumps(error.body), error.status, headers, "application/json")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }
        await send(start)
        await send({"type": "http.response.body", "body": self.body, "more_body": True})

        if isinstance(receive, _Arrival):
            complete = receive.complete
        else:
            complete = not has_body(Request(scope).headers)
        if not complete:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    await self._drop_body(receive)
        await send({"type": "http.response.body", "body": b""})

    async def _drop_body(self, receive: Receive) -> None:
        dropped = 0
        more = True
        while more and dropped < LINGER_BYTES:
            message = await receive()
            dropped += len(message.get("body", b""))
            more = bool(message.get("more_body"))


def has_body(headers: Mapping[str, str]) -> bool:
    """Return whether a request announces a body."""
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
