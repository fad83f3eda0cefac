"""Parser interface and table-driven formats: find the thinking and the calls in a reply's text.

A format is a row of marks with a reader for the text between them. Parsing is linear in the length
of the text. Malformed calls become calls with an error and a cause (`ToolCall.error`, `.cause`).

`ReplyFormat.parse` is the way of a reply: its thinking is split off, then the calls, and what is
left is visible text. The rows are in `formats.py`, the readers in `readers.py`; formats that are no
row of marks have parsers of their own in `special_formats.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from turnwright.types import Message, ToolCall, Tools
from turnwright.types.json_schema import (
    JSON_TYPES,
    ObjectKeys,
    ResolvedSchema,
    SchemaFault,
    is_plain,
    read_schema,
)

Read = Callable[[str, Tools], list[ToolCall]]
"""Reads the text between the marks of a call, or of a list of calls; ids may be empty. Never
raises."""


class Parser(Protocol):
    """Parser of one reply format."""

    @property
    def name(self) -> str:
        """Name of the format in `PARSERS`."""

    @property
    def closes(self) -> tuple[str, ...]:
        """Marks that end calls.

        Where one is also the reply's end token, the text to parse ends in it.
        """

    def parse(self, text: str, tools: Tools = (), *, thinking: bool = False) -> Message:
        """Parse a reply's text into a message. Never raises.

        Args:
            text: the reply without its end token, except where this token is also the mark that
                ends a call (see `closes`).
            tools: OpenAI schemas of the tools offered to the model; without any, calls are not
                parsed.
            thinking: whether the prompt opens the thinking, so that the reply starts inside it.
        """

    def opens_reasoning(self, prompt: str) -> bool:
        """Return whether a generation prompt opens the thinking without closing it."""


class MalformedCall(ValueError):
    """Malformed tool call; the message is for the model."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


def malformed_call(
    cause: str, message: str, name: str = "", given_id: str = "", raw: str = ""
) -> ToolCall:
    """Make a call that cannot be executed, with its error, and the text of its arguments if it is
    known."""
    return ToolCall(name, {}, given_id, message, cause, raw)


