"""Keep control tokens in untrusted text from being encoded as control tokens."""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, Literal, NamedTuple, NoReturn

from turnwise.errors import ControlTextError, TemplateError
from turnwise.renderers.tokenizer import PrecedingToken, Tokenizer, control_pattern
from turnwise.types import Message, ToolCall
from turnwise.types.messages import ROLES

_ROUNDS = 8
"""Control texts can be nested; after so many rounds of marking, what is left loses a character instead."""


class ControlTextRules(NamedTuple):
    """What texts of one role may not hold."""

    counted: Collection[int]
    """Control ids that count as control text."""
    literals: re.Pattern[str] | None
    """Finds the template's markers that are no tokens, which count too."""
    broken: Collection[int]
    """Control ids that are broken apart."""
    break_literals: bool


class ControlTextEscaper:
    """Breaks the control texts of one prompt or append, and counts them."""

    def __init__(
        self, codec: Tokenizer, split: re.Pattern[str], rules: Callable[[str], ControlTextRules], marks: tuple[str, str]
    ) -> None:
        """
        Args:
            codec: the tokenizer.
            split: finds the texts of its control tokens.
            rules: what texts of a role may not hold.
            marks: two texts that nobody can guess: for inside control texts, and for around contents.
        """
        self._codec = codec
        self._split = split
        self._rules = rules
        self._inner, self._edge = marks
        self.hits: Counter[str] = Counter()
        """Control texts met, by role."""
        self.broken = 0
        """Control texts that were broken apart."""
        self.first: tuple[str, str] | None = None
        """Role and text of the first one met."""

    def message(self, message: Message) -> Message:
        """The message with each control text in it broken, wherever a template may show it."""
        role = message.role

        def change(text: str) -> str:
            return self._text(text, role)

        changed = map_texts(message, change)
        if role not in ROLES:
            changed = replace(changed, role=change(role))
        if not (message.name or message.tool_call_id or message.reasoning or message.tool_calls):
            return changed
        return replace(
            changed,
            name=message.name and change(message.name),
            tool_call_id=message.tool_call_id and change(message.tool_call_id),
            reasoning=message.reasoning and change(message.reasoning),
            tool_calls=tuple(
                ToolCall(change(call.name), self.value(call.arguments, role), change(call.id), call.error)
                for call in message.tool_calls
            ),
        )

    def value(self, value: Any, role: str) -> Any:
        """JSON with each control text in its strings broken, keys too."""
        if isinstance(value, str):
            return self._text(value, role)
        if isinstance(value, Mapping):
            return {self._text(str(key), role): self.value(item, role) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.value(item, role) for item in value]
        return value

    def without_control(self, text: str, role: str) -> str:
        """The text with every control text taken out of it, counted."""
        while text and (found := self._control(text, self._rules(role).counted)):
            self.hits[role] += 1
            start, end = next(iter(found.items()))
            text = text[:start] + text[end:]
        return text

    def mark_contents(self, message: Message) -> Message:
        """The message with marks around each text of its content; a demonstration that a template may take apart stays."""
        if message.role == "assistant" and (self._split.search(message.text) or "think" in message.text.lower()):
            return message
        return map_texts(message, self.pad_with_marks)

    def pad_with_marks(self, text: str) -> str:
        """The text with marks around it, inside the white space at its ends, which templates may trim."""
        core = text.strip()
        if not core:
            return text
        start = text.index(core)
        return f"{text[:start]}{self._edge}{core}{self._edge}{text[start + len(core) :]}"

    def strip_marks(self, text: str) -> str:
        """The text without marks."""
        return text.replace(self._edge, "").replace(self._inner, "")

    def split_at_marks(self, text: str) -> list[str]:
        """The text cut where control texts were broken; none where it is empty."""
        return [part for part in text.replace(self._edge, "").split(self._inner) if part]

    def _text(self, text: str, role: str) -> str:
        rules = self._rules(role)
        met = self._control(text, rules.counted)
        literal = {m.start(): m.end() for m in rules.literals.finditer(text)} if rules.literals else {}
        literal = {start: end for start, end in literal.items() if start not in met}
        if not met and not literal:
            return text
        who = role if role in (*ROLES, "tools") else "other"
        self.hits[who] += len(met) + len(literal)
        if self.first is None:
            start = min((*met, *literal))
            self.first = who, text[start : met.get(start) or literal[start]]
        places = [self._inside(text, start, end) for start, end in literal.items()] if rules.break_literals else []
        unsafe = met if rules.broken is rules.counted else self._control(text, rules.broken)
        self.broken += len(unsafe) + len(places)
        return self._break(text, unsafe, places, rules.broken)

    def _break(self, text: str, unsafe: dict[int, int], places: list[int], broken: Collection[int]) -> str:
        """The text with marks at these places and inside each control text."""
        rounds = 0
        while unsafe or places:
            edits = [(place, place) for place in places]
            for start, end in unsafe.items():
                # A control token of one character cannot be broken: it is left out.
                drop = end - start < 2 or rounds >= _ROUNDS
                edits.append((start, start + 1) if drop else (start + 1, start + 1))
            for start, end in sorted(set(edits), reverse=True):
                text = text[:start] + ("" if end > start else self._inner) + text[end:]
            unsafe, places = self._control(text, broken), []
            rounds += 1
        return text

    def _control(self, text: str, ids: Collection[int]) -> dict[int, int]:
        """Where control texts of these ids stand, start to end."""
        found: dict[int, int] = {}
        control = self._codec.control
        for token, start, end in self._codec.encode_with_offsets(text):
            if token in ids:
                while end - start > 1 and text[start].isspace():  # a token may eat the white space beside it
                    start += 1
                while end - start > 1 and text[end - 1].isspace():
                    end -= 1
                found[start] = end
        for match in self._split.finditer(text):
            if control[match.group()] in ids:
                found[match.start()] = match.end()
        return found

    def _inside(self, text: str, start: int, end: int) -> int:
        """A place inside a literal marker, within one of its tokens, so that its ids are not those of the template's own."""
        for _, first, last in self._codec.encode_with_offsets(text):
            if last - first > 1 and start <= first and first + 1 < end:
                return first + 1
        self.hits["uncut"] += 1  # one id a character: the tokenizer has no second way to write it
        return start + 1


