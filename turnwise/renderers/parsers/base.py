"""What the formats share: finding the thinking and the calls in a reply's text, whatever is written between the marks.

A format is a row of marks and a reader for what stands between them. Everything here is linear in the length of the text,
looks at no character twice per mark, and turns what does not read into a call that says why (`ToolCall.error`, `.cause`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from turnwise.types import Message, ToolCall

Tools = Sequence[Mapping[str, Any]]
Read = Callable[[str, Tools], list[ToolCall]]
"""Reads what stands between the marks of a call, or of a list of calls; ids may be empty. Never raises."""


class Parser(Protocol):
    """Reads one format of replies."""

    @property
    def name(self) -> str:
        """What the format is called in `PARSERS`."""
        ...

    def parse(self, text: str, tools: Tools = (), *, thinking: bool = False) -> Message:
        """A reply's text, without its end token, as a message. Never raises.

        Args:
            text: the decoded reply.
            tools: OpenAI schemas of the tools that the model was told of; without any, no calls are looked for.
            thinking: whether the prompt has already opened the thinking, so that the reply begins inside it.
        """
        ...

    def opens_reasoning(self, prompt: str) -> bool:
        """Whether a generation prompt has opened the thinking and not closed it."""
        ...


class MalformedCall(ValueError):
    """A call that cannot be read; the message is worded for the model."""

    def __init__(self, cause: str, said: str) -> None:
        super().__init__(said)
        self.cause = cause


def malformed_call(cause: str, said: str, name: str = "", given_id: str = "") -> ToolCall:
    """A call that cannot be run, and why."""
    return ToolCall(name, {}, given_id, said, cause)


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The marks around a reply's thinking."""

    open: str = "<think>"
    close: str = "</think>"

    def opened(self, prompt: str) -> bool:
        """See `Parser.opens_reasoning`."""
        return prompt.rfind(self.open.strip()) > prompt.rfind(self.close)

    def split(self, text: str, thinking: bool) -> tuple[str | None, str | None]:
        """The thinking, None where there is none, and the rest, None where the reply was cut off while thinking."""
        before, closed, rest = text.partition(self.close)
        if closed:
            return before.lstrip().removeprefix(self.open).strip("\n"), rest.lstrip()
        begun = text.lstrip()
        if thinking or begun.startswith(self.open):
            return begun.removeprefix(self.open).strip("\n"), None
        return None, text


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """Where calls stand in a text."""

    open: str
    """What begins a call, or a list of them."""
    read: Read
    close: str = ""
    """What ends it; empty where the next one or the end of the reply does."""
    sections: tuple[str, ...] = ()
    """Marks around all the calls; the first, without any call behind it, is a call that was cut off."""

    def scan(self, text: str, tools: Tools) -> tuple[list[ToolCall], str]:
        """The calls in a text, and the text without them."""
        found: list[ToolCall] = []
        outside: list[str] = []
        at = 0
        while (start := text.find(self.open, at)) >= 0:
            outside.append(text[at:start])
            calls, at = self._block(text, start + len(self.open), tools)
            found += calls
        outside.append(text[at:])
        rest = "".join(outside)
        if self.sections:
            if not found and self.sections[0] in rest:
                found.append(malformed_call("truncated", f"the tool call is cut off: {self.open} is missing"))
            for mark in self.sections:
                rest = rest.replace(mark, "")
        return found, rest.strip() if found else rest

    def _block(self, text: str, start: int, tools: Tools) -> tuple[list[ToolCall], int]:
        """The calls of one block, and where the text goes on behind it.

        A mark may stand inside an argument: the block ends at the first close where it reads, else, where it seems cut off
        there, at the last close before the next block. A block that does not read ends at the latest where another begins.
        """
        if not self.close:
            end = text.find(self.open, start)
            end = len(text) if end < 0 else end
            return self.read(text[start:end], tools), end
        end = text.find(self.close, start)
        if end < 0:
            return [malformed_call("truncated", f"the tool call is cut off: {self.close} is missing")], len(text)
        behind = end + len(self.close)
        calls = self.read(text[start:end], tools)
        if all(call.error is None for call in calls):
            return calls, behind
        again = text.rfind(self.open, start, end)
        if again >= 0:
            return [malformed_call("truncated", f"the tool call is cut off: another begins before {self.close}")], again
        if calls[-1].cause == "truncated":
            following = text.find(self.open, behind)
            last = text.rfind(self.close, behind, len(text) if following < 0 else following)
            if last >= 0:
                longer = self.read(text[start:last], tools)
                if all(call.error is None for call in longer):
                    return longer, last + len(self.close)
        return calls, behind


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """A format as a row: where calls stand, where thinking stands, and what is no part of the visible text."""

    name: str
    dialects: tuple[CallSyntax, ...]
    hints: tuple[str, ...] = ("<",)
    """A text that holds none of these has neither calls nor thinking."""
    thinking: ReasoningMarks = field(default_factory=ReasoningMarks)
    dropped: tuple[str, ...] = ()
    """Marks around the visible text."""

    def parse(self, text: str, tools: Tools = (), *, thinking: bool = False) -> Message:
        """See `Parser.parse`."""
        if not thinking:
            for hint in self.hints:
                if hint in text:
                    break
            else:
                return Message("assistant", text)
        reasoning, rest = (
            (None, text) if tools and not thinking and self._calls_first(text) else self.thinking.split(text, thinking)
        )
        calls: tuple[ToolCall, ...] = ()
        ignored = 0
        if tools:
            if reasoning:
                ignored = sum(reasoning.count(dialect.open) for dialect in self.dialects)
            if rest:
                calls, rest = self._calls(rest, tools)
        visible = rest or ""
        for mark in self.dropped:
            visible = visible.replace(mark, "")
        return Message("assistant", visible, tool_calls=calls, reasoning=reasoning, calls_in_thinking=ignored)

    def opens_reasoning(self, prompt: str) -> bool:
        """See `Parser.opens_reasoning`."""
        return self.thinking.opened(prompt)

    def _calls_first(self, text: str) -> bool:
        """Whether a call begins before anything ends thinking that nobody began: the end then stands in an argument, say."""
        end = text.find(self.thinking.close)
        if end < 0 or text.lstrip().startswith(self.thinking.open):
            return False
        return any(0 <= text.find(dialect.open) < end for dialect in self.dialects)

    def _calls(self, text: str, tools: Tools) -> tuple[tuple[ToolCall, ...], str]:
        for dialect in self.dialects:
            if dialect.open in text or (dialect.sections and dialect.sections[0] in text):
                found, text = dialect.scan(text, tools)
                return finish_calls(found, tools), text
        return (), text


