"""Probe a template with marker conversations; proven append patterns."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from turnwise.errors import TemplateError
from turnwise.renderers.control_text import ControlTextGuard, GuardRender, map_texts, random_mark
from turnwise.renderers.template import ADAPT, PROBE_TOOLS, ChatTemplate, Tools, call_id
from turnwise.renderers.tokenizer import Tokenizer
from turnwise.types import Message, ToolCall

# Contents that templates are known to treat differently: padded (trimmed), JSON (loaded and dumped again), escapes.
_PROBES = ("plain words", " \n padded\t ", '{"key": [1, "a"], "ok": true}', "line\nline\n\nline", "<b>'&\"</b>")
SHOWN: Mapping[str, Callable[[str], str]] = {
    "": lambda text: text,
    "strip": lambda text: text.strip(),
    "json": lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    "strip json": lambda text: json.dumps(text.strip(), ensure_ascii=False)[1:-1],
}
"""By name: what templates are known to do to a content."""


def contents_unchanged(messages: Sequence[Message], pieces: Sequence[str], shown: str, render: GuardRender) -> bool:
    """Whether template text with contents between its pieces is what the template writes, for contents that are awkward."""
    for contents in probe_contents(len(pieces) - 1):
        text = render(with_texts(messages, contents))
        if text != interleave(pieces, list(map(SHOWN[shown], contents))):
            return False
    return True


def texts_of(messages: Sequence[Message]) -> list[str]:
    """The texts of contents in order: one of a content that is a text, else one per part that is."""
    texts: list[str] = []
    for message in messages:
        if isinstance(message.content, str):
            texts.append(message.content)
        else:
            texts += [part for part in message.content if isinstance(part, str)]
    return texts


def with_texts(messages: Sequence[Message], texts: Sequence[str]) -> list[Message]:
    """The messages with these texts in place of their own; what is seen stays where it is."""
    rest = iter(texts)
    return [map_texts(message, lambda _: next(rest)) for message in messages]


def probe_contents(count: int) -> list[list[str]]:
    """Awkward contents for so many messages, each in each place once."""
    return [[_PROBES[(number + i) % len(_PROBES)] for i in range(count)] for number in range(len(_PROBES))]


def interleave(pieces: Sequence[str], contents: Sequence[str]) -> str:
    """Pieces with contents between them, one fewer."""
    if len(contents) == 1:
        return pieces[0] + contents[0] + pieces[1]
    return "".join([text for pair in zip(pieces, contents, strict=False) for text in pair]) + pieces[-1]


_ASKED = (Message("user", "u"),)


def _conversations() -> tuple[tuple[Message, ...], ...]:
    """Conversations up to a reply, none of which a template that keeps no state tells from a lone question.

    They have a system message, replies with and without thinking, calls and results, several of each and behind each other,
    and are of several lengths: counters, flags and windows differ in them.
    """
    user, said = Message("user", "u"), Message("assistant", "a")
    thought = replace(said, reasoning="thought")

    def called(*numbers: int) -> tuple[Message, ...]:
        calls = tuple(ToolCall("f", {"x": "1"}, f"past{number:05d}") for number in numbers)
        told = (Message("tool", "t", tool_call_id=call.id, name="f") for call in calls)
        return (Message("assistant", "", calls), *told)

    system = (Message("system", "s"), user)
    rounds = (user, *called(0), said, user, *called(1, 2), thought, user, *called(3), *called(4), said, user)
    return (
        system,
        (user, said, user),
        (user, thought, user, thought, user, thought, user),
        (user, *called(0), said, user),
        (user, *called(0)),
        rounds,
        (*system, thought, *rounds, said, *rounds, *called(5), *called(6, 7)),
    )


CONVERSATIONS = _conversations()


@dataclass(frozen=True, slots=True)
class ReplyEnding:
    """How a template ends replies of one kind: with text, or with tool calls."""

    stops: tuple[str, ...] = ()
    """Control tokens that end such a reply, as texts; empty where only plain text ends it."""
    heads: bool = False
    """Whether the stop is the header of the message that follows, so that it must not be written twice."""
    head: str = ""
    """What stands behind the reply's content in the middle of a conversation, the stop included."""
    last: str = ""
    """What stands behind it where the conversation ends."""

    @property
    def close_in_last(self) -> str:
        """The part of `last` up to the stop; empty where the stop is not in it."""
        stop = self.stops[0] if self.stops else ""
        before, found, _ = self.last.partition(stop) if stop else ("", "", "")
        return before + found if found else "" if stop else self.last


