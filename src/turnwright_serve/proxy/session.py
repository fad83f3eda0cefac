"""One program's conversations with the model: its requests become calls of `Model.generate`.

`ProxySession.read` reads a request, `submit` samples its reply or finds the one it repeats, and
`_reply` is one exchange from the conversation that it continues to what is sent. Which conversation
that is, is decided by `History.match` (`matching.py`); the wire formats are in `chat.py`,
`responses.py` and `anthropic.py`, the server in `server.py`.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Hashable
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import orjson

from turnwright.errors import LimitReached, MediaError, TemplateError, UsageError
from turnwright.rollouts.agent_function import Model, Reply
from turnwright.rollouts.counts import add_counts
from turnwright.types import Image, Message, StopReason
from turnwright_serve.proxy.matching import Exchange, History
from turnwright_serve.proxy.request_cache import KEPT_CONVERSATIONS, RequestBody, RequestCache
from turnwright_serve.proxy.wire import UNMET_CHOICE, RequestFault, WireCall, WireReply, WireRequest

if TYPE_CHECKING:
    from turnwright_serve.proxy.dialect import Dialect

TEXT_PER_TOKEN = 16
"""Maximum bytes of a request without its images, for each token of the context. A MiB takes 0.4 s
to render, in which no other request is answered."""
MIN_TEXT = 2**20
"""Bytes of such text that are read for any context, however short."""
MAX_TEXT = 2**22
"""Maximum bytes of such text where the context is not known."""
UNPACED_TEXT = 2**18
"""Bytes of such text after which the next request is read at once; a longer one makes it wait for a
second for each MiB."""
MAX_AGENT_NAME = 200
"""Maximum characters of a header that names an agent; of a longer one, a digest is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxySettings:
    """How a program's requests are answered."""

    untrained: tuple[str, ...] = ("side",)
    """Reasons of branches whose replies are recorded and not trained (`side`, `subagent`,
    `compacted`, ...)."""
    models: tuple[str, ...] = ()
    """Names of models that requests may ask for; empty accepts any, since there is only one."""


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A request, and what identifies it."""

    request: WireRequest
    agent: str
    key: Hashable
    """Equal for requests that repeat each other."""
    size: int
    """Bytes of its body."""
    text: int
    """Bytes of its body without its images."""


@dataclass(frozen=True, slots=True)
class _LatestRequest:
    """The last request of an agent."""

    request: WireRequest
    body: bytes
    key: Hashable


class ProxySession:
    """The requests of one episode, from any number of connections."""

    def __init__(self, model: Model, settings: ProxySettings | None = None) -> None:
        self.token = secrets.token_hex(16)
        """Names the session in URLs and as an API key."""
        self.model = model
        self.settings = settings or ProxySettings()
        self.cache = RequestCache()
        self.history = History()
        self.limit: LimitReached | None = None
        """The limit that ended the episode."""
        self.error: BaseException | None = None
        """What failed: the engine, a deadline. The episode fails by it."""
        self.ended = asyncio.Event()
        """Set when no further request is answered."""
        self.agents: dict[str, str] = {}
        """Names of agents by the headers that tell them apart."""
        self.reading = asyncio.Lock()
        """Held while a request is read, which may be in a thread."""
        self._next_reading = 0.0
        """`time.monotonic()` from which on the next request is read."""
        self._tasks: dict[tuple[Hashable, str], asyncio.Task[Exchange]] = {}
        """The last task of each request, by the request."""
        self._latest: dict[str, _LatestRequest] = {}
        """By agent."""
        self._folds_roles = False
        """Whether the template takes one system message alone."""
        self._requests = 0

    @property
    def busy(self) -> bool:
        """Whether a reply is being sampled."""
        return any(not task.done() for task in self._tasks.values())

    @property
    def why_ended(self) -> str:
        """Why no further request is answered."""
        if self.limit is None:
            return "the episode is over"
        return f"the episode is over: {self.limit}"

    def count(self, *names: str, by: int = 1) -> None:
        """Count in the episode's metrics, as `proxy_<name>`."""
        add_counts(self.model.trajectory, *(f"proxy_{name}" for name in names), by=by)

    async def turn(self) -> None:
        """Wait until the session may read its next request, where the last one was long."""
        wait = self._next_reading - time.monotonic()
        if wait > 0:
            await asyncio.sleep(wait)

    def read(self, dialect: Dialect, named: str, raw: bytes) -> ReadRequest:
        """Read a request of the agent that its headers name so; runs in a thread for a long one,
        while `reading` is held.

        Raises:
            RequestFault: for one that cannot be read, or a model that is not served.
        """
        body = self.cache.parse(raw, dialect.rows)
        request = dialect.read(body, self.cache)
        agent = self._agent(named)
        if self.settings.models and request.model not in self.settings.models:
            known = ", ".join(self.settings.models)
            raise RequestFault(
                f"the model {request.model!r:.80} does not exist here; models are {known}", 404
            )

        key = self._key(request, dialect.name, body, agent)
        return ReadRequest(request, agent, key, len(raw), len(raw) - _image_bytes(request))

    def forget(self) -> None:
        """Drop what was kept of requests so that others are read faster."""
        self.cache = RequestCache()
        self.history.forget_prefixes()
        self._latest.clear()

    def check_text(self, read: ReadRequest) -> None:
        """Set when the next request is read.

        Raises:
            RequestFault: for more text than any context has, which ends the episode as its
                context's limit does.
        """
        pause = max(0, read.text - UNPACED_TEXT) / 2**20
        self._next_reading = time.monotonic() + pause

        context = self.model.context
        most = MAX_TEXT if context is None else max(MIN_TEXT, TEXT_PER_TOKEN * context)
        if read.text <= most:
            return

        text = f"the request has {read.text} bytes of text; at most {most} are read"
        if context is None:
            raise RequestFault(text, 413)
        self.limit = LimitReached(StopReason.CONTEXT, f"{text} for a context of {context} tokens")
        self.ended.set()
        raise RequestFault(self.why_ended)

    def _agent(self, named: str) -> str:
        """Return the name of an agent: the first that a session sees is `main`, others are
        numbered."""
        if len(named) > MAX_AGENT_NAME:
            named = blake2b(named.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        if named not in self.agents:
            self.agents[named] = f"agent{len(self.agents)}" if self.agents else "main"
        return self.agents[named]

    def submit(self, read: ReadRequest, *, retried: bool) -> asyncio.Task[Exchange]:
        """Return the task that samples the reply to a request, which no client can cancel.

        A request that repeats one in flight joins it. One whose reply was not delivered completely,
        or that is marked as a retry, gets the same reply.

        Raises:
            RequestFault: after the end of the episode.
        """
        name = read.key, read.agent
        last = self._tasks.get(name)
        if last is not None and not last.done():
            self.count("joined")
            return last
        if last is not None and not last.cancelled() and last.exception() is None:
            exchange = last.result()
            if not exchange.continued and (retried or not exchange.delivered):
                self.count("served_again")
                return last

        if self.ended.is_set():
            raise RequestFault(self.why_ended)
        self.check_text(read)

        task = asyncio.ensure_future(self._reply(read.request, read.agent))
        self._tasks[name] = task

        def finished(done: asyncio.Task[Exchange]) -> None:
            # A failure is not served again, and would keep its request.
            failed = done.cancelled() or done.exception() is not None
            if failed and self._tasks.get(name) is done:
                del self._tasks[name]

        task.add_done_callback(finished)
        return task

    def _key(self, request: WireRequest, dialect: str, body: RequestBody, agent: str) -> Hashable:
        """Return what equal requests have in common; Codex writes the keys of a retry in another
        order."""
        latest = self._latest.get(agent)
        raw = body.raw
        if (
            latest is not None
            and len(latest.body) == len(raw)
            and latest.request == request
            and _sorted(latest.body) == _sorted(raw)
        ):
            return latest.key

        key = dialect, len(raw), body.key
        self._latest.pop(agent, None)
        self._latest[agent] = _LatestRequest(request, raw, key)
        if len(self._latest) > KEPT_CONVERSATIONS:
            del self._latest[next(iter(self._latest))]
        return key

    async def _reply(self, request: WireRequest, agent: str) -> Exchange:
        for name, number in request.counts.items():
            self.count(name, by=number)
        if not request.messages:
            raise RequestFault("a request needs at least one message")

        exchange = self.history.match(request, agent)
        self._requests += 1
        number = self._requests
        try:
            reply = await self._generate(exchange, request)
        except BaseException:
            self.history.withdraw(exchange)
            raise

        self._record(exchange, reply)
        wire = self._wire(reply, number, request.stop)
        self.history.add_reply(exchange, reply, wire)
        if request.needs_call and not wire.calls:
            self.count(UNMET_CHOICE)
        return exchange

    async def count_tokens(self, request: WireRequest) -> int:
        """Return the number of ids of a request's prompt, in which recorded replies have their
        sampled ids."""
        messages, *_ = self.history.read(request)
        ids_of_message = {
            id(exchange.reply.message): exchange.reply.ids
            for exchange in self.history.exchanges
            if exchange.reply is not None
        }
        replies = {
            number: ids_of_message[id(message)]
            for number, message in enumerate(messages)
            if id(message) in ids_of_message
        }
        try:
            return len(await self.model.render(messages, replies, request.tools))
        except (MediaError, TemplateError, UsageError) as error:
            raise RequestFault(str(error)) from error

    async def _generate(self, exchange: Exchange, request: WireRequest) -> Reply:
        """Sample a reply; a limit, or what fails, ends the episode."""

        async def generate(messages: list[Message]) -> Reply:
            return await self.model.generate(
                messages,
                agent=exchange.agent,
                tools=request.tools,
                max_tokens=request.max_tokens,
                stop=request.stop,
                branch=exchange.branch,
            )

        try:
            if not self._folds_roles:
                try:
                    return await generate(exchange.messages)
                except TemplateError:
                    if fold_roles(exchange.messages) == exchange.messages:
                        raise
                    self._folds_roles = True
            self.count("roles_folded")
            return await generate(fold_roles(exchange.messages))
        except LimitReached as limit:
            self.limit = limit
            self.ended.set()
            raise RequestFault(self.why_ended) from limit
        except (MediaError, TemplateError, UsageError) as error:
            raise RequestFault(str(error)) from error
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.error = error
            self.ended.set()
            raise

    def _record(self, exchange: Exchange, reply: Reply) -> None:
        """Record what a reply continues, and weigh it."""
        self.count(*exchange.counts)
        if exchange.branch == "compacted":
            for summary in self.history.summaries(exchange.messages):
                assert summary.reply is not None
                self.model.note(summary.reply, {"proxy": summary.about() | {"summary": True}})
                self.count("summaries")
        about = exchange.about()
        if about:
            self.model.note(reply, {"proxy": about})
        if exchange.branch in self.settings.untrained:
            self.model.weigh(reply, 0.0)

    def _wire(self, reply: Reply, number: int, stop: tuple[str, ...]) -> WireReply:
        """Return a reply as it is sent; calls that cannot be read are text, unless their name and
        arguments are known."""
        uid = f"{self.token[:8]}{number:04d}"
        message = reply.message
        text = message.text
        reasoning = message.reasoning
        calls = reply.tool_calls
        if any(call.error is not None and not (call.name and call.raw) for call in calls):
            text = self.model.text_of(reply)
            reasoning = None
            calls = ()
        wire_calls = tuple(
            WireCall(f"call_{uid}_{index}", call.name, call.raw or _json(call.arguments))
            for index, call in enumerate(calls)
        )

        # A stop text is no part of what is sent.
        stopped = ""
        if not calls:
            stopped = next((stop_text for stop_text in stop if text.endswith(stop_text)), "")
        text = text.removesuffix(stopped)

        turn = next(turn for turn in reversed(self.model.trajectory.turns) if turn.reply is message)
        return WireReply(
            uid, text, reasoning, wire_calls, reply.finish, turn.context, len(reply.ids), stopped
        )

    async def end(self) -> None:
        """Refuse further requests, and cancel those in flight."""
        self.ended.set()
        running = [task for task in self._tasks.values() if not task.done()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        self._find_main()

    def _find_main(self) -> None:
        """Exchange the labels of the first conversation and a later one, where the first one was a
        side call: it had no tools, and the later one has some. Programs ask for a title first."""
        exchanges = self.history.exchanges
        first = exchanges[0] if exchanges else None
        if first is None or first.tools or first.continued:
            return
        with_tools = [
            exchange
            for exchange in exchanges
            if exchange.branch == "subagent" and exchange.parent is None and exchange.tools
        ]
        if not with_tools:
            return
        main = with_tools[0]
        if main.agent != first.agent or main.reply is None or first.reply is None:
            return

        branches = self.model.trajectory.branches
        branches["subagent"] -= 1
        if not branches["subagent"]:
            del branches["subagent"]
        branches["side"] = branches.get("side", 0) + 1

        self.model.note(first.reply, {"proxy": {"branch": "side"}})
        self.model.weigh(first.reply, 0.0 if "side" in self.settings.untrained else 1.0)
        self.model.note(main.reply, {"proxy": {}})
        self.model.weigh(main.reply, 1.0)


def fold_roles(messages: list[Message]) -> list[Message]:
    """Return messages for a template that takes one system message, at the start.

    The system and developer messages at the start become one; later ones become messages of the
    user.
    """
    opening: list[Message] = []
    for message in messages:
        if message.role not in ("system", "developer"):
            break
        opening.append(message)
    rest = [
        replace(message, role="user") if message.role in ("system", "developer") else message
        for message in messages[len(opening) :]
    ]
    if not opening:
        return rest
    return [Message("system", "\n".join(message.text for message in opening)), *rest]


def _image_bytes(request: WireRequest) -> int:
    total = 0
    for message in request.messages:
        if isinstance(message.content, str):
            continue
        for part in message.content:
            if isinstance(part, Image) and isinstance(part.value, str):
                total += len(part.value)
    return total


def _sorted(body: bytes) -> bytes:
    return orjson.dumps(orjson.loads(body), option=orjson.OPT_SORT_KEYS)


def _json(arguments: Any) -> str:
    return json.dumps(dict(arguments), ensure_ascii=False)
