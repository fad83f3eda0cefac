"""HTTP server of the recording proxy: `/s/TOKEN/v1/...` for each session, or `/v1/...` with the
token as API key.

`ProxyServer._answer` is one request: which session it belongs to (`_session`), what it says
(`_read`), and the task that samples its reply (`ProxySession.submit`), whose answer is streamed or
sent in one piece. The three chat APIs are a `Dialect` each.
"""

from __future__ import annotations

import asyncio
import hmac
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import orjson
from starlette.responses import Response, StreamingResponse

from turnwright.types import is_finite_number
from turnwright_serve.proxy.anthropic import AnthropicMessages
from turnwright_serve.proxy.chat import ChatCompletions
from turnwright_serve.proxy.dialect import Dialect
from turnwright_serve.proxy.matching import Exchange
from turnwright_serve.proxy.request_cache import parse_object
from turnwright_serve.proxy.responses import Responses
from turnwright_serve.proxy.session import ProxySession, ReadRequest
from turnwright_serve.proxy.wire import RequestFault, WireRequest
from turnwright_serve.server import Call, Endpoint, HttpError, IntakeLimits, JsonHttpServer, RawBody

HEARTBEAT_S = 5.0
"""Seconds without a reply after which a streamed answer begins, and between heartbeats. An answer
that begins later can still have the status of an error."""
_AGENT_HEADERS = ("x-claude-code-agent-id", "x-session-id", "thread-id")
"""Headers by which programs name their agents; the first value of a session, or none, is the main
agent's."""
KEPT_BYTES = 256 * 2**20
"""Bytes of requests of which all sessions of a server keep something to read the next ones faster;
those that have been without a request for longest drop it first."""
_RETRIES = "x-stainless-retry-count"
"""Header in which the official clients count retries of a request."""


class NamedSessions(Protocol):
    """Sessions that begin with their first request."""

    def name_of(self, path: str, headers: Mapping[str, str], key: str) -> str:
        """Return the name of a request's session."""

    async def session(self, name: str) -> ProxySession:
        """Return a session by its name, begun if it is new."""

    def end(self, name: str, reward: float | None) -> None:
        """End a session."""