def map_texts(message: Message, change: Callable[[str], str]) -> Message:
    """The message with each text of its content changed."""
    if isinstance(message.content, str):
        return replace(message, content=change(message.content))
    return replace(message, content=tuple(change(part) if isinstance(part, str) else part for part in message.content))


_TAG = re.compile(
    r"</?[^\s<>]{1,60}>|<<[^<>]{1,60}>>|[\[{(][|\uff5c][^\s|\uff5c]{1,60}[|\uff5c][\]})]"
    r"|\[/?[A-Z][A-Z_ ]{1,60}\]|\{\{?/?[A-Za-z_]{1,60}\}\}?"
)
"""`<start_of_turn>`, `[|user|]`, `<<SYS>>`, `[INST]`."""
_HEADING = re.compile(
    r"^\s*(#{1,6} *[^\n]{1,60}|[A-Z][\w ]{0,30}:|(?:USER|ASSISTANT|SYSTEM|TOOL)\b[^\n]{0,30})\s*$", re.MULTILINE
)
"""`### User:`, `Human:`: a line of its own that is short and names something."""
_PROSE = 200
"""Characters at either end of a piece of template text that are looked at; what is longer is a preamble, in prose."""
_MEDIA = re.compile(r"image|img|video|vision|audio|media|pad", re.IGNORECASE)
_NAMES = ("look_up", "word")
"""Names that the probes below use."""

MarkersRender = Callable[..., str]
"""`render(messages, tools, generation_prompt=...)` of a template."""


class TemplateMarkers(NamedTuple):
    """What a template was seen to write."""

    literals: tuple[str, ...] = ()
    """Markers between contents that the tokenizer has no token for, longest first."""
    assistant_control: frozenset[str] = frozenset()
    """Control tokens inside an assistant's turn, its close included: a reply may hold them."""
    incoming_control: frozenset[str] = frozenset()
    """Control tokens around what the world says, and never inside an assistant's turn: a reply that holds one forges."""


def markers(pieces: Iterable[str]) -> tuple[str, ...]:
    """The marker-like literals in template text: tags, brackets, headings; longest first.

    Args:
        pieces: what a template writes between contents, control tokens taken out.
    """
    found: set[str] = set()
    for piece in pieces:
        ends = [piece] if len(piece) <= 2 * _PROSE else [piece[:_PROSE], piece[-_PROSE:]]
        for text in ends:
            tags = _TAG.findall(text)
            found.update(tags or [line.strip() for line in _HEADING.findall(text)])
    return tuple(sorted((text for text in found if len(text) > 1), key=lambda text: (-len(text), text)))


_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look it up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string", "description": "d"}}, "required": ["word"]},
    },
}


