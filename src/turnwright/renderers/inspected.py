"""What a template inspects of the texts that it renders.

A prompt that was derived from placeholders is right for other texts only if the template treats all
of them alike. So placeholders are rendered once by a sandbox that records every operation whose
outcome depends on one: a search for a word, a comparison, a length (`watching_sandbox`). A
placeholder is a random number (`random_mark`), which no template contains, and which survives
joining, trimming and changes of case; hence every value that holds one comes from the conversation.

As long as a text contains none of the recorded words, each of these operations has the outcome that
it had for the placeholder, and the template takes the same way. Where an operation has no such word
(a length, a slice), nothing is known of other texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

_PLACEHOLDER = re.compile(r"[1-9][0-9]{20}")
"""What `random_mark` returns."""
_MAX_DEPTH = 20
"""Nesting in which placeholders are looked for; deeper values count as holding one."""


@dataclass(slots=True)
class Inspected:
    """What a template inspected of placeholders."""

    words: set[str] = field(default_factory=set)
    """Words that it looked for in them."""
    any_case: bool = False
    """Whether it changed their case, so that words may be written in any."""
    unprovable: str = ""
    """An operation whose outcome for other texts is unknown; empty if there was none."""

    def allows(self, texts: Iterable[str]) -> bool:
        """Return whether the template treats these texts as it treated the placeholders in their
        place."""
        if self.unprovable:
            return False
        if not self.words:
            return True

        words: Iterable[str] = self.words
        if self.any_case:
            texts = [text.casefold() for text in texts]
            words = [word.casefold() for word in self.words]
        return not any(word in text for text in texts for word in words)

    def give_up(self, operation: str) -> None:
        """Record an operation whose outcome for other texts is unknown."""
        self.unprovable = self.unprovable or operation

    def add(self, word: Any, value: Any, operation: str) -> None:
        """Record that a word was looked for in a value that holds a placeholder."""
        if word == "":
            return  # whether a text is empty is part of its shape
        if holds_placeholder(word):
            self.give_up(operation)  # two texts are compared with each other
        elif not _is_placeholder(value):
            self.give_up(operation)  # the word may lie across a text and what was joined to it
        elif isinstance(word, str):
            self.words.add(word)
        elif isinstance(word, (list, tuple)):
            for item in word:
                self.add(item, value, operation)
        elif word is not None and not isinstance(word, (bool, int, float)):
            self.give_up(operation)


_inspected: ContextVar[Inspected | None] = ContextVar("_inspected", default=None)


@contextmanager
def watch_placeholders() -> Iterator[Inspected]:
    """Record what templates inspect of placeholders while they render in the body."""
    record = Inspected()
    token = _inspected.set(record)
    try:
        yield record
    finally:
        _inspected.reset(token)


@contextmanager
def watch_nothing() -> Iterator[None]:
    """Record nothing of what is rendered in the body: questions about the template itself."""
    token = _inspected.set(None)
    try:
        yield
    finally:
        _inspected.reset(token)


def is_watching() -> bool:
    """Return whether renderings are being recorded."""
    return _inspected.get() is not None


def current_record() -> Inspected:
    """Return the record of the body being watched; one that is thrown away if none is."""
    return _inspected.get() or Inspected()


def _is_placeholder(value: Any) -> bool:
    """Return whether a value is a placeholder, but for white space, or a list in which no value
    holds more."""
    if isinstance(value, str):
        return _PLACEHOLDER.fullmatch(value.strip()) is not None or not holds_placeholder(value)
    if isinstance(value, (list, tuple)):
        return all(map(_is_placeholder, value))
    return not holds_placeholder(value)


def holds_placeholder(value: Any, depth: int = 0) -> bool:
    """Return whether a value, or one inside it, contains a placeholder."""
    if isinstance(value, str):
        return _PLACEHOLDER.search(value) is not None
    if depth > _MAX_DEPTH:
        return True
    if isinstance(value, Mapping):
        return any(holds_placeholder(item, depth + 1) for pair in value.items() for item in pair)
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(holds_placeholder(item, depth + 1) for item in value)
    return False
