"""Replies of one model: read in the format that its template shows, and written for scripts and demonstrations."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from turnwise.errors import TemplateError
from turnwise.render.codec import PrecedingToken, Tokenizer, control_pattern
from turnwise.render.parsers import PARSERS, Parser, parser_for_template
from turnwise.render.parsers.choose import PROBE_TOOL, render_probe_reply, shows_calls
from turnwise.render.template import ChatTemplate
from turnwise.types import Message

_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_HERMES = PARSERS["hermes"]


class ReplyReader:
    """Reads and writes what one model says."""

    def __init__(self, codec: Tokenizer, template: ChatTemplate, outside: Collection[int]) -> None:
        """
        Args:
            codec: the tokenizer.
            template: the chat template, in the form that it reads.
            outside: control ids that stand in no reply, or end it.
        """
        shown = render_probe_reply(template) or ""
        found = parser_for_template(template)
        self.parser: Parser = found or _HERMES
        self.unread = shows_calls(template) if found is None else ""
        """What the template writes for a reply with a call, where no parser reads it back; else empty."""
        self.thinking = self.parser.opens_reasoning(_prompt(template))
        """Whether a reply begins inside the thinking, which the generation prompt has opened."""
        self._plain = codec.encode_plain
        control = codec.control
        self._marks = {t: i for t, i in control.items() if t in _MARKS or (t in shown and i not in outside)}
        self._split = control_pattern(self._marks)

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]], thinking: bool | None) -> Message:
        """A reply's text as a message."""
        return self.parser.parse(text, tools, thinking=self.thinking if thinking is None else thinking)

    def encode(self, text: str, behind: PrecedingToken) -> list[int]:
        """The ids that a model would sample to say `text`; marks of thinking and of calls count as tokens.

        Args:
            behind: what the reply stands behind.

        Raises:
            TemplateError: for calls in Hermes' format where the model writes and is read in another one.
        """
        if self.parser is not _HERMES and "<tool_call>" in text:
            hermes, own = (parser.parse(text, (PROBE_TOOL,)).tool_calls for parser in (_HERMES, self.parser))
            if any(call.error is None for call in hermes) and not any(call.error is None for call in own):
                raise TemplateError(
                    f"this reply makes a call in Hermes' format, but the template shows calls in that of {self.parser.name!r}, "
                    "and they are read so; write scripts and demonstrations in it (docs/templates.md)"
                )
        ids: list[int] = []
        for piece in self._split.split(text):
            if piece:
                ids.extend([self._marks[piece]] if piece in self._marks else self._plain(piece, behind))
                behind = "control"
        return ids


def _prompt(template: ChatTemplate) -> str:
    """What stands behind a question where the model is asked to reply."""
    try:
        return template.render((Message("user", "USERMARK"),), generation_prompt=True).rpartition("USERMARK")[2]
    except TemplateError:
        return ""