def find_template_markers(
    render: MarkersRender, split: re.Pattern[str], known: Iterable[str], mark: Callable[[], str], source: str = ""
) -> TemplateMarkers:
    """See by rendering short conversations what a template writes around each party's texts.

    A conversation that the template refuses is left out; so is a message whose text changes what stands before it, and what
    stands before a first message: a preamble speaks of markers without using them.

    Args:
        render: the template.
        split: splits a text at control tokens and keeps them.
        known: the texts of control tokens.
        mark: gives texts that nobody can guess.
        source: the template's source. A control token in it that was seen nowhere stands in replies of a kind that no message
            here has (thinking as a part of a content, say), but for placeholders of images and the like.
    """
    control = frozenset(known)
    said: set[str] = set()
    heard: set[str] = set()
    loose: list[str] = []
    calls_shown = False
    for messages, tools in _conversations(mark):
        for number, message in enumerate(messages):
            before = _try(render, messages[:number], tools, message.role == "assistant")
            after = _try(render, messages[: number + 1], tools, False)
            if after is None or (message.role == "tool" and not calls_shown) or (tools and number == 0):
                continue
            if number == 0:
                heard.update(_leading(split.split(after), control))
                if message.role != "system":
                    continue
            texts = [text for text in (message.text, message.reasoning, *_arguments(message)) if text]
            written = _written(before or "", after, texts, message.role)
            if written is None:
                continue
            if number == 0:
                written = _beside(written)
            parts = [part for piece in written for part in split.split(piece)]
            (said if message.role == "assistant" else heard).update(part for part in parts if part in control)
            loose += [part for part in parts if part not in control]
            calls_shown |= bool(message.tool_calls)
    asked, prompt = _prompt(render, mark)
    header = prompt.removeprefix(asked) if asked else ""
    heard.update(_leading(split.split(header), control)[:1])  # the header of a reply is no part of it
    unseen = {text for text in control if text in source and text not in heard and not _MEDIA.search(text)}
    literals = tuple(text for text in markers(loose) if not any(name in text for name in _NAMES))
    return TemplateMarkers(literals, frozenset(said | unseen), frozenset(heard - said))


def _prompt(render: MarkersRender, mark: Callable[[], str]) -> tuple[str, str]:
    """A user's message without and with what opens the next reply."""
    asked = [Message("user", mark())]
    return _try(render, asked, (), False) or "", _try(render, asked, (), True) or ""


def _leading(parts: Sequence[str], control: frozenset[str]) -> list[str]:
    """The control tokens that a text begins with: a beginning of sequence, a header."""
    return list(takewhile(lambda part: part in control, filter(str.strip, parts)))


def _beside(written: Sequence[str]) -> list[str]:
    """What stands right before and right behind the content of a first message: the line beside it."""
    before = [line for line in written[0].splitlines() if line.strip()][-1:]
    behind = [line for line in written[-1].splitlines() if line.strip()][:1]
    return [*before, *(line for line in behind if not _HEADING.match(line))]


def _conversations(mark: Callable[[], str]) -> list[tuple[list[Message], Sequence[Mapping[str, Any]]]]:
    call = ToolCall("look_up", {"word": mark()}, "call00001")
    asks = Message("user", mark())
    answers = Message("assistant", mark())
    calls = Message("assistant", mark(), tool_calls=(call,))
    result = Message("tool", mark(), tool_call_id="call00001", name="look_up")
    again = Message("user", mark())
    return [
        ([asks, answers, again], ()),
        ([asks, replace(answers, reasoning=mark())], ()),
        ([Message("system", mark()), asks, answers, again], ()),
        ([asks, calls, result, replace(answers, content=mark()), again], (_TOOL,)),
        ([asks, replace(calls, content="", reasoning=mark()), result], (_TOOL,)),
    ]


def _try(render: MarkersRender, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], prompt: bool) -> str | None:
    try:
        return render(messages, tools, generation_prompt=prompt) if messages else ""
    except TemplateError:
        return None


def _arguments(message: Message) -> list[str]:
    return [str(value) for call in message.tool_calls for value in call.arguments.values()]


def _written(before: str, after: str, texts: Sequence[str], role: str) -> list[str] | None:
    """The pieces of template text that a message of these texts adds; None where they cannot be told."""
    start = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after)))
    places = sorted((after.find(text, start), text) for text in texts if text in after[start:])
    if not places or (role != "assistant" and start < len(before)):
        return None
    pieces = []
    for place, text in places:
        pieces.append(after[start:place])
        start = place + len(text)
    return [*pieces, after[start:]]


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