@dataclass(frozen=True, slots=True)
class AppendProbe:
    """How messages of certain roles are appended behind a reply; proven on stand-ins, used for all of that shape."""

    base: tuple[Message, ...]
    """A conversation that ends in a stand-in of the reply."""
    mark: str
    """What the stand-in's visible end is marked with."""
    tools: Tools
    proof: str
    """`append`: all that was written before stays; `tail`: what follows the reply stays, something before it is rewritten;
    `swap`: the template closes a reply in another way once something follows, and what was sampled is kept."""
    head: str = ""
    """What stands between the mark and the end of the reply, its stop included."""
    heads: bool = False
    """Whether the stop is the header of what follows."""
    adapt: str = ""
    """How messages have to be changed so that the template shows them: `""`, `ids` or `user`."""
    pieces: tuple[str, ...] = ()
    """What the template writes from the mark on: before, between and behind the contents of the messages."""

    @property
    def with_calls(self) -> bool:
        """Whether the reply makes tool calls, so that its mark stands inside one."""
        return bool(self.base[-1].tool_calls)

    def adapted(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as the template can show them."""
        return ADAPT[self.adapt](messages)


@dataclass(frozen=True, slots=True)
class TemplateProbe:
    """Shows one template conversations made of marks."""

    template: ChatTemplate
    control: Collection[str]
    """The tokenizer's control tokens."""
    split: re.Pattern[str]
    """Splits a text at control tokens and keeps them."""
    declared: frozenset[str] = frozenset()
    """Control tokens that are known to end replies (the tokenizer's end of sequence)."""
    text: ReplyEnding = field(init=False)
    """How replies without tool calls end."""
    calls: ReplyEnding = field(init=False)
    """How replies with tool calls end."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", self._text_closing())
        object.__setattr__(self, "calls", self._calls_closing())

    @property
    def stops(self) -> tuple[str, ...]:
        """Every control token that ends a reply."""
        return tuple(dict.fromkeys((*self.text.stops, *self.calls.stops)))

    # How replies end

    def _text_closing(self) -> ReplyEnding:
        asked, said, next_said = random_mark(), random_mark(), random_mark()
        base = (Message("user", asked), Message("assistant", said))
        shown = self.template.render(base)
        last = _behind(shown, said)
        if last is None:
            raise TemplateError(f"{self.template.origin}: does not show what an assistant says")
        try:
            following = self.template.render((*base, Message("user", next_said)), generation_prompt=True)
        except TemplateError:
            following = shown
        text = _behind(following, said) or ""
        text = text.partition(next_said)[0]
        same = common_prefix(last, text)
        found = [(t, end) for t, end in self._tokens(text) if t in self.declared]
        if found:
            stop, end = found[0]
            return ReplyEnding((stop,), self._opens(stop, text, shown, asked), text[:end], last)
        both, ending = self._tokens(same), self._tokens(last)
        if not text.startswith(last) or self._prompts():
            both = both[: len(ending) - self._prompted(shown, asked) + 1]
        if both:
            stop, end = both[-1]
            return ReplyEnding((stop,), self._opens(stop, text, shown, asked), text[:end], last)
        if ending:  # swapped for another token once something follows
            following_tokens = self._tokens(text)[: len(ending)]
            return ReplyEnding((ending[-1][0],), False, text[: following_tokens[-1][1]] if following_tokens else "", last)
        tokens = self._tokens(text)
        if tokens and not last.strip():  # nothing ends the last reply: what follows it does
            stop, end = tokens[0]
            return ReplyEnding((stop,), self._opens(stop, text, shown, asked), text[:end], last)
        return ReplyEnding(head=same, last=last)

    def _prompts(self) -> bool:
        """Whether the template opens all of the next reply unasked, so that its header seems to close the last one."""
        asked = (Message("user", "u"),)
        return self.template.render(asked) == self.template.render(asked, generation_prompt=True)

    def _prompted(self, shown: str, asked: str) -> int:
        """Control tokens that end both a user's message and a reply where the template opens the next reply unasked."""
        alone = self.template.render((Message("user", asked),))
        return len(self._tokens(common_prefix(alone[::-1], shown[::-1])[::-1]))

    def _opens(self, stop: str, between: str, shown: str, asked: str) -> bool:
        """Whether a token that ends a reply is the header of the user's message behind it (GLM's `<|user|>`)."""
        return self._tokens(between)[-1][0] == stop and stop in shown.partition(asked)[0]

    def _calls_closing(self) -> ReplyEnding:
        """Where no reply with calls can be shown, they end like any other."""
        result = random_mark()
        answer = Message("tool", result, tool_call_id=call_id(0), name="f")
        calls = (ToolCall("f", {"x": "1"}, call_id(0)),)
        for tools in (PROBE_TOOLS, ()):
            for base, own in self._stand_ins(_ASKED, Message("assistant"), calls, tools):
                try:
                    last = _behind(self.template.render(base, tools), own)
                    following = self.template.render((*base, answer), tools, generation_prompt=True)
                except TemplateError:
                    continue
                text = _behind(following, own)
                if last is None or text is None or result not in text:
                    continue
                return self._end_of_calls(last, text.partition(result)[0])
        return self.text

    def _end_of_calls(self, last: str, text: str) -> ReplyEnding:
        known = [(t, end) for t, end in self._tokens(text) if t in self.declared or t in self.text.stops]
        if known:
            return ReplyEnding((known[0][0],), self.text.heads, text[: known[0][1]], last)
        same = common_prefix(last, text)
        inside, behind = self._tokens(same), self._tokens(text)[len(self._tokens(same)) :]
        unended = not self._tokens(self.text.last) and bool(self.text.stops)
        opened = [end - len(token) for token, end in inside if token in self._openers()]
        if opened and self.text.stops:  # what follows is opened with nothing before it: the model ends calls as it ends text
            return ReplyEnding(self.text.stops, self.text.heads, same[: opened[0]], last)
        if behind and (unended or len(self._tokens(last)) > len(inside)):
            return ReplyEnding((behind[0][0],), True, text[: behind[0][1]], last)
        if inside:
            return ReplyEnding((inside[-1][0],), False, text[: inside[-1][1]], last)
        return ReplyEnding(self.text.stops, self.text.heads, same, last)

    def _openers(self) -> set[str]:
        """The control tokens of a generation prompt."""
        asked = (Message("user", "u"),)
        without, prompted = self.template.render(asked), self.template.render(asked, generation_prompt=True)
        return {token for token, _ in self._tokens(prompted[len(common_prefix(without, prompted)) :])}

    def _tokens(self, text: str) -> list[tuple[str, int]]:
        """The control tokens of a text, in order, each with the position behind it."""
        return [(match.group(), match.end()) for match in self.split.finditer(text)]

    # Appending

    def append(
        self, reply: Message, messages: Sequence[Message], tools: Tools = (), before: Sequence[Message] = _ASKED
    ) -> AppendProbe:
        """How messages like these are appended behind a reply like this one.

        Args:
            before: the conversation that the reply ends.

        Raises:
            TemplateError: when the template cannot show them there in any way.
        """
        first: TemplateError | None = None
        for adapt in ["", *(["ids", "user"] if any(m.role == "tool" for m in (*before, *messages)) else [])]:
            change = ADAPT[adapt]
            try:
                found = self._prove(change(before), change([reply])[0], change(messages), tools)
                return replace(found, adapt=adapt)
            except TemplateError as error:
                first = first or error
        assert first is not None
        raise first

    def varies(self, append: AppendProbe, reply: Message, messages: Sequence[Message], tools: Tools = ()) -> bool:
        """Whether what follows a reply is another text behind other calls, or some longer conversation."""
        calls = tuple(replace(call, arguments={"x": "2"}) for call in reply.tool_calls)
        for number, before in enumerate((_ASKED, *CONVERSATIONS)):
            one = reply if number else replace(reply, tool_calls=calls)
            try:
                if self.append(one, messages, tools, before).pieces != append.pieces:
                    return True
            except TemplateError:
                continue  # a conversation of another kind than the template takes
        return False

    def _prove(self, before: Sequence[Message], reply: Message, messages: Sequence[Message], tools: Tools) -> AppendProbe:
        refused: TemplateError | None = None
        for calls in self._calls(reply, messages):
            for told in (tools, ()) if tools else (tools,):
                for base, own in self._stand_ins(before, reply, calls, told):
                    try:
                        return self._try(base, own, messages, told)
                    except TemplateError as problem:
                        refused = refused or problem
        error = f"{self.template.origin}: cannot show the reply that {[m.role for m in messages]} answers"
        raise refused or TemplateError(error)

    def _calls(self, reply: Message, messages: Sequence[Message]) -> list[tuple[ToolCall, ...]]:
        """The calls of a stand-in: the reply's own, else, for templates that insist on some, those that are answered."""
        own, answered = calls_before(reply), calls_before(reply, messages)
        return [own] if own == answered else [own, answered]

    def _try(self, base: tuple[Message, ...], own: str, messages: Sequence[Message], tools: Tools) -> AppendProbe:
        """How messages are appended behind a stand-in.

        Raises:
            TemplateError: where they cannot be.
        """
        roles = [m.role for m in messages]
        marks = [random_mark() for _ in messages]
        marked = [replace(m, content=one) for m, one in zip(messages, marks, strict=True)]
        shown = self.template.render(base, tools)
        full = self.template.render((*base, *marked), tools, generation_prompt=True)
        tail, text = _behind(shown, own), _behind(full, own)
        if tail is None or text is None:
            raise TemplateError(f"{self.template.origin}: does not show the reply in front of {roles}")
        rest, pieces = text, []
        for one in marks:
            piece, found, rest = rest.partition(one)
            if not found or one in rest or full.count(one) != 1:
                raise TemplateError(f"{self.template.origin}: drops, repeats or moves a message of roles {roles}")
            pieces.append(piece)
        end, heads = self.reply_end(text, marks[0] if marks else None)
        proof = "append" if full.startswith(shown) else "tail" if text.startswith(tail) else "swap"
        if proof == "swap" and not end:
            raise TemplateError(
                f"{self.template.origin}: appending {roles} rewrites the close of the reply before it "
                f"({tail!r} became {text[: len(tail) + 8]!r})"
            )
        return AppendProbe(base, own, tools, proof, text[:end], heads, "", (*pieces, rest))

    def reply_end(self, text: str, until: str | None = None) -> tuple[int, bool]:
        """Where a reply is over in the text behind its visible end, and whether its stop is the header of what follows.

        Args:
            until: a content that the reply cannot reach over.
        """
        if until is not None:
            text = text.partition(until)[0]
        for token, end in self._tokens(text):
            for closing in (self.text, self.calls):
                if token in closing.stops:
                    return end, closing.heads
            if token in self.declared:
                return end, False
        head = next((c.head for c in (self.text, self.calls) if c.head and text.startswith(c.head)), "")
        return len(head), False

    def rendered(self, append: AppendProbe, messages: Sequence[Message]) -> str:
        """What the template writes behind the end of a stand-in reply when these messages, adapted, follow it.

        Raises:
            TemplateError: when it refuses them.
        """
        text = self.template.render((*append.base, *messages), append.tools, generation_prompt=True)
        return text[self.end_of_reply(append, text) :]

    def end_of_reply(self, append: AppendProbe, text: str) -> int:
        """Where a stand-in reply is over in a text.

        Raises:
            TemplateError: where the text does not show it.
        """
        behind = _behind(text, append.mark)
        if behind is None or not behind.startswith(append.head):
            raise TemplateError(f"{self.template.origin}: does not show the reply in front of what follows it")
        return len(text) - len(behind) + len(append.head)

    def _stand_ins(
        self, before: Sequence[Message], reply: Message, calls: Sequence[ToolCall], tools: Tools
    ) -> Iterator[tuple[tuple[Message, ...], str]]:
        """Conversations that end in a stand-in of a reply, each with the mark that is shown last; the likeliest first."""
        content = not calls or bool(reply.text)
        for with_content in (content, not content) if calls else (True,):
            said, argument = random_mark(), random_mark()
            marked = tuple(
                replace(call, arguments={"x": argument}) if number == len(calls) - 1 else call
                for number, call in enumerate(calls)
            )
            thought = reply.reasoning and "thought"
            base = (*before, Message("assistant", said if with_content else "", tool_calls=marked, reasoning=thought))
            try:
                shown = self.template.render(base, tools)
            except TemplateError:
                continue
            place, own = max((shown.rfind(one), one) for one in (said, argument))
            if place >= 0:
                yield base, own


def text_between(text: str, one: str, other: str) -> str:
    """What stands between two marks, empty where they do not follow each other."""
    return text.rpartition(one)[2].partition(other)[0] if other in text.rpartition(one)[2] else ""


def common_prefix(one: str, other: str) -> str:
    """What two texts begin with alike."""
    size = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:size]


