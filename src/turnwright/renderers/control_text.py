"""Keep control tokens in untrusted text from being encoded as control tokens (invariant 8).

`ControlTextGuard.encode` puts a mark inside every control text of a content before the template
renders it, and a mark around each content. Every control token in the rendered text is then the
template's own; all other text is encoded without control tokens, split at the marks. What counts as
control text depends on the role (`ControlTextRules`): control tokens, and the literal markers that
a template writes without a token of their own (`find_template_markers`).

Appends of a known shape do not come here: `AppendShapes.fill_ids` looks at the ids, and gives a
content to the guard only if it holds a control text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any, Literal, NamedTuple, NoReturn

from turnwright.errors import ControlTextError, TemplateError
from turnwright.renderers.model_files import remember
from turnwright.renderers.renderer import common_prefix_length
from turnwright.renderers.template import probe_tool, random_mark
from turnwright.renderers.tokenizer import PrecedingToken, Tokenizer, control_pattern
from turnwright.types import Message, ToolCall, Tools
from turnwright.types.messages import ROLES

_ROUNDS = 8
"""Maximum rounds of marking nested control texts; after that, the rest loses a character
instead."""


class ControlTextRules(NamedTuple):
    """Control text that texts of one role may not contain."""

    counted: Collection[int]
    """Control ids that count as control text."""
    literals: re.Pattern[str] | None
    """Pattern of the template's text markers, which count too."""
    broken: Collection[int]
    """Control ids that are split."""
    break_literals: bool
    """Whether text markers are split too."""