class ProxyServer:
    """Serves the sessions of a rollout on one address of this machine.

    Example::

        async with ProxyServer() as server:
            url = server.open(ProxySession(model))     # http://127.0.0.1:PORT/s/TOKEN/v1
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        recorded: NamedSessions | None = None,
        key: str = "",
        keyed_sampling: bool = True,
        limits: IntakeLimits | None = None,
    ) -> None:
        """
        Args:
            recorded: sessions that begin with their first request; by default only opened ones are
                served.
            key: API key that requests of recorded ones need, as it is or followed by a dash and
                any name; empty for none.
            keyed_sampling: whether all of them need it, or only those that end a session.
            limits: bounds of what is taken in at once.
        """
        self._required_key = key
        self._keyed_sampling = keyed_sampling
        self._kept: dict[ProxySession, int] = {}
        """Bytes of the requests of which a session keeps something; the last one had the last
        request."""
        self._kept_bytes = 0
        self._sessions: dict[str, ProxySession] = {}
        self._recorded = recorded
        self.unknown_sessions = 0
        """Number of requests that named no session; those of a session are counted in its
        episode."""

        routes: dict[tuple[str, str], Endpoint] = {}
        for path, dialect in (
            ("/v1/chat/completions", ChatCompletions()),
            ("/v1/responses", Responses()),
            ("/v1/messages", AnthropicMessages()),
        ):
            self._add(routes, "POST", path, partial(self._answer, dialect), dialect)
        counted = AnthropicMessages()
        self._add(
            routes,
            "POST",
            "/v1/messages/count_tokens",
            partial(self._count_tokens, counted),
            counted,
            ends=False,
        )
        self._add(routes, "GET", "/v1/models", self._models)
        if recorded is not None:
            self._add(routes, "POST", "/end", self._end, keyed=True)

        self._folder = tempfile.TemporaryDirectory(prefix="turnwright-")
        self.socket = Path(self._folder.name, "proxy") if sys.platform.startswith("linux") else None
        """Unix socket of the server, for programs in a sandbox without a network; in a directory of
        this user."""
        self._http = JsonHttpServer(
            routes, host=host, port=port, token=None, unix=self.socket, limits=limits
        )

    def _add(
        self,
        routes: dict[tuple[str, str], Endpoint],
        method: str,
        path: str,
        handler: Callable[[Call], Awaitable[Any]],
        dialect: Dialect | None = None,
        *,
        ends: bool = True,
        keyed: bool = False,
    ) -> None:
        """Add a route. A program whose episode is over ends by the status of its answer, unless
        `ends` is false. A `keyed` one always needs the key of recorded sessions."""
        body = RawBody if method == "POST" else None
        for prefix in ("", "/s/{token}"):
            routes[method, prefix + path] = Endpoint(
                handler, body, admits=partial(self._admit, dialect, ends, keyed)
            )

    async def __aenter__(self) -> ProxyServer:
        await self._http.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.close()
        self._folder.cleanup()

    @property
    def port(self) -> int:
        """Port of the server."""
        return self._http.port

    async def run(self) -> None:
        """Serve until cancelled."""
        await self._http.run()

    @property
    def url(self) -> str:
        """URL of the server, for programs that send a session's token as their API key."""
        return self._http.url

    def open(self, session: ProxySession) -> str:
        """Serve a session; return its root, to which programs add `/v1` and a route."""
        self._sessions[session.token] = session
        return f"{self.url}/s/{session.token}"

    def close_session(self, session: ProxySession) -> None:
        """Serve a session no longer."""
        self._sessions.pop(session.token, None)
        self._kept_bytes -= self._kept.pop(session, 0)

    def _admit(self, dialect: Dialect | None, ends: bool, keyed: bool, head: Call) -> str:
        """Return the session that the head of a request names.

        Raises:
            HttpError: where it names none, or its key is wrong.
        """
        try:
            if self._recorded is None:
                return self._opened(head).token
            if (keyed or self._keyed_sampling) and not _fits(_key(head), self._required_key):
                raise RequestFault(NO_KEY, 401)
            return self._recorded.name_of(head.path.get("token", ""), head.headers, _key(head))
        except RequestFault as fault:
            if dialect is None:
                raise HttpError(fault.status, str(fault)) from None
            # A program whose episode is over must end; one that is recorded may go on.
            status = dialect.end_status if ends and self._recorded is None else fault.status
            body = dialect.error(status, str(fault))
            raise HttpError(status, str(fault), body, NO_RETRY) from None

    def _opened(self, call: Call) -> ProxySession:
        session = self._sessions.get(call.path.get("token", "") or _key(call))
        if session is None:
            self.unknown_sessions += 1
            raise RequestFault(
                "no such session: its episode is over, or the base URL or API key is wrong", 401
            )
        return session

    async def _session(self, call: Call) -> ProxySession:
        if self._recorded is None:
            return self._opened(call)
        name = self._recorded.name_of(call.path.get("token", ""), call.headers, _key(call))
        return await self._recorded.session(name)

    async def _read(self, dialect: Dialect, session: ProxySession, call: Call) -> ReadRequest:
        """Read a request, in a thread if that takes long.

        Raises:
            RequestFault: as `ProxySession.read`.
        """
        assert call.parse is not None
        named = ""
        for header in _AGENT_HEADERS:
            value = call.headers.get(header)
            if value:
                named = f"{header}={value}"
                break

        async with session.reading:
            await session.turn()
            try:
                read: ReadRequest = await call.parse(partial(session.read, dialect, named))
            except HttpError as error:
                raise RequestFault(str(error), error.status) from None
        self._keep(session, read.size)
        return read

    def _keep(self, session: ProxySession, size: int) -> None:
        """Count a request of which its session keeps something, and let sessions forget where all
        keep too much."""
        self._kept[session] = self._kept.pop(session, 0) + size
        self._kept_bytes += size
        for other in list(self._kept):
            if self._kept_bytes <= KEPT_BYTES:
                break
            if not other.reading.locked():
                other.forget()
                self._kept_bytes -= self._kept.pop(other)

    async def _models(self, call: Call) -> Any:
        try:
            session = await self._session(call)
        except RequestFault as fault:
            raise HttpError(fault.status, str(fault)) from None
        rows = [
            {"id": name, "object": "model", "created": 0, "owned_by": "turnwright"}
            for name in session.settings.models or ("turnwright",)
        ]
        return {"object": "list", "data": rows}

    async def _end(self, call: Call) -> Any:
        """End a recorded session: `{"reward": 1.0}`, or an empty object for none."""
        assert self._recorded is not None
        assert call.parse is not None
        try:
            name = self._recorded.name_of(call.path.get("token", ""), call.headers, _key(call))
            reward = _reward(await call.parse(parse_object))
            self._recorded.end(name, reward)
        except RequestFault as fault:
            raise HttpError(fault.status, str(fault)) from None
        return {"ended": name}

    async def _count_tokens(self, dialect: Dialect, call: Call) -> Any:
        try:
            session = await self._session(call)
            read = await self._read(dialect, session, call)
            session.check_text(read)
            return {"input_tokens": await session.count_tokens(read.request)}
        except RequestFault as fault:
            return _error(dialect, fault)

    async def _answer(self, dialect: Dialect, call: Call) -> Any:
        session = None
        try:
            session = await self._session(call)
            read = await self._read(dialect, session, call)
            request = read.request
            retried = call.headers.get(_RETRIES, "0") not in ("", "0")
            task = session.submit(read, retried=retried)
        except RequestFault as fault:
            return _refused(dialect, fault, session)

        # A streamed answer waits for a while too: once begun, it has no status of an error.
        await asyncio.wait([task], timeout=HEARTBEAT_S if request.stream else None)
        problem = _problem(task) if task.done() else None
        if problem is not None:
            return _refused(dialect, problem, session)
        if request.stream:
            return StreamingResponse(
                _stream(dialect, request, task), media_type="text/event-stream"
            )
        exchange = task.result()
        return _Delivered(exchange, orjson.dumps(dialect.answer(request, exchange.sent())))


