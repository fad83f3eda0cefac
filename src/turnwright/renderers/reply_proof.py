"""Prove that a template's own replies come back when they are cut as an engine cuts them.

A reply with thinking, text and calls is rendered, cut after the generation prompt and at its first
stop id, and parsed as the ids of a model are. What differs is reported: a reply without its end
mark, calls after a stop, text with marks in it, and arguments that the template writes ambiguously.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from turnwright.renderers.probe import TemplateProbe
from turnwright.renderers.renderer import common_prefix_length
from turnwright.renderers.template import random_mark
from turnwright.renderers.tokenizer import Tokenizer
from turnwright.types import Message, ToolCall, Tools

_KINDS: Mapping[str, Any] = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "flag": {"type": "boolean"},
    "rows": {"type": "array", "items": {"type": "string"}},
    "deep": {"type": "object", "additionalProperties": {"type": "string"}},
}
_NULLABLE = {"type": ["string", "null"]}
_NAME, _OTHER = "proof_find", "proof_save"
_PLAIN = {"text": "a"}
_VALUES: Mapping[str, Mapping[str, Any]] = {
    "no arguments": {},
    "a string with quotes": {"text": 'it\'s "x" \\ y'},
    "a string with line breaks": {"text": "a\n\nb"},
    "a string that begins and ends with line breaks": {"text": "\na\n"},
    "a string of markup": {"text": "<b>&amp;</b> {[,]}"},
    "a string that reads as a number": {"text": "007"},
    "a string in other scripts": {"text": "é漢"},
    "numbers": {"text": "a", "count": -3, "ratio": 1e-05},
    "a truth value": {"text": "a", "flag": False},
    "a list and an object": {
        "text": "a",
        "rows": ["b", 'c"d'],
        "deep": {"e": {"f": "g, h"}, "i": []},
    },
    "null": {"text": "a", "nothing": None},
}
"""Arguments that formats write and read in their own way."""
_EXCERPT = 300
"""Characters of a reply in a report."""


@dataclass(frozen=True, slots=True)
class UnreadReply:
    """Kind of reply that the template does not write, or that is read as something else
    than it was rendered from."""

    kind: str
    """Content of the reply in words, such as `text and a call`."""
    problem: str
    """What is read instead, or what the template does instead of writing it."""
    reply: str = ""
    """The reply as an engine returns it, with its end token; empty if the template writes none."""

    def __str__(self) -> str:
        excerpt = f" ({self.reply[:_EXCERPT]!r})" if self.reply else ""
        return f"{self.kind}: {self.problem}{excerpt}"


class ParseIds(Protocol):
    """Parses the ids of a reply, see `Renderer.parse`."""

    def __call__(
        self,
        ids: Sequence[int],
        tools: Tools = (),
        text: str | None = None,
        thinking: bool | None = None,
    ) -> Message: ...


@dataclass(frozen=True, slots=True)
class ReplyProof:
    """Renders, cuts and parses replies of one template."""

    probe: TemplateProbe
    codec: Tokenizer
    stop_ids: frozenset[int]
    parse: ParseIds
    opens_reasoning: Callable[[str], bool]
    """`Parser.opens_reasoning` of the reply format."""

    def unread(self) -> tuple[UnreadReply, ...]:
        """Return the kinds of replies that do not come back, each once."""
        return tuple(self._unread())

    def _unread(self) -> Iterator[UnreadReply]:
        ends = sorted(self.probe.part_ends & {*self.probe.text.stops, *self.probe.calls.stops})
        if ends:
            yield UnreadReply("the end of a reply", self._part_end(ends))

        answer, thought = Message("assistant", "An answer."), "Thought."
        for kind, message in (
            ("text", answer),
            ("thinking and text", Message("assistant", "An answer.", reasoning=thought)),
        ):
            yield from self._check(kind, message)

        call, other = (
            ToolCall(_NAME, _PLAIN, "abcdefgh0"),
            ToolCall(_OTHER, {"text": "b"}, "abcdefgh1"),
        )
        alone = Message("assistant", "", (call,))
        if _NAME not in self._cut_opening(self._render(alone, _tools()) or "", _tools())[1]:
            return  # the template writes no calls
        problems = list(self._check("a call", alone))
        yield from problems
        if problems:
            return

        yield from self._check("text and a call", Message("assistant", "An answer.", (call,)))
        yield from self._check(
            "thinking and a call", Message("assistant", "", (call,), reasoning=thought)
        )
        yield from self._check(
            "thinking, text and a call",
            Message("assistant", "An answer.", (call,), reasoning=thought),
        )
        yield from self._check("two calls", Message("assistant", "", (call, other)))
        for kind, arguments in _VALUES.items():
            message = Message("assistant", "", (ToolCall(_NAME, arguments, "abcdefgh0"),))
            nullable = "nothing" in arguments
            if nullable and self._render(alone, _tools(nullable)) is None:
                continue  # a template that does not render such a schema
            yield from self._check(f"a call with {kind}", message, nullable=nullable)

    def _part_end(self, ends: Sequence[str]) -> str:
        names = " and ".join(map(repr, ends))
        declared = " and ".join(map(repr, sorted(self.probe.declared)))
        if declared:
            return (
                f"the template ends replies with {names}, which also ends a part of one (its "
                f"thinking, or the first of several calls); so a reply ends with {declared} only, "
                "which the model must sample"
            )
        return (
            f"nothing but {names} ends a reply, and it also ends a part of one (its thinking, or "
            "the first of several calls): a reply is stopped there; declare another end "
            "(eos_token_id in generation_config.json)"
        )

    def _check(
        self, kind: str, message: Message, *, nullable: bool = False
    ) -> Iterator[UnreadReply]:
        """Yield what differs in a reply like this message."""
        tools = _tools(nullable)
        rendered = self._render(message, tools)
        if rendered is None:
            yield UnreadReply(kind, "the template rejects it")
            return

        opening, reply = self._cut_opening(rendered, tools)
        unwritten = [call.name for call in message.tool_calls if call.name not in reply]
        if unwritten:
            written = len(message.tool_calls) - len(unwritten)
            yield UnreadReply(
                kind, f"the template writes {written} of {len(message.tool_calls)} calls", reply
            )
            return

        ids, rest = self._cut_at_stop(reply, message, tools)
        thinking = self.opens_reasoning(opening)
        for text in (
            None,
            self.codec.decode(ids[:-1]),
        ):  # an engine's ids, and its text without the stop
            parsed = self.parse(ids, tools, text, thinking)
            if problem := _difference(message, parsed, reply):
                excerpt = self.codec.decode(ids)
                stopped = (
                    f", because {self.codec.decode(ids[-1:])!r} stops it before {rest[:_EXCERPT]!r}"
                    if rest
                    else ""
                )
                yield UnreadReply(kind, f"{problem}{stopped}", excerpt)
                return

    def _render(self, message: Message, tools: Tools) -> str | None:
        """Render a question and a reply to it, with tools if the template accepts them; None if
        it rejects the reply."""
        template = self.probe.template
        rendered = template.try_render((_ASKED, message), tools)
        if rendered is None:
            rendered = template.try_render((_ASKED, message))
        return rendered if rendered is not None and _ASKED.text in rendered else None

    def _cut_opening(self, rendered: str, tools: Tools) -> tuple[str, str]:
        """Split the text after the question into the part that the prompt also has and the reply.

        Where the template opens this reply otherwise than the prompt does, the reply begins at the
        first difference, without the end of the prompt's opening.
        """
        after = rendered.rpartition(_ASKED.text)[2]
        prompt = self._opening(tools, prompted=True)
        at = common_prefix_length(prompt, after)
        if at == len(prompt):
            return prompt, after[at:]

        for text in (prompt, after):
            for token in self.probe.split.finditer(text):
                if token.start() < at < token.end():
                    at = token.start()
        tag = after.rfind("<", 0, at)
        if tag >= 0 and ">" not in after[tag:at]:
            at = tag
        for token in self.probe.split.finditer(prompt):
            if after.startswith(prompt[token.start() :], at):
                at += len(prompt) - token.start()
                break
        return after[:at], after[at:]

    def _opening(self, tools: Tools, *, prompted: bool) -> str:
        """Return the text after a question, with or without the generation prompt."""
        template = self.probe.template
        rendered = template.try_render((_ASKED,), tools, generation_prompt=prompted)
        if rendered is None:
            rendered = template.try_render((_ASKED,), generation_prompt=prompted)
        return (rendered or "").rpartition(_ASKED.text)[2]

    def _cut_at_stop(self, reply: str, message: Message, tools: Tools) -> tuple[list[int], str]:
        """Return the ids of a reply up to its first stop id, and what the template
        writes of the reply after it.

        What the template writes after a question too is no part of the reply. Its stop is kept,
        or added if there is none.
        """
        opening = self._opening(tools, prompted=False)
        following = ""
        for token in self.probe.split.finditer(opening):
            if reply.endswith(opening[token.start() :]):
                following = opening[token.start() :]
                break
        ids = self.codec.encode_segment(reply.removesuffix(following))
        for position, token_id in enumerate(ids):
            if token_id in self.stop_ids:
                rest = self.codec.decode(ids[position + 1 :])
                content = (message.text, *(call.name for call in message.tool_calls))
                return ids[: position + 1], rest if any(
                    text and text in rest for text in content
                ) else ""

        ending = self.probe.calls if message.tool_calls else self.probe.text
        stops = (
            *self.codec.encode_segment(following),
            *(self.codec.control[text] for text in ending.stops),
        )
        ended = [
            token_id for token_id in (*stops, *sorted(self.stop_ids)) if token_id in self.stop_ids
        ]
        return ids + ended[:1], ""


_ASKED = Message("user", random_mark())


def _tools(nullable: bool = False) -> Tools:
    """Return the schemas of two tools; `nullable` adds a parameter of a type that some
    templates cannot render."""
    kinds = {**_KINDS, "nothing": _NULLABLE} if nullable else _KINDS
    properties = {key: {**kind, "description": "d"} for key, kind in kinds.items()}
    parameters = {"type": "object", "properties": properties, "required": ["text"]}
    return [
        {
            "type": "function",
            "function": {"name": name, "description": "d", "parameters": parameters},
        }
        for name in (_NAME, _OTHER)
    ]


def _difference(wanted: Message, parsed: Message, reply: str) -> str:
    """Return what a reply was read as, if it is not the message that it was rendered
    from; else an empty text."""
    problems = []
    if [_row(call) for call in parsed.tool_calls] != [_row(call) for call in wanted.tool_calls]:
        calls = [
            f"{call.name}({_row(call)[1]}){f' {call.cause}' if call.error else ''}"
            for call in parsed.tool_calls
        ]
        problems.append(f"read as {', '.join(calls) or 'no call'}")

    # A template may write the text before a call as thinking, or leave either out.
    thought = parsed.reasoning or ""
    text = parsed.text.strip()
    moved = wanted.text in thought or wanted.text not in reply
    if text != wanted.text and not (moved and not text):
        problems.append(f"its text is read as {text[:_EXCERPT]!r}")
    if (
        wanted.reasoning is not None
        and wanted.reasoning in reply
        and wanted.reasoning not in thought
    ):
        problems.append(f"its thinking is read as {parsed.reasoning!r}")
    return ", ".join(problems)


def _row(call: ToolCall) -> tuple[str, str, bool]:
    """Return a call as it is compared: 1, 1.0 and True are different arguments."""
    return (
        call.name,
        json.dumps(call.arguments, sort_keys=True, ensure_ascii=False),
        call.error is not None,
    )
