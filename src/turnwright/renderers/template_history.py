"""Re-render a conversation by its template while keeping sampled ids.

Each sampled reply is rendered as a placeholder of the same shape, made of random digits. Where a
complete placeholder appears in the text, the template renders that reply completely, and the
sampled ids take its place. A second rendering has the reply's own texts between the digits, which
reveals what the template shortens, closes or hides. Every other reply (one without its thinking,
for example) is rendered by the template and encoded as text. The text between replies comes from
the template and the environment; the guard encodes it. Positions are found in the text, so a
segment has the same ids at every turn, however a reply was tokenized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product, takewhile
from typing import Any, NamedTuple

from turnwright.errors import TemplateError
from turnwright.renderers.control_text import ControlTextGuard, EncodedMessages, map_texts
from turnwright.renderers.conversation_shape import ConversationShapes, ProvenByShape
from turnwright.renderers.model_files import remember
from turnwright.renderers.probe import TemplateProbe, calls_before, readable
from turnwright.renderers.renderer import Branch, Extend, SampledReply, common_prefix_length
from turnwright.renderers.template import (
    ADAPT,
    ASKED,
    PROBE_CALL,
    PROBE_TOOLS,
    calls_as_text,
    probe_result,
    random_mark,
)
from turnwright.renderers.tokenizer import Tokenizer
from turnwright.renderers.vision.media_blocks import MediaExpander
from turnwright.types import (
    MediaPlacement,
    Message,
    ToolCall,
    Tools,
    ids_with_media_keys,
    placements_between,
)

_CALL = ToolCall("f", {"x": "1"}, "call_0")
_ANSWER = Message("tool", "t", tool_call_id="call_0", name="f")


class MarkedMessage(NamedTuple):
    """Message rendered in place of a reply, with the marks in it."""

    message: Message
    texts: tuple[str, ...]
    """Marks of reasoning and content, in order."""
    calls: tuple[str, ...]
    """Marks of the calls' arguments."""
    thinking: str
    """First mark of the reasoning; empty if there is none."""

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks."""
        return self.texts + self.calls


class ReplyPlaceholder(NamedTuple):
    """Sampled reply and the messages rendered in its place."""

    reply: SampledReply
    bare: MarkedMessage
    """Marks in place of the texts, around which the prompt is encoded."""
    verbatim: MarkedMessage
    """Marks before and after each text, which show whether the template renders all of it."""
    real: Message
    """Message to render where the template does not render the reply completely."""
    opening: str
    """Generation prompt before the reply, as the template writes it now."""
    after_result: bool
    """Whether the reply follows the result of a tool."""
    plain: str | None = None
    """Text of a reply without thinking and calls; else None."""
    blank: bool = False
    """Whether the reply has thinking that is empty."""


@dataclass(frozen=True, slots=True)
class ReplyFrame:
    """Template text around a final reply of some shape; None where unknown."""

    lead: str | None = None
    """Between the generation prompt and the start of the reply's content."""
    tail: str | None = None
    """Between the end of the reply's content and the token that closes it."""