class ControlTextEscaper:
    """Splits the control texts of one prompt or append, and counts them."""

    def __init__(
        self,
        codec: Tokenizer,
        split: re.Pattern[str],
        rules: Callable[[str], ControlTextRules],
        marks: tuple[str, str],
    ) -> None:
        """`rules` returns the rules of a role; `marks` are two random texts, for inside control
        texts and around contents."""
        self._codec = codec
        self._split = split
        self._rules = rules
        self._inner, self._edge = marks
        self.hits: Counter[str] = Counter()
        """Number of control texts found, by role."""
        self.broken = 0
        """Number of control texts that were split."""
        self.first: tuple[str, str] | None = None
        """Role and text of the first one found."""

    def message(self, message: Message) -> Message:
        """Split each control text in a message, in every field that a template may render."""
        role = message.role
        change = partial(self._text, role=role)
        changed = map_texts(message, change)
        if role not in ROLES:
            changed = replace(changed, role=change(role))
        if not (message.name or message.tool_call_id or message.reasoning or message.tool_calls):
            return changed

        # The first control text that is found is quoted in errors, so the order counts.
        name = message.name and change(message.name)
        tool_call_id = message.tool_call_id and change(message.tool_call_id)
        reasoning = message.reasoning and change(message.reasoning)
        calls = []
        for call in message.tool_calls:
            call_name = change(call.name)
            arguments = self.value(call.arguments, role)
            calls.append(ToolCall(call_name, arguments, change(call.id), call.error))
        return replace(
            changed,
            name=name,
            tool_call_id=tool_call_id,
            reasoning=reasoning,
            tool_calls=tuple(calls),
        )

    def value(self, value: Any, role: str) -> Any:
        """Split each control text in the strings of a JSON value, keys included."""
        if isinstance(value, str):
            return self._text(value, role)
        if isinstance(value, Mapping):
            return {
                self._text(str(key), role): self.value(item, role) for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.value(item, role) for item in value]
        return value

    def without_control(self, text: str, role: str) -> str:
        """Remove and count every control text in a text."""
        counted = self._rules(role).counted
        spans = self._control(text, counted) if text else {}
        while spans:
            self.hits[role] += 1
            start, end = next(iter(spans.items()))
            text = text[:start] + text[end:]
            # What was on either side may be a control text now.
            spans = self._control(text, counted) if text else {}
        return text

    def mark_contents(self, message: Message) -> Message:
        """Put marks around each text of a message; skip a demonstration with control text or
        thinking."""
        if message.role == "assistant":
            text = message.text
            if self._split.search(text) or "think" in text.lower():
                return message
        return map_texts(message, self.pad_with_marks)

    def pad_with_marks(self, text: str) -> str:
        """Put marks around a text, inside leading and trailing white space, which templates may
        trim."""
        core = text.strip()
        if not core:
            return text
        start = text.index(core)
        return f"{text[:start]}{self._edge}{core}{self._edge}{text[start + len(core) :]}"

    def strip_marks(self, text: str) -> str:
        """Remove all marks from a text."""
        return text.replace(self._edge, "").replace(self._inner, "")

    def split_at_marks(self, text: str) -> list[str]:
        """Split a text where control texts were split; empty if the text is empty."""
        return [part for part in text.replace(self._edge, "").split(self._inner) if part]

    def _text(self, text: str, role: str) -> str:
        """Count the control texts in a text, and split those that the rules of its role say."""
        rules = self._rules(role)
        counted = self._control(text, rules.counted)
        literals: dict[int, int] = {}
        if rules.literals is not None:
            for match in rules.literals.finditer(text):
                if match.start() not in counted:
                    literals[match.start()] = match.end()
        if not counted and not literals:
            return text

        label = role if role in (*ROLES, "tools") else "other"
        self.hits[label] += len(counted) + len(literals)
        if self.first is None:
            start = min((*counted, *literals))
            end = counted[start] if start in counted else literals[start]
            self.first = label, text[start:end]

        splits: list[int] = []
        if rules.break_literals:
            splits = [self._split_position(text, start, end) for start, end in literals.items()]
        unsafe = counted if rules.broken is rules.counted else self._control(text, rules.broken)
        self.broken += len(unsafe) + len(splits)
        return self._break(text, unsafe, splits, rules.broken)

    def _break(
        self, text: str, unsafe: dict[int, int], splits: list[int], broken: Collection[int]
    ) -> str:
        """Insert marks at these positions and inside each control text."""
        rounds = 0
        while unsafe or splits:
            edits = [(position, position) for position in splits]
            for start, end in unsafe.items():
                # A control token of one character cannot be split: drop it.
                drop = end - start < 2 or rounds >= _ROUNDS
                edits.append((start, start + 1) if drop else (start + 1, start + 1))
            for start, end in sorted(set(edits), reverse=True):
                inserted = "" if end > start else self._inner
                text = text[:start] + inserted + text[end:]

            # The parts may hold control texts again.
            unsafe = self._control(text, broken)
            splits = []
            rounds += 1
        return text

    def _control(self, text: str, ids: Collection[int]) -> dict[int, int]:
        """Return the start and end of control texts with these ids."""
        spans: dict[int, int] = {}
        control = self._codec.control
        for token, start, end in self._codec.encode_with_offsets(text):
            if token in ids:
                # A token may absorb adjacent white space.
                while end - start > 1 and text[start].isspace():
                    start += 1
                while end - start > 1 and text[end - 1].isspace():
                    end -= 1
                spans[start] = end
        for match in self._split.finditer(text):
            if control[match.group()] in ids:
                spans[match.start()] = match.end()
        return spans

    def _split_position(self, text: str, start: int, end: int) -> int:
        """Return a position within a token of a text marker, so that its ids differ from the
        template's."""
        for _, first, last in self._codec.encode_with_offsets(text):
            if last - first > 1 and start <= first and first + 1 < end:
                return first + 1
        self.hits["uncut"] += 1  # one id per character: the tokenizer has no other spelling
        return start + 1


def map_texts(message: Message, change: Callable[[str], str]) -> Message:
    """Change each text of a message's content."""
    content = message.content
    if isinstance(content, str):
        return replace(message, content=change(content))
    parts = tuple([change(part) if isinstance(part, str) else part for part in content])
    return replace(message, content=parts)


_TAG = re.compile(
    r"</?[^\s<>]{1,60}>|<<[^<>]{1,60}>>|[\[{(][|\uff5c][^\s|\uff5c]{1,60}[|\uff5c][\]})]"
    r"|\[/?[A-Z][A-Z_ ]{1,60}\]|\{\{?/?[A-Za-z_]{1,60}\}\}?"
)
"""`<start_of_turn>`, `[|user|]`, `<<SYS>>`, `[INST]`."""
_HEADING = re.compile(
    r"^\s*(#{1,6} *[^\n]{1,60}|[A-Z][\w ]{0,30}:|(?:USER|ASSISTANT|SYSTEM|TOOL)\b[^\n]{0,30})\s*$",
    re.MULTILINE,
)
"""`### User:`, `Human:`: a short line of its own that names something."""
_PROSE = 200
"""Characters to inspect at either end of template text; longer text is a preamble in prose."""
_MEDIA = re.compile(r"image|img|video|vision|audio|media|pad", re.IGNORECASE)
_NAMES = ("look_up", "word")
"""Names in the probes below."""