def unopened_call(part: str, beginning: str) -> ToolCall:
    """Make the malformed call of a reply that shows a part of a call, but not the mark that begins
    one."""
    return malformed_call(
        "unopened",
        f"the tool call has no beginning: {part} is outside of a call; begin it with {beginning}",
    )


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """Marks around a reply's thinking."""

    open: str = "<think>"
    close: str = "</think>"
    always_opened: bool = False
    """Whether a text before the close is thinking also where neither prompt nor reply opens it."""

    def opened(self, prompt: str) -> bool:
        """See `Parser.opens_reasoning`."""
        return prompt.rfind(self.open.strip()) > prompt.rfind(self.close)

    def split(self, text: str, thinking: bool) -> tuple[str | None, str | None]:
        """Return the thinking, None if there is none, and the rest, None if the reply was cut off
        while thinking.

        A close that nothing opened is text, since an answer may mention it; unless the reply begins
        with it.
        """
        start = text.lstrip()
        opened = thinking or self.always_opened or start.startswith((self.open, self.close))
        if not opened:
            return None, text

        before, closed, rest = text.partition(self.close)
        if closed:
            return before.lstrip().removeprefix(self.open).strip("\n"), rest.lstrip()
        if thinking or start.startswith(self.open):
            return start.removeprefix(self.open).strip("\n"), None
        return None, text


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """Marks and reader of calls in a text."""

    open: str
    """Beginning of a call, or of a list of calls."""
    read: Read
    close: str = ""
    """End of a call; empty if the next call or the end of the reply ends it."""
    sections: tuple[str, ...] = ()
    """Marks around all calls; the first one without a call after it is a truncated call."""
    inner: tuple[str, ...] = ()
    """Marks that stand only inside a call.

    Outside of one they show, as `close` does, that its beginning is missing.
    """

    @property
    def beginning(self) -> str:
        """Marks before the first call, for the model."""
        return "".join((*self.sections[:1], self.open)).strip()

    def scan(self, text: str, tools: Tools) -> tuple[list[ToolCall], str]:
        """Return the calls in a text, and the text without them."""
        calls: list[ToolCall] = []
        outside: list[str] = []
        position = 0
        start = text.find(self.open)
        while start >= 0:
            outside.append(text[position:start])
            block_calls, position = self._block(text, start + len(self.open), tools)
            calls += block_calls
            start = text.find(self.open, position)
        outside.append(text[position:])
        rest = "".join(outside)

        if self.sections:
            if not calls and self.sections[0] in rest:
                problem = f"the tool call is cut off: {self.open} is missing"
                calls.append(malformed_call("truncated", problem))
            for mark in self.sections:
                rest = rest.replace(mark, "")
        return calls, rest.strip() if calls else rest

    def _block(self, text: str, start: int, tools: Tools) -> tuple[list[ToolCall], int]:
        """Return the calls of one block, and the position after it.

        A close mark may be part of an argument. The block ends at the first close where it parses;
        if it seems truncated there, at the last close before the next block. A malformed block ends
        at the latest where another begins.
        """
        if not self.close:
            end = text.find(self.open, start)
            if end < 0:
                end = len(text)
            return self.read(text[start:end], tools), end

        end = text.find(self.close, start)
        if end < 0:
            problem = f"the tool call is cut off: {self.close} is missing"
            return [malformed_call("truncated", problem)], len(text)
        after = end + len(self.close)
        calls = self.read(text[start:end], tools)
        if all(call.error is None for call in calls):
            return calls, after

        # Malformed. Another block may begin inside.
        next_open = text.rfind(self.open, start, end)
        if next_open >= 0:
            problem = f"the tool call is cut off: another begins before {self.close}"
            return [malformed_call("truncated", problem)], next_open

        # The close mark may be part of an argument.
        if calls[-1].cause == "truncated":
            next_block = text.find(self.open, after)
            last_close = text.rfind(self.close, after, len(text) if next_block < 0 else next_block)
            if last_close >= 0:
                longer = self.read(text[start:last_close], tools)
                if all(call.error is None for call in longer):
                    return longer, last_close + len(self.close)
        return calls, after


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """Table row of a format: marks of calls and thinking, and marks outside the visible text."""

    name: str
    dialects: tuple[CallSyntax, ...]
    hints: tuple[str, ...] = ("<",)
    """Texts of which every reply with calls or thinking contains at least one."""
    thinking: ReasoningMarks = field(default_factory=ReasoningMarks)
    dropped: tuple[str, ...] = ()
    """Marks around the visible text."""
    header: re.Pattern[str] | None = None
    """Headers of the messages that a reply may consist of; not visible text.

    Group 1 is the recipient: a tool is called.
    """
    bare: re.Pattern[str] | None = None
    """Beginning of a call that has no mark at all; group 1 is its tool, which must exist.

    Such a call is malformed.
    """
    closes: tuple[str, ...] = field(init=False)
    _inside: Mapping[str, str] = field(init=False)
    """Marks that show outside of a call that one has no beginning, with the mark that begins
    one."""

    def __post_init__(self) -> None:
        closes: list[str] = []
        inside: dict[str, str] = {}
        for dialect in self.dialects:
            ends = [mark for mark in (*dialect.sections[1:], dialect.close) if mark.strip("`")]
            closes += ends
            for mark in (*dialect.inner, *ends):
                inside.setdefault(mark, dialect.beginning)
        object.__setattr__(self, "closes", tuple(closes))
        object.__setattr__(self, "_inside", inside)

    def parse(self, text: str, tools: Tools = (), *, thinking: bool = False) -> Message:
        """See `Parser.parse`."""
        # Most replies are text alone. A loop, since `any` takes a generator for every reply.
        if not thinking:
            for hint in self.hints:
                if hint in text:
                    break
            else:
                if not tools or self.bare is None or text[-1:] not in _LAST_CHARACTERS:
                    return Message("assistant", text)
                bare_call = self._bare_call(text, tools)
                bare_calls = () if bare_call is None else finish_calls([bare_call], tools)
                return Message("assistant", text, tool_calls=bare_calls)

        # The thinking; calls in it do not count.
        reasoning, rest = None, text
        if not tools or thinking or not self._calls_first(text):
            reasoning, after_thinking = self.thinking.split(text, thinking)
            rest = after_thinking or ""
        ignored = 0
        if tools and reasoning:
            ignored = sum(reasoning.count(dialect.open) for dialect in self.dialects)

        # The calls, and the text around them.
        calls: tuple[ToolCall, ...] = ()
        visible = rest
        if tools:
            calls, visible = self._calls(rest, tools)
        if self.header is not None:
            if tools and not calls:
                calls = self._called_by_header(visible, tools)
            visible = self.header.sub("", visible)
        for mark in self.dropped:
            visible = visible.replace(mark, "")
        return Message(
            "assistant", visible, tool_calls=calls, reasoning=reasoning, calls_in_thinking=ignored
        )

    def opens_reasoning(self, prompt: str) -> bool:
        """See `Parser.opens_reasoning`."""
        return self.thinking.opened(prompt)

    def _calls_first(self, text: str) -> bool:
        """Return whether a call begins before an unopened thinking ends: the end may be part of an
        argument."""
        end = text.find(self.thinking.close)
        if end < 0 or text.lstrip().startswith(self.thinking.open):
            return False
        return any(0 <= text.find(dialect.open) < end for dialect in self.dialects)

    def _calls(self, text: str, tools: Tools) -> tuple[tuple[ToolCall, ...], str]:
        """Return the calls of a reply after its thinking, and its text without them."""
        calls: list[ToolCall] = []
        outside = text
        for dialect in self.dialects:
            if dialect.open in text or (dialect.sections and dialect.sections[0] in text):
                calls, outside = dialect.scan(text, tools)
                break

        # Half a call stays in the text: only the model can say where it begins.
        for mark, beginning in self._inside.items():
            if mark in outside and not is_mentioned(outside, mark):
                calls = [*calls, unopened_call(mark.strip(), beginning)]
                break
        else:
            if not calls:
                bare_call = self._bare_call(text, tools)
                if bare_call is not None:
                    calls = [bare_call]
        return finish_calls(calls, tools) if calls else (), outside

    def _called_by_header(self, text: str, tools: Tools) -> tuple[ToolCall, ...]:
        """Return the malformed call of a text that has the header of one, and no call after it."""
        assert self.header is not None
        recipients = {match[1] for match in self.header.finditer(text)}
        problem = f"the tool call is cut off: {self.dialects[0].open} is missing"
        called = [name for name in map(name_of, tools) if name in recipients]
        return finish_calls([malformed_call("truncated", problem, name) for name in called], tools)

    def _bare_call(self, text: str, tools: Tools) -> ToolCall | None:
        """Return the malformed call of a text that ends in a call without any mark; None if it does
        not."""
        if self.bare is None or not text.rstrip().endswith(CALL_ENDS):
            return None
        names = {name_of(tool) for tool in tools}
        called = any(match[1] in names for match in self.bare.finditer(text))
        return unopened_call("the call", self.dialects[0].beginning) if called else None


