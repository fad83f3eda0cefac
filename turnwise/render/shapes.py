"""What a template writes around the texts of messages of certain roles and parts, found once and filled in from then on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from turnwise.errors import TemplateError
from turnwise.render.breaker import map_texts
from turnwise.render.codec import Tokenizer
from turnwise.render.contents import SHOWN, contents_unchanged, interleave, probe_contents, texts_of, with_texts
from turnwise.render.guard import ControlTextGuard, GuardRender, random_mark
from turnwise.types import Message


@dataclass(frozen=True, slots=True)
class AppendShape:
    """What a template writes between a reply and the next one, for messages of certain roles; proven by probing.

    Added tokens cut a text before anything else happens to it, so what stands between two of them is encoded by itself:
    only the stretches that hold a content are encoded per turn, the rest is known.
    """

    pieces: tuple[str, ...] = ()
    """Template text before, between and behind the texts of contents; the first begins right behind the reply's end token.
    Empty where contents do not stand in the text as they are, so that every append is rendered for real."""
    shown: str = ""
    """How the template changes contents: `""`, `strip`, `json` or `strip json`."""
    expected: tuple[int, ...] = ()
    """Control ids of the pieces, in order."""
    fixed: tuple[tuple[int, ...], ...] = ()
    """Ids before, between and behind the stretches."""
    behind: str = ""
    """The control token that the whole stands behind; empty where it begins a prompt."""
    edges: tuple[tuple[str, str], ...] = ()
    """Template text before and behind each content, up to the nearest control tokens; empty where a whole append has to be
    encoded at once."""

    def contents(self, messages: Sequence[Message]) -> list[str]:
        """The texts of contents as the template shows them."""
        texts = texts_of(messages)
        return list(map(SHOWN[self.shown], texts)) if self.shown else texts


class AppendShapes:
    """Finds shapes of one template with one tokenizer, and fills them."""

    def __init__(self, codec: Tokenizer, guard: ControlTextGuard, origin: str) -> None:
        """
        Args:
            origin: what errors call the template.
        """
        self._codec = codec
        self._encode_stretch = codec.encode_segment
        self._guard = guard
        self._origin = origin

    def fill_ids(self, shape: AppendShape, contents: Sequence[str], close: list[int]) -> list[int] | None:
        """Ids of a shape with these contents behind `close`; None where a control token came out that the template did not
        write, or a marker of its that is no token stands in a content."""
        if self._guard.holds_marker(contents):
            return None
        if not shape.edges:
            ids = self._codec.encode_after(interleave(shape.pieces, contents), shape.behind)
            return close + ids if tuple(filter(self._guard.control_ids.__contains__, ids)) == shape.expected else None
        ids = close.copy()
        for (before, after), fixed, content in zip(shape.edges, shape.fixed, contents, strict=False):
            stretch = self._encode_stretch(f"{before}{content}{after}")
            if not self._guard.control_ids.isdisjoint(stretch):
                return None
            ids += fixed
            ids += stretch
        ids += shape.fixed[-1]
        return ids

    def find(
        self, messages: Sequence[Message], render: GuardRender, tools: Sequence[Mapping[str, Any]] = (), behind: str = ""
    ) -> AppendShape:
        """Find the template text around the contents, and whether contents pass through it unchanged.

        Raises:
            TemplateError: when the template drops or repeats a content.
        """
        harmless = [map_texts(m, lambda _: "x") for m in messages]
        if self._guard.encode(harmless, render, tools, behind).control:
            return AppendShape(behind=behind)  # names, ids and schemas are the world's too, and none of the template's own text
        if any(m.tool_calls or m.reasoning for m in messages):
            render([replace(m, content=m.text) for m in messages])
            return AppendShape(behind=behind)
        marks = [random_mark() for _ in texts_of(messages)]
        text = render(with_texts(messages, marks))
        pieces: list[str] = []
        for own in marks:
            before, found, text = text.partition(own)
            if not found or own in text:
                raise TemplateError(f"{self._origin}: drops or repeats a message of roles {[m.role for m in messages]}")
            pieces.append(before)
        pieces.append(text)
        for shown in SHOWN:
            if contents_unchanged(messages, pieces, shown, render):
                return self._cut(tuple(pieces), shown, behind)
        return AppendShape(behind=behind)

    def _cut(self, pieces: tuple[str, ...], shown: str, behind: str) -> AppendShape:
        """Cut the template text at its control tokens into what is known and what touches a content.

        Each cut is compared with the whole, encoded at once, over the probes: tokenizers whose pieces are not independent
        (word-start marks, tokens that eat white space) keep to the whole.
        """
        expected = tuple(i for piece in pieces for i in self._guard.template_control_ids(piece))
        whole = AppendShape(pieces, shown, expected, behind=behind)
        fixed: list[str] = []
        edges: list[str] = []
        for number, piece in enumerate(pieces):
            tokens = [match.span() for match in self._guard.split.finditer(piece)]
            is_first, is_last = number == 0, number == len(pieces) - 1
            if not tokens and not (is_first or is_last):
                return whole  # two contents that no control token parts
            start = 0 if is_first else tokens[0][0] if tokens else len(piece)
            end = len(piece) if is_last else tokens[-1][1] if tokens else 0
            if not is_first:
                edges.append(piece[:start])
            fixed.append(piece[start:end])
            if not is_last:
                edges.append(piece[end:])
        cut = AppendShape(
            pieces,
            shown,
            expected,
            (tuple(self._codec.encode_after(fixed[0], behind)), *(tuple(self._encode_stretch(text)) for text in fixed[1:])),
            behind,
            tuple(zip(edges[::2], edges[1::2], strict=True)),
        )
        for contents in probe_contents(len(pieces) - 1):
            if self.fill_ids(cut, contents, []) != self.fill_ids(whole, contents, []):
                return whole
        return cut
