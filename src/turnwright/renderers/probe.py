"""Probe a template with random marks; derive and prove append patterns."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

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

# Contents that templates treat differently: padded (trimmed), JSON (loaded and
# dumped again), escapes.
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
    """Return lists of `count` difficult contents, such that each content is
    at each position once."""
    return [
        [_PROBES[(number + i) % len(_PROBES)] for i in range(count)]
        for number in range(len(_PROBES))
    ]


def interleave(pieces: Sequence[str], contents: Sequence[str]) -> str:
    """Join pieces with contents between them; there is one content fewer than pieces."""
    if len(contents) == 1:
        return pieces[0] + contents[0] + pieces[1]
    return (
        "".join([text for pair in zip(pieces, contents, strict=False) for text in pair])
        + pieces[-1]
    )


def _conversations() -> tuple[tuple[Message, ...], ...]:
    """Return conversations up to a reply, which a stateless template continues as
    it does a single question.

    They include system messages, replies with and without thinking, and single, parallel and
    successive calls and results. Their lengths differ, so that counters, flags and windows show.
    """
    user, answer = ASKED, Message("assistant", "a")
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
        stop = self.stops[0] if self.stops else ""
        before, found, _ = self.last.partition(stop) if stop else ("", "", "")
        return before + found if found else "" if stop else self.last


@dataclass(frozen=True, slots=True)
class AppendProbe:
    """How messages of certain roles are appended to a reply; proven with placeholders, used
    for all of that shape."""

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
    """Change of tool results that the template requires, a name of `ADAPT`; `user` if it
    has no place for them."""
    part_ends: frozenset[str] = field(init=False)
    """Control tokens that end a reply, and also a part of one: its thinking, or the
    first of several calls."""

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
        return tuple(token for token in stops if token not in self.part_ends) or tuple(
            sorted(self.declared)
        )

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
        following = self.template.try_render(
            (*base, Message("user", next_message)), generation_prompt=True
        )
        text = (_after_mark(rendered if following is None else following, reply) or "").partition(
            next_message
        )[0]
        same = last[: common_prefix_length(last, text)]
        if found := [(t, end) for t, end in self._tokens(text) if t in self.declared]:
            return self._stopped(found[0], text, rendered, asked, last)
        both, ending = self._tokens(same), self._tokens(last)
        if not text.startswith(last) or len(set(self._prompts())) == 1:
            # A template that always opens the next reply seems to close the last one by its header:
            # leave out the tokens that end both a user message and a reply.
            alone = self.template.render((Message("user", asked),))
            same_end = rendered[len(rendered) - common_prefix_length(alone[::-1], rendered[::-1]) :]
            both = both[: len(ending) - len(self._tokens(same_end)) + 1]
        if both:
            return self._stopped(both[-1], text, rendered, asked, last)
        if ending:  # replaced by another token once something follows
            following_tokens = self._tokens(text)[: len(ending)]
            return ReplyEnding(
                (ending[-1][0],),
                False,
                text[: following_tokens[-1][1]] if following_tokens else "",
                last,
            )
        tokens = self._tokens(text)
        if (
            tokens and not last.strip()
        ):  # nothing ends the last reply; the next message's header does
            return self._stopped(tokens[0], text, rendered, asked, last)
        return ReplyEnding(head=same, last=last)

    def _find_part_ends(self) -> frozenset[str]:
        """Find the stops that the template also writes before a reply's end.

        They stand between the thinking and the text, between two calls, or between the
        generation prompt and a call.
        """
        asked, thought, answered, one, two = (random_mark() for _ in range(5))
        base = (Message("user", asked),)
        answer = Message("assistant", answered, reasoning=thought)
        calls = tuple(
            ToolCall("f", {"x": text}, call_id(number)) for number, text in enumerate((one, two))
        )
        thinking = self.template.try_render((*base, answer)) or ""
        calling = (
            self.template.try_render((*base, Message("assistant", "", calls)), PROBE_TOOLS) or ""
        )

        found: set[str] = set()
        prompt = self.template.try_render(base, PROBE_TOOLS, generation_prompt=True) or ""
        opening = prompt.rpartition(asked)[2]
        for rendered, first, last, stops in (
            (thinking, thought, answered, self.text.stops),
            (calling, one, two, self.calls.stops),
            (calling, opening, one, self._written_stops()),
        ):
            _, asks, reply = rendered.rpartition(asked)
            _, begins, rest = reply.partition(first) if first else ("", "", "")
            between, ends, _ = rest.partition(last)
            if asks and begins and ends:
                found |= {token for token, _ in self._tokens(between) if token in stops}
        return frozenset(found) - self.declared

    def _prompts(self) -> tuple[str, str]:
        """Render a question without and with the generation prompt."""
        return self.template.render((ASKED,)), self.template.render(
            (ASKED,), generation_prompt=True
        )

    def _stopped(
        self, stop: tuple[str, int], text: str, rendered: str, asked: str, last: str
    ) -> ReplyEnding:
        """Return the ending by a token, which may be the header of the next user message
        too (GLM's `<|user|>`)."""
        token, end = stop
        heads = self._tokens(text)[-1][0] == token and token in rendered.partition(asked)[0]
        return ReplyEnding((token,), heads, text[:end], last)

    def _find_calls_ending(self) -> ReplyEnding:
        """Find the ending of replies with calls; that of other replies if none with
        calls can be rendered."""
        result = random_mark()
        for tools in (PROBE_TOOLS, ()):
            for base, mark, rendered in self._placeholders(
                (ASKED,), Message("assistant"), (PROBE_CALL,), tools
            ):
                last = _after_mark(rendered, mark)
                following = self.template.try_render(
                    (*base, probe_result(result)), tools, generation_prompt=True
                )
                text = _after_mark(following or "", mark)
                if last is not None and text is not None and result in text:
                    return self._calls_ending(last, text.partition(result)[0])
        return self.text

    def _calls_ending(self, last: str, text: str) -> ReplyEnding:
        known = [
            (t, end) for t, end in self._tokens(text) if t in self.declared or t in self.text.stops
        ]
        if known:
            return ReplyEnding((known[0][0],), self.text.heads, text[: known[0][1]], last)
        same = last[: common_prefix_length(last, text)]
        inside, after = self._tokens(same), self._tokens(text)[len(self._tokens(same)) :]
        unended = not self._tokens(self.text.last) and bool(self.text.stops)
        without, prompted = self._prompts() if inside else ("", "")
        openers = {
            token for token, _ in self._tokens(prompted[common_prefix_length(without, prompted) :])
        }
        opened = [end - len(token) for token, end in inside if token in openers]
        if (
            opened and self.text.stops
        ):  # the next message opens without a stop before it: calls end as text does
            return ReplyEnding(self.text.stops, self.text.heads, same[: opened[0]], last)
        if after and (unended or len(self._tokens(last)) > len(inside)):
            return ReplyEnding((after[0][0],), True, text[: after[0][1]], last)
        if inside:
            return ReplyEnding((inside[-1][0],), False, text[: inside[-1][1]], last)
        return ReplyEnding(self.text.stops, self.text.heads, same, last)

    def _find_result_form(self) -> str:
        """Find the form in which the template shows a tool result; `user` if it
        shows it in no other."""
        result = random_mark()
        rows = (ASKED, Message("assistant", "", (PROBE_CALL,)), probe_result(result))
        for name in ("", "ids"):
            for tools in (PROBE_TOOLS, ()):
                if result in (
                    self.template.try_render(ADAPT[name](rows), tools, generation_prompt=True) or ""
                ):
                    return name
        return "user"

    def result_forms(self, messages: Sequence[Message]) -> list[str]:
        """Return the changes to try of messages with tool results, the likeliest
        first; names of `ADAPT`."""
        if not any(m.role == "tool" for m in messages):
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
        """Derive how messages like these are appended to a reply like this one, which ends
        the conversation `before`.

        With `verbatim`, the reply's text is rendered too, for a template
        that looks for words in it.

        Raises `TemplateError` if the template cannot append them in any form.
        """
        first: TemplateError | None = None
        for adapt in self.result_forms((*before, *messages)):
            change = ADAPT[adapt]
            try:
                found = self._prove(
                    change(before), change([reply])[0], change(messages), tools, verbatim
                )
                return replace(found, adapt=adapt)
            except TemplateError as error:
                first = first or error
        assert first is not None
        raise first

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
        marked = [m if _is_blank(m) else replace(m, content=random_mark()) for m in messages]
        text = self.template.try_render((*before, reply, *marked), tools, generation_prompt=True)
        rest = _after_mark(text or "", thought)
        if rest is None:
            return ""
        first = str(marked[0].content) if marked and not _is_blank(marked[0]) else None
        end, _ = self.reply_end(rest, first)
        at = rest.partition(first)[0].find(head) if first and head else -1
        if not end and at >= 0:
            end = at + len(head)  # a header in plain text
        # Some templates end a reply that has no text without a stop, or write its
        # parts after the thinking.
        if not end or self.part_ends:
            alone = _after_mark(self.template.try_render((*before, reply), tools) or "", thought)
            end = common_prefix_length(rest, alone or "")
        return rest[:end]

    def varies(
        self, append: AppendProbe, reply: Message, messages: Sequence[Message], tools: Tools = ()
    ) -> bool:
        """Return whether the appended text differs after other calls or
        some longer conversation."""
        calls = tuple(replace(call, arguments={"x": "2"}) for call in reply.tool_calls)
        for number, before in enumerate(((ASKED,), *CONVERSATIONS)):
            one = reply if number else replace(reply, tool_calls=calls)
            try:
                if self.append(one, messages, tools, before).pieces != append.pieces:
                    return True
            except TemplateError:
                continue  # a kind of conversation that the template rejects
        return False

    def _prove(
        self,
        before: Sequence[Message],
        reply: Message,
        messages: Sequence[Message],
        tools: Tools,
        verbatim: bool,
    ) -> AppendProbe:
        refused: TemplateError | None = None
        of_reply, answered = (
            calls_before(reply),
            calls_before(reply, messages),
        )  # some templates require calls
        for calls in (of_reply,) if of_reply == answered else (of_reply, answered):
            for offered in (tools, ()) if tools else (tools,):
                for base, mark, rendered in self._placeholders(
                    before, reply, calls, offered, verbatim
                ):
                    try:
                        return self._try(base, mark, rendered, messages, offered)
                    except TemplateError as problem:
                        refused = refused or problem
        error = (
            f"{self.template.origin}: cannot render the reply that "
            f"{[m.role for m in messages]} answers"
        )
        raise refused or TemplateError(error)

    def _try(
        self,
        base: tuple[Message, ...],
        mark: str,
        rendered: str,
        messages: Sequence[Message],
        tools: Tools,
    ) -> AppendProbe:
        """Derive how messages are appended to a placeholder.

        Raises `TemplateError` if they cannot be.
        """
        roles = [m.role for m in messages]
        # A blank text stays as it is, since templates may omit it.
        marked = [m if _is_blank(m) else replace(m, content=random_mark()) for m in messages]
        marks = [
            str(one.content) for m, one in zip(messages, marked, strict=True) if not _is_blank(m)
        ]
        full = self.template.render((*base, *marked), tools, generation_prompt=True)
        tail, text = _after_mark(rendered, mark), _after_mark(full, mark)
        if tail is None or text is None:
            raise TemplateError(f"{self.template.origin}: does not render the reply before {roles}")
        rest, pieces = text, []
        for one in marks:
            piece, found, rest = rest.partition(one)
            if not found or one in rest or full.count(one) != 1:
                raise TemplateError(
                    f"{self.template.origin}: drops, repeats or moves a message of roles {roles}"
                )
            pieces.append(piece)
        first = marks[0] if marks and not _is_blank(messages[0]) else None
        end, heads = self.reply_end(text, first)
        proof = (
            "append" if full.startswith(rendered) else "tail" if text.startswith(tail) else "swap"
        )
        if proof == "swap" and not end:
            change = (
                f"rewrites the close of the reply before it ({tail!r} became "
                f"{text[: len(tail) + 8]!r})"
            )
            raise TemplateError(f"{self.template.origin}: appending {roles} {change}")
        return AppendProbe(base, mark, tools, proof, text[:end], heads, "", (*pieces, rest))

    def reply_end(self, text: str, until: str | None = None) -> tuple[int, bool]:
        """Find where a reply ends in the text after its visible end, and whether its stop is
        the next message's header.

        The reply cannot include the content `until`.
        """
        if until is not None:
            text = text.partition(until)[0]
        for token, end in self._tokens(text):
            for closing in (self.text, self.calls):
                if token in closing.stops:
                    return end, closing.heads
            if token in self.declared:
                return end, False
        head = next(
            (c.head for c in (self.text, self.calls) if c.head and text.startswith(c.head)), ""
        )
        return len(head), False

    def rendered(self, append: AppendProbe, messages: Sequence[Message]) -> str:
        """Return the template text after a placeholder reply that these adapted messages follow;
        may raise `TemplateError`."""
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
    ) -> Iterator[tuple[tuple[Message, ...], str, str]]:
        """Yield conversations that end in a placeholder of a reply, each with its last rendered
        mark and all that is rendered; the likeliest first."""
        content = not calls or bool(reply.text)
        for with_content in (content, not content) if calls else (True,):
            text, argument = random_mark(), random_mark()
            if verbatim:
                marked = (*calls[:-1], *(_with_mark(call, argument) for call in calls[-1:]))
            else:
                earlier = (replace(call, arguments={"x": random_mark()}) for call in calls[:-1])
                marked = (
                    *earlier,
                    *(replace(call, arguments={"x": argument}) for call in calls[-1:]),
                )
            thought = reply.reasoning
            if thought and not thought.isspace():
                thought = random_mark()
            visible = text if with_content else ""
            if verbatim and with_content:
                visible = reply.text + text  # the mark stays at the visible end
            base = (*before, Message("assistant", visible, tool_calls=marked, reasoning=thought))
            rendered = self.template.try_render(base, tools) or ""
            position, mark = max((rendered.rfind(one), one) for one in (text, argument))
            if position >= 0:
                yield base, mark, rendered


