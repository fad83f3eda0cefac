"""Text from the world cannot become control: rendered messages to ids, control tokens from the template alone."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace

from turnwise.render.codec import Codec, control_pattern
from turnwise.types import Message

Render = Callable[[Sequence[Message]], str]
"""The text of messages, by a template."""


class Guard:
    """Encodes rendered messages of one tokenizer so that no content becomes a control token (invariant 8)."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.split = control_pattern(codec.control)
        """Splits a text at control tokens and keeps them."""
        self.control_ids = frozenset(codec.control.values())

    def owned(self, text: str) -> tuple[int, ...]:
        """The control ids of a text that is all the template's own, in order."""
        control = self._codec.control
        return tuple(control[part] for part in self.split.split(text) if part in control)

    def encode(self, messages: Sequence[Message], render: Render) -> tuple[list[int], int]:
        """Ids of rendered messages whose contents hold no control token, and how many control texts they held.

        Each control text in a content gets a mark put inside before the template sees it, so every control token in what is
        rendered is the template's own; the rest is encoded without control tokens, the marks taken out.
        """
        inner = mark()
        cleaned = [self._break_control(message, inner) for message in messages]
        hits = sum(count for _, count in cleaned)
        text = render([message for message, _ in cleaned])
        if not hits:
            ids = self._codec.encode(text)
            # With marks around the contents none can join with the template's text into a control token at a seam.
            apart = render([m if m.role == "assistant" else map_text(m, lambda t: f"{inner}{t}{inner}") for m in messages])
            if [i for i in ids if i in self.control_ids] == list(self.owned(apart)):
                return ids, 0
        ids, _ = self.encode_apart([text], [], inner)
        return ids, hits

    def encode_apart(self, pieces: Sequence[str], contents: Sequence[str], inner: str = "") -> tuple[list[int], int]:
        """Ids of template pieces and contents woven together, control tokens from the pieces alone; and control texts met."""
        ids: list[int] = []
        run: list[str] = []

        def flush() -> None:
            text = "".join(run)
            ids.extend(self._codec.plain(text.replace(inner, "") if inner else text) if text else [])
            run.clear()

        for number, piece in enumerate(pieces):
            for part in self.split.split(piece):
                if part in self._codec.control:
                    flush()
                    ids.append(self._codec.control[part])
                else:
                    run.append(part)
            if number < len(contents):
                run.append(contents[number])
        flush()
        hits = sum(1 for content in contents for _ in self.split.finditer(content))
        return ids, max(hits, 1) if contents else 0

    def _break_control(self, message: Message, inner: str) -> tuple[Message, int]:
        """The message with `inner` inside each control text, and how many there were.

        Assistant turns are demonstrations: thinking and tool calls in them are meant, the end of a turn is not.
        """
        count = 0
        codec = self._codec
        unsafe = codec.special if message.role == "assistant" else self.control_ids

        def broken(text: str) -> str:
            nonlocal count
            found = {start: end for i, start, end in codec.spans(text) if i in unsafe}
            found |= {m.start(): m.end() for m in self.split.finditer(text) if codec.control[m.group()] in unsafe}
            for start, end in sorted(found.items(), reverse=True):
                kept = min(start + 1, end - 1)  # a control token of one character cannot be broken: it is left out
                text = text[:kept] + inner + text[start + 1 :]
            count += len(found)
            return text

        return map_text(message, broken), count


def mark() -> str:
    """Digits nobody can guess: they survive trimming, JSON, and changes of case."""
    return str(10**20 + secrets.randbelow(9 * 10**20))


def map_text(message: Message, change: Callable[[str], str]) -> Message:
    """The message with each text of its content changed."""
    if isinstance(message.content, str):
        return replace(message, content=change(message.content))
    return replace(message, content=tuple(change(part) if isinstance(part, str) else part for part in message.content))