class ReplyPlaceholders:
    """Makes placeholders for one template."""

    def __init__(self, codec: Tokenizer, probe: TemplateProbe, stops: Mapping[str, int]) -> None:
        """`stops` are the ids that end a reply, by text."""
        self._codec = codec
        self._template = probe.template
        self._probe = probe
        self._stops = stops
        self._frames: dict[Any, ReplyFrame] = {}
        self._openings: ProvenByShape[str] = ProvenByShape(
            ConversationShapes(probe.template.source)
        )

    def make(
        self,
        messages: Sequence[Message],
        reply: SampledReply,
        tools: Tools,
        *,
        called: bool = False,
    ) -> ReplyPlaceholder:
        """Make a reply's placeholder; with `called`, tool answers count as called if the
        reply makes no calls."""
        original = messages[reply.message]
        message = original
        if message.tool_calls and not self.reads_calls:
            message = self._with_calls_as_text(message, reply.ids)

        calls = message.tool_calls
        if self.reads_calls:
            answers = list(takewhile(lambda m: m.role == "tool", messages[reply.message + 1 :]))
            calls = calls or (
                calls_before(message, answers) if called and not original.tool_calls else ()
            )
        bare, verbatim = (
            self._marked(message, calls, verbatim=verbatim) for verbatim in (False, True)
        )

        before = messages[: reply.message]
        return ReplyPlaceholder(
            reply,
            bare,
            verbatim,
            real=self._real(message, reply.ids),
            opening=self._opening(before, tools),
            after_result=bool(before) and before[-1].role == "tool",
            plain=original.text if original.reasoning is None and not original.tool_calls else None,
            blank=_is_blank(original.reasoning),
        )

    def _marked(
        self, message: Message, calls: tuple[ToolCall, ...], *, verbatim: bool
    ) -> MarkedMessage:
        """Return a message with a mark in place of each text and each call's
        arguments, or around each text."""
        texts: list[str] = []

        def mark(text: str) -> str:
            begin, end = random_mark(), random_mark()
            texts.append(begin)
            if not verbatim:
                return begin
            texts.append(end)
            return f"{begin}{text}{end}"

        blank = _is_blank(message.reasoning)
        reasoning = (
            mark(message.reasoning) if message.reasoning and not blank else message.reasoning
        )
        thinking = texts[0] if texts else ""

        arguments = tuple(random_mark() for _ in calls)
        # A name that contains control text is `f`.
        names = [
            call.name if call.name and not self._probe.split.search(call.name) else "f"
            for call in calls
        ]
        marked_calls = tuple(
            ToolCall(name, {"x": argument}, call.id)
            for name, argument, call in zip(names, arguments, calls, strict=True)
        )
        malformed = any(
            call.error for call in message.tool_calls
        )  # then the text around the call is a part of it
        content = ""
        if not (texts or arguments) or (message.text and not malformed):
            content = mark(message.text)
        made = replace(message, content=content, reasoning=reasoning, tool_calls=marked_calls)
        return MarkedMessage(self._with_folded_reasoning(made), tuple(texts), arguments, thinking)

    @property
    def text_ending(self) -> str:
        """Text after a reply's content that is not its stop: empty, or the end of a part."""
        return self._probe.text.close_in_last

    def closed(self, reply: SampledReply) -> bool:
        """Return whether a reply ends in a stop id."""
        return bool(reply.ids) and reply.ids[-1] in self._stops.values()

    def frame(self, stub: ReplyPlaceholder) -> ReplyFrame:
        """Return the template text around a reply like this one."""
        message = stub.bare.message
        names = tuple((call.name, call.id) for call in message.tool_calls)
        key = (bool(stub.bare.thinking), stub.blank, bool(message.text), names, stub.after_result)
        if key not in self._frames:
            remember(self._frames, key, self._find_frame(stub))
        return self._frames[key]

    def first_stop(self, text: str) -> tuple[int, str] | None:
        """Return the first token of a text that ends a reply, and its start."""
        found = [(text.find(token), token) for token in self._stops if token in text]
        return min(found, key=lambda row: (row[0], -len(row[1])), default=None)

    def adapted(
        self, messages: Sequence[Message], replies: Sequence[SampledReply]
    ) -> tuple[list[Message], list[SampledReply]]:
        """Return a conversation with tool results, and calls of demonstrations, in the form that
        the template renders."""
        sampled = {reply.message for reply in replies}
        messages = [
            m if number in sampled else self.demonstration(m) for number, m in enumerate(messages)
        ]
        adapt = self._adapt
        rows: list[Message] = []
        moved: list[SampledReply] = []
        low = 0
        for reply in replies:
            rows += adapt(messages[low : reply.message])
            moved.append(reply._replace(message=len(rows)))
            rows += adapt([messages[reply.message]])
            low = reply.message + 1
        return rows + adapt(messages[low:]), moved

    def demonstration(self, message: Message) -> Message:
        """Return a reply that was not sampled, with calls and thinking for which the template has
        no place in its text."""
        if message.role != "assistant":
            return message
        if not self.reads_calls:
            message = calls_as_text(message)
        return self._with_folded_reasoning(message)

    def _with_calls_as_text(self, message: Message, ids: Sequence[int]) -> Message:
        """Return a reply with its calls in its text, as they were sampled."""
        text = self._codec.decode(ids[:-1] if ids and ids[-1] in self._stops.values() else ids)
        if message.reasoning is not None:
            text = text.partition("</think>")[2].lstrip("\n") or message.text
        stop = self._probe.text.stops[0] if self._probe.text.stops else ""
        text = text.removesuffix(
            self._probe.text.close_in_last.removesuffix(stop)
        )  # the template writes it again
        return replace(message, content=text, tool_calls=())

    def _real(self, message: Message, ids: Sequence[int]) -> Message:
        """Return the message to render in place of the ids; malformed calls are text."""
        if any(call.error for call in message.tool_calls):
            message = self._with_calls_as_text(message, ids)
        return self._with_folded_reasoning(message)

    def _with_folded_reasoning(self, message: Message) -> Message:
        """Move the reasoning into the text for a template that has no field for it."""
        if message.reasoning is None or not self.folds:
            return message
        if message.tool_calls and not message.text.strip() and self._hides_calls_beside_text:
            return replace(
                message, reasoning=None
            )  # in the text, it would take the place of the calls
        return replace(
            message,
            content=f"<think>\n{message.reasoning}\n</think>\n\n{message.text}",
            reasoning=None,
        )

    # Properties of the template

    @cached_property
    def folds(self) -> bool:
        """Whether the template renders reasoning in the text, but never
        reasoning in its own field."""
        thought, answer = random_mark(), random_mark()
        if any(
            thought in text
            for text in self._contexts(Message("assistant", answer, reasoning=thought))
        ):
            return False
        folded = Message("assistant", f"<think>\n{thought}\n</think>\n\n{answer}")
        return any(thought in text for text in self._contexts(folded))

    @cached_property
    def thinking_end(self) -> str:
        """Template text between thinking, which may be empty, and text; without white space."""
        thought, answer = random_mark(), random_mark()
        for text in self._contexts(
            self._with_folded_reasoning(Message("assistant", answer, reasoning=thought))
        ):
            found = (
                "".join(text.rpartition(thought)[2].rpartition(answer)[0].split())
                if thought in text
                else ""
            )
            if found:
                return found
        return "</think>"

    @cached_property
    def reads_calls(self) -> bool:
        """Whether the template renders tool calls separately from text."""
        mark = random_mark()
        call = replace(_CALL, arguments={"x": mark})
        return any(mark in text for text in self._contexts(Message("assistant", "", (call,))))

    @cached_property
    def _hides_calls_beside_text(self) -> bool:
        """Whether the template renders the calls of a reply only if that has no text."""
        content, argument = random_mark(), random_mark()
        call = replace(_CALL, arguments={"x": argument})
        return not any(
            argument in text for text in self._contexts(Message("assistant", content, (call,)))
        )

    @cached_property
    def _adapt(self) -> Callable[[Sequence[Message]], list[Message]]:
        try:
            return self._probe.append(Message("assistant", "", (_CALL,)), (_ANSWER,)).adapted
        except TemplateError:
            return list

    def _contexts(self, reply: Message) -> Iterator[str]:
        """Yield renderings of conversations with a reply at several positions."""
        calling = replace(reply, tool_calls=reply.tool_calls or (_CALL,))
        rows = ([ASKED, reply], [ASKED, calling], [ASKED, calling, _ANSWER], [ASKED, reply, ASKED])
        for adapt, row, tools in product(("", "ids"), rows, ((), PROBE_TOOLS)):
            if (text := self._template.try_render(ADAPT[adapt](row), tools)) is not None:
                yield text

    def _opening(self, before: Sequence[Message], tools: Tools) -> str:
        """Return the template text that opens a reply after these messages."""

        def derive(given: Sequence[Message]) -> str:
            closed = self._template.try_render(given, tools)
            opened = self._template.try_render(given, tools, generation_prompt=True)
            if closed is None or opened is None:
                return ""
            return opened[len(closed) :] if opened.startswith(closed) else ""

        names = tuple([tool.get("function", tool).get("name") for tool in tools])
        given = readable(before)
        # The last message's role decides too, also where earlier messages do not.
        last = tuple((m.role, bool(m.tool_calls)) for m in given[-2:])
        proven = self._openings.get((names, last), given, derive)
        return derive(given) if proven is None else proven

    def _find_frame(self, stub: ReplyPlaceholder) -> ReplyFrame:
        before = (
            (ASKED, Message("assistant", "", (PROBE_CALL,)), probe_result("t"))
            if stub.after_result
            else (ASKED,)
        )
        for tools in ((), PROBE_TOOLS):
            opened = self._template.try_render(before, tools, generation_prompt=True)
            text = self._template.try_render((*before, stub.bare.message), tools)
            if (
                opened is None
                or text is None
                or (positions := mark_positions(text, stub.bare.marks)) is None
            ):
                continue
            lead = text[len(opened) : positions[0]] if text.startswith(opened) else None
            close = self.first_stop(text[positions[1] :])
            return ReplyFrame(lead, text[positions[1] :][: close[0]] if close else None)
        return ReplyFrame()


