"""Probe a template with random marks; derive and prove how messages are appended to a reply.

`TemplateProbe` finds out how replies end (`ReplyEnding`), and `TemplateProbe.append` derives what
the template writes between a reply and the next one: it renders the conversation with a random
number in place of each text, cuts after the reply, and refuses where a text is missing, repeated or
moved. `AppendShapes.find` then proves, over contents that templates treat differently
(`probe_contents`), that contents appear unchanged between fixed pieces, and encodes the pieces
once; `fill_ids` is what runs at every turn.

What is proven here holds for one shape of reply and messages. For which conversations and texts it
is used is decided in `chat_renderer.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, NamedTuple

from turnwright.errors import TemplateError
from turnwright.renderers.control_text import ControlTextGuard, GuardRender, map_texts
from turnwright.renderers.renderer import common_prefix_length
from turnwright.renderers.template import (
    ADAPT,
    ASKED,
    PROBE_CALL,
    PROBE_TOOLS,
    ChatTemplate,
    call_id,
    probe_result,
    random_mark,
)
from turnwright.renderers.tokenizer import Tokenizer
from turnwright.types import Message, ToolCall, Tools

# Contents that templates treat differently: padded (trimmed), JSON (loaded and dumped again),
# escapes.
_PROBES = (
    "plain words",
    " \n padded\t ",
    '{"key": [1, "a"], "ok": true}',
    "line\nline\n\nline",
    "<b>'&\"</b>",
)
CONTENT_TRANSFORMS: Mapping[str, Callable[[str], str]] = {
    "": lambda text: text,
    "strip": lambda text: text.strip(),
    "json": lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    "strip json": lambda text: json.dumps(text.strip(), ensure_ascii=False)[1:-1],
}
"""Known changes that templates make to a content, by name."""


def texts_of(messages: Sequence[Message]) -> list[str]:
    """Return the texts of all contents in order: a text content itself, else its text parts."""
    texts: list[str] = []
    for message in messages:
        if isinstance(message.content, str):
            texts.append(message.content)
        else:
            texts += [part for part in message.content if isinstance(part, str)]
    return texts


def with_texts(messages: Sequence[Message], texts: Sequence[str]) -> list[Message]:
    """Replace the texts of messages; media stay in place."""
    rest = iter(texts)
    return [map_texts(message, lambda _: next(rest)) for message in messages]


def probe_contents(count: int) -> list[list[str]]:
    """Return lists of `count` difficult contents, such that each content is at each position
    once."""
    return [
        [_PROBES[(first + offset) % len(_PROBES)] for offset in range(count)]
        for first in range(len(_PROBES))
    ]


def interleave(pieces: Sequence[str], contents: Sequence[str]) -> str:
    """Join pieces with contents between them; there is one content fewer than pieces."""
    if len(contents) == 1:  # most appends
        return pieces[0] + contents[0] + pieces[1]
    pairs = zip(pieces, contents, strict=False)
    return "".join([text for pair in pairs for text in pair]) + pieces[-1]


def _conversations() -> tuple[tuple[Message, ...], ...]:
    """Return conversations up to a reply, which a stateless template continues as it does a single
    question.

    They include system messages, replies with and without thinking, and single, parallel and
    successive calls and results. Their lengths differ, so that counters, flags and windows show.
    """
    user = ASKED
    answer = Message("assistant", "a")
    thought = replace(answer, reasoning="thought")

    def called(*numbers: int) -> tuple[Message, ...]:
        calls = tuple(ToolCall("f", {"x": "1"}, f"past{number:05d}") for number in numbers)
        results = (Message("tool", "t", tool_call_id=call.id, name="f") for call in calls)
        return (Message("assistant", "", calls), *results)

    system = (Message("system", "s"), user)
    rounds = (
        user,
        *called(0),
        answer,
        user,
        *called(1, 2),
        thought,
        user,
        *called(3),
        *called(4),
        answer,
        user,
    )
    return (
        system,
        (user, answer, user),
        (user, thought, user, thought, user, thought, user),
        (user, *called(0), answer, user),
        (user, *called(0)),
        rounds,
        (*system, thought, *rounds, answer, *rounds, *called(5), *called(6, 7)),
    )


CONVERSATIONS = _conversations()


@dataclass(frozen=True, slots=True)
class ReplyEnding:
    """Template text that ends replies of one kind: with text, or with tool calls."""

    stops: tuple[str, ...] = ()
    """Control tokens that end such a reply, as texts; empty if plain text ends it."""
    heads: bool = False
    """Whether the stop is also the header of the next message, so that it is not written twice."""
    head: str = ""
    """Text after the reply's content in the middle of a conversation, with the stop."""
    last: str = ""
    """Text after the reply's content at the end of a conversation."""

    @property
    def close_in_last(self) -> str:
        """Part of `last` up to and including the stop; empty if `last` does not contain it."""
        if not self.stops:
            return self.last
        before, stop, _ = self.last.partition(self.stops[0])
        return before + stop if stop else ""