def finish_calls(found: Iterable[ToolCall], tools: Tools) -> tuple[ToolCall, ...]:
    """Calls with ids where the format gives none, and with causes that can be seen without running them.

    An unknown tool and a call said twice carry a cause without an error: the one is answered by the environment, which knows
    the nearest name, the other may be meant (a step to the right, twice).
    """
    names = {name_of(tool) for tool in tools}
    seen: set[tuple[str, str]] = set()
    calls: list[ToolCall] = []
    for number, call in enumerate(found):
        cause = call.cause
        if call.error is None:
            said = (call.name, arguments_text(call.arguments))
            if call.name not in names:
                cause = "unknown_tool"
            elif said in seen:
                cause = "duplicated"
            seen.add(said)
        calls.append(ToolCall(call.name, call.arguments, call.id or f"call_{number}", call.error, cause))
    return tuple(calls)


def name_of(tool: Mapping[str, Any]) -> Any:
    """The name in a tool's schema, with or without the outer `function`."""
    body = tool.get("function", tool)
    return body.get("name") if isinstance(body, Mapping) else None


def properties_of(tools: Tools, name: str) -> Mapping[str, Any]:
    """What the schema says of each parameter of a tool; empty where it is not known."""
    body: Any = next((tool.get("function", tool) for tool in tools if name_of(tool) == name), None)
    for key in ("parameters", "properties"):
        body = body.get(key) if isinstance(body, Mapping) else None
    return body if isinstance(body, Mapping) else {}


def arguments_text(arguments: Any) -> str:
    """Arguments as a text to compare by."""
    try:
        return repr(arguments)
    except RecursionError:
        return ""
