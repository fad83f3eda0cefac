"""HTTP around handlers: starlette's routes on uvicorn, a schema for each body, and a look at who asks before that is read."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
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
MOST_BODY = 64 * 2**20
"""Bytes of a request's body: a context of some million ids."""
MOST_WEIGHTS = 2**30
"""Bytes of a body that holds weights."""
MOST_HEAD = 2**16
"""Bytes of a request's head."""
HEAD_S = 75
"""Seconds that a connection may be idle, and that its first head may take."""
MOST_TOLD = 3
"""Faults of a body that an answer names."""


class HttpError(Exception):
    """A request that is answered with an HTTP status of its own."""

    def __init__(self, status: int, told: str) -> None:
        super().__init__(told)
        self.status = status


@dataclass(frozen=True, slots=True)
class Call:
    """One request as a handler sees it."""

    body: Any
    """As the endpoint's schema reads it; None for an endpoint without one."""
    headers: Mapping[str, str]
    """By name in small letters."""
    query: Mapping[str, str]


Handler = Callable[[Call], Awaitable[Any]]
"""Gives JSON, or a `Response` of starlette, a stream for instance."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What answers at a path, and what is asked of those who call it."""

    handler: Handler
    body: type[BaseModel] | None = None
    changes: bool = False
    """Whether it changes what others get: it takes the token, and is finished also when its client goes away."""
    most: int = MOST_BODY
    """Bytes of its body."""


Table = dict[tuple[str, str], Endpoint]
"""By method and path."""


