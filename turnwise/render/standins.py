"""Stand-ins of sampled replies: the same shape, made of digits nobody can guess, so that a rendered text can be searched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import Any, NamedTuple

from turnwise.errors import TemplateError
from turnwise.render.base import SampledReply
from turnwise.render.codec import Tokenizer
from turnwise.render.forms import ADAPT, PROBE_TOOLS
from turnwise.render.guard import random_mark
from turnwise.render.probe import TemplateProbe, calls_before
from turnwise.types import Message, ToolCall

Tools = Sequence[Mapping[str, Any]]
_MOST_KEPT = 1024
_ANSWER = Message("tool", "t", tool_call_id="call_0", name="f")


class ReplyPlaceholder(NamedTuple):
    """A sampled reply and what stands for it."""

    reply: SampledReply
    message: Message
    real: Message
    """What is shown where the template does not show the reply whole."""
    marks: tuple[str, ...]
    thinking: str
    """The mark of the reasoning; empty where there is none."""
    opening: str
    """The generation prompt that it was sampled behind, as the template writes it now."""

    plain: str | None = None
    """What it says where that is text alone, without thinking and calls."""
    blank: bool = False
    """Whether it marks thinking that holds nothing."""

    @property
    def calls(self) -> bool:
        """Whether it makes tool calls, so that its marks stand inside them."""
        return bool(self.message.tool_calls)


@dataclass(frozen=True, slots=True)
class ReplyFrame:
    """What a template writes around a reply of some shape that comes last; None where that is not known."""

    lead: str | None = None
    """Between the generation prompt and the first thing that the reply says."""
    tail: str | None = None
    """Between the last thing that it says and the token that closes it."""


class ReplyPlaceholders:
    """Makes stand-ins for one template."""

    def __init__(self, codec: Tokenizer, probe: TemplateProbe, stops: Mapping[str, int]) -> None:
        """
        Args:
            stops: ids that end a reply, by their text.
        """
        self._codec = codec
        self._template = probe.template
        self._probe = probe
        self._stops = stops
        self._ends = frozenset(stops.values())
        self._frames: dict[Any, ReplyFrame] = {}
        self._openings: dict[Any, str] = {}

    def make(self, messages: Sequence[Message], reply: SampledReply, tools: Tools, *, called: bool = False) -> ReplyPlaceholder:
        """The stand-in of one reply of a conversation.

        Args:
            called: whether what tools answer counts as called where the reply makes no calls.
        """
        message = messages[reply.message]
        marks: list[str] = []

        def fresh() -> str:
            marks.append(random_mark())
            return marks[-1]

        blank = message.reasoning is not None and not message.reasoning.strip()
        reasoning = fresh() if message.reasoning and not blank else message.reasoning
        thinking = marks[0] if marks else ""
        calls = message.tool_calls
        if self._reads_calls:
            answers = list(takewhile(lambda m: m.role == "tool", messages[reply.message + 1 :]))
            calls = calls or (calls_before(message, answers) if called else ())
            calls = tuple(ToolCall(self._name(call.name), {"x": fresh()}, call.id) for call in calls)
        elif calls:
            calls, message = (), replace(message, content="calls")
        unread = any(
            call.error for call in message.tool_calls
        )  # its text is what stood around a call that cannot be read: part of the call
        content = fresh() if not marks or (message.text and not unread) else ""
        stub = self._shown(replace(message, content=content, reasoning=reasoning, tool_calls=calls))
        opening = self._opening(messages[: reply.message], tools)
        own = messages[reply.message]
        real = self._real(own, reply.ids)
        plain = own.text if own.reasoning is None and not own.tool_calls else None
        return ReplyPlaceholder(reply, stub, real, tuple(marks), thinking, opening, plain, blank)

    def closed(self, reply: SampledReply) -> bool:
        """Whether a reply ends in an id that closes it."""
        return bool(reply.ids) and reply.ids[-1] in self._ends

    def frame(self, stub: ReplyPlaceholder) -> ReplyFrame:
        """What the template writes around a reply like this one."""
        message = stub.message
        names = tuple((call.name, call.id) for call in message.tool_calls)
        key = (bool(stub.thinking), stub.blank, bool(message.text), names)
        if key not in self._frames:
            if len(self._frames) >= _MOST_KEPT:
                self._frames.clear()
            self._frames[key] = self._find_frame(stub)
        return self._frames[key]

    def shows_thinking(self, text: str) -> bool:
        """Whether what a template writes in front of a reply's first words ends some thinking, an empty one say."""
        return self._closes in "".join(text.split())

    def first_stop(self, text: str) -> tuple[int, str] | None:
        """The first token of a text that ends a reply, and where it begins."""
        found = [(text.find(token), token) for token in self._stops if token in text]
        return min(found, key=lambda row: (row[0], -len(row[1])), default=None)

    def adapted(self, messages: Sequence[Message], replies: Sequence[SampledReply]) -> tuple[list[Message], list[SampledReply]]:
        """A conversation with the results of tools as the template can show them."""
        adapt = ADAPT[self._adapt]
        rows: list[Message] = []
        moved: list[SampledReply] = []
        low = 0
        for reply in replies:
            rows += adapt(messages[low : reply.message])
            moved.append(reply._replace(message=len(rows)))
            rows += adapt([messages[reply.message]])
            low = reply.message + 1
        return rows + adapt(messages[low:]), moved

    def _name(self, name: str) -> str:
        """A name for a stand-in: one that holds what could be read as control is left out."""
        return name if name and not self._probe.split.search(name) else "f"

    def _real(self, message: Message, ids: Sequence[int]) -> Message:
        """What a template shows in place of the ids; calls that cannot be read, or that it has no form for, are text."""
        if any(call.error for call in message.tool_calls) or (message.tool_calls and not self._reads_calls):
            text = self._codec.decode(ids[:-1] if ids and ids[-1] in self._ends else ids)
            if message.reasoning is not None:
                text = text.partition("</think>")[2].lstrip("\n") or message.text
            message = replace(message, content=text, tool_calls=())
        return self._shown(message)

    def _shown(self, message: Message) -> Message:
        """The message as the template reads it: one that knows no field for reasoning gets it as text."""
        if message.reasoning is None or not self._folds:
            return message
        return replace(message, content=f"<think>\n{message.reasoning}\n</think>\n\n{message.text}", reasoning=None)

    # What the template knows

    @cached_property
    def _folds(self) -> bool:
        """Whether the template shows reasoning that stands in the text, and never such that has a field of its own."""
        thought, said = random_mark(), random_mark()
        if any(thought in text for text in self._contexts(Message("assistant", said, reasoning=thought))):
            return False
        folded = Message("assistant", f"<think>\n{thought}\n</think>\n\n{said}")
        return any(thought in text for text in self._contexts(folded))

    @cached_property
    def _closes(self) -> str:
        """What the template writes between thinking and text, white space left out."""
        thought, said = random_mark(), random_mark()
        for text in self._contexts(self._shown(Message("assistant", said, reasoning=thought))):
            found = "".join(text.rpartition(thought)[2].rpartition(said)[0].split()) if thought in text else ""
            if found:
                return found
        return "</think>"

    @cached_property
    def _reads_calls(self) -> bool:
        """Whether the template shows tool calls that are told apart from text."""
        own = random_mark()
        call = ToolCall("f", {"x": own}, "call_0")
        return any(own in text for text in self._contexts(Message("assistant", "", (call,))))

    @cached_property
    def _adapt(self) -> str:
        reply = Message("assistant", "", (ToolCall("f", {"x": "1"}, "call_0"),))
        try:
            return self._probe.append(reply, (_ANSWER,)).adapt
        except TemplateError:
            return ""

    def _contexts(self, reply: Message) -> Iterator[str]:
        """What the template makes of conversations with a reply in several places."""
        asked = Message("user", "u")
        calling = replace(reply, tool_calls=reply.tool_calls or (ToolCall("f", {"x": "1"}, "call_0"),))
        rows = ([asked, reply], [asked, calling], [asked, calling, _ANSWER], [asked, reply, asked])
        for adapt in ("", "ids"):
            for row in rows:
                for tools in ((), PROBE_TOOLS):
                    try:
                        yield self._template.render(ADAPT[adapt](row), tools)
                    except TemplateError:
                        continue

    def _opening(self, before: Sequence[Message], tools: Tools) -> str:
        """What the template writes to open a reply behind messages of these roles."""
        key = tuple((m.role, bool(m.tool_calls)) for m in before[-2:])
        if key not in self._openings:
            try:
                closed = self._template.render(before, tools)
                opened = self._template.render(before, tools, generation_prompt=True)
                self._openings[key] = opened[len(closed) :] if opened.startswith(closed) else ""
            except TemplateError:
                return ""
        return self._openings[key]

    def _find_frame(self, stub: ReplyPlaceholder) -> ReplyFrame:
        for tools in ((), PROBE_TOOLS):
            try:
                opened = self._template.render((Message("user", "u"),), tools, generation_prompt=True)
                text = self._template.render((Message("user", "u"), stub.message), tools)
            except TemplateError:
                continue
            if (spots := mark_positions(text, stub.marks)) is not None:
                lead = text[len(opened) : spots[0]] if text.startswith(opened) else None
                close = self.first_stop(text[spots[1] :])
                return ReplyFrame(lead, text[spots[1] :][: close[0]] if close else None)
        return ReplyFrame()


def mark_positions(text: str, marks: Sequence[str]) -> tuple[int, int] | None:
    """Where marks begin and end in a text in which each of them stands once; None where they do not."""
    at = [text.find(m) for m in marks]
    if min(at) < 0 or any(text.count(m) > 1 for m in marks):
        return None
    return min(at), max(at) + max(map(len, marks))