def _behind(text: str, own: str) -> str | None:
    """What stands behind the last occurrence of a mark; None where there is none."""
    _, found, rest = text.rpartition(own)
    return rest if found else None


def readable(messages: Sequence[Message]) -> list[Message]:
    """A conversation in which each call can be shown: those that could not be read give way to what answers them."""
    rows = list(messages)
    for number, message in enumerate(rows):
        if any(call.error or not call.name for call in message.tool_calls):
            answers = list(takewhile(lambda m: m.role == "tool", rows[number + 1 :]))
            rows[number] = replace(message, tool_calls=calls_before(message, answers))
    return rows


def calls_before(reply: Message, messages: Sequence[Message] = ()) -> tuple[ToolCall, ...]:
    """The calls of a reply that these messages may answer; made up where tools answer calls that it did not make."""
    calls = tuple(call for call in reply.tool_calls if call.name and not call.error)
    answers = [m for m in messages if m.role == "tool"]
    if calls or not answers:
        return calls
    return tuple(ToolCall(m.name or "f", {"x": "1"}, m.tool_call_id or call_id(i)) for i, m in enumerate(answers))


@dataclass(frozen=True, slots=True)
class AppendShape:
    """What a template writes between a reply and the next one, for messages of certain roles; proven by probing.

    Added tokens cut a text before anything else happens to it, so what stands between two of them is encoded by itself:
    only the stretches that hold a content are encoded per turn, the rest is known.
    """

    pieces: tuple[str, ...] = ()
    """Template text before, between and behind the texts of contents; the first begins right behind the reply's end token.
    Empty where contents do not stand in the text as they are, so that every append is rendered for real."""
    shown: str = ""
    """How the template changes contents: `""`, `strip`, `json` or `strip json`."""
    expected: tuple[int, ...] = ()
    """Control ids of the pieces, in order."""
    fixed: tuple[tuple[int, ...], ...] = ()
    """Ids before, between and behind the stretches."""
    behind: str = ""
    """The control token that the whole stands behind; empty where it begins a prompt."""
    edges: tuple[tuple[str, str], ...] = ()
    """Template text before and behind each content, up to the nearest control tokens; empty where a whole append has to be
    encoded at once."""

    def contents(self, messages: Sequence[Message]) -> list[str]:
        """The texts of contents as the template shows them."""
        texts = texts_of(messages)
        return list(map(SHOWN[self.shown], texts)) if self.shown else texts


