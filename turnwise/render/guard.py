"""Text from the world cannot become control: rendered messages to ids, control tokens from the template alone."""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, NoReturn

from turnwise.errors import ControlTextError, TemplateError
from turnwise.render.breaker import ControlTextEscaper, ControlTextRules
from turnwise.render.codec import PrecedingToken, Tokenizer, control_pattern
from turnwise.render.markers import TemplateMarkers
from turnwise.types import Message

ControlText = Literal["neutralise", "reject", "allow"]
"""What becomes of control text in messages: encoded as plain text, refused, or taken for control (and counted)."""
GuardRender = Callable[..., str]
"""The text of messages by a template, `render(messages)`; called as `render(messages, tools)` where tools were given."""
Tools = Sequence[Mapping[str, Any]]
Cut = Callable[[str], Sequence[tuple[int, int, str]]]
"""Stretches of a text: where each begins and ends, and the control token that it stands behind (empty for none)."""

_NONE: Counter[str] = Counter()
_SHOWN = 60
"""Characters of a control text in an error."""


class EncodedMessages(NamedTuple):
    """Rendered messages as ids."""

    ids: list[int]
    neutralised: int = 0
    """Control texts encoded as plain text."""
    control: Mapping[str, int] = {}
    """Control texts met, whatever was done about them, by the role that they came from (`tools` for schemas)."""


class ControlTextGuard:
    """Encodes rendered messages of one tokenizer so that no content becomes a control token (invariant 8)."""

    def __init__(self, codec: Tokenizer, mode: ControlText = "neutralise", banned: Collection[str] = ()) -> None:
        """
        Args:
            codec: the tokenizer.
            mode: what becomes of control text.
            banned: texts of control tokens that no mode lets through (image placeholders).
        """
        self._codec = codec
        self.mode = mode
        self.split = control_pattern(codec.control)
        """Splits a text at control tokens and keeps them."""
        self.control_ids = frozenset(codec.control.values())
        self.literals: re.Pattern[str] | None = None
        """Finds the template's markers that are no tokens; None where it writes none."""
        self._banned = frozenset(codec.control[text] for text in banned if text in codec.control)
        self._unsaid = codec.special

    def observe_template(self, seen: TemplateMarkers) -> None:
        """Take account of what a template writes.

        Args:
            seen: its markers, and the control tokens that only the world's turns hold.
        """
        self.literals = re.compile("|".join(map(re.escape, seen.literals))) if seen.literals else None
        self._unsaid = self._codec.special | {self._codec.control[text] for text in seen.incoming_control}

    def template_control_ids(self, text: str) -> tuple[int, ...]:
        """The control ids of a text that is all the template's own, in order."""
        control = self._codec.control
        return tuple(control[part] for part in self.split.split(text) if part in control)

    def holds_marker(self, contents: Sequence[str]) -> bool:
        """Whether contents hold a marker of the template's that is no token, which ids alone do not show."""
        return self.literals is not None and any(map(self.literals.search, contents))

    def sanitize_reply(self, reply: Message) -> tuple[Message, Counter[str]]:
        """A reply without control text in the names and ids of its calls, which a template may write elsewhere; and hits.

        The reply's own ids are what was sampled, and stay; this is about what answers it.
        """
        if not reply.tool_calls:
            return reply, _NONE
        breaker = ControlTextEscaper(self._codec, self.split, lambda _: self._rules("tool"), ("", ""))
        calls = tuple(
            replace(
                call, name=breaker.without_control(call.name, "assistant"), id=breaker.without_control(call.id, "assistant")
            )
            for call in reply.tool_calls
        )
        return (replace(reply, tool_calls=calls), breaker.hits) if breaker.hits else (reply, _NONE)

    def encode(self, messages: Sequence[Message], render: GuardRender, tools: Tools = (), behind: str = "") -> EncodedMessages:
        """Ids of rendered messages whose contents hold no control token, and which control texts they held.

        Each control text in a content gets a mark put inside before the template sees it, so every control token in what is
        rendered is the template's own; the rest is encoded without control tokens, cut at the marks.

        Args:
            messages: from the world; assistant messages among them are demonstrations.
            render: the template.
            tools: schemas that the template shows; they are the world's too.
            behind: the control token that the text stands behind; empty where it begins a prompt.

        Raises:
            ControlTextError: in mode `reject`, for the first control text.
            TemplateError: when the template cannot show the messages.
        """
        (ids,), found = self.encode_cut(messages, render, lambda text: [(0, len(text), behind)], tools)
        return found._replace(ids=ids)

    def encode_cut(
        self, messages: Sequence[Message], render: GuardRender, cut: Cut, tools: Tools = (), said: int = 0
    ) -> tuple[list[list[int]], EncodedMessages]:
        """As `encode`, for stretches of what is rendered; what stands between them has ids already.

        Args:
            cut: finds the stretches in the rendered text.
            said: the first message that is new; control texts of earlier ones were counted when they were.
        """
        inner, edge = random_mark(), random_mark()
        breaker = ControlTextEscaper(self._codec, self.split, self._rules, (inner, edge))
        clean = [breaker.message(m) for m in messages[:said]]
        clean_tools = [breaker.value(tool, "tools") for tool in tools]
        known, broken = (breaker.hits.copy(), breaker.broken) if said else (Counter(), 0)
        clean += [breaker.message(m) for m in messages[said:]]
        if self.mode == "reject" and breaker.first is not None:
            _reject(*breaker.first)
        text = _render(render, clean, clean_tools)
        apart = self._apart(breaker, clean, clean_tools, render, text)
        rows: list[list[int]] = []
        stretches = cut(text)
        for number, (start, end, behind) in enumerate(stretches):
            piece, marked = text[start:end], _between(text, apart, start, end, (inner, edge))
            owned = [(i, a, b) for i, a, b in self._codec.encode_with_offsets(marked) if i in self.control_ids]
            if inner not in piece:
                ids = self._codec.encode_after(piece, behind)
                if [i for i in ids if i in self.control_ids] == [i for i, _, _ in owned]:
                    rows.append(ids)
                    continue
                # Contents and template text, or two parts of a content, join into a control token.
                if self.mode == "reject":
                    _reject("seam", "(where a content meets what stands beside it)")
                if number == len(stretches) - 1:
                    breaker.hits["seam"] += 1
                    breaker.broken += not breaker.broken
            rows.append(self._cut(marked, owned, breaker, "control" if behind else "nothing"))
        return rows, EncodedMessages([], breaker.broken - broken, breaker.hits - known)

    def encode_continuation(self, text: str) -> EncodedMessages:
        """Ids of a text from the world that goes on behind other text, and which control texts it held.

        Raises:
            ControlTextError: in mode `reject`, for the first control text.
        """
        breaker = ControlTextEscaper(self._codec, self.split, self._rules, (random_mark(), random_mark()))
        said = breaker.value(text, "user")
        if self.mode == "reject" and breaker.first is not None:
            _reject(*breaker.first)
        rows = [(i, start, end) for i, start, end in self._codec.encode_with_offsets(said) if i in self.control_ids]
        return EncodedMessages(self._cut(said, rows, breaker, "text"), breaker.broken, breaker.hits)

    def _rules(self, role: str) -> ControlTextRules:
        """What a text of this role may not hold.

        Assistant turns are demonstrations: thinking and tool calls in them are meant, the end of a turn is not.
        """
        said = role == "assistant"
        counted = self._unsaid if said else self.control_ids
        literals = None if said else self.literals
        return ControlTextRules(counted, literals, self._banned if self.mode == "allow" else counted, self.mode != "allow")

    def _apart(
        self, breaker: ControlTextEscaper, messages: Sequence[Message], tools: Tools, render: GuardRender, text: str
    ) -> str:
        """The rendered text with marks around contents, so that none joins with what stands beside it.

        Where a template does not show marks as they are, fewer texts get them.
        """
        plain = breaker.strip_marks(text)
        wrapped = [breaker.mark_contents(m) for m in messages]
        named = [replace(m, name=breaker.pad_with_marks(m.name)) if m.name else m for m in wrapped]
        apart = text
        for given, shown in ((named, [_rename(tool, breaker.pad_with_marks) for tool in tools]), (wrapped, tools)):
            try:
                apart = _render(render, given, shown)
            except TemplateError:
                continue
            if breaker.strip_marks(apart) == plain:
                return apart
        # The template looks into contents: what it writes for marked ones is taken only where a seam would forge otherwise.
        return text if self._control(apart) == self._control(text) else apart

    def _control(self, text: str) -> list[int]:
        return [i for i in self._codec.encode(text) if i in self.control_ids]

    def _cut(
        self, apart: str, rows: Sequence[tuple[int, int, int]], breaker: ControlTextEscaper, place: PrecedingToken
    ) -> list[int]:
        """Ids of a text whose control tokens are these, all other text encoded as plain, cut at marks.

        Args:
            place: what stands before the text.
        """
        ids: list[int] = []
        at = 0
        for token, start, end in (*rows, (-1, len(apart), len(apart))):
            for part in breaker.split_at_marks(apart[at:start]):
                ids += self._codec.encode_plain(part, place)
                place = "text"
            if token >= 0:
                ids.append(token)
            at, place = end, "control"
        return ids


