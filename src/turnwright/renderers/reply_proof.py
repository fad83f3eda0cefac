"""Prove that a template's own replies come back when they are cut as an engine cuts them.

A reply with thinking, text and calls is rendered, cut after the generation prompt and at its first
stop id, and parsed as the ids of a model are. What differs is reported: a reply without its end
mark, calls after a stop, text with marks in it, and arguments that the template writes ambiguously.

`ReplyProof.unread` is what `turnwright check` prints. That a model writes replies as its template
does is not proven here; sampled ids stay as they are, whatever is read from them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
_NAME = "proof_find"
_OTHER_NAME = "proof_save"
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
    """Kind of reply that the template does not write, or that is read as something else than it was
    rendered from."""

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

        answer = Message("assistant", "An answer.")
        yield from self._check("text", answer)
        yield from self._check("thinking and text", replace(answer, reasoning="Thought."))

        # Calls. Where a single one is not read, nothing with a call is.
        call = ToolCall(_NAME, _PLAIN, "abcdefgh0")
        with_call = Message("assistant", "", (call,))
        rendered = self._render(with_call, _tools()) or ""
        _, reply = self._cut_opening(rendered, _tools())
        if _NAME not in reply:
            return  # the template writes no calls
        problems = list(self._check("a call", with_call))
        yield from problems
        if problems:
            return

        other_call = ToolCall(_OTHER_NAME, {"text": "b"}, "abcdefgh1")
        with_text = replace(with_call, content="An answer.")
        for kind, message in (
            ("text and a call", with_text),
            ("thinking and a call", replace(with_call, reasoning="Thought.")),
            ("thinking, text and a call", replace(with_text, reasoning="Thought.")),
            ("two calls", replace(with_call, tool_calls=(call, other_call))),
        ):
            yield from self._check(kind, message)

        # Arguments of every kind.
        for kind, arguments in _VALUES.items():
            message = replace(with_call, tool_calls=(replace(call, arguments=arguments),))
            nullable = "nothing" in arguments
            if nullable and self._render(with_call, _tools(nullable)) is None:
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

        # An engine returns ids, or ids and a text without the stop.
        ids, rest = self._cut_at_stop(reply, message, tools)
        thinking = self.opens_reasoning(opening)
        for text in (None, self.codec.decode(ids[:-1])):
            problem = _difference(message, self.parse(ids, tools, text, thinking), reply)
            if not problem:
                continue
            if rest:
                stop = self.codec.decode(ids[-1:])
                problem += f", because {stop!r} stops it before {rest[:_EXCERPT]!r}"
            yield UnreadReply(kind, problem, self.codec.decode(ids))
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
        start = common_prefix_length(prompt, after)
        if start == len(prompt):
            return prompt, after[start:]

        # The first difference may be within a control token, or within a tag of plain text.
        for text in (prompt, after):
            for token in self.probe.split.finditer(text):
                if token.start() < start < token.end():
                    start = token.start()
        tag_start = after.rfind("<", 0, start)
        if tag_start >= 0 and ">" not in after[tag_start:start]:
            start = tag_start

        for token in self.probe.split.finditer(prompt):
            end_of_prompt = prompt[token.start() :]
            if after.startswith(end_of_prompt, start):
                start += len(end_of_prompt)
                break
        return after[:start], after[start:]

    def _opening(self, tools: Tools, *, prompted: bool) -> str:
        """Return the text after a question, with or without the generation prompt."""
        template = self.probe.template
        rendered = template.try_render((_ASKED,), tools, generation_prompt=prompted)
        if rendered is None:
            rendered = template.try_render((_ASKED,), generation_prompt=prompted)
        return (rendered or "").rpartition(_ASKED.text)[2]

    def _cut_at_stop(self, reply: str, message: Message, tools: Tools) -> tuple[list[int], str]:
        """Return the ids of a reply up to its first stop id, and what the template writes of the
        reply after it.

        What the template writes after a question too is no part of the reply. Its stop is kept,
        or added if there is none.
        """
        after_question = self._opening(tools, prompted=False)
        following = ""
        for token in self.probe.split.finditer(after_question):
            if reply.endswith(after_question[token.start() :]):
                following = after_question[token.start() :]
                break

        ids = self.codec.encode_segment(reply.removesuffix(following))
        for position, token_id in enumerate(ids):
            if token_id in self.stop_ids:
                rest = self.codec.decode(ids[position + 1 :])
                contents = [message.text, *[call.name for call in message.tool_calls]]
                if not any(text and text in rest for text in contents):
                    rest = ""
                return ids[: position + 1], rest

        ending = self.probe.calls if message.tool_calls else self.probe.text
        likely_stops = [
            *self.codec.encode_segment(following),
            *[self.codec.control[text] for text in ending.stops],
            *sorted(self.stop_ids),
        ]
        stops = [token_id for token_id in likely_stops if token_id in self.stop_ids]
        return ids + stops[:1], ""


_ASKED = Message("user", random_mark())


def _tools(nullable: bool = False) -> Tools:
    """Return the schemas of two tools; `nullable` adds a parameter of a type that some templates
    cannot render."""
    kinds = {**_KINDS, "nothing": _NULLABLE} if nullable else _KINDS
    properties = {key: {**kind, "description": "d"} for key, kind in kinds.items()}
    parameters = {"type": "object", "properties": properties, "required": ["text"]}
    tools = []
    for name in (_NAME, _OTHER_NAME):
        function = {"name": name, "description": "d", "parameters": parameters}
        tools.append({"type": "function", "function": function})
    return tools


def _difference(wanted: Message, parsed: Message, reply: str) -> str:
    """Return what a reply was read as, if it is not the message that it was rendered from; else an
    empty text."""
    problems = []
    wanted_calls = [_comparable(call) for call in wanted.tool_calls]
    if [_comparable(call) for call in parsed.tool_calls] != wanted_calls:
        calls = []
        for call in parsed.tool_calls:
            cause = f" {call.cause}" if call.error else ""
            calls.append(f"{call.name}({_arguments_text(call)}){cause}")
        problems.append(f"read as {', '.join(calls) or 'no call'}")

    # A template may write the text before a call as thinking, or leave either out.
    thought = parsed.reasoning or ""
    text = parsed.text.strip()
    moved = wanted.text in thought or wanted.text not in reply
    if text != wanted.text and not (moved and not text):
        problems.append(f"its text is read as {text[:_EXCERPT]!r}")

    wanted_thought = wanted.reasoning
    if wanted_thought is not None and wanted_thought in reply and wanted_thought not in thought:
        problems.append(f"its thinking is read as {parsed.reasoning!r}")
    return ", ".join(problems)


def _comparable(call: ToolCall) -> tuple[str, str, bool]:
    """Return a call as it is compared: 1, 1.0 and True are different arguments."""
    return call.name, _arguments_text(call), call.error is not None


def _arguments_text(call: ToolCall) -> str:
    return json.dumps(call.arguments, sort_keys=True, ensure_ascii=False)