def _with_mark(call: ToolCall, mark: str) -> ToolCall:
    """Return a call with a mark at the end of its last text argument, or in
    an argument of its own."""
    arguments = dict(call.arguments)
    texts = [key for key, value in arguments.items() if isinstance(value, str)]
    if texts and texts[-1] == list(arguments)[-1]:
        return replace(call, arguments={**arguments, texts[-1]: arguments[texts[-1]] + mark})
    return replace(call, arguments={**arguments, "x": mark})


def _is_blank(message: Message) -> bool:
    content = message.content
    return isinstance(content, str) and (not content or content.isspace())


def _after_mark(text: str, mark: str) -> str | None:
    """Return the text after the last occurrence of a mark; None if there is none."""
    _, found, rest = text.rpartition(mark)
    return rest if found else None


def readable(messages: Sequence[Message]) -> list[Message]:
    """Replace malformed calls by calls that match their answers, so that every
    call can be rendered."""
    rows = list(messages)
    for number, message in enumerate(rows):
        if message.tool_calls and any(call.error or not call.name for call in message.tool_calls):
            answers = list(takewhile(lambda m: m.role == "tool", rows[number + 1 :]))
            rows[number] = replace(message, tool_calls=calls_before(message, answers))
    return rows


def calls_before(reply: Message, messages: Sequence[Message] = ()) -> tuple[ToolCall, ...]:
    """Return the calls of a reply that these messages may answer; invented if tools answer calls
    that it did not make."""
    calls = tuple(call for call in reply.tool_calls if call.name and not call.error)
    answers = [m for m in messages if m.role == "tool"]
    if calls or not answers:
        return calls
    return tuple(
        ToolCall(m.name or "f", {"x": "1"}, m.tool_call_id or call_id(i))
        for i, m in enumerate(answers)
    )