class TemplateMarkers(NamedTuple):
    """Markers and control tokens that a template writes."""

    literals: tuple[str, ...] = ()
    """Markers between contents without a token of their own, longest first."""
    assistant_control: frozenset[str] = frozenset()
    """Control tokens inside an assistant turn, with its close: a reply may contain them."""
    incoming_control: frozenset[str] = frozenset()
    """Control tokens around other turns, never inside an assistant turn: a reply with one is a
    forgery."""


def markers(pieces: Iterable[str]) -> tuple[str, ...]:
    """Return the marker-like literals (tags, brackets, headings) in text between contents and
    control tokens; longest first."""
    literals: set[str] = set()
    for piece in pieces:
        ends = [piece] if len(piece) <= 2 * _PROSE else [piece[:_PROSE], piece[-_PROSE:]]
        for text in ends:
            tags = _TAG.findall(text)
            literals.update(tags or [line.strip() for line in _HEADING.findall(text)])

    longer = [literal for literal in literals if len(literal) > 1]
    return tuple(sorted(longer, key=lambda literal: (-len(literal), literal)))


_TOOL = probe_tool("look_up", "Look it up.", "word", "d")


def find_template_markers(
    try_render: Callable[..., str | None], split: re.Pattern[str], known: Iterable[str], source: str
) -> TemplateMarkers:
    """Find the markers that a template writes around each role's texts, by rendering short
    conversations.

    Conversations that the template rejects are skipped, and so are messages whose text changes
    earlier text. Text before a first message is skipped too: a preamble mentions markers without
    using them. Control tokens in the template's `source` that no probe rendered belong to other
    kinds of replies (such as thinking as a content part), except media placeholders.
    """
    control = frozenset(known)
    assistant: set[str] = set()
    incoming: set[str] = set()
    literal_texts: list[str] = []
    has_calls = False
    for messages, tools in _conversations():
        for number, message in enumerate(messages):
            is_reply = message.role == "assistant"
            before: str | None = ""
            if number:
                before = try_render(messages[:number], tools, generation_prompt=is_reply)
            after = try_render(messages[: number + 1], tools)
            if after is None or (tools and number == 0):
                continue
            if message.role == "tool" and not has_calls:
                continue

            # Before a first message there is only the header of its turn, or a preamble.
            if number == 0:
                incoming.update(_leading(split.split(after), control))
                if message.role != "system":
                    continue

            written = _written(before or "", after, message)
            if written is None:
                continue
            if number == 0:
                written = _adjacent_lines(written)
            parts = [part for piece in written for part in split.split(piece)]
            control_texts = assistant if is_reply else incoming
            for part in parts:
                if part in control:
                    control_texts.add(part)
                else:
                    literal_texts.append(part)
            has_calls = has_calls or bool(message.tool_calls)

    # A reply does not include its header.
    asked = [Message("user", random_mark())]
    bare = try_render(asked) or ""
    prompt = try_render(asked, generation_prompt=True) or ""
    header = prompt.removeprefix(bare) if bare else ""
    incoming.update(_leading(split.split(header), control)[:1])

    unrendered = {
        text
        for text in control
        if text in source and text not in incoming and not _MEDIA.search(text)
    }
    literals = [
        literal for literal in markers(literal_texts) if not any(name in literal for name in _NAMES)
    ]
    return TemplateMarkers(
        tuple(literals),
        assistant_control=frozenset(assistant | unrendered),
        incoming_control=frozenset(incoming - assistant),
    )


def _leading(parts: Sequence[str], control: frozenset[str]) -> list[str]:
    """Return the control tokens at the beginning of a text: a beginning of sequence, a header."""
    return list(takewhile(lambda part: part in control, filter(str.strip, parts)))


def _adjacent_lines(written: Sequence[str]) -> list[str]:
    """Return the lines right before and after the content of a first message.

    A heading after it belongs to the preamble.
    """
    lines_before = [line for line in written[0].splitlines() if line.strip()]
    lines_after = [line for line in written[-1].splitlines() if line.strip()]
    after = [line for line in lines_after[:1] if not _HEADING.match(line)]
    return [*lines_before[-1:], *after]


