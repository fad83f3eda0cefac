"""One program's conversations with the model: its requests become calls of `Model.generate`."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Hashable
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

MIN_TEXT, MAX_TEXT, TEXT_PER_TOKEN = 2**20, 2**22, 16
"""Maximum bytes of a request without its images: so many for each token of the context, at least
the first, and the second where the context is not known. A MiB takes 0.4 s to render, in which no
other request is answered."""
UNPACED_TEXT = 2**18
"""Bytes of such text after which the next request is read at once; a longer one makes it wait
for a second for each MiB."""
MAX_AGENT_NAME = 200
"""Maximum characters of a header that names an agent; of a longer one, a digest is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxySettings:
    """How a program's requests are answered."""

    untrained: tuple[str, ...] = ("side",)
    """Reasons of branches whose replies are recorded and not trained (`side`,
    `subagent`, `compacted`, ...)."""
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
        self._latest: dict[str, tuple[WireRequest, bytes, Hashable]] = {}
        """Last request of each agent, its body and key."""
        self._folds_roles = False
        self._requests = 0

    @property
    def busy(self) -> bool:
        """Whether a reply is being sampled."""
        return any(not task.done() for task in self._tasks.values())

    @property
    def why_ended(self) -> str:
        """Why no further request is answered."""
        return "the episode is over" if self.limit is None else f"the episode is over: {self.limit}"

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
            RequestFault: for more text than any context has, which ends the episode as
                its context's limit does.
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
        """Return the name of an agent: the first that a session sees is
        `main`, others are numbered."""
        if len(named) > MAX_AGENT_NAME:
            named = blake2b(named.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        if named not in self.agents:
            self.agents[named] = "main" if not self.agents else f"agent{len(self.agents)}"
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

        self._tasks[name] = task = asyncio.ensure_future(self._reply(read.request, read.agent))

        def finished(done: asyncio.Task[Exchange]) -> None:
            # A failure is not served again, and would keep its request.
            if (done.cancelled() or done.exception() is not None) and self._tasks.get(name) is done:
                del self._tasks[name]

        task.add_done_callback(finished)
        return task

    def _key(self, request: WireRequest, dialect: str, body: RequestBody, agent: str) -> Hashable:
        """Return what equal requests have in common; Codex writes the keys of a
        retry in another order."""
        known = self._latest.get(agent)
        raw = body.raw
        if (
            known is not None
            and len(known[1]) == len(raw)
            and known[0] == request
            and _sorted(known[1]) == _sorted(raw)
        ):
            return known[2]
        key = dialect, len(raw), body.key
        self._latest.pop(agent, None)
        self._latest[agent] = request, raw, key
        if len(self._latest) > KEPT_CONVERSATIONS:
            del self._latest[next(iter(self._latest))]
        return key

    async def _reply(self, request: WireRequest, agent: str) -> Exchange:
        for name, number in request.counts.items():
            self.count(name, by=number)
        if not request.messages:
            raise RequestFault("a request needs at least one message")
        exchange = self.history.match(request, agent)
        number = self._requests = self._requests + 1
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
        """Return the number of ids of a request's prompt, in which recorded replies
        have their sampled ids."""
        messages = self.history.read(request)[0]
        known = {
            id(one.reply.message): one.reply.ids
            for one in self.history.exchanges
            if one.reply is not None
        }
        replies = {
            number: known[id(message)]
            for number, message in enumerate(messages)
            if id(message) in known
        }
        try:
            return len(await self.model.render(messages, replies, request.tools))
        except (MediaError, TemplateError, UsageError) as error:
            raise RequestFault(str(error)) from error

    async def _generate(self, exchange: Exchange, request: WireRequest) -> Reply:
        given: dict[str, Any] = {
            "agent": exchange.agent,
            "tools": request.tools,
            "max_tokens": request.max_tokens,
        }
        given |= {"stop": request.stop, "branch": exchange.branch}
        generate: Callable[..., Awaitable[Reply]] = self.model.generate
        try:
            if not self._folds_roles:
                try:
                    return await generate(exchange.messages, **given)
                except TemplateError:
                    if fold_roles(exchange.messages) == exchange.messages:
                        raise
                    self._folds_roles = True
            self.count("roles_folded")
            return await generate(fold_roles(exchange.messages), **given)
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
        if about := exchange.about():
            self.model.note(reply, {"proxy": about})
        if exchange.branch in self.settings.untrained:
            self.model.weigh(reply, 0.0)

    def _wire(self, reply: Reply, number: int, stop: tuple[str, ...]) -> WireReply:
        """Return a reply as it is sent; calls that cannot be read are text, unless their name
        and arguments are known."""
        uid = f"{self.token[:8]}{number:04d}"
        message, calls = reply.message, reply.tool_calls
        text, reasoning = message.text, message.reasoning
        if any(call.error is not None and not (call.name and call.raw) for call in calls):
            text, reasoning, calls = self.model.text_of(reply), None, ()
        sent = tuple(
            WireCall(f"call_{uid}_{at}", call.name, call.raw or _json(call.arguments))
            for at, call in enumerate(calls)
        )
        turn = next(turn for turn in reversed(self.model.trajectory.turns) if turn.reply is message)
        stopped = next((one for one in stop if not calls and text.endswith(one)), "")
        text = text.removesuffix(stopped)
        return WireReply(
            uid, text, reasoning, sent, reply.finish, turn.context, len(reply.ids), stopped
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
        main = next(
            (
                one
                for one in exchanges
                if one.branch == "subagent" and one.parent is None and one.tools
            ),
            None,
        )
        if (
            main is not None
            and main.agent == first.agent
            and main.reply is not None
            and first.reply is not None
        ):
            branches = self.model.trajectory.branches
            branches["subagent"] -= 1
            if not branches["subagent"]:
                del branches["subagent"]
            branches["side"] = branches.get("side", 0) + 1
            for reply, branch in ((first.reply, "side"), (main.reply, None)):
                self.model.note(reply, {"proxy": {} if branch is None else {"branch": branch}})
                self.model.weigh(reply, 0.0 if branch in self.settings.untrained else 1.0)


def fold_roles(messages: list[Message]) -> list[Message]:
    """Return messages for a template that takes one system message, at the start.

    The system and developer messages at the start become one; later ones
    become messages of the user.
    """
    opening: list[Message] = []
    for message in messages:
        if message.role not in ("system", "developer"):
            break
        opening.append(message)
    rest = [
        replace(one, role="user") if one.role in ("system", "developer") else one
        for one in messages[len(opening) :]
    ]
    return [Message("system", "\n".join(one.text for one in opening)), *rest] if opening else rest


def _image_bytes(request: WireRequest) -> int:
    parts = (
        part
        for message in request.messages
        if not isinstance(message.content, str)
        for part in message.content
    )
    return sum(
        len(part.value) for part in parts if isinstance(part, Image) and isinstance(part.value, str)
    )


def _sorted(body: bytes) -> bytes:
    return orjson.dumps(orjson.loads(body), option=orjson.OPT_SORT_KEYS)


def _json(arguments: Any) -> str:
    return json.dumps(dict(arguments), ensure_ascii=False)