CALL_ENDS = ("}", "]", ")", "`")
"""Ends of a text that may be a call without marks."""
_LAST_CHARACTERS = frozenset((*CALL_ENDS, "\n", " "))
"""Last characters of a text that may end so, up to white space."""


def is_mentioned(text: str, mark: str) -> bool:
    """Return whether a text only talks about a mark: it is in quotes, or in a code span, wherever
    it is."""
    start = text.find(mark)
    while start >= 0:
        quote = text[start - 1 : start] if start else ""
        end = start + len(mark)
        if not quote or quote not in "`'\"" or quote not in text[end : end + _MENTION]:
            return False
        start = text.find(mark, end)
    return True


_MENTION = 80
"""Characters after a mark in which its quote ends."""


def finish_calls(calls: Iterable[ToolCall], tools: Tools) -> tuple[ToolCall, ...]:
    """Add missing ids, and causes that are known without executing the calls.

    An unknown tool and a repeated call get a cause without an error. The environment answers the
    first, because it knows the nearest name; the second may be intended (a step to the right,
    twice).
    """
    tool_names = {name_of(tool) for tool in tools}
    made_calls: set[tuple[str, str]] = set()
    finished: list[ToolCall] = []
    for number, call in enumerate(calls):
        cause = call.cause
        if call.error is None:
            try:
                key = call.name, repr(call.arguments)
            except RecursionError:
                key = call.name, ""
            if call.name not in tool_names:
                cause = "unknown_tool"
            elif key in made_calls:
                cause = "duplicated"
            made_calls.add(key)
        call_id = call.id or f"call_{number}"
        finished.append(ToolCall(call.name, call.arguments, call_id, call.error, cause, call.raw))
    return tuple(finished)


def name_of(tool: Mapping[str, Any]) -> Any:
    """Return the name in a tool's schema, with or without the outer `function`."""
    body = tool.get("function", tool)
    return body.get("name") if isinstance(body, Mapping) else None


def properties_of(tools: Tools, name: str) -> Mapping[str, Any]:
    """Return the schema of each parameter of a tool, with what its references mean; empty if
    unknown. Never raises."""
    for tool in tools:
        if name_of(tool) == name:
            body = tool.get("function", tool)
            parameters = body.get("parameters") if isinstance(body, Mapping) else None
            return ParameterSchemas(parameters) if isinstance(parameters, Mapping) else {}
    return {}


class ParameterSchemas(Mapping[str, Any]):
    """Schemas of a tool's parameters by name, also of names that only a pattern or
    `additionalProperties` allows.

    A schema that names its type itself is the author's. Of others there is the list of types that
    they allow, after references and compositions are resolved, which is done once and only if such
    a parameter is asked for.
    """

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self._parameters = parameters
        properties = parameters.get("properties")
        self._properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        self._resolved: ResolvedSchema | None = None
        self._keys: ObjectKeys | None = None

    def __getitem__(self, name: str) -> Any:
        declared = self._properties.get(name)
        if is_plain(declared):
            return declared

        if self._keys is None:
            try:
                self._resolved = read_schema(self._parameters)
                self._keys = self._resolved.keys([self._resolved.root])
            except SchemaFault:  # an environment refuses such a tool; a parser reads what it can
                self._keys = ObjectKeys(
                    {key: [True] for key in self._properties}, [], [], closed=True
                )
        try:
            schemas = self._keys.schemas_of(name, _occurs_in)
        except re.error:
            schemas = []
        if not schemas:
            raise KeyError(name)
        if self._resolved is None:
            return declared

        # Alternatives may differ; those without a type leave it to the others.
        types = [self._resolved.types(schema) for schema in schemas]
        telling = [allowed for allowed in types if allowed != JSON_TYPES]
        return {"type": sorted(frozenset().union(*telling))} if telling else {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._properties)

    def __len__(self) -> int:
        return len(self._properties)


def _occurs_in(pattern: str, key: str) -> bool:
    """Return whether a pattern for names occurs in a name.

    Names are short, which bounds the time of a pattern.
    """
    return len(key) <= _MAX_NAME and re.search(pattern, key) is not None


_MAX_NAME = 64