def _conversations() -> list[tuple[list[Message], Tools]]:
    call = ToolCall("look_up", {"word": random_mark()}, "call00001")
    asks = Message("user", random_mark())
    answers = Message("assistant", random_mark())
    calls = Message("assistant", random_mark(), tool_calls=(call,))
    result = Message("tool", random_mark(), tool_call_id="call00001", name="look_up")
    again = Message("user", random_mark())
    return [
        ([asks, answers, again], ()),
        ([asks, replace(answers, reasoning=random_mark())], ()),
        ([Message("system", random_mark()), asks, answers, again], ()),
        ([asks, calls, result, replace(answers, content=random_mark()), again], (_TOOL,)),
        ([asks, replace(calls, content="", reasoning=random_mark()), result], (_TOOL,)),
    ]


def _written(before: str, after: str, message: Message) -> list[str] | None:
    """Return the template text that a message adds before, between and after its texts.

    None if it cannot be separated.
    """
    texts = [message.text, message.reasoning]
    for call in message.tool_calls:
        texts += [str(value) for value in call.arguments.values()]

    start = common_prefix_length(before, after)
    new_text = after[start:]
    positions = sorted(
        (after.find(text, start), text) for text in texts if text and text in new_text
    )
    if not positions or (message.role != "assistant" and start < len(before)):
        return None

    pieces = []
    for position, text in positions:
        pieces.append(after[start:position])
        start = position + len(text)
    return [*pieces, after[start:]]


ControlText = Literal["neutralise", "reject", "allow"]
"""Handling of control text in messages: encode as plain text, reject, or encode as control tokens
(and count)."""
GuardRender = Callable[..., str]
"""Renders messages by a template: `render(messages)`, or `render(messages, tools)` if there are
tools."""
Cut = Callable[[str], Sequence[tuple[int, int, str]]]
"""Returns segments of a text: start, end, and the control token before it (empty for none)."""

_NO_HITS: Counter[str] = Counter()
_MAX_REMEMBERED = 64
"""Maximum characters of a call's name or id that is looked up, not searched again."""
_MAX_QUOTE = 60
"""Maximum characters of a control text in an error."""


class EncodedMessages(NamedTuple):
    """Ids of rendered messages."""

    ids: list[int]
    neutralised: int = 0
    """Number of control texts encoded as plain text."""
    control: Mapping[str, int] = {}
    """Number of control texts found, by role of origin (`tools` for schemas), under every
    setting."""