def _is_blank(reasoning: str | None) -> bool:
    """Return whether a reply has thinking that is empty."""
    return reasoning is not None and not reasoning.strip()


def mark_positions(text: str, marks: Sequence[str]) -> tuple[int, int] | None:
    """Return where marks begin and end in a text that contains each of them
    once; None if it does not."""
    at = [text.find(m) for m in marks]
    if min(at) < 0 or any(text.count(m) > 1 for m in marks):
        return None
    return min(at), max(at) + max(map(len, marks))


_MAX_LEAD = 64
"""Maximum characters of template text between the prompt and a reply's content, in
addition to the probed ones."""


class _ReplyPosition(NamedTuple):
    """Position of a reply in a rendered text."""

    start: int
    end: int
    """After its close if that was sampled, else before it."""
    swapped: bool
    """Whether the close differs from the sampled one."""


class _RepliesNotRendered(Exception):
    """Reasons why a rendered text does not contain some replies completely, by message index."""

    def __init__(self, why: Mapping[int, str]) -> None:
        super().__init__(why)
        self.why = why


class _RepliesInspected(Exception):
    """Raised if the text around replies depends on what they say."""


class _RenderedConversation(NamedTuple):
    """Conversation as rendered by the template."""

    complete: list[ReplyPlaceholder]
    """Replies rendered completely."""
    positions: list[_ReplyPosition]
    """Positions of these replies in the text."""
    segments: list[list[int]]
    """Ids before, between and after them."""
    found: EncodedMessages
    """Control texts."""


