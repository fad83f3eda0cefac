"""Matching: which replies of the episode a request repeats, what differs, and why a conversation is
not the last one continued.

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
    """Why it does not continue a reply that nothing continued before; None where it does,
    and for the first one."""
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
        self.reply, self.wire = reply, wire

    def sent(self) -> WireReply:
        """Return the reply as sent."""
        assert self.wire is not None
        return self.wire

    def mark_delivered(self) -> None:
        """Note that the program received all of the reply."""
        self.delivered = True

    def about(self) -> dict[str, Any]:
        """Return what is noted with its turn."""
        return dict(self.counts) | ({} if self.branch is None else {"branch": self.branch})

    @property
    def chain(self) -> list[Exchange]:
        """The exchanges of its conversation, first to last."""
        chain, last = [self], self.parent
        while last is not None:
            chain.append(last)
            last = last.parent
        return chain[::-1]

    def is_repeated_by(self, messages: list[Message]) -> bool:
        """Whether a conversation begins with this one and its reply."""
        size = len(self.messages)
        own = (
            self.reply is not None and len(messages) > size and messages[size] is self.reply.message
        )
        return own and messages[:size] == self.messages


class _Prefix(NamedTuple):
    """What the first messages of a request were read as."""

    last: WireMessage
    """The last one of them, which has the same messages before it wherever
    it is the same object."""
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
        items = (
            f"msg_{wire.uid}",
            f"rs_{wire.uid}",
            *(f"fc_{wire.uid}_{number}" for number in range(len(wire.calls))),
        )
        for mark in (wire.signature, *items, *(call.id for call in wire.calls)):
            self._by_mark[mark] = exchange
        for call, recorded in zip(wire.calls, reply.tool_calls, strict=False):
            self._call_ids[call.id] = recorded.id
        for text in {wire.text, wire.text + wire.stop_text}:
            same = self._by_text[_key(text, wire.calls)]
            if same:  # which of them a message repeats may be another one now
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
        wire, size = request.messages, len(request.messages)
        while size and id(wire[size - 1]) not in self._prefixes:
            size -= 1
        known = self._prefixes[id(wire[size - 1])] if size else None
        messages: list[Message] = [] if known is None else list(known.messages)
        counts: Counter[str] = Counter(None if known is None else known.counts)
        parent, own_text = None if known is None else known.parent, ""
        for number, one in enumerate(wire[size:], size + 1):
            if one.role != "assistant":
                messages.append(self._other(one, messages))
            else:
                found = self._find(one, parent)
                sent = None if found is None else found.wire
                if (
                    found is not None
                    and sent is not None
                    and (differences := compare(one, sent)) is not None
                ):
                    counts.update(differences)
                    parent = found
                    assert found.reply is not None
                    messages.append(found.reply.message)
                else:
                    rewritten = found is not None or (not own_text and self._replied(messages))
                    own_text = own_text or ("rewritten_reply" if rewritten else "unknown_reply")
                    messages.append(_own_message(one))
            if not own_text and number > len(wire) - 3:
                # Later requests change marks of the last message.
                self._prefixes[id(one)] = _Prefix(one, list(messages), Counter(counts), parent)
        for old in list(self._prefixes)[:-KEPT_PREFIXES]:
            del self._prefixes[old]
        return messages, counts, parent, own_text

    def _other(self, one: WireMessage, before: Sequence[Message]) -> Message:
        """Return a message of the program; an answer to a call carries the call's recorded id and
        name, as in our own loops."""
        if one.role != "tool":
            return Message(one.role, one.content)
        call_id = self._call_ids.get(one.tool_call_id or "", one.tool_call_id)
        calls = next((m.tool_calls for m in reversed(before) if m.role == "assistant"), ())
        name = next((call.name for call in calls if call.id == call_id), None)
        return Message("tool", one.content, tool_call_id=call_id or None, name=name)

    def _find(self, one: WireMessage, parent: Exchange | None) -> Exchange | None:
        """Return the exchange whose reply a message repeats: by an id of its own, else by its
        text after the same parent.

        Where several fit and none is certain, the result is None: nothing is guessed.
        """
        marks = (*one.marks, *(call.id for call in one.calls))
        by_mark = {
            id(found): found for mark in marks if (found := self._by_mark.get(mark)) is not None
        }
        if by_mark:
            return next(iter(by_mark.values())) if len(by_mark) == 1 else None
        same = self._by_text.get(_key(one.text, one.calls), [])
        near = [found for found in same if found.parent is parent] or same
        different = {found.reply.ids: found for found in near if found.reply is not None}
        return next(iter(different.values())) if len(different) == 1 else None

    def _replied(self, messages: list[Message]) -> bool:
        """Whether a conversation had a reply."""
        return any(one.reply is not None and one.messages == messages for one in self.exchanges)

    def _reason(
        self, messages: list[Message], request: WireRequest, parent: Exchange | None, agent: str
    ) -> str | None:
        """Return why a conversation is a branch or a beginning of its own, by comparing it
        with what was recorded."""
        if parent is None:
            return self._reason_of_root(messages, request, agent)
        if parent.is_repeated_by(messages):
            if request.tools != parent.tools:
                return "tools_changed"
            if agent != parent.agent:
                return "subagent"
            others = [one.messages for one in parent.continued]
            if messages in others:
                return "sampled_again"
            if any(messages[: len(other)] == other for other in others):
                return "dropped_reply"
            return "edited" if others else None
        opening = parent.chain[0].messages
        if messages[: len(opening)] != opening and next(self.summaries(messages), None) is not None:
            return "compacted"
        recorded = [id(one.reply.message) for one in parent.chain if one.reply is not None]
        present = [id(message) for message in messages if id(message) in set(recorded)]
        return "dropped_reply" if present != recorded else "edited"

    def _reason_of_root(
        self, messages: list[Message], request: WireRequest, agent: str
    ) -> str | None:
        if not self.exchanges:
            return None
        if all(one.agent != agent for one in self.exchanges):
            return "subagent"
        if any(one.messages == messages for one in self.exchanges):
            return "sampled_again"
        first = self.exchanges[0]
        if next(self.summaries(messages), None) is not None:
            return "compacted"
        if messages[0] == first.messages[0] and any(
            message in first.messages[1:] for message in messages[1:]
        ):
            return (
                "dropped_reply" if messages[: len(first.messages)] == first.messages else "edited"
            )
        return "side" if len(request.tools) < len(first.tools) or not request.tools else "subagent"

    def summaries(self, messages: Sequence[Message]) -> Iterator[Exchange]:
        """Yield the exchanges whose replies are used in another conversation: a line of one is
        text there that was not in its own conversation, or all of it is a message between
        others that were not."""
        replies = {id(one.reply.message) for one in self.exchanges if one.reply is not None}
        present = {id(message) for message in messages}
        texts = {message.text for message in messages if id(message) not in replies}
        for one in self.exchanges:
            if one.reply is None or one.wire is None:
                continue
            known = {message.text for message in one.messages if message.text}
            new = texts - known
            lines = [
                line
                for line in _TAGS.sub("", one.wire.text).splitlines()
                if len(line.strip()) >= SUMMARY_CHARS
            ]
            found = (line.strip() for line in lines if any(line.strip() in text for text in new))
            if (
                (bool(lines) and new == texts)
                if id(one.reply.message) in present
                else any(all(line not in text for text in known) for line in found)
            ):
                yield one


def compare(one: WireMessage, sent: WireReply) -> Counter[str] | None:
    """Return the tolerated differences between a message and a reply as it was sent; None if they
    say different things."""
    found: Counter[str] = Counter()
    if one.text != sent.text:
        texts = {"".join(text.split()): text for text in (sent.text + sent.stop_text, sent.text)}
        text = texts.get("".join(one.text.split()))
        if text is None:
            return None
        found["whitespace"] += one.text != text
        found["stop_text_added"] += text != sent.text
    if (one.reasoning or "").strip() != (sent.reasoning or "").strip():
        if one.reasoning:
            return None
        found["reasoning_dropped"] += 1
    if len(one.calls) != len(sent.calls):
        return None
    for call, own in zip(one.calls, sent.calls, strict=True):
        if call.name != own.name:
            return None
        if call.arguments == own.arguments:
            continue
        given, known = _arguments(call.arguments), _arguments(own.arguments)
        if given == known:
            found["arguments_form"] += 1
        elif all(key in given and given[key] == value for key, value in known.items()):
            found["arguments_defaulted"] += 1
        else:
            return None
    return +found


def _arguments(text: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"__unparsed": text}


def _key(text: str, calls: Sequence[WireCall]) -> tuple[Any, ...]:
    return "".join(text.split()), *(
        (call.name, json.dumps(_arguments(call.arguments), sort_keys=True)) for call in calls
    )


def _own_message(one: WireMessage) -> Message:
    """Return a message of the assistant that the program wrote itself."""
    calls = tuple(ToolCall(call.name, _arguments(call.arguments), call.id) for call in one.calls)
    return Message("assistant", one.content, tool_calls=calls, reasoning=one.reasoning)