class ControlTextGuard:
    """Encodes rendered messages so that no content becomes a control token (invariant 8)."""

    def __init__(
        self, codec: Tokenizer, mode: ControlText = "neutralise", banned: Collection[str] = ()
    ) -> None:
        """`banned` are texts of control tokens that every mode encodes as plain text (image
        placeholders)."""
        self._codec = codec
        self.mode = mode
        self.split = control_pattern(codec.control)
        """Pattern that splits a text at control tokens and keeps them."""
        self.control_ids = frozenset(codec.control.values())
        self.literals: re.Pattern[str] | None = None
        """Pattern of the template's text markers; None if it writes none."""
        self._banned = frozenset(codec.control[text] for text in banned if text in codec.control)
        self._not_in_replies = codec.special
        self._without_control: dict[str, None] = {}
        """Names and ids of earlier calls in which no control text was found."""

    def observe_template(self, markers: TemplateMarkers) -> None:
        """Update the rules for a template's markers and the control tokens outside its assistant
        turns."""
        self.literals = None
        if markers.literals:
            self.literals = re.compile("|".join(map(re.escape, markers.literals)))
        incoming = {self._codec.control[text] for text in markers.incoming_control}
        self._not_in_replies = self._codec.special | incoming

    def template_control_ids(self, text: str) -> tuple[int, ...]:
        """Return the control ids of a text that the template alone wrote, in order."""
        control = self._codec.control
        return tuple(control[part] for part in self.split.split(text) if part in control)

    def holds_marker(self, contents: Sequence[str]) -> bool:
        """Return whether contents contain a text marker of the template, which ids alone do not
        reveal."""
        return self.literals is not None and any(map(self.literals.search, contents))

    def sanitize_reply(self, reply: Message) -> tuple[Message, Counter[str]]:
        """Remove control text from the names and ids of a reply's calls, which a template may
        repeat; return the hits.

        The reply's sampled ids stay unchanged; this concerns the messages that answer it.
        """
        texts = {text for call in reply.tool_calls for text in (call.name, call.id)}
        if self._without_control.keys() >= texts:
            return reply, _NO_HITS

        def rules_of_a_tool(_: str) -> ControlTextRules:
            return self._rules("tool")

        escaper = ControlTextEscaper(self._codec, self.split, rules_of_a_tool, marks=("", ""))
        clean = partial(escaper.without_control, role="assistant")
        calls = tuple(
            [replace(call, name=clean(call.name), id=clean(call.id)) for call in reply.tool_calls]
        )
        if escaper.hits:
            return replace(reply, tool_calls=calls), escaper.hits

        for text in texts:
            if len(text) <= _MAX_REMEMBERED:
                remember(self._without_control, text, None)
        return reply, _NO_HITS

    def encode(
        self, messages: Sequence[Message], render: GuardRender, tools: Tools = (), after: str = ""
    ) -> EncodedMessages:
        """Encode rendered messages such that no content gives a control token, and count their
        control texts.

        Messages and schemas are untrusted; assistant messages are demonstrations. `after` is the
        control token before the text, empty if the text begins a prompt.

        Raises `ControlTextError` in mode `reject`, for the first control text; `TemplateError` if
        the template cannot render the messages.
        """

        def complete(text: str) -> list[tuple[int, int, str]]:
            return [(0, len(text), after)]

        (ids,), encoded = self.encode_cut(messages, render, complete, tools)
        return encoded._replace(ids=ids)

    def encode_cut(
        self,
        messages: Sequence[Message],
        render: GuardRender,
        cut: Cut,
        tools: Tools = (),
        first_new: int = 0,
    ) -> tuple[list[list[int]], EncodedMessages]:
        """Encode segments of the rendered text, found by `cut`, as `encode` does; the text
        between them has ids already.

        Control texts of messages before index `first_new` are not counted: they were when these
        messages were new.
        """
        inner, edge = random_mark(), random_mark()
        escaper = ControlTextEscaper(self._codec, self.split, self._rules, (inner, edge))
        clean = [escaper.message(message) for message in messages[:first_new]]
        clean_tools = [escaper.value(tool, "tools") for tool in tools]
        earlier_hits: Counter[str] = Counter()
        earlier_broken = 0
        if first_new:
            earlier_hits = escaper.hits.copy()
            earlier_broken = escaper.broken
        clean += [escaper.message(message) for message in messages[first_new:]]
        if self.mode == "reject" and escaper.first is not None:
            _reject(*escaper.first)

        text = _render(render, clean, clean_tools)
        marked_text = self._with_edges(escaper, clean, clean_tools, render, text)
        segments = cut(text)
        ids_of_segments: list[list[int]] = []
        for number, (start, end, after) in enumerate(segments):
            piece = text[start:end]
            marked = _between(text, marked_text, start, end, (inner, edge))
            own_tokens = self._control_tokens(marked)

            # Without a split inside, the text is encoded at once, as a tokenizer would encode it.
            if inner not in piece:
                ids = self._codec.encode_after(piece, after)
                own_ids = [token for token, _, _ in own_tokens]
                if [token for token in ids if token in self.control_ids] == own_ids:
                    ids_of_segments.append(ids)
                    continue

                # Contents and template text, or two parts of a content, join into a control token.
                if self.mode == "reject":
                    _reject("seam", "(where a content meets the text next to it)")
                if number == len(segments) - 1:
                    escaper.hits["seam"] += 1
                    escaper.broken += not escaper.broken

            preceding: PrecedingToken = "control" if after else "nothing"
            ids_of_segments.append(self._encode_split(marked, own_tokens, escaper, preceding))

        counts = EncodedMessages(
            [],
            neutralised=escaper.broken - earlier_broken,
            control=escaper.hits - earlier_hits,
        )
        return ids_of_segments, counts

    def encode_continuation(self, text: str) -> EncodedMessages:
        """Encode untrusted text that continues other text, and count its control texts.

        Raises `ControlTextError` in mode `reject`, for the first control text.
        """
        marks = random_mark(), random_mark()
        escaper = ControlTextEscaper(self._codec, self.split, self._rules, marks)
        clean = escaper.value(text, "user")
        if self.mode == "reject" and escaper.first is not None:
            _reject(*escaper.first)
        ids = self._encode_split(clean, self._control_tokens(clean), escaper, "text")
        return EncodedMessages(ids, escaper.broken, escaper.hits)

    def _rules(self, role: str) -> ControlTextRules:
        """Return the rules for texts of a role.

        Assistant messages are demonstrations: thinking and tool calls in them are allowed,
        the end of a turn is not.
        """
        is_reply = role == "assistant"
        is_allowed = self.mode == "allow"
        counted = self._not_in_replies if is_reply else self.control_ids
        return ControlTextRules(
            counted,
            literals=None if is_reply else self.literals,
            broken=self._banned if is_allowed else counted,
            break_literals=not is_allowed,
        )

    def _with_edges(
        self,
        escaper: ControlTextEscaper,
        messages: Sequence[Message],
        tools: Tools,
        render: GuardRender,
        text: str,
    ) -> str:
        """Return the rendered text with marks around contents, so that none joins with adjacent
        text.

        If the template does not render marks unchanged, fewer texts get them.
        """
        plain = escaper.strip_marks(text)
        wrapped = [escaper.mark_contents(message) for message in messages]
        named = [
            replace(message, name=escaper.pad_with_marks(message.name)) if message.name else message
            for message in wrapped
        ]
        named_tools = [_rename(tool, escaper.pad_with_marks) for tool in tools]

        marked = text
        for marked_messages, marked_tools in ((named, named_tools), (wrapped, tools)):
            try:
                marked = _render(render, marked_messages, marked_tools)
            except TemplateError:
                continue
            if escaper.strip_marks(marked) == plain:
                return marked

        # The template inspects contents: use its marked rendering only where a seam would forge a
        # control token otherwise.
        return text if self._control(marked) == self._control(text) else marked

    def _control(self, text: str) -> list[int]:
        return [token for token in self._codec.encode(text) if token in self.control_ids]

    def _control_tokens(self, text: str) -> list[tuple[int, int, int]]:
        """Return the control ids of a text, each with its start and end."""
        return [row for row in self._codec.encode_with_offsets(text) if row[0] in self.control_ids]

    def _encode_split(
        self,
        marked: str,
        own_tokens: Sequence[tuple[int, int, int]],
        escaper: ControlTextEscaper,
        after: PrecedingToken,
    ) -> list[int]:
        """Encode a text with only these control tokens; all other text is plain, split at marks."""
        ids: list[int] = []

        def add_plain(text: str, preceding: PrecedingToken) -> None:
            for part in escaper.split_at_marks(text):
                ids.extend(self._codec.encode_plain(part, preceding))
                preceding = "text"

        position = 0
        for token, start, end in own_tokens:
            add_plain(marked[position:start], after)
            ids.append(token)
            position = end
            after = "control"
        add_plain(marked[position:], after)
        return ids


