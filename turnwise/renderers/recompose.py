"""Re-render a conversation while keeping sampled ids.

The next prompt as a model's own template shows the conversation, with sampled ids wherever it shows a reply whole.

Each sampled reply is rendered as a stub of its shape that is made of digits nobody can guess. Where all of a stub comes out,
the template shows that reply whole, and the ids that were sampled stand in its place; any other reply (its thinking is
stripped, say) is rendered for real and encoded as text. What stands between is the template's and the world's, encoded by
the guard. The places are found in text, so the same stretch gives the same ids at every turn, however a reply was spelled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import takewhile
from typing import Any, NamedTuple

from turnwise.errors import TemplateError
from turnwise.renderers.base import Branch, Extend, SampledReply
from turnwise.renderers.control_text import ControlTextGuard, EncodedMessages, map_texts, random_mark
from turnwise.renderers.probe import TemplateProbe, calls_before
from turnwise.renderers.template import ADAPT, PROBE_TOOLS
from turnwise.renderers.tokenizer import Tokenizer
from turnwise.renderers.vision.media_blocks import MediaExpander
from turnwise.types import MediaPlacement, Message, ToolCall, ids_with_media_keys, placements_between

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


REASONS = {
    "thinking_stripped": "The template shows an earlier reply without its reasoning.",
    "reply_dropped": "The template does not show an earlier reply at all.",
    "reply_rewritten": "The template shows an earlier reply in other words than it was sampled in, or more than once.",
    "close_swapped": "The template closes an earlier reply by another token than was sampled.",
    "prefix_changed": "The template opens an earlier reply otherwise than the prompt that it was sampled behind did.",
    "preamble_changed": "What the template writes before or between replies moved or changed (system prompt, tools, date).",
}
"""Why a prompt of the model's own template does not begin with what the engine has seen."""
_LEAD = 64
"""Most characters that a template writes between the prompt and what a reply says, beside what probing shows."""


class _ReplyPosition(NamedTuple):
    """Where a reply stands in a rendered text."""

    start: int
    end: int
    """Behind its close where that was sampled, else before it."""
    swapped: bool
    """Whether the close is not the one that was sampled."""


class _RepliesNotShown(Exception):
    """Replies that a rendered text does not show whole, by the index of their message, and why."""

    def __init__(self, why: Mapping[int, str]) -> None:
        super().__init__(why)
        self.why = why


class _RenderedConversation(NamedTuple):
    """A conversation as the template shows it."""

    whole: list[ReplyPlaceholder]
    """The replies that it shows whole, and"""
    places: list[_ReplyPosition]
    """where in the text."""
    stretches: list[list[int]]
    """Ids of what stands before, between and behind them."""
    found: EncodedMessages
    """Control texts."""


