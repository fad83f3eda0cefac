"""HTTP server of the recording proxy: `/s/TOKEN/v1/...` for each session, or `/v1/...` with the token as API key."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import orjson
from starlette.responses import Response, StreamingResponse

from turnwise.engines.server import Call, Endpoint, HttpError, JsonHttpServer
from turnwise.proxy.anthropic import AnthropicMessages
from turnwise.proxy.chat import ChatCompletions
from turnwise.proxy.matching import Exchange
from turnwise.proxy.request_cache import RequestBody, RequestCache, parse_object
from turnwise.proxy.responses import Responses
from turnwise.proxy.session import ProxySession
from turnwise.proxy.wire import RequestFault, WireReply, WireRequest
from turnwise.types import is_finite_number

if TYPE_CHECKING:
    from turnwise.proxy.recording import RecordedSessions

HEARTBEAT_S = 5.0
"""Seconds without a reply after which a streamed answer begins, and between heartbeats. An answer that begins later can still
have the status of an error."""
_AGENT_HEADERS = ("x-claude-code-agent-id", "x-session-id", "thread-id")
"""Headers by which programs name their agents; the first value of a session, or none, is the main agent's."""
_RETRIES = "x-stainless-retry-count"
"""Header in which the official clients count retries of a request."""


class Dialect(Protocol):
    """A chat API on the wire."""

    name: str
    end_status: int
    """HTTP status after which the programs that use this API end instead of trying again."""
    heartbeat: bytes
    """Bytes that keep a stream open and mean nothing."""
    rows: str
    """Field of a request with its history."""

    def read(self, body: RequestBody, cache: RequestCache) -> WireRequest:
        """Read a request's body; raise `RequestFault`."""

    def answer(self, request: WireRequest, reply: WireReply) -> dict[str, Any]:
        """Return the body of a reply that is not streamed."""

    def events(self, request: WireRequest, reply: WireReply) -> Iterable[bytes]:
        """Return the pieces of a streamed reply."""

    def error(self, status: int, text: str) -> dict[str, Any]:
        """Return the body of an error."""

    def error_event(self, status: int, text: str) -> bytes:
        """Return the piece of a stream that is an error."""


class ProxyServer:
    """Serves the sessions of a rollout on one address of this machine.

    Example::

        async with ProxyServer() as server:
            url = server.open(ProxySession(model))     # http://127.0.0.1:PORT/s/TOKEN/v1
    """

    def __init__(self, *, host: str = "127.0.0.1", port: int = 0, recorded: RecordedSessions | None = None) -> None:
        """
        Args:
            recorded: sessions that begin with their first request; by default only opened ones are served.
        """
        self._sessions: dict[str, ProxySession] = {}
        self._recorded = recorded
        self.unknown_sessions = 0
        """Number of requests that named no session; those of a session are counted in its episode."""
        routes: dict[tuple[str, str], Endpoint] = {}
        for path, dialect in (
            ("/v1/chat/completions", ChatCompletions()),
            ("/v1/responses", Responses()),
            ("/v1/messages", AnthropicMessages()),
        ):
            self._add(routes, "POST", path, partial(self._answer, dialect), bytes)
        self._add(routes, "POST", "/v1/messages/count_tokens", self._count_tokens, bytes)
        self._add(routes, "GET", "/v1/models", self._models, None)
        if recorded is not None:
            self._add(routes, "POST", "/end", self._end, bytes)
        self._folder = tempfile.TemporaryDirectory(prefix="turnwise-")
        self.socket = Path(self._folder.name, "proxy") if sys.platform.startswith("linux") else None
        """Unix socket of the server, for programs in a sandbox without a network; in a directory of this user."""
        self._http = JsonHttpServer(routes, host=host, port=port, token=None, unix=self.socket)

    @staticmethod
    def _add(routes: dict[tuple[str, str], Endpoint], method: str, path: str, handler: Any, body: type[bytes] | None) -> None:
        for prefix in ("", "/s/{token}"):
            routes[method, prefix + path] = Endpoint(handler, body)

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

    async def _session(self, call: Call) -> ProxySession:
        if self._recorded is not None:
            return await self._recorded.session(self._recorded.name_of(call.path.get("token", ""), call.headers, _key(call)))
        session = self._sessions.get(call.path.get("token", "") or _key(call))
        if session is None:
            self.unknown_sessions += 1
            raise RequestFault("no such session: its episode is over, or the base URL or API key is wrong", 401)
        return session

    async def _models(self, call: Call) -> Any:
        try:
            names = (await self._session(call)).settings.models or ("turnwise",)
        except RequestFault as fault:
            raise HttpError(fault.status, str(fault)) from None
        rows = [{"id": name, "object": "model", "created": 0, "owned_by": "turnwise"} for name in names]
        return {"object": "list", "data": rows}

    async def _end(self, call: Call) -> Any:
        """End a recorded session: `{"reward": 1.0}`, or an empty object for none."""
        assert self._recorded is not None
        try:
            name = self._recorded.name_of(call.path.get("token", ""), call.headers, _key(call))
            self._recorded.end(name, _reward(parse_object(call.body)))
        except RequestFault as fault:
            raise HttpError(fault.status, str(fault)) from None
        return {"ended": name}

    async def _count_tokens(self, call: Call) -> Any:
        dialect = AnthropicMessages()
        try:
            session = await self._session(call)
            body = session.cache.parse(call.body, dialect.rows)
            return {"input_tokens": await session.count_tokens(dialect.read(body, session.cache))}
        except RequestFault as fault:
            return _error(dialect, fault)

    async def _answer(self, dialect: Dialect, call: Call) -> Any:
        session = None
        try:
            session = await self._session(call)
            body = session.cache.parse(call.body, dialect.rows)
            request = dialect.read(body, session.cache)
            retried = call.headers.get(_RETRIES, "0") not in ("", "0")
            agent = self._agent(session, call.headers)
            task = session.submit(request, dialect.name, body, agent, retried=retried)
        except RequestFault as fault:
            return _refused(dialect, fault, session)
        await asyncio.wait([task], timeout=HEARTBEAT_S if request.stream else None)
        if task.done() and (problem := _problem(task)) is not None:
            return _refused(dialect, problem, session)
        if request.stream:
            return StreamingResponse(_stream(dialect, request, task, session), media_type="text/event-stream")
        exchange = task.result()
        return _Delivered(exchange, orjson.dumps(dialect.answer(request, exchange.sent())))

    def _agent(self, session: ProxySession, headers: Mapping[str, str]) -> str:
        """Return the name of the agent whose request this is: the first that a session sees is `main`, others are numbered."""
        given = next((f"{name}={headers[name]}" for name in _AGENT_HEADERS if headers.get(name)), "")
        known = session.agents
        if given not in known:
            known[given] = "main" if not known else f"agent{len(known)}"
        return known[given]