def _between(text: str, marked: str, start: int, end: int, marks: tuple[str, str]) -> str:
    """Return the part of a marked text between two positions of the unmarked text.

    Raises `TemplateError` if the two differ in more than marks.
    """
    if (start, end) == (0, len(text)):
        return marked
    pattern = re.compile("|".join(marks))
    if pattern.sub("", text) != pattern.sub("", marked):
        raise TemplateError(
            "the template inspects contents and writes control text next to them; use another "
            "template"
        )

    def position_in_marked(position: int) -> int:
        marked_position = len(pattern.sub("", text[:position]))
        for match in pattern.finditer(marked):
            if match.start() >= marked_position:
                break
            marked_position += len(match.group())
        return marked_position

    marked_start = position_in_marked(start)
    if end == len(text):
        return marked[marked_start:]
    return marked[marked_start : position_in_marked(end)]


def _rename(tool: Mapping[str, Any], change: Callable[[str], str]) -> Mapping[str, Any]:
    """Change the name and the description of a tool."""
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return tool
    changed = dict(function)
    for key in ("name", "description"):
        if isinstance(function.get(key), str):
            changed[key] = change(function[key])
    return {**tool, "function": changed}


def _render(render: GuardRender, messages: Sequence[Message], tools: Tools) -> str:
    return render(messages, tools) if tools else render(messages)


def _reject(role: str, text: str) -> NoReturn:
    quote = ascii(text)[1:-1]
    if len(quote) > _MAX_QUOTE:
        quote = f"{quote[:_MAX_QUOTE]}..."
    source = {"tools": "a tool's schema", "seam": "a message"}.get(role, f"a {role} message")
    raise ControlTextError(
        f"{source} contains control text: {quote}; remove it in the environment, or have it "
        'encoded as plain text (rollout.control_text = "neutralise")'
    )