@dataclass(frozen=True, slots=True)
class AppendProbe:
    """How messages of certain roles are appended to a reply; proven with placeholders, used for all
    of that shape."""

    base: tuple[Message, ...]
    """Conversation that ends in a placeholder of the reply."""
    mark: str
    """Mark at the visible end of the placeholder."""
    tools: Tools
    proof: str
    """`append`: all earlier text stays; `tail`: the text after the reply stays, earlier text is
    rewritten; `swap`: the template closes the reply differently once something follows, and the
    sampled close is kept."""
    head: str = ""
    """Text between the mark and the end of the reply, with its stop."""
    heads: bool = False
    """Whether the stop is also the header of the next message."""
    adapt: str = ""
    """Change of the messages that the template requires: `""`, `ids` or `user`."""
    pieces: tuple[str, ...] = ()
    """Template text from the mark on: before, between and after the contents of the messages."""

    def adapted(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages in the form that the template renders."""
        return ADAPT[self.adapt](messages)


class _Placeholder(NamedTuple):
    """Rendered conversation that ends in a placeholder of a reply."""

    base: tuple[Message, ...]
    mark: str
    """The last mark of the placeholder that is rendered."""
    rendered: str


@dataclass(frozen=True, slots=True)
class TemplateProbe:
    """Renders conversations made of random marks with one template."""

    template: ChatTemplate
    control: Collection[str]
    """The tokenizer's control tokens."""
    split: re.Pattern[str]
    """Pattern that splits a text at control tokens and keeps them."""
    declared: frozenset[str] = frozenset()
    """Control tokens known to end replies (the tokenizer's end of sequence)."""
    text: ReplyEnding = field(init=False)
    """Ending of replies without tool calls."""
    calls: ReplyEnding = field(init=False)
    """Ending of replies with tool calls."""
    results: str = field(init=False)
    """Change of tool results that the template requires, a name of `ADAPT`; `user` if it has no
    place for them."""
    part_ends: frozenset[str] = field(init=False)
    """Control tokens that end a reply, and also a part of one: its thinking, or the first of
    several calls."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", self._find_text_ending())
        object.__setattr__(self, "calls", self._find_calls_ending())
        object.__setattr__(self, "results", self._find_result_form())
        object.__setattr__(self, "part_ends", self._find_part_ends())

    @property
    def stops(self) -> tuple[str, ...]:
        """All control tokens that end a reply.

        A token that also ends a part of a reply would stop it there. It is left out if the
        tokenizer declares another end.
        """
        stops = self._written_stops()
        if not self.part_ends or not self.declared:
            return stops
        ends = tuple(token for token in stops if token not in self.part_ends)
        return ends or tuple(sorted(self.declared))

    # Reply endings

    def _written_stops(self) -> tuple[str, ...]:
        """Return the control tokens that the template writes after a reply."""
        return tuple(dict.fromkeys((*self.text.stops, *self.calls.stops)))

    def _find_text_ending(self) -> ReplyEnding:
        asked, reply, next_message = random_mark(), random_mark(), random_mark()
        base = (Message("user", asked), Message("assistant", reply))
        rendered = self.template.render(base)
        last = _after_mark(rendered, reply)
        if last is None:
            raise TemplateError(f"{self.template.origin}: does not render assistant messages")
        followed = self.template.try_render(
            (*base, Message("user", next_message)), generation_prompt=True
        )
        after_reply = _after_mark(rendered if followed is None else followed, reply) or ""
        text = after_reply.partition(next_message)[0]
        tokens = self._tokens(text)
        last_tokens = self._tokens(last)

        def ended_by(stop: tuple[str, int]) -> ReplyEnding:
            token, end = stop
            # It may be the header of the next user message too (GLM's `<|user|>`).
            heads = tokens[-1][0] == token and token in rendered.partition(asked)[0]
            return ReplyEnding((token,), heads, head=text[:end], last=last)

        # A token that is known to end replies.
        declared = [token for token in tokens if token[0] in self.declared]
        if declared:
            return ended_by(declared[0])

        # A token that ends a reply whether or not something follows.
        same = last[: common_prefix_length(last, text)]
        shared_tokens = self._tokens(same)
        if not text.startswith(last) or len(set(self._prompts())) == 1:
            # A template that always opens the next reply seems to close the last one by its header:
            # leave out the tokens that end both a user message and a reply.
            alone = self.template.render((Message("user", asked),))
            same_end = rendered[len(rendered) - common_prefix_length(alone[::-1], rendered[::-1]) :]
            shared_tokens = shared_tokens[: len(last_tokens) - len(self._tokens(same_end)) + 1]
        if shared_tokens:
            return ended_by(shared_tokens[-1])

        # A token that another one replaces once something follows.
        if last_tokens:
            replacing = tokens[: len(last_tokens)]
            head = text[: replacing[-1][1]] if replacing else ""
            return ReplyEnding((last_tokens[-1][0],), heads=False, head=head, last=last)

        # Nothing ends the last reply; the next message's header does.
        if tokens and not last.strip():
            return ended_by(tokens[0])
        return ReplyEnding(head=same, last=last)

    def _find_part_ends(self) -> frozenset[str]:
        """Find the stops that the template also writes before a reply's end.

        They stand between the thinking and the text, between two calls, or between the
        generation prompt and a call.
        """
        asked, thought, answered, first, second = (random_mark() for _ in range(5))
        question = (Message("user", asked),)
        answer = Message("assistant", answered, reasoning=thought)
        thinking = self.template.try_render((*question, answer)) or ""

        calls = tuple(
            ToolCall("f", {"x": argument}, call_id(number))
            for number, argument in enumerate((first, second))
        )
        called = Message("assistant", "", calls)
        calling = self.template.try_render((*question, called), PROBE_TOOLS) or ""
        prompt = self.template.try_render(question, PROBE_TOOLS, generation_prompt=True) or ""
        opening = prompt.rpartition(asked)[2]

        part_ends: set[str] = set()
        for rendered, begin, end, stops in (
            (thinking, thought, answered, self.text.stops),
            (calling, first, second, self.calls.stops),
            (calling, opening, first, self._written_stops()),
        ):
            _, has_question, reply = rendered.rpartition(asked)
            _, begins, rest = reply.partition(begin) if begin else ("", "", "")
            between, ends, _ = rest.partition(end)
            if has_question and begins and ends:
                part_ends |= {token for token, _ in self._tokens(between) if token in stops}
        return frozenset(part_ends) - self.declared

    def _prompts(self) -> tuple[str, str]:
        """Render a question without and with the generation prompt."""
        without = self.template.render((ASKED,))
        return without, self.template.render((ASKED,), generation_prompt=True)

    def _find_calls_ending(self) -> ReplyEnding:
        """Find the ending of replies with calls.

        That of other replies if none with calls can be rendered.
        """
        result = random_mark()
        for tools in (PROBE_TOOLS, ()):
            for placeholder in self._placeholders(
                (ASKED,), Message("assistant"), (PROBE_CALL,), tools
            ):
                last = _after_mark(placeholder.rendered, placeholder.mark)
                followed = self.template.try_render(
                    (*placeholder.base, probe_result(result)), tools, generation_prompt=True
                )
                text = _after_mark(followed or "", placeholder.mark)
                if last is not None and text is not None and result in text:
                    return self._calls_ending(last, text.partition(result)[0])
        return self.text

    def _calls_ending(self, last: str, text: str) -> ReplyEnding:
        """Return the ending of a reply with calls, by the text after it: at the end of a
        conversation, and where a result follows."""
        tokens = self._tokens(text)
        for token, end in tokens:
            if token in self.declared or token in self.text.stops:
                return ReplyEnding((token,), self.text.heads, text[:end], last)

        same = last[: common_prefix_length(last, text)]
        shared_tokens = self._tokens(same)
        later_tokens = tokens[len(shared_tokens) :]

        # Where the next message opens without a stop before it, calls end as text does.
        without, prompted = self._prompts() if shared_tokens else ("", "")
        generation_prompt = prompted[common_prefix_length(without, prompted) :]
        openers = {token for token, _ in self._tokens(generation_prompt)}
        opened = [end - len(token) for token, end in shared_tokens if token in openers]
        if opened and self.text.stops:
            return ReplyEnding(self.text.stops, self.text.heads, same[: opened[0]], last)

        # The header of what follows ends them.
        text_unended = not self._tokens(self.text.last) and bool(self.text.stops)
        if later_tokens and (text_unended or len(self._tokens(last)) > len(shared_tokens)):
            token, end = later_tokens[0]
            return ReplyEnding((token,), True, text[:end], last)

        if shared_tokens:
            token, end = shared_tokens[-1]
            return ReplyEnding((token,), False, text[:end], last)
        return ReplyEnding(self.text.stops, self.text.heads, same, last)

    def _find_result_form(self) -> str:
        """Find the form in which the template shows a tool result; `user` if it shows it in no
        other."""
        result = random_mark()
        messages = (ASKED, Message("assistant", "", (PROBE_CALL,)), probe_result(result))
        for form in ("", "ids"):
            for tools in (PROBE_TOOLS, ()):
                text = self.template.try_render(
                    ADAPT[form](messages), tools, generation_prompt=True
                )
                if text is not None and result in text:
                    return form
        return "user"

    def result_forms(self, messages: Sequence[Message]) -> list[str]:
        """Return the changes to try of messages with tool results, the likeliest first; names of
        `ADAPT`."""
        if not any(message.role == "tool" for message in messages):
            return [""]
        # A template without a place for results drops those of earlier turns too, without an error.
        return ["user"] if self.results == "user" else ["", "ids", "user"]

    def _tokens(self, text: str) -> list[tuple[str, int]]:
        """Return the control tokens of a text, in order, each with its end position."""
        return [(match.group(), match.end()) for match in self.split.finditer(text)]

    # Appending

    def append(
        self,
        reply: Message,
        messages: Sequence[Message],
        tools: Tools = (),
        before: Sequence[Message] = (ASKED,),
        *,
        verbatim: bool = False,
    ) -> AppendProbe:
        """Derive how messages like these are appended to a reply like this one, which follows the
        conversation `before`.

        With `verbatim`, the reply's text is rendered too, for a template that looks for words in
        it.

        Raises `TemplateError` if the template cannot append them in any form.
        """
        first_error: TemplateError | None = None
        for form in self.result_forms((*before, *messages)):
            adapt = ADAPT[form]
            try:
                append = self._prove(
                    adapt(before), adapt([reply])[0], adapt(messages), tools, verbatim
                )
            except TemplateError as error:
                first_error = first_error or error
            else:
                return replace(append, adapt=form)
        assert first_error is not None
        raise first_error

    def close_of_thinking(
        self,
        before: Sequence[Message],
        messages: Sequence[Message],
        tools: Tools,
        *,
        folds: bool,
        head: str,
    ) -> str:
        """Return what the template writes after thinking that the reply to `before` left open, up
        to the end of the reply.

        Empty if it strips that thinking once these messages follow. `folds`: the template has no
        field for thinking; `head` is the text that ends other replies here.
        """
        thought = random_mark()
        reply = Message("assistant", "", reasoning=thought)
        if folds:
            reply = Message("assistant", f"<think>\n{thought}\n</think>\n\n")
        marked = _with_marked_contents(messages)
        text = self.template.try_render((*before, reply, *marked), tools, generation_prompt=True)
        rest = _after_mark(text or "", thought)
        if rest is None:
            return ""

        first_mark = str(marked[0].content) if marked and not _is_blank(marked[0]) else None
        end, _ = self.reply_end(rest, first_mark)
        if not end and first_mark and head:
            # A header in plain text ends it.
            head_start = rest.partition(first_mark)[0].find(head)
            if head_start >= 0:
                end = head_start + len(head)

        # Some templates end a reply that has no text without a stop, or write its parts after the
        # thinking.
        if not end or self.part_ends:
            alone = _after_mark(self.template.try_render((*before, reply), tools) or "", thought)
            end = common_prefix_length(rest, alone or "")
        return rest[:end]

    def varies(
        self, append: AppendProbe, reply: Message, messages: Sequence[Message], tools: Tools = ()
    ) -> bool:
        """Return whether the appended text differs after other calls or some longer
        conversation."""
        other_calls = tuple(replace(call, arguments={"x": "2"}) for call in reply.tool_calls)
        other_reply = replace(reply, tool_calls=other_calls)
        variants = [(other_reply, (ASKED,)), *[(reply, before) for before in CONVERSATIONS]]
        for variant, before in variants:
            try:
                pieces = self.append(variant, messages, tools, before).pieces
            except TemplateError:
                continue  # a kind of conversation that the template rejects
            if pieces != append.pieces:
                return True
        return False

    def _prove(
        self,
        before: Sequence[Message],
        reply: Message,
        messages: Sequence[Message],
        tools: Tools,
        verbatim: bool,
    ) -> AppendProbe:
        """Derive how messages are appended, by the likeliest placeholder of the reply that works.

        Raises `TemplateError`, of the likeliest one, if none does.
        """
        # Some templates require that answers were called.
        variants_of_calls = [calls_before(reply)]
        answered = calls_before(reply, messages)
        if answered != variants_of_calls[0]:
            variants_of_calls.append(answered)

        first_error: TemplateError | None = None
        for calls in variants_of_calls:
            for offered in (tools, ()) if tools else (tools,):
                for placeholder in self._placeholders(before, reply, calls, offered, verbatim):
                    try:
                        return self._try(placeholder, messages, offered)
                    except TemplateError as error:
                        first_error = first_error or error
        if first_error is not None:
            raise first_error
        raise TemplateError(
            f"{self.template.origin}: cannot render the reply that "
            f"{[message.role for message in messages]} answers"
        )

    def _try(
        self, placeholder: _Placeholder, messages: Sequence[Message], tools: Tools
    ) -> AppendProbe:
        """Derive how messages are appended to a placeholder.

        Raises `TemplateError` if they cannot be.
        """
        base, mark, rendered = placeholder
        roles = [message.role for message in messages]
        marked = _with_marked_contents(messages)
        full = self.template.render((*base, *marked), tools, generation_prompt=True)
        tail = _after_mark(rendered, mark)
        text = _after_mark(full, mark)
        if tail is None or text is None:
            raise TemplateError(f"{self.template.origin}: does not render the reply before {roles}")

        # The text between contents, each of which appears once and in order.
        content_marks = [str(message.content) for message in marked if not _is_blank(message)]
        pieces: list[str] = []
        rest = text
        for content_mark in content_marks:
            piece, found, rest = rest.partition(content_mark)
            if not found or content_mark in rest or full.count(content_mark) != 1:
                raise TemplateError(
                    f"{self.template.origin}: drops, repeats or moves a message of roles {roles}"
                )
            pieces.append(piece)

        until = content_marks[0] if content_marks and not _is_blank(messages[0]) else None
        end, heads = self.reply_end(text, until)
        proof = "swap"
        if full.startswith(rendered):
            proof = "append"
        elif text.startswith(tail):
            proof = "tail"
        if proof == "swap" and not end:
            change = (
                f"rewrites the close of the reply before it ({tail!r} became "
                f"{text[: len(tail) + 8]!r})"
            )
            raise TemplateError(f"{self.template.origin}: appending {roles} {change}")
        return AppendProbe(
            base,
            mark,
            tools,
            proof,
            head=text[:end],
            heads=heads,
            pieces=(*pieces, rest),
        )

    def reply_end(self, text: str, until: str | None = None) -> tuple[int, bool]:
        """Find where a reply ends in the text after its visible end, and whether its stop is the
        next message's header.

        The reply cannot include the content `until`.
        """
        if until is not None:
            text = text.partition(until)[0]
        for token, end in self._tokens(text):
            for ending in (self.text, self.calls):
                if token in ending.stops:
                    return end, ending.heads
            if token in self.declared:
                return end, False

        # Plain text ends it.
        for ending in (self.text, self.calls):
            if ending.head and text.startswith(ending.head):
                return len(ending.head), False
        return 0, False

    def rendered(self, append: AppendProbe, messages: Sequence[Message]) -> str:
        """Return the template text after a placeholder reply that these adapted messages follow.

        Raises `TemplateError` if the template cannot render them.
        """
        text = self.template.render((*append.base, *messages), append.tools, generation_prompt=True)
        return text[self.end_of_reply(append, text) :]

    def end_of_reply(self, append: AppendProbe, text: str) -> int:
        """Find where a placeholder reply ends in a text.

        Raises `TemplateError` if the text does not contain it.
        """
        rest = _after_mark(text, append.mark)
        if rest is None or not rest.startswith(append.head):
            raise TemplateError(
                f"{self.template.origin}: does not render the reply before the messages that "
                "follow it"
            )
        return len(text) - len(rest) + len(append.head)

    def _placeholders(
        self,
        before: Sequence[Message],
        reply: Message,
        calls: Sequence[ToolCall],
        tools: Tools,
        verbatim: bool = False,
    ) -> Iterator[_Placeholder]:
        """Yield placeholders of a reply that the template renders, the likeliest first."""
        has_content = not calls or bool(reply.text)
        for with_content in (has_content, not has_content) if calls else (True,):
            text_mark, argument_mark = random_mark(), random_mark()
            marked_calls: list[ToolCall] = []
            for call in calls[:-1]:
                marked_calls.append(
                    call if verbatim else replace(call, arguments={"x": random_mark()})
                )
            for call in calls[-1:]:
                marked_calls.append(
                    _with_mark(call, argument_mark)
                    if verbatim
                    else replace(call, arguments={"x": argument_mark})
                )
            reasoning = reply.reasoning
            if reasoning and not reasoning.isspace():
                reasoning = random_mark()
            content = text_mark if with_content else ""
            if verbatim and with_content:
                content = reply.text + text_mark  # the mark stays at the visible end

            placeholder = Message(
                "assistant", content, tool_calls=tuple(marked_calls), reasoning=reasoning
            )
            base = (*before, placeholder)
            rendered = self.template.try_render(base, tools) or ""
            position, mark = max(
                (rendered.rfind(mark), mark) for mark in (text_mark, argument_mark)
            )
            if position >= 0:
                yield _Placeholder(base, mark, rendered)


def _with_mark(call: ToolCall, mark: str) -> ToolCall:
    """Return a call with a mark at the end of its last argument, or in an argument of its own if
    that is no text."""
    arguments = dict(call.arguments)
    last_key = list(arguments)[-1] if arguments else None
    if last_key is not None and isinstance(arguments[last_key], str):
        arguments[last_key] += mark
    else:
        arguments["x"] = mark
    return replace(call, arguments=arguments)


def _with_marked_contents(messages: Sequence[Message]) -> list[Message]:
    """Put a mark in place of each content; a blank one stays, since templates may omit it."""
    return [
        message if _is_blank(message) else replace(message, content=random_mark())
        for message in messages
    ]


def _is_blank(message: Message) -> bool:
    content = message.content
    return isinstance(content, str) and (not content or content.isspace())


def _after_mark(text: str, mark: str) -> str | None:
    """Return the text after the last occurrence of a mark; None if there is none."""
    _, found, rest = text.rpartition(mark)
    return rest if found else None


def readable(messages: Sequence[Message]) -> list[Message]:
    """Replace malformed calls by calls that match their answers, so that every call can be
    rendered."""
    rows = list(messages)
    for index, message in enumerate(rows):
        if message.tool_calls and any(call.error or not call.name for call in message.tool_calls):
            answers = list(takewhile(lambda m: m.role == "tool", rows[index + 1 :]))
            rows[index] = replace(message, tool_calls=calls_before(message, answers))
    return rows


def calls_before(reply: Message, messages: Sequence[Message] = ()) -> tuple[ToolCall, ...]:
    """Return the calls of a reply that these messages may answer.

    They are invented if tools answer calls that it did not make.
    """
    calls = tuple([call for call in reply.tool_calls if call.name and not call.error])
    answers = [message for message in messages if message.role == "tool"]
    if calls or not answers:
        return calls
    return tuple(
        [
            ToolCall(answer.name or "f", {"x": "1"}, answer.tool_call_id or call_id(number))
            for number, answer in enumerate(answers)
        ]
    )


@dataclass(frozen=True, slots=True)
class AppendShape:
    """Template text between a reply and the next one, for messages of certain roles; proven by
    probing.

    Added tokens split a text before anything else happens to it, so the text between two of them is
    encoded independently. Only the segments that contain a content are encoded per turn; all other
    ids are known.
    """

    pieces: tuple[str, ...] = ()
    """Template text before, between and after the texts of contents; the first starts after the
    reply's end token. Empty if contents do not appear unchanged in the text, so that every append
    is rendered by the template."""
    transform: str = ""
    """Change of contents by the template: `""`, `strip`, `json` or `strip json`."""
    expected: tuple[int, ...] = ()
    """Control ids of the pieces, in order."""
    fixed: tuple[tuple[int, ...], ...] = ()
    """Ids before, between and after the segments."""
    after: str = ""
    """Control token before the text; empty if the text begins a prompt."""
    edges: tuple[tuple[str, str], ...] = ()
    """Template text before and after each content, up to the nearest control tokens; empty if an
    append is encoded at once."""

    def contents(self, messages: Sequence[Message]) -> list[str]:
        """Return the texts of contents as the template writes them."""
        texts = texts_of(messages)
        return list(map(CONTENT_TRANSFORMS[self.transform], texts)) if self.transform else texts


class AppendShapes:
    """Finds and fills append shapes for one template and tokenizer."""

    def __init__(self, codec: Tokenizer, guard: ControlTextGuard, origin: str) -> None:
        """`origin` names the template in errors."""
        self._codec = codec
        self._encode_segment = codec.encode_segment
        self._guard = guard
        self._origin = origin

    def fill_ids(
        self, shape: AppendShape, contents: Sequence[str], close: list[int]
    ) -> list[int] | None:
        """Return the ids of a shape with these contents after `close`.

        None if the ids have a control token that the template did not write, or a content has a
        text marker of the template.
        """
        if self._guard.holds_marker(contents):
            return None

        if not shape.edges:
            ids = self._codec.encode_after(interleave(shape.pieces, contents), shape.after)
            control_ids = tuple(filter(self._guard.control_ids.__contains__, ids))
            return close + ids if control_ids == shape.expected else None

        ids = close.copy()
        for (before, after), fixed, content in zip(
            shape.edges, shape.fixed, contents, strict=False
        ):
            segment = self._encode_segment(f"{before}{content}{after}")
            if not self._guard.control_ids.isdisjoint(segment):
                return None
            ids += fixed
            ids += segment
        ids += shape.fixed[-1]
        return ids

    def find(
        self,
        messages: Sequence[Message],
        render: GuardRender,
        tools: Sequence[Mapping[str, Any]] = (),
        after: str = "",
    ) -> AppendShape:
        """Find the text around contents and how the template changes them.

        A shape without `pieces` is returned where contents do not appear unchanged.

        Raises `TemplateError` if the template drops a content.
        """
        # Names, ids and schemas come from the environment: control text in them is not the
        # template's.
        harmless = [map_texts(message, lambda _: "x") for message in messages]
        if self._guard.encode(harmless, render, tools, after).control:
            return AppendShape(after=after)
        if any(message.tool_calls or message.reasoning for message in messages):
            render([replace(message, content=message.text) for message in messages])
            return AppendShape(after=after)

        marks = [random_mark() for _ in texts_of(messages)]
        rest = render(with_texts(messages, marks))
        pieces: list[str] = []
        for mark in marks:
            before, found, rest = rest.partition(mark)
            if not found and not any(mark in piece for piece in pieces):
                roles = [message.role for message in messages]
                raise TemplateError(f"{self._origin}: drops a message of roles {roles}")
            if not found or mark in rest:
                return AppendShape(after=after)  # it repeats a text, or changes the order
            pieces.append(before)
        pieces.append(rest)

        def is_written(contents: Sequence[str], transform: Callable[[str], str]) -> bool:
            rendered = render(with_texts(messages, contents))
            return rendered == interleave(pieces, list(map(transform, contents)))

        probes = probe_contents(len(pieces) - 1)
        for name, transform in CONTENT_TRANSFORMS.items():
            if all(is_written(contents, transform) for contents in probes):
                return self._split_at_control(tuple(pieces), name, after)
        return AppendShape(after=after)

    def _split_at_control(self, pieces: tuple[str, ...], transform: str, after: str) -> AppendShape:
        """Split the template text at its control tokens into known ids and text that touches a
        content.

        The result is compared with encoding the complete text at once, over the probe contents.
        Tokenizers whose segments are not independent (word-start marks, tokens that absorb white
        space) encode the complete text.
        """
        expected: list[int] = []
        for piece in pieces:
            expected += self._guard.template_control_ids(piece)
        unsplit = AppendShape(pieces, transform, tuple(expected), after=after)

        # A piece is cut before its first control token and after its last one. What is outside
        # touches a content; before the first content and after the last one there is no such end.
        fixed: list[str] = []
        edges: list[str] = []
        for number, piece in enumerate(pieces):
            tokens = [match.span() for match in self._guard.split.finditer(piece)]
            is_first = number == 0
            is_last = number == len(pieces) - 1
            if not tokens and not (is_first or is_last):
                return unsplit  # no control token separates two contents

            start = 0
            if not is_first:
                start = tokens[0][0] if tokens else len(piece)
                edges.append(piece[:start])
            end = len(piece)
            if not is_last:
                end = tokens[-1][1] if tokens else 0
                edges.append(piece[end:])
            fixed.append(piece[start:end])

        fixed_ids = [tuple(self._codec.encode_after(fixed[0], after))]
        fixed_ids += [tuple(self._encode_segment(text)) for text in fixed[1:]]
        split = replace(
            unsplit,
            fixed=tuple(fixed_ids),
            edges=tuple(zip(edges[::2], edges[1::2], strict=True)),
        )
        for contents in probe_contents(len(pieces) - 1):
            if self.fill_ids(split, contents, []) != self.fill_ids(unsplit, contents, []):
                return unsplit
        return split