def random_mark() -> str:
    """Digits nobody can guess: they survive trimming, JSON, and changes of case."""
    return str(10**20 + secrets.randbelow(9 * 10**20))


def _between(text: str, apart: str, start: int, end: int, marks: tuple[str, str]) -> str:
    """What of a text with further marks in it stands between two positions of the text.

    Raises:
        TemplateError: where the two differ in more than marks.
    """
    if (start, end) == (0, len(text)):
        return apart
    pattern = re.compile("|".join(marks))
    if pattern.sub("", text) != pattern.sub("", apart):
        raise TemplateError("the template writes control text where contents meet its own, and looks into contents")
    edges = [len(pattern.sub("", text[:at])) for at in (start, end)]
    places = []
    for edge in edges:
        at = edge
        for match in pattern.finditer(apart):
            if match.start() >= at:
                break
            at += len(match.group())
        places.append(at)
    return apart[places[0] : len(apart) if end == len(text) else places[1]]


def _rename(tool: Mapping[str, Any], change: Callable[[str], str]) -> Mapping[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return tool
    texts = {key: change(function[key]) for key in ("name", "description") if isinstance(function.get(key), str)}
    return {**tool, "function": {**function, **texts}}


def _render(render: GuardRender, messages: Sequence[Message], tools: Tools) -> str:
    return render(messages, tools) if tools else render(messages)


def _reject(role: str, text: str) -> NoReturn:
    shown = ascii(text)[1:-1]
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    whose = {"tools": "a tool's schema", "seam": "a message"}.get(role, f"a {role} message")
    raise ControlTextError(
        f"{whose} holds control text: {shown}; take it out where the world writes it, or let it be encoded as plain text "
        '(rollout.control_text = "neutralise")'
    )
