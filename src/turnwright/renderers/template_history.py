"""Re-render a conversation by its template while keeping sampled ids (`history = "template"`).

Each sampled reply is rendered as a placeholder of the same shape, made of random digits. Where a
complete placeholder appears in the text, the template renders that reply completely, and the
sampled ids take its place. A second rendering has the reply's own texts between the digits, which
reveals what the template shortens, closes or hides. Every other reply (one without its thinking,
for example) is rendered by the template and encoded as text. The text between replies comes from
the template and the environment; the guard encodes it. Positions are found in the text, so a
segment has the same ids at every turn, however a reply was tokenized.

Start at `ConversationComposer.compose`. It makes the placeholders (`ReplyPlaceholders.make`),
renders until every one of them appears completely (`_settle`), puts the ids together (`_join`) and
compares them with the path. `_position` decides whether a reply was rendered as it was sampled.
Control texts are left to `ControlTextGuard.encode_cut`.
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
        shapes = ConversationShapes(probe.template.source)
        self._openings: ProvenByShape[str] = ProvenByShape(shapes)

    def make(
        self,
        messages: Sequence[Message],
        reply: SampledReply,
        tools: Tools,
        *,
        called: bool = False,
    ) -> ReplyPlaceholder:
        """Make a reply's placeholder.

        With `called`, tool answers count as called if the reply makes no calls.
        """
        original = messages[reply.message]
        message = original
        if message.tool_calls and not self.reads_calls:
            message = self._with_calls_as_text(message, reply.ids)

        calls = message.tool_calls
        if called and self.reads_calls and not original.tool_calls:
            answers = list(takewhile(lambda m: m.role == "tool", messages[reply.message + 1 :]))
            calls = calls_before(message, answers)

        before = messages[: reply.message]
        is_plain = original.reasoning is None and not original.tool_calls
        return ReplyPlaceholder(
            reply,
            bare=self._marked(message, calls, verbatim=False),
            verbatim=self._marked(message, calls, verbatim=True),
            real=self._real(message, reply.ids),
            opening=self._opening(before, tools),
            after_result=bool(before) and before[-1].role == "tool",
            plain=original.text if is_plain else None,
            blank=_is_blank(original.reasoning),
        )

    def _marked(
        self, message: Message, calls: tuple[ToolCall, ...], *, verbatim: bool
    ) -> MarkedMessage:
        """Return a message with a mark in place of each text and each call's arguments, or, with
        `verbatim`, around each text."""
        text_marks: list[str] = []

        def mark(text: str) -> str:
            begin, end = random_mark(), random_mark()
            text_marks.append(begin)
            if not verbatim:
                return begin
            text_marks.append(end)
            return f"{begin}{text}{end}"

        reasoning = message.reasoning
        if reasoning and not _is_blank(reasoning):
            reasoning = mark(reasoning)
        thinking_mark = text_marks[0] if text_marks else ""

        call_marks: list[str] = []
        marked_calls: list[ToolCall] = []
        for call in calls:
            holds_control = self._probe.split.search(call.name) is not None
            name = call.name if call.name and not holds_control else "f"
            call_marks.append(random_mark())
            marked_calls.append(ToolCall(name, {"x": call_marks[-1]}, call.id))

        # The text around a malformed call is a part of it.
        is_malformed = any(call.error for call in message.tool_calls)
        content = ""
        if not (text_marks or call_marks) or (message.text and not is_malformed):
            content = mark(message.text)
        marked = replace(
            message, content=content, reasoning=reasoning, tool_calls=tuple(marked_calls)
        )
        return MarkedMessage(
            self._with_folded_reasoning(marked),
            texts=tuple(text_marks),
            calls=tuple(call_marks),
            thinking=thinking_mark,
        )

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
        stops = [(text.find(token), token) for token in self._stops if token in text]
        # Of two at the same position, the longer one: its text may begin with the other's.
        return min(stops, key=lambda stop: (stop[0], -len(stop[1])), default=None)

    def adapted(
        self, messages: Sequence[Message], replies: Sequence[SampledReply]
    ) -> tuple[list[Message], list[SampledReply]]:
        """Return a conversation in the form that the template renders, and its replies.

        Tool results, and calls of demonstrations, may change; then replies have other positions.
        """
        sampled = {reply.message for reply in replies}
        messages = [
            message if number in sampled else self.demonstration(message)
            for number, message in enumerate(messages)
        ]

        # Between replies, messages may be joined.
        adapted: list[Message] = []
        moved_replies: list[SampledReply] = []
        start = 0
        for reply in replies:
            adapted += self._adapt(messages[start : reply.message])
            moved_replies.append(reply._replace(message=len(adapted)))
            adapted += self._adapt([messages[reply.message]])
            start = reply.message + 1
        adapted += self._adapt(messages[start:])
        return adapted, moved_replies

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
        is_closed = bool(ids) and ids[-1] in self._stops.values()
        text = self._codec.decode(ids[:-1] if is_closed else ids)
        if message.reasoning is not None:
            text = text.partition("</think>")[2].lstrip("\n") or message.text

        # The template writes what closes a reply again.
        ending = self._probe.text
        stop = ending.stops[0] if ending.stops else ""
        text = text.removesuffix(ending.close_in_last.removesuffix(stop))
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
            # In the text, it would take the place of the calls.
            return replace(message, reasoning=None)
        content = f"<think>\n{message.reasoning}\n</think>\n\n{message.text}"
        return replace(message, content=content, reasoning=None)

    # Properties of the template

    @cached_property
    def folds(self) -> bool:
        """Whether the template renders reasoning in the text, but never reasoning in its own
        field."""
        thought, answer = random_mark(), random_mark()
        in_field = Message("assistant", answer, reasoning=thought)
        if any(thought in text for text in self._contexts(in_field)):
            return False
        in_text = Message("assistant", f"<think>\n{thought}\n</think>\n\n{answer}")
        return any(thought in text for text in self._contexts(in_text))

    @cached_property
    def thinking_end(self) -> str:
        """Template text between thinking, which may be empty, and text; without white space."""
        thought, answer = random_mark(), random_mark()
        reply = self._with_folded_reasoning(Message("assistant", answer, reasoning=thought))
        for text in self._contexts(reply):
            if thought not in text:
                continue
            between = text.rpartition(thought)[2].rpartition(answer)[0]
            if between.strip():
                return _without_space(between)
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
        reply = Message("assistant", content, (replace(_CALL, arguments={"x": argument}),))
        return not any(argument in text for text in self._contexts(reply))

    @cached_property
    def _adapt(self) -> Callable[[Sequence[Message]], list[Message]]:
        try:
            return self._probe.append(Message("assistant", "", (_CALL,)), (_ANSWER,)).adapted
        except TemplateError:
            return list

    def _contexts(self, reply: Message) -> Iterator[str]:
        """Yield renderings of conversations with a reply at several positions."""
        calling = replace(reply, tool_calls=reply.tool_calls or (_CALL,))
        conversations = (
            [ASKED, reply],
            [ASKED, calling],
            [ASKED, calling, _ANSWER],
            [ASKED, reply, ASKED],
        )
        for form, messages, tools in product(("", "ids"), conversations, ((), PROBE_TOOLS)):
            text = self._template.try_render(ADAPT[form](messages), tools)
            if text is not None:
                yield text

    def _opening(self, before: Sequence[Message], tools: Tools) -> str:
        """Return the template text that opens a reply after these messages."""

        def derive(given: Sequence[Message]) -> str:
            closed = self._template.try_render(given, tools)
            opened = self._template.try_render(given, tools, generation_prompt=True)
            if closed is None or opened is None:
                return ""
            return opened[len(closed) :] if opened.startswith(closed) else ""

        tool_names = tuple([tool.get("function", tool).get("name") for tool in tools])
        messages = readable(before)
        # The last message's role decides too, also where earlier messages do not.
        last_roles = tuple([(m.role, bool(m.tool_calls)) for m in messages[-2:]])
        proven = self._openings.get((tool_names, last_roles), messages, derive)
        return derive(messages) if proven is None else proven

    def _find_frame(self, stub: ReplyPlaceholder) -> ReplyFrame:
        before: tuple[Message, ...] = (ASKED,)
        if stub.after_result:
            before = (ASKED, Message("assistant", "", (PROBE_CALL,)), probe_result("t"))

        for tools in ((), PROBE_TOOLS):
            opened = self._template.try_render(before, tools, generation_prompt=True)
            text = self._template.try_render((*before, stub.bare.message), tools)
            if opened is None or text is None:
                continue
            positions = mark_positions(text, stub.bare.marks)
            if positions is None:
                continue

            start, end = positions
            lead = text[len(opened) : start] if text.startswith(opened) else None
            stop = self.first_stop(text[end:])
            return ReplyFrame(lead, tail=text[end : end + stop[0]] if stop else None)
        return ReplyFrame()


def _is_blank(reasoning: str | None) -> bool:
    """Return whether a reply has thinking that is empty."""
    return reasoning is not None and not reasoning.strip()


def mark_positions(text: str, marks: Sequence[str]) -> tuple[int, int] | None:
    """Return where marks begin and end in a text that contains each of them once; None if it does
    not."""
    starts = [text.find(mark) for mark in marks]
    if min(starts) < 0 or any(text.count(mark) > 1 for mark in marks):
        return None
    return min(starts), max(starts) + max(map(len, marks))


REASONS: Mapping[str, str] = {
    "thinking_stripped": "The template renders an earlier reply without its reasoning.",
    "reply_dropped": "The template omits an earlier reply.",
    "reply_rewritten": "The template renders an earlier reply in other words than sampled, or more "
    "than once.",
    "close_swapped": "The template closes an earlier reply by another token than was sampled.",
    "prefix_changed": "The template opens an earlier reply differently from the prompt that it was "
    "sampled after.",
    "preamble_changed": "Template text before or between replies moved or changed (system prompt, "
    "tools, date).",
}
"""Reasons why a prompt in `template` mode does not begin with the ids that the engine has
processed."""
_MAX_LEAD = 64
"""Maximum characters of template text between the prompt and a reply's content, in addition to the
probed ones."""


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
    control: EncodedMessages
    """Control texts, without ids."""


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
        """Render the next prompt by the template and compare it with `ids`, which the engine has
        processed.

        Raises `TemplateError` if the template cannot render the conversation, or drops the latest
        observation; `MediaError` if the model does not support one of its images.
        """
        # Earlier tool images were counted when their messages were new.
        first_new = replies[-1].message + 1 if replies else 0
        moved = self._media.move_tool_images(messages[first_new:]).moved

        # Messages in the form that the template renders.
        messages, _, new_indices = self._media.move_tool_images(messages)
        if new_indices:
            replies = [reply._replace(message=new_indices[reply.message]) for reply in replies]
        if any(m.role == "tool" or m.tool_calls or m.reasoning for m in messages):
            messages, replies = self._placeholders.adapted(messages, replies)

        rendered, why, stubs = self._render(messages, replies, tools)
        prompt, starts, media = self._join(rendered, messages)
        start_of = {
            stub.reply.message: start for stub, start in zip(rendered.complete, starts, strict=True)
        }
        reply_starts = tuple([start_of.get(reply.message, -1) for reply in replies])

        # Keys of media take part, because the placeholder ids of all images are the same.
        keep = common_prefix_length(
            ids_with_media_keys(prompt, media), ids_with_media_keys(ids, placed)
        )
        new_media = placements_between(media, keep, len(prompt))
        if keep == len(ids):
            return Extend(
                prompt[keep:],
                close=int(len(prompt) > keep and self._is_last_open(rendered, replies)),
                neutralised=rendered.control.neutralised,
                control_text=rendered.control.control,
                replies=reply_starts,
                media=new_media,
                tool_images_moved=moved,
            )

        for stub, position in zip(rendered.complete, rendered.positions, strict=True):
            if position.swapped:
                why[stub.reply.message] = "close_swapped"
        return Branch(
            keep,
            prompt[keep:],
            reason=self._reason(keep, stubs, why),
            neutralised=rendered.control.neutralised,
            control_text=rendered.control.control,
            replies=reply_starts,
            media=new_media,
            tool_images_moved=moved,
        )

    def _render(
        self, messages: Sequence[Message], replies: Sequence[SampledReply], tools: Tools
    ) -> tuple[_RenderedConversation, dict[int, str], list[ReplyPlaceholder]]:
        """Render a conversation with placeholders in place of replies.

        Also return the reasons of those replies that do not appear completely, by message index,
        and the placeholders.
        """
        first_new = replies[-1].message + 1 if replies else 0
        stubs = [self._placeholders.make(messages, reply, tools) for reply in replies]
        try:
            rendered, why = self._settle(messages, stubs, tools, first_new)
        except TemplateError:
            # Some templates require that every tool answer was called.
            called = [
                self._placeholders.make(messages, reply, tools, called=True) for reply in replies
            ]
            pairs = zip(stubs, called, strict=True)
            if all(len(stub.bare.calls) == len(other.bare.calls) for stub, other in pairs):
                raise
            stubs = called
            rendered, why = self._settle(messages, stubs, tools, first_new)
        return rendered, why, stubs

    def _is_last_open(
        self, rendered: _RenderedConversation, replies: Sequence[SampledReply]
    ) -> bool:
        """Return whether the last reply is rendered completely and has no stop id, so that the
        template closes it."""
        if not rendered.complete:
            return False
        last = rendered.complete[-1].reply
        return last.message == replies[-1].message and not self._placeholders.closed(last)

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
        """Render with real messages for replies that do not appear completely; return the reasons
        by message index."""
        why: dict[int, str] = {}
        while True:
            complete = [stub for stub in stubs if stub.reply.message not in why]
            bare = list(messages)
            verbatim = list(messages)
            for stub in stubs:
                index = stub.reply.message
                bare[index] = stub.real if index in why else stub.bare.message
                verbatim[index] = stub.real if index in why else stub.verbatim.message

            try:
                around = self._check(verbatim, complete, tools, first_new)
                try:
                    rendered = self._encode(bare, complete, tools, first_new, around=around)
                except _RepliesInspected:
                    rendered = self._encode(verbatim, complete, tools, first_new, verbatim=True)
                return rendered, why
            except _RepliesNotRendered as lost:
                why |= lost.why

    def _check(
        self,
        messages: Sequence[Message],
        complete: Sequence[ReplyPlaceholder],
        tools: Tools,
        first_new: int,
    ) -> str | None:
        """Check that the template renders new observations, else `TemplateError`, and no
        observation inside a reply.

        Return the text around the replies without white space; None if the template rejects marks
        in the messages.
        """
        marks = [random_mark() if message.role != "assistant" else "" for message in messages]
        marked = [
            map_texts(message, partial("{0}{1}{0}".format, mark))
            for message, mark in zip(messages, marks, strict=True)
        ]
        text = self._template.try_render(marked, tools, generation_prompt=True)
        if text is None:
            # The template inspects contents; the unmarked conversation is rendered next.
            text = self._template.try_render(messages, tools, generation_prompt=True)
            if text is not None:
                self._positions(text, complete, verbatim=True)
            return None

        # No observation inside a reply.
        positions = self._positions(text, complete, verbatim=True)
        used_marks = [
            mark
            for message, mark in zip(marked, marks, strict=True)
            if mark and mark in message.text
        ]
        swallowed: dict[int, str] = {}
        for stub, position in zip(complete, positions, strict=True):
            inside = text[position.start : position.end]
            if any(mark in inside for mark in used_marks):
                swallowed[stub.reply.message] = "reply_rewritten"
        if swallowed:
            raise _RepliesNotRendered(swallowed)

        # New observations are rendered.
        for message, mark in zip(marked[first_new:], marks[first_new:], strict=True):
            if mark and mark in message.text and mark not in text:
                roles = ", ".join(m.role for m in messages)
                error = f"drops a message of role {message.role} from a conversation of {roles}"
                raise TemplateError(f"{self._template.origin}: {error}")

        around = _text_around(text, positions)
        for mark in used_marks:
            around = around.replace(mark, "")
        return around

    def _encode(
        self,
        messages: Sequence[Message],
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

        def around_replies(text: str) -> list[tuple[int, int, str]]:
            """Return the segments between replies, each with the control token before it."""
            positions.extend(self._positions(text, complete, verbatim=verbatim))
            starts = [0, *[position.end for position in positions]]
            ends = [*[position.start for position in positions], len(text)]
            last_tokens = [""]
            for stub, position in zip(complete, positions, strict=True):
                last_tokens.append(self._last_token(stub, position))
            return list(zip(starts, ends, last_tokens, strict=True))

        def render(given: Sequence[Message], clean_tools: Tools = tools) -> str:
            return self._template.render(given, clean_tools, generation_prompt=True)

        if around is not None:
            text = render(messages)
            if _text_around(text, self._positions(text, complete, verbatim=verbatim)) != around:
                raise _RepliesInspected
        segments, control = self._guard.encode_cut(
            messages, render, around_replies, tools, first_new
        )
        return _RenderedConversation(complete, positions, segments, control)

    def _last_token(self, stub: ReplyPlaceholder, position: _ReplyPosition) -> str:
        """Return the control token at the end of a reply at this position; empty for none."""
        ids = stub.reply.ids[:-1] if position.swapped else stub.reply.ids
        return self._codec.decode(ids[-1:]) if ids and ids[-1] in self._guard.control_ids else ""

    def _positions(
        self, text: str, complete: Sequence[ReplyPlaceholder], *, verbatim: bool
    ) -> list[_ReplyPosition]:
        """Return the position of each reply in a text.

        Raises `_RepliesNotRendered` if some are not rendered completely.
        """
        marked = [stub.verbatim if verbatim else stub.bare for stub in complete]
        spans = [mark_positions(text, message.marks) for message in marked]
        positions: list[_ReplyPosition] = []
        lost: dict[int, str] = {}
        low = 0
        for number, (stub, span) in enumerate(zip(complete, spans, strict=True)):
            if span is None or span[0] < low:
                lost[stub.reply.message] = _why_lost(text, marked[number])
                continue

            high = len(text)
            for later in spans[number + 1 :]:
                if later and later[0] > span[1]:
                    high = later[0]
                    break

            position = self._position(text, stub, low, high, span)
            if isinstance(position, str):
                lost[stub.reply.message] = position
            elif verbatim and not self._is_as_sampled(text, stub, position):
                lost[stub.reply.message] = "reply_rewritten"
            else:
                positions.append(position)
                low = position.end
        if lost:
            raise _RepliesNotRendered(lost)
        return positions

    def _position(
        self, text: str, stub: ReplyPlaceholder, low: int, high: int, span: tuple[int, int]
    ) -> _ReplyPosition | str:
        """Return the position of a reply whose marks are at `span`, between `low` and `high`; or
        the reason why it is not rendered as it was sampled."""
        first, last = span
        thinking_end = self._placeholders.thinking_end
        if stub.blank and thinking_end not in _without_space(self._codec.decode(stub.reply.ids)):
            return "reply_rewritten"  # the template closes the thinking

        # Where the reply begins.
        frame = self._placeholders.frame(stub)
        lead_size = self._lead_size(text[low:first], stub, frame)
        if lead_size is None:
            return "prefix_changed"
        start = first - lead_size

        # The stop after it: at its usual place, else the first one.
        after = text[last:high]
        has_usual_tail = frame.tail is not None and after.startswith(frame.tail)
        close = None
        if frame.tail is not None and has_usual_tail:
            match = self._guard.split.match(after, len(frame.tail))
            close = (len(frame.tail), match.group()) if match else None
        if close is None:
            close = self._placeholders.first_stop(after)
        if close is None and stub.bare.calls:
            return "reply_rewritten"
        if close is None:  # closed by plain text, or by the end of its last part
            ending = self._placeholders.text_ending
            size = self._sampled_of_close(stub, ending) if after.startswith(ending) else 0
            close = (size, "")
        tail_size, token = close

        tail = after[:tail_size]
        moved = frame.tail is not None and not has_usual_tail
        mismatch = self._mismatch(stub, text[start:first], tail, moved)
        if mismatch is not None:
            return mismatch

        if not self._placeholders.closed(stub.reply):
            return _ReplyPosition(start, last + self._sampled_of_close(stub, tail), swapped=False)
        if self._stops.get(token) != stub.reply.ids[-1]:
            return _ReplyPosition(start, last + tail_size, swapped=True)
        return _ReplyPosition(start, last + tail_size + len(token), swapped=False)

    def _sampled_of_close(self, stub: ReplyPlaceholder, close: str) -> int:
        """Return how many characters of the template's text before the stop a reply contains: all
        or none."""
        if stub.bare.calls:
            return len(close)  # the end of a call's arguments is a part of the call
        sampled = _without_space(self._codec.decode(self._without_stop(stub)))
        return len(close) if sampled.endswith(_without_space(close) or close) else 0

    def _without_stop(self, stub: ReplyPlaceholder) -> Sequence[int]:
        """Return the ids of a reply without its stop id, if it has one."""
        ids = stub.reply.ids
        return ids[:-1] if self._placeholders.closed(stub.reply) else ids

    def _mismatch(self, stub: ReplyPlaceholder, lead: str, tail: str, moved: bool) -> str | None:
        """Return why a reply is not rendered as sampled, by the template text before and after its
        content.

        Differences in white space, and in the spelling of thinking and calls, do not count.
        `moved`: the text after it differs from the text after a final reply.
        """
        sampled = _without_space(self._codec.decode(stub.reply.ids[:-1]))
        lead = _without_space(lead)
        tail = _without_space(tail)
        closes_thinking = self._placeholders.thinking_end in lead
        if not stub.bare.thinking and stub.blank != closes_thinking:
            return "thinking_stripped" if stub.blank else "prefix_changed"
        if stub.blank and not sampled.startswith(lead):
            return "prefix_changed"
        if not self._placeholders.closed(stub.reply):
            return None

        if stub.bare.calls:  # the marks are inside them
            return "reply_rewritten" if moved and not sampled.endswith(tail) else None
        if stub.plain is None:
            return None
        if not sampled.startswith(lead):
            return "prefix_changed"
        return None if sampled.endswith(tail) else "close_swapped"

    def _is_as_sampled(self, text: str, stub: ReplyPlaceholder, position: _ReplyPosition) -> bool:
        """Return whether the template writes a reply's thinking, and the text up to its calls, as
        they were sampled.

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
        """Return how many characters before a reply's content belong to the reply; None if
        unknown."""
        lead = frame.lead or ""
        opening_start = text.rfind(stub.opening) if stub.opening else -1
        if opening_start >= 0:
            size = len(text) - opening_start - len(stub.opening)
            names = sum(len(call.name) + len(call.id) for call in stub.bare.message.tool_calls)
            return size if size <= _MAX_LEAD + len(lead) + names else None
        if frame.lead is not None and text.endswith(lead):
            return self._sampled_of_lead(stub, lead)

        # Opened differently from its prompt: the template's text stays, and so does a reply of
        # plain text.
        if stub.plain is None:
            return None
        sampled = self._codec.decode(self._without_stop(stub))
        return 0 if sampled.strip() == stub.plain.strip() else None

    def _sampled_of_lead(self, stub: ReplyPlaceholder, lead: str) -> int | None:
        """Return how many characters of the text before a reply's content the reply contains; None
        if unknown.

        The template may open a reply itself, after a prompt that did not.
        """
        sampled = self._codec.decode(stub.reply.ids).lstrip()
        if not stub.bare.calls:
            if _without_space(sampled).startswith(_without_space(lead)):
                return len(lead)
            return None if self._placeholders.thinking_end in _without_space(lead) else 0

        # A call may be spelled otherwise, so of its lead only a control token that opens it is
        # looked for.
        opener = self._guard.split.match(sampled)
        begins = self._guard.split.match(lead.lstrip())
        if begins is None or (opener is not None and begins.group() == opener.group()):
            return len(lead)
        if opener is None:  # it begins with text
            start = max(match.end() for match in self._guard.split.finditer(lead))
        else:
            start = lead.find(opener.group())
        return len(lead) - start if start >= 0 else None

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

        # An image takes more ids than its placeholder, which moves the replies after it.
        ids, media = self._media.expand(ids, messages)
        for block in media:
            growth = block.length - len(block.compact)
            starts = [start + growth if start > block.start else start for start in starts]
        return ids, starts, media

    def _reason(self, keep: int, stubs: Sequence[ReplyPlaceholder], why: Mapping[int, str]) -> str:
        """Return why a prompt differs from the processed ids from `keep` on, one of `REASONS`."""
        for stub in stubs:
            reply = stub.reply
            if reply.start < 0 or keep >= reply.start + len(reply.ids):
                continue
            if keep < reply.start - len(self._codec.encode(stub.opening)):
                return "preamble_changed"
            reason = why.get(reply.message)
            if reason is not None and (keep >= reply.start or reason != "close_swapped"):
                return reason
            return "prefix_changed"
        return "preamble_changed"


def _why_lost(text: str, marked: MarkedMessage) -> str:
    """Return why a text does not contain all marks of a reply once, in order."""
    written = [mark for mark in marked.marks if mark in text]
    if marked.thinking and marked.thinking not in written:
        return "thinking_stripped"
    return "reply_rewritten" if written else "reply_dropped"


def _text_around(text: str, positions: Sequence[_ReplyPosition]) -> str:
    """Return the text before, between and after replies, without white space."""
    pieces: list[str] = []
    start = 0
    for position in positions:
        pieces.append(text[start : position.start])
        start = position.end
    pieces.append(text[start:])
    return _without_space("".join(pieces))


def _without_space(text: str) -> str:
    """Remove all white space from a text."""
    return "".join(text.split())