class JsonHttpServer:
    """Answers requests on one address.

    A page of another site that a browser of this machine shows can send requests here too, so: a request names this server as
    its host, comes from no page (`Origin`, `Sec-Fetch-Site`), has a body that is declared to be JSON, and holds the token
    where it changes anything. With a token of the caller's every request holds it, and may name any host.

    Args:
        routes: by `(method, path)`.
        token: what `authorization: Bearer ...` has to hold in every request. Without one, the server draws one for what
            changes anything and writes it to a file that clients of this user find (`turnwise.engines.tokens`).
    """

    def __init__(self, routes: Mapping[tuple[str, str], Endpoint], *, host: str, port: int, token: str = "") -> None:
        self._host, self._port = host, port
        self.token = token or secrets.token_urlsafe(24)
        """What a request that changes anything has to hold."""
        self.published = not token
        """Whether the token stands in a file."""
        self._app = _Gate(_app(routes, self.token), self.token, every=bool(token))
        self._socket: socket.socket | None = None
        self._server: _Uvicorn | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """Where it listens, once it was started."""
        assert self._socket is not None
        return int(self._socket.getsockname()[1])

    @property
    def url(self) -> str:
        """Where it answers, once it was started."""
        return f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{self.port}"

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: when the address cannot be had.
            ConfigError: when the token cannot be written.
        """
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
            h11_max_incomplete_event_size=MOST_HEAD,
        )
        self._socket = _bound(self._host, self._port)
        self._server = _Uvicorn(config)
        if self.published:
            try:
                tokens.publish(self.port, self.token)
            except ConfigError:
                self._socket.close()
                raise
        self._task = asyncio.create_task(self._server.serve([self._socket]))
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.001)

    async def run(self) -> None:
        """Answer until cancelled."""
        assert self._task is not None
        await asyncio.shield(self._task)

    async def close(self) -> None:
        """Listen no more and end every connection."""
        if self._server is None or self._task is None:
            return
        if self.published:
            tokens.withdraw(self.port, self.token)
        self._server.should_exit = True
        await asyncio.gather(self._task, return_exceptions=True)


class _Uvicorn(uvicorn.Server):
    """Leaves signals to whoever runs the loop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Protocol(H11Protocol):
    """Lets go of connections on which no request comes."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(HEAD_S, self._late)

    def _late(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.close()


class _Gate:
    """Looks at who asks, by the head alone."""

    def __init__(self, app: ASGIApp, token: str, *, every: bool) -> None:
        self._app, self._token, self._every = app, token, every

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Request(scope).headers
        fault = _foreign(headers) or ("" if self._every else _elsewhere(headers.get("host", "")))
        answer: ASGIApp = self._app
        if fault:
            answer = _told(403, fault, close=True)
        elif self._every and not _knows(headers, self._token):
            answer = _told(401, "the token is wrong or missing (authorization: Bearer ...)", close=True)
        await answer(scope, receive, send)


def _foreign(headers: Mapping[str, str]) -> str:
    """What shows that a page in a browser asks: this server has none."""
    if headers.get("origin") is not None:
        return "requests of pages in a browser are not answered (they carry an Origin)"
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return "requests of pages in a browser are not answered (Sec-Fetch-Site)"
    return ""


def _elsewhere(host: str) -> str:
    """What is wrong with a Host: a page whose name was pointed at this machine sends its own."""
    name = host.lower().rpartition("]")[0].removeprefix("[") if host.startswith("[") else host.lower().partition(":")[0]
    return "" if name in tokens.LOOPBACK else "the Host is not this machine; set TURNWISE_SERVE_TOKEN for other names"


def _knows(headers: Mapping[str, str], token: str) -> bool:
    given = headers.get("authorization", "")
    return hmac.compare_digest(given.encode("latin-1", "replace"), f"Bearer {token}".encode("latin-1", "replace"))


def _app(routes: Mapping[tuple[str, str], Endpoint], token: str) -> Starlette:
    async def no_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _told(error.status_code, error.detail, name="detail", headers=error.headers)

    made = [Route(path, _answering(endpoint, token), methods=[method]) for (method, path), endpoint in routes.items()]
    return Starlette(routes=made, exception_handlers={HTTPException: no_route})


def _answering(endpoint: Endpoint, token: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            if endpoint.changes and not _knows(request.headers, token):
                raise HttpError(401, "this changes what others get: send the token of the server (authorization: Bearer ...)")
            call = Call(await _read(request, endpoint), request.headers, request.query_params)
        except HttpError as error:
            return _told(error.status, str(error), close=True)
        except ClientDisconnect:
            return Response()
        return await _done(endpoint, call, request)

    return answer


async def _read(request: Request, endpoint: Endpoint) -> Any:
    """The body, as the endpoint's schema reads it.

    Raises:
        Refused: for one that it does not read.
    """
    pieces, size = [], int(request.headers.get("content-length") or 0)
    if size > endpoint.most:
        raise HttpError(413, f"the body has {size} bytes, at most {endpoint.most} are read")
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > endpoint.most:
            raise HttpError(413, f"the body has over {endpoint.most} bytes")
        pieces.append(piece)
    raw = b"".join(pieces)
    if raw and request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HttpError(415, "send JSON, and content-type: application/json")
    if endpoint.body is None:
        return None
    try:
        return endpoint.body.model_validate_json(raw if raw.strip() else b"{}")
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        said = [f"{'.'.join(map(str, one['loc'])) or 'the body'}: {one['msg']}"[:300] for one in faults[:MOST_TOLD]]
        more = f" (and {len(faults) - MOST_TOLD} more)" if len(faults) > MOST_TOLD else ""
        raise HttpError(400, f"the request is not understood: {'; '.join(said)}{more}") from None


async def _done(endpoint: Endpoint, call: Call, request: Request) -> Response:
    """The answer to a request that was read; what changes nothing ends when its client goes away."""
    work = asyncio.ensure_future(_worked(endpoint.handler, call))
    gone = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((work,) if endpoint.changes else (work, gone), return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else Response()
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def _worked(handler: Handler, call: Call) -> Response:
    try:
        found = await handler(call)
        return found if isinstance(found, Response) else Response(orjson.dumps(found), media_type="application/json")
    except HttpError as error:
        return _told(error.status, str(error))
    except BackendContractError as error:  # the request is at fault, not the engine
        return _told(400, str(error))
    except TurnwiseError as error:
        return _told(500, str(error))
    except Exception as error:
        _log.exception("a request failed")
        return _told(500, f"the server failed: {type(error).__name__}: {error}")


def _told(
    status: int, text: str, *, name: str = "error", close: bool = False, headers: Mapping[str, str] | None = None
) -> Response:
    more = dict(headers or {}) | ({"connection": "close"} if close else {})
    return Response(orjson.dumps({name: text[:2000]}), status, more, "application/json")


def _bound(host: str, port: int) -> socket.socket:
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    made = socket.socket(family, kind, proto)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.setblocking(False)
    except OSError:
        made.close()
        raise
    return made
