"""Finds control texts in what the world says, and puts a mark inside each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from turnwise.render.codec import Tokenizer
from turnwise.types import Message, ToolCall
from turnwise.types.message import ROLES

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