class _Delivered(Response):
    """Answer in one piece; the exchange is delivered when the connection took all of it."""

    def __init__(self, exchange: Exchange, body: bytes) -> None:
        super().__init__(body, media_type="application/json")
        self._exchange = exchange

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await super().__call__(scope, receive, send)
        self._exchange.mark_delivered()


async def _stream(
    dialect: Dialect, request: WireRequest, task: asyncio.Task[Exchange], session: ProxySession
) -> AsyncIterator[bytes]:
    while not task.done():
        yield dialect.heartbeat
        await asyncio.wait([task], timeout=HEARTBEAT_S)
    if (problem := _problem(task)) is not None:
        yield dialect.error_event(dialect.end_status, str(problem))
        return
    exchange = task.result()
    for piece in dialect.events(request, exchange.sent()):
        yield piece
    exchange.mark_delivered()


def _key(call: Call) -> str:
    """Return the API key of a request."""
    scheme, _, given = call.headers.get("authorization", "").partition(" ")
    return call.headers.get("x-api-key", "") or (given.strip() if scheme.lower() == "bearer" else "")


def _problem(task: asyncio.Task[Exchange]) -> RequestFault | None:
    if task.cancelled():
        return RequestFault("the episode is over")
    error = task.exception()
    if error is None or isinstance(error, RequestFault):
        return error
    return RequestFault(f"the model failed: {type(error).__name__}: {error!s:.500}")


def _refused(dialect: Dialect, fault: RequestFault, session: ProxySession | None) -> Response:
    """Return the answer to a request that has no reply; after the end of an episode, in the form that ends its program."""
    if session is not None:
        session.count("requests_after_end" if session.ended.is_set() else "refused_requests")
    if session is None or session.ended.is_set():
        fault = RequestFault(str(fault), dialect.end_status)
    return _error(dialect, fault)


def _error(dialect: Dialect, fault: RequestFault) -> Response:
    body = orjson.dumps(dialect.error(fault.status, str(fault)))
    return Response(body, fault.status, {"x-should-retry": "false"}, "application/json")


def _reward(body: Mapping[str, Any]) -> float | None:
    """Return the reward in the body of a request that ends a session."""
    reward = body.get("reward")
    if reward is not None and not is_finite_number(reward):
        raise RequestFault(f"reward must be a number, not {reward!r:.40}")
    return None if reward is None else float(reward)