class ConversationComposer:
    """Composes prompts for one tokenizer and one chat template."""

    def __init__(
        self,
        codec: Tokenizer,
        guard: ControlTextGuard,
        probe: TemplateProbe,
        stop_ids: frozenset[int],
        media: MediaExpander,
    ) -> None:
        self._codec = codec
        self._template = probe.template
        self._guard = guard
        self._media = media
        self._stops = {codec.decode([i]): i for i in stop_ids}
        self._placeholders = ReplyPlaceholders(codec, probe, self._stops)

    def compose(
        self,
        messages: Sequence[Message],
        replies: Sequence[SampledReply],
        ids: Sequence[int],
        tools: Tools = (),
        placed: Sequence[MediaPlacement] = (),
    ) -> Extend | Branch:
        """Render the next prompt by the template and compare it with `ids`, which
        the engine has processed.

        Raises `TemplateError` if the template cannot render the conversation, or drops the latest
        observation; `MediaError` if the model does not support one of its images.
        """
        new = replies[-1].message + 1 if replies else 0
        moved = self._media.move_tool_images(
            messages[new:]
        ).moved  # earlier messages were counted when they were new
        messages, _, where = self._media.move_tool_images(messages)
        if where:
            replies = [reply._replace(message=where[reply.message]) for reply in replies]
        if any(
            message.role == "tool" or message.tool_calls or message.reasoning
            for message in messages
        ):
            messages, replies = self._placeholders.adapted(messages, replies)
        first_new = replies[-1].message + 1 if replies else 0
        stubs = [self._placeholders.make(messages, reply, tools) for reply in replies]
        try:
            rendered, why = self._settle(messages, stubs, tools, first_new)
        except TemplateError:  # some templates require that every tool answer was called
            called = [
                self._placeholders.make(messages, reply, tools, called=True) for reply in replies
            ]
            if all(
                len(one.bare.calls) == len(other.bare.calls)
                for one, other in zip(stubs, called, strict=True)
            ):
                raise
            stubs = called
            rendered, why = self._settle(messages, stubs, tools, first_new)
        prompt, starts, media = self._join(rendered, messages)
        complete, found = rendered.complete, rendered.found
        start_of = {stub.reply.message: start for stub, start in zip(complete, starts, strict=True)}
        reply_starts = tuple(start_of.get(reply.message, -1) for reply in replies)
        keep = common_prefix_length(
            ids_with_media_keys(prompt, media), ids_with_media_keys(ids, placed)
        )
        rest = placements_between(media, keep, len(prompt))
        if keep == len(ids):
            last = complete[-1].reply if complete else None
            open_end = (
                last is not None
                and last.message == first_new - 1
                and not self._placeholders.closed(last)
            )
            close = int(open_end and len(prompt) > keep)
            return Extend(
                prompt[keep:], close, found.neutralised, found.control, reply_starts, rest, moved
            )
        for stub, position in zip(complete, rendered.positions, strict=True):
            if position.swapped:
                why[stub.reply.message] = "close_swapped"
        reason = self._reason(keep, stubs, why)
        return Branch(
            keep, prompt[keep:], reason, found.neutralised, found.control, reply_starts, rest, moved
        )

    @property
    def folds(self) -> bool:
        """See `ReplyPlaceholders.folds`."""
        return self._placeholders.folds

    def demonstration(self, message: Message) -> Message:
        """See `ReplyPlaceholders.demonstration`."""
        return self._placeholders.demonstration(message)

    # Positions of replies

    def _settle(
        self,
        messages: Sequence[Message],
        stubs: Sequence[ReplyPlaceholder],
        tools: Tools,
        first_new: int,
    ) -> tuple[_RenderedConversation, dict[int, str]]:
        """Render with real messages for replies that do not appear completely; return the
        reasons by message index."""
        why: dict[int, str] = {}
        while True:
            complete = [stub for stub in stubs if stub.reply.message not in why]
            bare, verbatim = list(messages), list(messages)
            for stub in stubs:
                number = stub.reply.message
                bare[number] = stub.real if number in why else stub.bare.message
                verbatim[number] = stub.real if number in why else stub.verbatim.message
            try:
                around = self._check(verbatim, complete, tools, first_new)
                try:
                    return self._encode(bare, complete, tools, first_new, around=around), why
                except _RepliesInspected:
                    return self._encode(verbatim, complete, tools, first_new, verbatim=True), why
            except _RepliesNotRendered as lost:
                why |= lost.why

    def _check(
        self,
        given: Sequence[Message],
        complete: Sequence[ReplyPlaceholder],
        tools: Tools,
        first_new: int,
    ) -> str | None:
        """Check that the template renders new observations, else `TemplateError`, and no
        observation inside a reply.

        Return the text around the replies without white space; None if the template
        rejects marks in the messages.
        """
        marks = [random_mark() if m.role != "assistant" else "" for m in given]
        marked = [
            map_texts(message, partial("{0}{1}{0}".format, mark))
            for message, mark in zip(given, marks, strict=True)
        ]
        text = self._template.try_render(marked, tools, generation_prompt=True)
        if (
            text is None
        ):  # the template inspects contents; the unmarked conversation is rendered next
            text = self._template.try_render(given, tools, generation_prompt=True)
            if text is not None:
                self._positions(text, complete, verbatim=True)
            return None
        positions = self._positions(text, complete, verbatim=True)
        inside = [text[position.start : position.end] for position in positions]
        used = [own for m, own in zip(marked, marks, strict=True) if own and own in m.text]
        pairs = zip(complete, inside, strict=True)
        swallowed = [stub.reply.message for stub, part in pairs if any(own in part for own in used)]
        if swallowed:
            raise _RepliesNotRendered(dict.fromkeys(swallowed, "reply_rewritten"))
        for message, own in zip(marked[first_new:], marks[first_new:], strict=True):
            if own and own in message.text and own not in text:
                roles = ", ".join(m.role for m in given)
                error = f"drops a message of role {message.role} from a conversation of {roles}"
                raise TemplateError(f"{self._template.origin}: {error}")
        around = _text_around(text, positions)
        for own in used:
            around = around.replace(own, "")
        return around

    def _encode(
        self,
        given: Sequence[Message],
        complete: list[ReplyPlaceholder],
        tools: Tools,
        first_new: int,
        *,
        verbatim: bool = False,
        around: str | None = None,
    ) -> _RenderedConversation:
        """Encode the text around the replies that are rendered completely.

        Raises `_RepliesInspected` if it is not `around`, so that it depends on the replies' texts.
        """
        positions: list[_ReplyPosition] = []

        def cut(text: str) -> list[tuple[int, int, str]]:
            positions.extend(self._positions(text, complete, verbatim=verbatim))
            edges = [
                0,
                *[edge for position in positions for edge in (position.start, position.end)],
                len(text),
            ]
            before = [
                "",
                *[
                    self._last(stub, position)
                    for stub, position in zip(complete, positions, strict=True)
                ],
            ]
            return list(zip(edges[::2], edges[1::2], before, strict=True))

        def render(messages: Sequence[Message], clean_tools: Tools = tools) -> str:
            return self._template.render(messages, clean_tools, generation_prompt=True)

        if around is not None:
            text = render(given)
            if _text_around(text, self._positions(text, complete, verbatim=verbatim)) != around:
                raise _RepliesInspected
        segments, found = self._guard.encode_cut(given, render, cut, tools, first_new)
        return _RenderedConversation(complete, positions, segments, found)

    def _last(self, stub: ReplyPlaceholder, position: _ReplyPosition) -> str:
        """Return the control token at the end of a reply at this position; empty for none."""
        ids = stub.reply.ids[:-1] if position.swapped else stub.reply.ids
        return self._codec.decode(ids[-1:]) if ids and ids[-1] in self._guard.control_ids else ""

    def _positions(
        self, text: str, complete: Sequence[ReplyPlaceholder], *, verbatim: bool
    ) -> list[_ReplyPosition]:
        """Return the position of each reply in a text; raise `_RepliesNotRendered` if some are
        not rendered completely."""
        marked = [stub.verbatim if verbatim else stub.bare for stub in complete]
        spans = [mark_positions(text, one.marks) for one in marked]
        positions: list[_ReplyPosition] = []
        lost: dict[int, str] = {}
        low = 0
        for number, (stub, span) in enumerate(zip(complete, spans, strict=True)):
            found: _ReplyPosition | str
            if span is None or span[0] < low:
                some = [mark for mark in marked[number].marks if mark in text]
                found = "reply_rewritten" if some else "reply_dropped"
                thinking = marked[number].thinking
                found = "thinking_stripped" if thinking and thinking not in some else found
            else:
                high = next(
                    (later[0] for later in spans[number + 1 :] if later and later[0] > span[1]),
                    len(text),
                )
                found = self._position(text, stub, low, high, span)
                if (
                    verbatim
                    and not isinstance(found, str)
                    and not self._is_as_sampled(text, stub, found)
                ):
                    found = "reply_rewritten"
            if isinstance(found, str):
                lost[stub.reply.message] = found
            else:
                positions.append(found)
                low = found.end
        if lost:
            raise _RepliesNotRendered(lost)
        return positions

    def _position(
        self, text: str, stub: ReplyPlaceholder, low: int, high: int, span: tuple[int, int]
    ) -> _ReplyPosition | str:
        first, last = span
        if stub.blank and self._placeholders.thinking_end not in _without_space(
            self._codec.decode(stub.reply.ids)
        ):
            return "reply_rewritten"  # the template closes the thinking
        frame = self._placeholders.frame(stub)
        after = text[last:high]
        size = self._lead_size(text[low:first], stub, frame)
        at = len(frame.tail) if frame.tail is not None and after.startswith(frame.tail) else -1
        match = self._guard.split.match(after, at) if at >= 0 else None
        close = (at, match.group()) if match else self._placeholders.first_stop(after)
        if size is None or (close is None and stub.bare.calls):
            return "prefix_changed" if size is None else "reply_rewritten"
        if close is None:  # closed by plain text, or by the end of its last part
            ending = self._placeholders.text_ending
            close = (self._sampled_of_close(stub, ending) if after.startswith(ending) else 0, "")
        before, token = close
        moved = at < 0 and frame.tail is not None
        if (
            mismatch := self._mismatch(stub, text[first - size : first], after[:before], moved)
        ) is not None:
            return mismatch
        if not self._placeholders.closed(stub.reply):
            return _ReplyPosition(
                first - size, last + self._sampled_of_close(stub, after[:before]), False
            )
        swapped = self._stops.get(token) != stub.reply.ids[-1]
        return _ReplyPosition(first - size, last + before + (0 if swapped else len(token)), swapped)

    def _sampled_of_close(self, stub: ReplyPlaceholder, close: str) -> int:
        """Return how many characters of the template's text before the stop a reply
        contains: all or none."""
        if stub.bare.calls:
            return len(close)  # the end of a call's arguments is a part of the call
        ids = stub.reply.ids[:-1] if self._placeholders.closed(stub.reply) else stub.reply.ids
        sampled = _without_space(self._codec.decode(ids))
        return len(close) if sampled.endswith(_without_space(close) or close) else 0

    def _mismatch(self, stub: ReplyPlaceholder, lead: str, rest: str, moved: bool) -> str | None:
        """Return why a reply is not rendered as sampled, by the template text
        before and after its content.

        Differences in white space, and in the spelling of thinking and calls, do not count.
        `moved`: the text after it differs from the text after a final reply.
        """
        own = _without_space(self._codec.decode(stub.reply.ids[:-1]))
        lead, rest = _without_space(lead), _without_space(rest)
        if not stub.bare.thinking and stub.blank != (self._placeholders.thinking_end in lead):
            return "thinking_stripped" if stub.blank else "prefix_changed"
        if stub.blank and not own.startswith(lead):
            return "prefix_changed"
        if not self._placeholders.closed(stub.reply):
            return None
        if stub.bare.calls:  # the marks are inside them
            return "reply_rewritten" if moved and not own.endswith(rest) else None
        if stub.plain is None:
            return None
        return (
            "prefix_changed"
            if not own.startswith(lead)
            else "close_swapped"
            if not own.endswith(rest)
            else None
        )

    def _is_as_sampled(self, text: str, stub: ReplyPlaceholder, position: _ReplyPosition) -> bool:
        """Return whether the template writes a reply's thinking, and the text up to its
        calls, as they were sampled.

        It may close thinking that the reply left open. White space does not count.
        """
        marked = stub.verbatim
        if not marked.thinking:
            return True
        last_text = max(text.find(mark) + len(mark) for mark in marked.texts)
        first_call = min((text.find(mark) for mark in marked.calls), default=len(text))
        if first_call < last_text:
            return False  # a model thinks before it calls
        # What the template writes after the thinking of a reply without text closes that thinking.
        # After a text that was cut off it is the close of the reply, which need not be sampled.
        thinks_alone = len(marked.texts) == 2
        closes = not marked.calls and (thinks_alone or self._placeholders.closed(stub.reply))
        end = position.end if closes else last_text
        written = text[position.start : end]
        for mark in marked.texts:
            written = written.replace(mark, "")
        sampled = _without_space(self._codec.decode(stub.reply.ids))
        return sampled.startswith(_without_space(written))

    def _lead_size(self, text: str, stub: ReplyPlaceholder, frame: ReplyFrame) -> int | None:
        """Return how many characters before a reply's content belong to the
        reply; None if unknown."""
        lead = frame.lead or ""
        at = text.rfind(stub.opening) if stub.opening else -1
        if at >= 0:
            size = len(text) - at - len(stub.opening)
            names = sum(len(call.name) + len(call.id) for call in stub.bare.message.tool_calls)
            return size if size <= _MAX_LEAD + len(lead) + names else None
        if frame.lead is not None and text.endswith(lead):
            return self._sampled_of_lead(stub, lead)
        # Opened differently from its prompt: the template's text stays, and so does
        # a reply of plain text.
        ids = stub.reply.ids[:-1] if self._placeholders.closed(stub.reply) else stub.reply.ids
        return (
            0
            if stub.plain is not None and self._codec.decode(ids).strip() == stub.plain.strip()
            else None
        )

    def _sampled_of_lead(self, stub: ReplyPlaceholder, lead: str) -> int | None:
        """Return how many characters of the text before a reply's content the reply
        contains; None if unknown.

        The template may open a reply itself, after a prompt that did not.
        """
        sampled = self._codec.decode(stub.reply.ids).lstrip()
        if not stub.bare.calls:
            if _without_space(sampled).startswith(_without_space(lead)):
                return len(lead)
            return None if self._placeholders.thinking_end in _without_space(lead) else 0

        # A call may be spelled otherwise, so of its lead only a control token that
        # opens it is looked for.
        opener = self._guard.split.match(sampled)
        begins = self._guard.split.match(lead.lstrip())
        if begins is None or (opener is not None and begins.group() == opener.group()):
            return len(lead)
        if opener is None:  # it begins with text
            at = max(match.end() for match in self._guard.split.finditer(lead))
        else:
            at = lead.find(opener.group())
        return len(lead) - at if at >= 0 else None

    # Ids

    def _join(
        self, rendered: _RenderedConversation, messages: Sequence[Message]
    ) -> tuple[list[int], list[int], tuple[MediaPlacement, ...]]:
        """Return the prompt's ids, the start of each reply in them, and the positions of media."""
        ids = list(rendered.segments[0])
        starts: list[int] = []
        for stub, position, segment in zip(
            rendered.complete, rendered.positions, rendered.segments[1:], strict=True
        ):
            starts.append(len(ids))
            ids += stub.reply.ids[:-1] if position.swapped else stub.reply.ids
            ids += segment
        ids, media = self._media.expand(ids, messages)
        for block in media:
            grown = block.length - len(block.compact)
            starts = [start + grown if start > block.start else start for start in starts]
        return ids, starts, media

    def _reason(self, keep: int, stubs: Sequence[ReplyPlaceholder], why: Mapping[int, str]) -> str:
        """Return why a prompt differs from the processed ids from `keep` on."""
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


def _text_around(text: str, positions: Sequence[_ReplyPosition]) -> str:
    """Return the text before, between and after replies, without white space."""
    edges = [
        0,
        *[edge for position in positions for edge in (position.start, position.end)],
        len(text),
    ]
    return _without_space(
        "".join(text[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True))
    )


def _without_space(text: str) -> str:
    """Remove all white space from a text."""
    return "".join(text.split())
