"""What a template writes by itself: markers that are no tokens, and control tokens by whose turn they stand in."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, NamedTuple

from turnwise.errors import TemplateError
from turnwise.types import Message, ToolCall

_TAG = re.compile(
    r"</?[^\s<>]{1,60}>|<<[^<>]{1,60}>>|[\[{(][|\uff5c][^\s|\uff5c]{1,60}[|\uff5c][\]})]"
    r"|\[/?[A-Z][A-Z_ ]{1,60}\]|\{\{?/?[A-Za-z_]{1,60}\}\}?"
)
"""`<start_of_turn>`, `[|user|]`, `<<SYS>>`, `[INST]`."""
_HEADING = re.compile(
    r"^\s*(#{1,6} *[^\n]{1,60}|[A-Z][\w ]{0,30}:|(?:USER|ASSISTANT|SYSTEM|TOOL)\b[^\n]{0,30})\s*$", re.MULTILINE
)
"""`### User:`, `Human:`: a line of its own that is short and names something."""
_PROSE = 200
"""Characters at either end of a piece of template text that are looked at; what is longer is a preamble, in prose."""
_MEDIA = re.compile(r"image|img|video|vision|audio|media|pad", re.IGNORECASE)
_NAMES = ("look_up", "word")
"""Names that the probes below use."""

MarkersRender = Callable[..., str]
"""`render(messages, tools, generation_prompt=...)` of a template."""


class TemplateMarkers(NamedTuple):
    """What a template was seen to write."""

    literals: tuple[str, ...] = ()
    """Markers between contents that the tokenizer has no token for, longest first."""
    assistant_control: frozenset[str] = frozenset()
    """Control tokens inside an assistant's turn, its close included: a reply may hold them."""
    incoming_control: frozenset[str] = frozenset()
    """Control tokens around what the world says, and never inside an assistant's turn: a reply that holds one forges."""


def markers(pieces: Iterable[str]) -> tuple[str, ...]:
    """The marker-like literals in template text: tags, brackets, headings; longest first.

    Args:
        pieces: what a template writes between contents, control tokens taken out.
    """
    found: set[str] = set()
    for piece in pieces:
        ends = [piece] if len(piece) <= 2 * _PROSE else [piece[:_PROSE], piece[-_PROSE:]]
        for text in ends:
            tags = _TAG.findall(text)
            found.update(tags or [line.strip() for line in _HEADING.findall(text)])
    return tuple(sorted((text for text in found if len(text) > 1), key=lambda text: (-len(text), text)))


_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look it up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string", "description": "d"}}, "required": ["word"]},
    },
}


def find_template_markers(
    render: MarkersRender, split: re.Pattern[str], known: Iterable[str], mark: Callable[[], str], source: str = ""
) -> TemplateMarkers:
    """See by rendering short conversations what a template writes around each party's texts.

    A conversation that the template refuses is left out; so is a message whose text changes what stands before it, and what
    stands before a first message: a preamble speaks of markers without using them.

    Args:
        render: the template.
        split: splits a text at control tokens and keeps them.
        known: the texts of control tokens.
        mark: gives texts that nobody can guess.
        source: the template's source. A control token in it that was seen nowhere stands in replies of a kind that no message
            here has (thinking as a part of a content, say), but for placeholders of images and the like.
    """
    control = frozenset(known)
    said: set[str] = set()
    heard: set[str] = set()
    loose: list[str] = []
    calls_shown = False
    for messages, tools in _conversations(mark):
        for number, message in enumerate(messages):
            before = _try(render, messages[:number], tools, message.role == "assistant")
            after = _try(render, messages[: number + 1], tools, False)
            if after is None or (message.role == "tool" and not calls_shown) or (tools and number == 0):
                continue
            if number == 0:
                heard.update(_leading(split.split(after), control))
                if message.role != "system":
                    continue
            texts = [text for text in (message.text, message.reasoning, *_arguments(message)) if text]
            written = _written(before or "", after, texts, message.role)
            if written is None:
                continue
            if number == 0:
                written = _beside(written)
            parts = [part for piece in written for part in split.split(piece)]
            (said if message.role == "assistant" else heard).update(part for part in parts if part in control)
            loose += [part for part in parts if part not in control]
            calls_shown |= bool(message.tool_calls)
    asked, prompt = _prompt(render, mark)
    header = prompt.removeprefix(asked) if asked else ""
    heard.update(_leading(split.split(header), control)[:1])  # the header of a reply is no part of it
    unseen = {text for text in control if text in source and text not in heard and not _MEDIA.search(text)}
    literals = tuple(text for text in markers(loose) if not any(name in text for name in _NAMES))
    return TemplateMarkers(literals, frozenset(said | unseen), frozenset(heard - said))


def _prompt(render: MarkersRender, mark: Callable[[], str]) -> tuple[str, str]:
    """A user's message without and with what opens the next reply."""
    asked = [Message("user", mark())]
    return _try(render, asked, (), False) or "", _try(render, asked, (), True) or ""


def _leading(parts: Sequence[str], control: frozenset[str]) -> list[str]:
    """The control tokens that a text begins with: a beginning of sequence, a header."""
    return list(takewhile(lambda part: part in control, filter(str.strip, parts)))


def _beside(written: Sequence[str]) -> list[str]:
    """What stands right before and right behind the content of a first message: the line beside it."""
    before = [line for line in written[0].splitlines() if line.strip()][-1:]
    behind = [line for line in written[-1].splitlines() if line.strip()][:1]
    return [*before, *(line for line in behind if not _HEADING.match(line))]


def _conversations(mark: Callable[[], str]) -> list[tuple[list[Message], Sequence[Mapping[str, Any]]]]:
    call = ToolCall("look_up", {"word": mark()}, "call00001")
    asks = Message("user", mark())
    answers = Message("assistant", mark())
    calls = Message("assistant", mark(), tool_calls=(call,))
    result = Message("tool", mark(), tool_call_id="call00001", name="look_up")
    again = Message("user", mark())
    return [
        ([asks, answers, again], ()),
        ([asks, replace(answers, reasoning=mark())], ()),
        ([Message("system", mark()), asks, answers, again], ()),
        ([asks, calls, result, replace(answers, content=mark()), again], (_TOOL,)),
        ([asks, replace(calls, content="", reasoning=mark()), result], (_TOOL,)),
    ]


def _try(render: MarkersRender, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], prompt: bool) -> str | None:
    try:
        return render(messages, tools, generation_prompt=prompt) if messages else ""
    except TemplateError:
        return None


def _arguments(message: Message) -> list[str]:
    return [str(value) for call in message.tool_calls for value in call.arguments.values()]


def _written(before: str, after: str, texts: Sequence[str], role: str) -> list[str] | None:
    """The pieces of template text that a message of these texts adds; None where they cannot be told."""
    start = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after)))
    places = sorted((after.find(text, start), text) for text in texts if text in after[start:])
    if not places or (role != "assistant" and start < len(before)):
        return None
    pieces = []
    for place, text in places:
        pieces.append(after[start:place])
        start = place + len(text)
    return [*pieces, after[start:]]
