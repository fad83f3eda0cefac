"""Matching: which replies of the episode a request repeats, what differs, and why a conversation is
not the last one continued.

`History.match` begins the exchange of a request: `read` puts recorded replies in their places
(`_find`, `compare`), and `_reason` says what kind of branch it is.

A program sends its complete history with every request. A message of the assistant that is a
recorded reply is replaced by the recorded object, so that its sampled ids are the context. It is
the recorded one if nothing but counted forms differ: white space, the notation of arguments,
arguments added by the program, reasoning left out. Everything else is the program's own text, which
is rendered by the template and never trained.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from turnwright.rollouts.agent_function import Reply
from turnwright.types import Message, ToolCall
from turnwright_serve.proxy.wire import WireCall, WireMessage, WireReply, WireRequest

SUMMARY_CHARS = 32
"""Minimum length of a line of a reply whose appearance in another conversation makes that
conversation a compacted one."""
_TAGS = re.compile(r"</?\w+>")
"""Tags around a summary, which programs take off."""


@dataclass(eq=False, slots=True)
class Exchange:
    """A request's conversation, with recorded replies in their places, and the reply to it."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    agent: str
    parent: Exchange | None
    """The exchange whose reply the conversation repeats last."""
    branch: str | None
    """Why it does not continue a reply that nothing continued before; None where it does, and for
    the first one."""
    counts: Counter[str]
    """Tolerated differences by name."""
    reply: Reply | None = None
    """The reply as sampled; None until then."""
    wire: WireReply | None = None
    """The reply as sent."""
    delivered: bool = False
    """Whether the program received all of it."""
    continued: list[Exchange] = field(default_factory=list)
    """Exchanges that continue this one."""

    def end(self, reply: Reply, wire: WireReply) -> None:
        """Set the reply."""
        self.reply = reply
        self.wire = wire

    def sent(self) -> WireReply:
        """Return the reply as sent."""
        assert self.wire is not None
        return self.wire

    def mark_delivered(self) -> None:
        """Note that the program received all of the reply."""
        self.delivered = True

    def about(self) -> dict[str, Any]:
        """Return what is noted with its turn."""
        about: dict[str, Any] = dict(self.counts)
        if self.branch is not None:
            about["branch"] = self.branch
        return about

    @property
    def chain(self) -> list[Exchange]:
        """The exchanges of its conversation, first to last."""
        chain = [self]
        last = self.parent
        while last is not None:
            chain.append(last)
            last = last.parent
        return chain[::-1]

    def is_repeated_by(self, messages: list[Message]) -> bool:
        """Whether a conversation begins with this one and its reply."""
        size = len(self.messages)
        if self.reply is None or len(messages) <= size:
            return False
        return messages[size] is self.reply.message and messages[:size] == self.messages


class _Prefix(NamedTuple):
    """What the first messages of a request were read as."""

    last: WireMessage
    """The last one of them, which has the same messages before it wherever it is the same
    object."""
    messages: list[Message]
    counts: Counter[str]
    parent: Exchange | None


KEPT_PREFIXES = 32
"""Prefixes of requests that are not matched again when a request repeats them, the newest ones."""