class ConversationComposer:
    """Composes prompts for one tokenizer and one chat template."""

    def __init__(
        self, codec: Tokenizer, guard: ControlTextGuard, probe: TemplateProbe, stop_ids: frozenset[int], seen: MediaExpander
    ) -> None:
        self._codec = codec
        self._template = probe.template
        self._guard = guard
        self._seen = seen
        self._stops = {codec.decode([i]): i for i in stop_ids}
        self._standins = ReplyPlaceholders(codec, probe, self._stops)

    def compose(
        self,
        messages: Sequence[Message],
        replies: Sequence[SampledReply],
        ids: Sequence[int],
        tools: Tools = (),
        placed: Sequence[MediaPlacement] = (),
    ) -> Extend | Branch:
        """The next prompt as the template shows the conversation, against `ids`, which the engine has seen.

        Raises:
            TemplateError: when the template cannot show the conversation, or leaves out what the world said last.
            MediaError: when the model cannot see one of its images.
        """
        new = replies[-1].message + 1 if replies else 0
        moved = self._seen.move_tool_images(messages[new:]).moved  # those of earlier messages were counted when they were new
        messages, _, where = self._seen.move_tool_images(messages)
        if where:
            replies = [reply._replace(message=where[reply.message]) for reply in replies]
        if any(message.role == "tool" for message in messages):
            messages, replies = self._standins.adapted(messages, replies)
        said = replies[-1].message + 1 if replies else 0
        stubs = [self._standins.make(messages, reply, tools) for reply in replies]
        try:
            shown, why = self._settle(messages, stubs, tools, said)
        except TemplateError:  # some templates insist that what is answered was called
            called = [self._standins.make(messages, reply, tools, called=True) for reply in replies]
            if all(one.message.tool_calls == other.message.tool_calls for one, other in zip(stubs, called, strict=True)):
                raise
            stubs = called
            shown, why = self._settle(messages, stubs, tools, said)
        prompt, starts, media = self._weave(shown, messages)
        whole, found = shown.whole, shown.found
        told = {stub.reply.message: start for stub, start in zip(whole, starts, strict=True)}
        stand = tuple(told.get(reply.message, -1) for reply in replies)
        keep = (
            common_prefix_length(ids_with_media_keys(prompt, media), ids_with_media_keys(ids, placed))
            if media or placed
            else common_prefix_length(prompt, ids)
        )
        rest = placements_between(media, keep, len(prompt))
        if keep == len(ids):
            open_end = bool(whole) and whole[-1].reply.message == said - 1 and not self._standins.closed(whole[-1].reply)
            close = int(open_end and len(prompt) > keep)
            return Extend(prompt[keep:], close, found.neutralised, found.control, stand, rest, moved)
        for stub, place in zip(whole, shown.places, strict=True):
            if place.swapped:
                why[stub.reply.message] = "close_swapped"
        reason = self._reason(keep, stubs, why)
        return Branch(keep, prompt[keep:], reason, found.neutralised, found.control, stand, rest, moved)

    # Where replies stand

    def _settle(
        self, messages: Sequence[Message], stubs: Sequence[ReplyPlaceholder], tools: Tools, said: int
    ) -> tuple[_RenderedConversation, dict[int, str]]:
        """The conversation rendered with real messages for replies that are not shown whole, and why, by message index."""
        why: dict[int, str] = {}
        while True:
            given = list(messages)
            for stub in stubs:
                given[stub.reply.message] = stub.real if stub.reply.message in why else stub.message
            whole = [stub for stub in stubs if stub.reply.message not in why]
            try:
                self._check(given, whole, tools, said)
                return self._encode(given, whole, tools, said), why
            except _RepliesNotShown as lost:
                why |= lost.why

    def _check(self, given: Sequence[Message], whole: Sequence[ReplyPlaceholder], tools: Tools, said: int) -> None:
        """Hold the template to showing what the world said, and outside of replies.

        Raises:
            TemplateError: when something that the world said last is not shown.
        """
        marks = [random_mark() if m.role != "assistant" else "" for m in given]
        marked = [map_texts(m, lambda t, own=own: f"{own}{t}{own}") for m, own in zip(given, marks, strict=True)]  # type: ignore[misc]
        try:
            text = self._render(marked, tools, tools)
        except TemplateError:
            return  # it looks into contents; the conversation itself is rendered next
        inside = [text[place.start : place.end] for place in self._places(text, whole)]
        told = [own for m, own in zip(marked, marks, strict=True) if own and own in m.text]
        swallowed = [any(own in part for own in told) for part in inside]
        if any(swallowed):
            raise _RepliesNotShown(
                {stub.reply.message: "reply_rewritten" for stub, odd in zip(whole, swallowed, strict=True) if odd}
            )
        for message, own in zip(marked[said:], marks[said:], strict=True):
            if own and own in message.text and own not in text:
                raise TemplateError(
                    f"{self._template.origin}: drops a message of role {message.role} from a conversation of "
                    f"{', '.join(m.role for m in given)}"
                )

    def _encode(
        self, given: Sequence[Message], whole: list[ReplyPlaceholder], tools: Tools, said: int
    ) -> _RenderedConversation:
        """Ids of what stands around the replies that are shown whole."""
        places: list[_ReplyPosition] = []

        def cut(text: str) -> list[tuple[int, int, str]]:
            places.extend(self._places(text, whole))
            edges = [0, *[edge for place in places for edge in (place.start, place.end)], len(text)]
            behind = ["", *[self._last(stub, place) for stub, place in zip(whole, places, strict=True)]]
            return list(zip(edges[::2], edges[1::2], behind, strict=True))

        stretches, found = self._guard.encode_cut(given, partial(self._render, known=tools), cut, tools, said)
        return _RenderedConversation(whole, places, stretches, found)

    def _render(self, given: Sequence[Message], tools: Tools = (), known: Tools = ()) -> str:
        return self._template.render(given, tools or known, generation_prompt=True)

    def _last(self, stub: ReplyPlaceholder, place: _ReplyPosition) -> str:
        """The control token that a reply ends in where it stands; empty for none."""
        ids = stub.reply.ids[:-1] if place.swapped else stub.reply.ids
        return self._codec.decode(ids[-1:]) if ids and ids[-1] in self._guard.control_ids else ""

    def _places(self, text: str, whole: Sequence[ReplyPlaceholder]) -> list[_ReplyPosition]:
        """Where each reply stands in a text.

        Raises:
            _Lost: where one is not shown whole.
        """
        found = self._locate(text, whole)
        lost = {stub.reply.message: place for stub, place in zip(whole, found, strict=True) if isinstance(place, str)}
        if lost:
            raise _RepliesNotShown(lost)
        return [place for place in found if isinstance(place, _ReplyPosition)]

    def _locate(self, text: str, stubs: Sequence[ReplyPlaceholder]) -> list[_ReplyPosition | str]:
        """Where each reply stands in a text, or why it does not."""
        spots = [mark_positions(text, stub.marks) for stub in stubs]
        places: list[_ReplyPosition | str] = []
        low = 0
        for number, (stub, spot) in enumerate(zip(stubs, spots, strict=True)):
            if spot is None or spot[0] < low:
                places.append(_missing(text, stub))
                continue
            high = next((later[0] for later in spots[number + 1 :] if later and later[0] > spot[1]), len(text))
            place = self._place(text, stub, low, high, spot)
            places.append(place)
            low = low if isinstance(place, str) else place.end
        return places

    def _place(self, text: str, stub: ReplyPlaceholder, low: int, high: int, spots: tuple[int, int]) -> _ReplyPosition | str:
        first, last = spots
        frame = self._standins.frame(stub)
        behind = text[last:high]
        size = self._size(text[low:first], stub, frame)
        at = len(frame.tail) if frame.tail is not None and behind.startswith(frame.tail) else -1
        match = self._guard.split.match(behind, at) if at >= 0 else None
        close = (at, match.group()) if match else self._standins.first_stop(behind)
        if size is None or (close is None and stub.calls):
            return "prefix_changed" if size is None else "reply_rewritten"
        before, token = close or (0, "")  # closed by plain text alone
        moved = at < 0 and frame.tail is not None
        if (odd := self._odd(stub, text[first - size : first], behind[:before], moved)) is not None:
            return odd
        if not self._standins.closed(stub.reply):
            return _ReplyPosition(first - size, last + before, False)
        swapped = self._stops.get(token) != stub.reply.ids[-1]
        return _ReplyPosition(first - size, last + before + (0 if swapped else len(token)), swapped)

    def _odd(self, stub: ReplyPlaceholder, lead: str, rest: str, moved: bool) -> str | None:
        """Why a reply is not shown as it was sampled, by what the template writes before and behind its words.

        White space is the reply's own matter, as is how its thinking and its calls are spelled.

        Args:
            moved: whether the template writes something else behind it than where it comes last.
        """
        own = _bare(self._codec.decode(stub.reply.ids[:-1]))
        lead, rest = _bare(lead), _bare(rest)
        if not stub.thinking and stub.blank != self._standins.shows_thinking(lead):
            return "thinking_stripped" if stub.blank else "prefix_changed"
        if not self._standins.closed(stub.reply):
            return None
        if stub.calls:
            return "reply_rewritten" if moved and not own.endswith(rest) else None
        if stub.plain is None:
            return None
        return "prefix_changed" if not own.startswith(lead) else "close_swapped" if not own.endswith(rest) else None

    def _size(self, text: str, stub: ReplyPlaceholder, frame: ReplyFrame) -> int | None:
        """How much of what stands before a reply's first words is the reply's own; None where that is not known."""
        lead = frame.lead or ""
        at = text.rfind(stub.opening) if stub.opening else -1
        if at >= 0:
            size = len(text) - at - len(stub.opening)
            names = sum(len(call.name) + len(call.id) for call in stub.message.tool_calls)
            return size if size <= _LEAD + len(lead) + names else None
        if frame.lead is not None and text.endswith(lead):
            return len(lead)
        # Opened otherwise than it was sampled behind: what the template writes stays, and a reply that is nothing but its text.
        ids = stub.reply.ids[:-1] if self._standins.closed(stub.reply) else stub.reply.ids
        return 0 if stub.plain is not None and self._codec.decode(ids).strip() == stub.plain.strip() else None

    # Ids

    def _weave(
        self, shown: _RenderedConversation, messages: Sequence[Message]
    ) -> tuple[list[int], list[int], tuple[MediaPlacement, ...]]:
        """The prompt's ids, where each reply begins in them, and where images and videos stand."""
        ids = list(shown.stretches[0])
        starts: list[int] = []
        for stub, place, stretch in zip(shown.whole, shown.places, shown.stretches[1:], strict=True):
            starts.append(len(ids))
            ids += stub.reply.ids[:-1] if place.swapped else stub.reply.ids
            ids += stretch
        ids, media = self._seen.expand(ids, messages)
        for block in media:
            grown = block.length - len(block.compact)
            starts = [start + grown if start > block.start else start for start in starts]
        return ids, starts, media

    def _reason(self, keep: int, stubs: Sequence[ReplyPlaceholder], why: Mapping[int, str]) -> str:
        """Why a prompt leaves what the engine has seen at `keep`."""
        for stub in stubs:
            reply = stub.reply
            if reply.start < 0 or keep >= reply.start + len(reply.ids):
                continue
            if keep < reply.start - len(self._codec.encode(stub.opening)):
                return "preamble_changed"
            own = why.get(reply.message)
            if own is not None and (keep >= reply.start or own != "close_swapped"):
                return own
            return "prefix_changed"
        return "preamble_changed"


def common_prefix_length(left: Sequence[int], right: Sequence[int]) -> int:
    """How many ids two sequences begin with alike."""
    most = min(len(left), len(right))
    if list(left[:most]) == list(right[:most]):
        return most
    return next(at for at in range(most) if left[at] != right[at])


def _bare(text: str) -> str:
    """A text without its white space."""
    return "".join(text.split())


def _missing(text: str, stub: ReplyPlaceholder) -> str:
    shown = [m for m in stub.marks if m in text]
    if stub.thinking and stub.thinking not in shown:
        return "thinking_stripped"
    return "reply_rewritten" if shown else "reply_dropped"
