"""How a template shows the contents of messages, and text woven of its pieces and contents."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from turnwise.render.breaker import map_texts
from turnwise.render.guard import GuardRender
from turnwise.types import Message

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