class _Delivered(Response):
    """Answer in one piece; the exchange is delivered when the connection took all of it."""

    def __init__(self, exchange: Exchange, body: bytes) -> None:
        super().__init__(body, media_type="application/json")
        self._exchange = exchange

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await super().__call__(scope, receive, send)
        self._exchange.mark_delivered()


async def _stream(
    dialect: Dialect, request: WireRequest, task: asyncio.Task[Exchange]
) -> AsyncIterator[bytes]:
    while not task.done():
        yield dialect.heartbeat
        await asyncio.wait([task], timeout=HEARTBEAT_S)
    problem = _problem(task)
    if problem is not None:
        yield dialect.error_event(dialect.end_status, str(problem))
        return

    exchange = task.result()
    for piece in dialect.events(request, exchange.sent()):
        yield piece
    exchange.mark_delivered()


def _key(call: Call) -> str:
    """Return the API key of a request."""
    key = call.headers.get("x-api-key", "")
    if key:
        return key
    scheme, _, value = call.headers.get("authorization", "").partition(" ")
    return value.strip() if scheme.lower() == "bearer" else ""


NO_KEY = "the API key is wrong or missing; turnwright record prints it when it starts"
NO_RETRY = {"x-should-retry": "false"}


def _fits(key: str, required: str) -> bool:
    """Return whether an API key is the required one, which a dash and a name may follow."""
    size = len(required)
    begins_so = hmac.compare_digest(key[:size].encode(), required.encode())
    return begins_so and (not required or key[size : size + 1] in ("", "-"))


def _problem(task: asyncio.Task[Exchange]) -> RequestFault | None:
    if task.cancelled():
        return RequestFault("the episode is over")
    error = task.exception()
    if error is None or isinstance(error, RequestFault):
        return error
    return RequestFault(f"the model failed: {type(error).__name__}: {error!s:.500}")


def _refused(dialect: Dialect, fault: RequestFault, session: ProxySession | None) -> Response:
    """Return the answer to a request that has no reply; after the end of an episode, in the form
    that ends its program."""
    if session is not None:
        session.count("requests_after_end" if session.ended.is_set() else "refused_requests")
    if session is None or session.ended.is_set():
        fault = RequestFault(str(fault), dialect.end_status)
    return _error(dialect, fault)


def _error(dialect: Dialect, fault: RequestFault) -> Response:
    body = orjson.dumps(dialect.error(fault.status, str(fault)))
    return Response(body, fault.status, NO_RETRY, "application/json")


def _reward(body: Mapping[str, Any]) -> float | None:
    """Return the reward in the body of a request that ends a session."""
    reward = body.get("reward")
    if reward is not None and not is_finite_number(reward):
        raise RequestFault(f"reward must be a number, not {reward!r:.40}")
    return None if reward is None else float(reward)