@dataclass(frozen=True, slots=True)
class AppendShape:
    """Template text between a reply and the next one, for messages of certain
    roles; proven by probing.

    Added tokens split a text before anything else happens to it, so the text between two of
    them is encoded independently. Only the segments that contain a content are encoded per
    turn; all other ids are known.
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
            return (
                close + ids
                if tuple(filter(self._guard.control_ids.__contains__, ids)) == shape.expected
                else None
            )
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
        """Find the text around contents and how the template changes them; raise `TemplateError` if
        it drops or repeats one."""
        harmless = [map_texts(m, lambda _: "x") for m in messages]
        if self._guard.encode(harmless, render, tools, after).control:
            return AppendShape(
                after=after
            )  # names, ids and schemas come from the environment, not from the template
        if any(m.tool_calls or m.reasoning for m in messages):
            render([replace(m, content=m.text) for m in messages])
            return AppendShape(after=after)
        marks = [random_mark() for _ in texts_of(messages)]
        text = render(with_texts(messages, marks))
        pieces: list[str] = []
        for mark in marks:
            before, found, text = text.partition(mark)
            if not found and not any(mark in piece for piece in pieces):
                raise TemplateError(
                    f"{self._origin}: drops a message of roles {[m.role for m in messages]}"
                )
            if not found or mark in text:
                return AppendShape(after=after)  # it repeats a text, or changes the order
            pieces.append(before)
        pieces.append(text)
        for name, transform in CONTENT_TRANSFORMS.items():
            if all(
                render(with_texts(messages, contents))
                == interleave(pieces, list(map(transform, contents)))
                for contents in probe_contents(len(pieces) - 1)
            ):
                return self._split_at_control(tuple(pieces), name, after)
        return AppendShape(after=after)

    def _split_at_control(self, pieces: tuple[str, ...], transform: str, after: str) -> AppendShape:
        """Split the template text at its control tokens into known ids and
        text that touches a content.

        The result is compared with encoding the complete text at once, over the probe contents.
        Tokenizers whose segments are not independent (word-start marks, tokens that absorb white
        space) encode the complete text.
        """
        expected = tuple(i for piece in pieces for i in self._guard.template_control_ids(piece))
        unsplit = AppendShape(pieces, transform, expected, after=after)
        fixed: list[str] = []
        edges: list[str] = []
        for number, piece in enumerate(pieces):
            tokens = [match.span() for match in self._guard.split.finditer(piece)]
            is_first, is_last = number == 0, number == len(pieces) - 1
            if not tokens and not (is_first or is_last):
                return unsplit  # no control token separates two contents
            start = 0 if is_first else tokens[0][0] if tokens else len(piece)
            end = len(piece) if is_last else tokens[-1][1] if tokens else 0
            if not is_first:
                edges.append(piece[:start])
            fixed.append(piece[start:end])
            if not is_last:
                edges.append(piece[end:])
        split = AppendShape(
            pieces,
            transform,
            expected,
            (
                tuple(self._codec.encode_after(fixed[0], after)),
                *(tuple(self._encode_segment(text)) for text in fixed[1:]),
            ),
            after,
            tuple(zip(edges[::2], edges[1::2], strict=True)),
        )
        for contents in probe_contents(len(pieces) - 1):
            if self.fill_ids(split, contents, []) != self.fill_ids(unsplit, contents, []):
                return unsplit
        return split