class History:
    """The exchanges of one episode, and how to find their replies again."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []
        """In the order of the requests; those in flight have no reply yet."""
        self._by_mark: dict[str, Exchange] = {}
        self._by_text: defaultdict[tuple[Any, ...], list[Exchange]] = defaultdict(list)
        self._prefixes: dict[int, _Prefix] = {}
        """By the identity of their last message."""
        self._call_ids: dict[str, str] = {}
        """Recorded ids of calls, by the ids that were sent."""

    def forget_prefixes(self) -> None:
        """Match the next requests from their beginning."""
        self._prefixes.clear()

    def add_reply(self, exchange: Exchange, reply: Reply, wire: WireReply) -> None:
        """Remember the reply of an exchange."""
        exchange.end(reply, wire)

        marks = [wire.signature, f"msg_{wire.uid}", f"rs_{wire.uid}"]
        for number, call in enumerate(wire.calls):
            marks += [f"fc_{wire.uid}_{number}", call.id]
        for mark in marks:
            self._by_mark[mark] = exchange
        for call, recorded in zip(wire.calls, reply.tool_calls, strict=False):
            self._call_ids[call.id] = recorded.id
        for text in {wire.text, wire.text + wire.stop_text}:
            same = self._by_text[_key(text, wire.calls)]
            if same:
                # Which of them a message repeats may be another one now.
                self._prefixes.clear()
            same.append(exchange)

    def withdraw(self, exchange: Exchange) -> None:
        """Forget an exchange that has no reply."""
        self.exchanges.remove(exchange)
        if exchange.parent is not None:
            exchange.parent.continued.remove(exchange)

    def match(self, request: WireRequest, agent: str) -> Exchange:
        """Begin the exchange of a request."""
        messages, counts, parent, own_text = self.read(request)
        branch = own_text or self._reason(messages, request, parent, agent)
        exchange = Exchange(messages, request.tools, agent, parent, branch, counts)
        self.exchanges.append(exchange)
        if parent is not None:
            parent.continued.append(exchange)
        return exchange

    def read(
        self, request: WireRequest
    ) -> tuple[list[Message], Counter[str], Exchange | None, str]:
        """Return the conversation of a request with recorded replies in their places, the
        differences, the exchange whose reply it repeats last, and the reason of a message of the
        assistant that is no recorded reply."""
        wire = request.messages

        # The longest prefix that an earlier request had is read already.
        size = len(wire)
        while size and id(wire[size - 1]) not in self._prefixes:
            size -= 1
        messages: list[Message] = []
        counts: Counter[str] = Counter()
        parent: Exchange | None = None
        if size:
            prefix = self._prefixes[id(wire[size - 1])]
            messages = list(prefix.messages)
            counts = Counter(prefix.counts)
            parent = prefix.parent

        own_text = ""
        for number, message in enumerate(wire[size:], size + 1):
            if message.role != "assistant":
                messages.append(self._other(message, messages))
            else:
                exchange = self._find(message, parent)
                differences = None
                if exchange is not None and exchange.wire is not None:
                    differences = compare(message, exchange.wire)
                if exchange is not None and differences is not None:
                    counts.update(differences)
                    parent = exchange
                    assert exchange.reply is not None
                    messages.append(exchange.reply.message)
                else:
                    rewritten = exchange is not None or (not own_text and self._replied(messages))
                    own_text = own_text or ("rewritten_reply" if rewritten else "unknown_reply")
                    messages.append(_own_message(message))

            if not own_text and number > len(wire) - 3:
                # Later requests change marks of the last message.
                self._prefixes[id(message)] = _Prefix(
                    message, list(messages), Counter(counts), parent
                )
        for old in list(self._prefixes)[:-KEPT_PREFIXES]:
            del self._prefixes[old]
        return messages, counts, parent, own_text

    def _other(self, message: WireMessage, before: Sequence[Message]) -> Message:
        """Return a message of the program; an answer to a call carries the call's recorded id and
        name, as in our own loops."""
        if message.role != "tool":
            return Message(message.role, message.content)
        call_id = self._call_ids.get(message.tool_call_id or "", message.tool_call_id)
        calls: Sequence[ToolCall] = ()
        for earlier in reversed(before):
            if earlier.role == "assistant":
                calls = earlier.tool_calls
                break
        name = next((call.name for call in calls if call.id == call_id), None)
        return Message("tool", message.content, tool_call_id=call_id or None, name=name)

    def _find(self, message: WireMessage, parent: Exchange | None) -> Exchange | None:
        """Return the exchange whose reply a message repeats: by an id of its own, else by its text
        after the same parent.

        Where several fit and none is certain, the result is None: nothing is guessed.
        """
        by_mark: dict[int, Exchange] = {}
        for mark in (*message.marks, *(call.id for call in message.calls)):
            exchange = self._by_mark.get(mark)
            if exchange is not None:
                by_mark[id(exchange)] = exchange
        if by_mark:
            return next(iter(by_mark.values())) if len(by_mark) == 1 else None

        same = self._by_text.get(_key(message.text, message.calls), [])
        near = [exchange for exchange in same if exchange.parent is parent] or same
        different = {
            exchange.reply.ids: exchange for exchange in near if exchange.reply is not None
        }
        return next(iter(different.values())) if len(different) == 1 else None

    def _replied(self, messages: list[Message]) -> bool:
        """Return whether a conversation had a reply."""
        return any(
            exchange.reply is not None and exchange.messages == messages
            for exchange in self.exchanges
        )

    def _reason(
        self, messages: list[Message], request: WireRequest, parent: Exchange | None, agent: str
    ) -> str | None:
        """Return why a conversation is a branch or a beginning of its own, by comparing it with
        what was recorded."""
        if parent is None:
            return self._reason_of_root(messages, request, agent)
        if parent.is_repeated_by(messages):
            if request.tools != parent.tools:
                return "tools_changed"
            if agent != parent.agent:
                return "subagent"
            others = [exchange.messages for exchange in parent.continued]
            if messages in others:
                return "sampled_again"
            if any(messages[: len(other)] == other for other in others):
                return "dropped_reply"
            return "edited" if others else None

        opening = parent.chain[0].messages
        if messages[: len(opening)] != opening and next(self.summaries(messages), None) is not None:
            return "compacted"
        recorded = [
            id(exchange.reply.message) for exchange in parent.chain if exchange.reply is not None
        ]
        present = [id(message) for message in messages if id(message) in set(recorded)]
        return "dropped_reply" if present != recorded else "edited"

    def _reason_of_root(
        self, messages: list[Message], request: WireRequest, agent: str
    ) -> str | None:
        if not self.exchanges:
            return None
        if all(exchange.agent != agent for exchange in self.exchanges):
            return "subagent"
        if any(exchange.messages == messages for exchange in self.exchanges):
            return "sampled_again"
        if next(self.summaries(messages), None) is not None:
            return "compacted"

        first = self.exchanges[0]
        same_opening = messages[0] == first.messages[0]
        if same_opening and any(message in first.messages[1:] for message in messages[1:]):
            begins_so = messages[: len(first.messages)] == first.messages
            return "dropped_reply" if begins_so else "edited"
        if not request.tools or len(request.tools) < len(first.tools):
            return "side"
        return "subagent"

    def summaries(self, messages: Sequence[Message]) -> Iterator[Exchange]:
        """Yield the exchanges whose replies are used in another conversation: a line of one is text
        there that was not in its own conversation, or all of it is a message between others that
        were not."""
        replies = {
            id(exchange.reply.message) for exchange in self.exchanges if exchange.reply is not None
        }
        present = {id(message) for message in messages}
        texts = {message.text for message in messages if id(message) not in replies}
        for exchange in self.exchanges:
            if exchange.reply is None or exchange.wire is None:
                continue

            own_texts = {message.text for message in exchange.messages if message.text}
            new_texts = texts - own_texts
            lines = [line.strip() for line in _TAGS.sub("", exchange.wire.text).splitlines()]
            lines = [line for line in lines if len(line) >= SUMMARY_CHARS]
            if id(exchange.reply.message) in present:
                is_used = bool(lines) and new_texts == texts
            else:
                is_used = any(
                    any(line in text for text in new_texts)
                    and all(line not in text for text in own_texts)
                    for line in lines
                )
            if is_used:
                yield exchange


def compare(message: WireMessage, sent: WireReply) -> Counter[str] | None:
    """Return the tolerated differences between a message and a reply as it was sent; None if they
    say different things."""
    differences: Counter[str] = Counter()
    if message.text != sent.text:
        texts = {"".join(text.split()): text for text in (sent.text + sent.stop_text, sent.text)}
        text = texts.get("".join(message.text.split()))
        if text is None:
            return None
        differences["whitespace"] += message.text != text
        differences["stop_text_added"] += text != sent.text

    if (message.reasoning or "").strip() != (sent.reasoning or "").strip():
        if message.reasoning:
            return None
        differences["reasoning_dropped"] += 1

    if len(message.calls) != len(sent.calls):
        return None
    for call, sent_call in zip(message.calls, sent.calls, strict=True):
        if call.name != sent_call.name:
            return None
        if call.arguments == sent_call.arguments:
            continue
        arguments = _arguments(call.arguments)
        sent_arguments = _arguments(sent_call.arguments)
        if arguments == sent_arguments:
            differences["arguments_form"] += 1
        elif all(
            key in arguments and arguments[key] == value for key, value in sent_arguments.items()
        ):
            differences["arguments_defaulted"] += 1
        else:
            return None
    # Without those that are 0.
    return +differences


def _arguments(text: str) -> Mapping[str, Any]:
    try:
        arguments = json.loads(text)
    except ValueError:
        arguments = None
    return arguments if isinstance(arguments, dict) else {"__unparsed": text}


def _key(text: str, calls: Sequence[WireCall]) -> tuple[Any, ...]:
    """Return what a message and a reply have in common where only white space, or the notation of
    arguments, differ."""
    key: list[Any] = ["".join(text.split())]
    for call in calls:
        key.append((call.name, json.dumps(_arguments(call.arguments), sort_keys=True)))
    return tuple(key)


def _own_message(message: WireMessage) -> Message:
    """Return a message of the assistant that the program wrote itself."""
    calls = tuple(
        ToolCall(call.name, _arguments(call.arguments), call.id) for call in message.calls
    )
    return Message("assistant", message.content, tool_calls=calls, reasoning=message.reasoning)