class AppendShapes:
    """Finds shapes of one template with one tokenizer, and fills them."""

    def __init__(self, codec: Tokenizer, guard: ControlTextGuard, origin: str) -> None:
        """
        Args:
            origin: what errors call the template.
        """
        self._codec = codec
        self._encode_stretch = codec.encode_segment
        self._guard = guard
        self._origin = origin

    def fill_ids(self, shape: AppendShape, contents: Sequence[str], close: list[int]) -> list[int] | None:
        """Ids of a shape with these contents behind `close`; None where a control token came out that the template did not
        write, or a marker of its that is no token stands in a content."""
        if self._guard.holds_marker(contents):
            return None
        if not shape.edges:
            ids = self._codec.encode_after(interleave(shape.pieces, contents), shape.behind)
            return close + ids if tuple(filter(self._guard.control_ids.__contains__, ids)) == shape.expected else None
        ids = close.copy()
        for (before, after), fixed, content in zip(shape.edges, shape.fixed, contents, strict=False):
            stretch = self._encode_stretch(f"{before}{content}{after}")
            if not self._guard.control_ids.isdisjoint(stretch):
                return None
            ids += fixed
            ids += stretch
        ids += shape.fixed[-1]
        return ids

    def find(
        self, messages: Sequence[Message], render: GuardRender, tools: Sequence[Mapping[str, Any]] = (), behind: str = ""
    ) -> AppendShape:
        """Find the template text around the contents, and whether contents pass through it unchanged.

        Raises:
            TemplateError: when the template drops or repeats a content.
        """
        harmless = [map_texts(m, lambda _: "x") for m in messages]
        if self._guard.encode(harmless, render, tools, behind).control:
            return AppendShape(behind=behind)  # names, ids and schemas are the world's too, and none of the template's own text
        if any(m.tool_calls or m.reasoning for m in messages):
            render([replace(m, content=m.text) for m in messages])
            return AppendShape(behind=behind)
        marks = [random_mark() for _ in texts_of(messages)]
        text = render(with_texts(messages, marks))
        pieces: list[str] = []
        for own in marks:
            before, found, text = text.partition(own)
            if not found or own in text:
                raise TemplateError(f"{self._origin}: drops or repeats a message of roles {[m.role for m in messages]}")
            pieces.append(before)
        pieces.append(text)
        for shown in SHOWN:
            if contents_unchanged(messages, pieces, shown, render):
                return self._cut(tuple(pieces), shown, behind)
        return AppendShape(behind=behind)

    def _cut(self, pieces: tuple[str, ...], shown: str, behind: str) -> AppendShape:
        """Cut the template text at its control tokens into what is known and what touches a content.

        Each cut is compared with the whole, encoded at once, over the probes: tokenizers whose pieces are not independent
        (word-start marks, tokens that eat white space) keep to the whole.
        """
        expected = tuple(i for piece in pieces for i in self._guard.template_control_ids(piece))
        whole = AppendShape(pieces, shown, expected, behind=behind)
        fixed: list[str] = []
        edges: list[str] = []
        for number, piece in enumerate(pieces):
            tokens = [match.span() for match in self._guard.split.finditer(piece)]
            is_first, is_last = number == 0, number == len(pieces) - 1
            if not tokens and not (is_first or is_last):
                return whole  # two contents that no control token parts
            start = 0 if is_first else tokens[0][0] if tokens else len(piece)
            end = len(piece) if is_last else tokens[-1][1] if tokens else 0
            if not is_first:
                edges.append(piece[:start])
            fixed.append(piece[start:end])
            if not is_last:
                edges.append(piece[end:])
        cut = AppendShape(
            pieces,
            shown,
            expected,
            (tuple(self._codec.encode_after(fixed[0], behind)), *(tuple(self._encode_stretch(text)) for text in fixed[1:])),
            behind,
            tuple(zip(edges[::2], edges[1::2], strict=True)),
        )
        for contents in probe_contents(len(pieces) - 1):
            if self.fill_ids(cut, contents, []) != self.fill_ids(whole, contents, []):
                return whole
        return cut
