"""Compare built ids with a full render of the conversation."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from turnwright.errors import TemplateError
from turnwright.renderers.chat_renderer import ChatRenderer
from turnwright.renderers.renderer import common_prefix_length
from turnwright.renderers.vision.media_blocks import media_of
from turnwright.types import Media, MediaPlacement, Message, Origin, Tools

Level = Literal["strict", "ignore_strippable"]
CAUSES: Mapping[str, str] = {
    "thinking_stripped": "The template no longer renders this thinking; the sampled ids stay in "
    "the context.",
    "thinking_added": "The template writes thinking, or an empty mark of it, where the model "
    "wrote none.",
    "prefill": "The generation prompt writes something that a finished turn does not contain, "
    "such as an opened <think>.",
    "tool_calls": "The template writes the tool calls of a reply differently from the model.",
    "retokenised": "The text is the same, the ids differ: the model sampled ids that the "
    "tokenizer would not produce.",
    "whitespace": "White space differs: the template trims or adds some.",
    "close": "The template closes a reply differently in the middle of a conversation.",
    "state": "The template keeps state across turns (a counter, a flag, a window): it now renders "
    "earlier turns differently.",
    "tool_folding": "The template joins tool results that came one by one, or the reverse.",
    "control_text": "Control text from the environment was encoded as plain text.",
    "truncated": "A reply was cut off; the template writes its end, or renders its parts "
    "differently.",
    "inline": "The conversation continues inside one assistant message.",
    "history": "History was rewritten, so the conversation is not a sequence of appended turns.",
    "image": "A message with an image is rendered differently.",
    "template_refuses": "The template cannot render this complete conversation.",
    "reply": "The template writes the reply differently from the sampled text.",
    "scaffold": "The template writes different text around messages once others follow.",
}
"""Causes of differences between built ids and a full render, each with a sentence."""
_CONTEXT = 48
"""Characters on either side of a reported difference."""
_THINK = ("<think>", "</think>", "<|channel|>", "[THINK]", "<seed:think>")


class OriginRun(NamedTuple):
    """Run of ids with one origin on the path."""

    origin: Origin
    start: int
    end: int
    turn: int = -1
    """Turn of the reply; -1 for ids that were not sampled."""


@dataclass(frozen=True, slots=True)
class BuiltConversation:
    """Conversation as built, up to and including a reply."""

    ids: Sequence[int]
    pieces: Sequence[OriginRun]
    messages: Sequence[Message]
    tools: Tools = ()
    finish: Mapping[int, str] | None = None
    """Finish reason of each turn's reply, from the engine."""
    neutralised: bool = False
    """Whether control text was encoded as plain text."""
    inline: bool = False
    rewritten: bool = False
    """Whether there was a branch or a rewound reply."""
    placed: Sequence[MediaPlacement] = ()
    """Images and videos among the ids."""


@dataclass(frozen=True, slots=True)
class RenderDifference:
    """First difference between built ids and a full render."""

    cause: str
    """One of `CAUSES`."""
    position: int
    """Position of the first differing id on the path."""
    origin: str
    """Origin of that id: prompt, template, model or env."""
    turn: int
    """Turn whose reply contains it or precedes it; -1 in the opening prompt."""
    sampled: str
    """Sampled text at the difference, or the last before it."""
    canonical: str
    """Text of the full render there."""
    sent: str
    """Text sent to the engine there (and trained on)."""
    said: str = ""
    """Error of the template, if it rejected the conversation."""

    @property
    def description(self) -> str:
        """One sentence about the cause."""
        return CAUSES[self.cause]


def compare_with_render(
    renderer: ChatRenderer, built: BuiltConversation, level: Level = "strict"
) -> RenderDifference | None:
    """Return the first difference between built ids and a full render of the same
    conversation; None if there is none.

    Template text after the end of the last reply does not count, because nothing is
    there yet. Never raises.
    """
    try:
        return _compare(renderer, built, level)
    except TemplateError as error:
        return _difference(
            renderer,
            built,
            "template_refuses",
            len(built.ids),
            len(built.ids),
            "",
            str(error)[:500],
        )


def _compare(
    renderer: ChatRenderer, built: BuiltConversation, level: Level
) -> RenderDifference | None:
    text = renderer.template.render(renderer.with_rendered_media(built.messages), built.tools)
    canonical = renderer.codec.encode(text)
    ids = list(built.ids)
    if built.placed and renderer.vision is not None:
        media = media_of(built.messages)
        if [block.media for block in built.placed] != media:
            return _image_difference(renderer, built, text, media)
        canonical, text = _with_media_blocks(renderer, canonical, text, built)
    ended = bool(ids) and ids[-1] in renderer.stop_ids
    size = len(ids)
    if ended and canonical[:size] == ids:
        return None
    sent = renderer.decode(ids)
    at = _first_difference(sent, text, level)
    same = at >= len(sent) and (ended or not text[at:].strip() or _only_closes(renderer, text[at:]))
    if same:
        position = next(
            (i for i, (a, b) in enumerate(zip(ids, canonical, strict=False)) if a != b), None
        )
        if position is None or sent != text[: len(sent)]:
            return None
        _, piece = _piece(built, position)
        cause = (
            "control_text"
            if built.neutralised and piece.origin is not Origin.MODEL
            else "retokenised"
        )
        found = _difference(
            renderer, built, cause, position, len(renderer.decode(ids[:position])), text
        )
        # The texts are equal: show the ids around the difference.
        nearby = slice(max(0, position - 4), position + 8)
        texts = ["|".join(renderer.token_texts(row[nearby])) for row in (canonical, ids)]
        return replace(found, canonical=texts[0], sent=texts[1])
    position = _position(renderer, ids, at)
    return _difference(
        renderer, built, _cause(renderer, built, sent, text, at, position), position, at, text
    )


def _image_difference(
    renderer: ChatRenderer, built: BuiltConversation, text: str, expected: Sequence[Media]
) -> RenderDifference:
    """Return the first image on the path that differs from the conversation's image there."""
    cause = "inline" if built.inline else "history" if built.rewritten else "image"
    pairs = zip(built.placed, expected, strict=False)
    last = built.placed[min(len(expected), len(built.placed) - 1)]
    block = next((block for block, media in pairs if block.media != media), last)
    return _difference(
        renderer, built, cause, block.start, len(renderer.decode(built.ids[: block.start])), text
    )


def _with_media_blocks(
    renderer: ChatRenderer, canonical: list[int], text: str, built: BuiltConversation
) -> tuple[list[int], str]:
    """Replace the placeholders of a full render, as ids and text, by the built media blocks."""
    assert renderer.vision is not None
    placeholders = re.compile(
        "|".join({re.escape(renderer.decode(block.compact)) for block in built.placed})
    )
    blocks = [renderer.decode(built.ids[block.start : block.end]) for block in built.placed]
    if len(placeholders.findall(text)) != len(blocks):
        return (
            canonical,
            text,
        )  # a content contains a placeholder's text, which was encoded as plain text
    ids, _ = renderer.vision.expand(canonical, [block.media for block in built.placed])
    rest = iter(blocks)
    return ids, placeholders.sub(lambda _: next(rest), text)


def _only_closes(renderer: ChatRenderer, rest: str) -> bool:
    """Return whether a text only closes a truncated reply."""
    ids = renderer.codec.encode(rest)
    found = [i for i, token in enumerate(ids) if token in renderer.stop_ids]
    return (
        bool(found)
        and not renderer.decode(ids[: found[0]]).strip()
        and not renderer.decode(ids[found[0] + 1 :]).strip()
    )


def _first_difference(sent: str, text: str, level: Level) -> int:
    """Return the position in `sent` where the texts first differ; its length if
    `text` contains all of it."""
    at = common_prefix_length(sent, text)
    if level == "strict":
        return at
    here = there = at
    while here < len(sent):
        if there < len(text) and sent[here] == text[there]:
            here, there = here + 1, there + 1
        elif sent[here].isspace():
            here += 1
        elif there < len(text) and text[there].isspace():
            there += 1
        else:
            return here
    return len(sent)


def _position(renderer: ChatRenderer, ids: Sequence[int], at: int) -> int:
    """Return the position of the id that contains a character."""
    return min(
        bisect_right(range(len(ids)), at, key=lambda n: len(renderer.decode(ids[: n + 1]))),
        max(len(ids) - 1, 0),
    )


def _cause(
    renderer: ChatRenderer, built: BuiltConversation, sent: str, text: str, at: int, position: int
) -> str:
    number, piece = _piece(built, position)
    if built.inline:
        return "inline"
    if built.rewritten:
        return "history"
    is_input = piece.origin in (Origin.PROMPT, Origin.ENV)
    if is_input and built.neutralised:
        return "control_text"
    if is_input and any(message.media for message in built.messages):
        return "image"
    here = sent[at : at + 200]
    there = _aligned(text, sent, at)
    if piece.origin is Origin.MODEL:
        return _cause_in_reply(renderer, built, piece, here, there, position)
    before = built.pieces[number - 1] if number else None
    if before is not None and before.origin is Origin.MODEL and _truncated(built, before):
        return "truncated"
    if any(there.startswith(one) or there.lstrip().startswith(one) for one in _THINK):
        return "thinking_added"
    if _keeps_state(renderer, built, sent, at, position):
        return "state"
    if before is not None and position == piece.start:
        return (
            "whitespace"
            if here.lstrip() == there.lstrip() or there[:1].isspace() != here[:1].isspace()
            else "close"
        )
    if _ends_prompt(renderer, built, piece, position):
        return "prefill"
    folds = is_input and any(m.role == "tool" for m in built.messages)
    return (
        "tool_folding"
        if folds
        else "whitespace"
        if here[:1].isspace() or there[:1].isspace()
        else "scaffold"
    )


def _keeps_state(
    renderer: ChatRenderer, built: BuiltConversation, sent: str, at: int, position: int
) -> bool:
    """Return whether a difference in template text is not due to the messages right after it.

    Either the template rendered it as sent when one more turn followed, and renders it differently
    by now. Or it never rendered it as sent after this conversation.
    """
    replies = [
        number for number, message in enumerate(built.messages) if message.role == "assistant"
    ]
    turns = len({piece.turn for piece in built.pieces if piece.turn >= 0})
    past = len(
        {piece.turn for piece in built.pieces if piece.turn >= 0 and piece.start <= position}
    )
    ends = [*replies[len(replies) - turns :], len(built.messages)]
    then, after = (built.messages[: ends[min(past + more, len(ends) - 1)]] for more in (0, 1))
    try:
        first, second = (
            renderer.template.render(
                renderer.with_rendered_media(rows), built.tools, generation_prompt=True
            )
            for rows in (then, after)
        )
    except TemplateError:
        return False
    if len(after) == len(built.messages):
        return not first.startswith(sent[: at + 1]) and first.startswith(sent[:at])
    return second.startswith(sent[: at + 1])


def _cause_in_reply(
    renderer: ChatRenderer,
    built: BuiltConversation,
    piece: OriginRun,
    here: str,
    there: str,
    position: int,
) -> str:
    reply = _reply(built, piece)
    own = renderer.decode(built.ids[piece.start : piece.end])
    if _truncated(built, piece) and not (reply and reply.tool_calls):
        return "truncated"
    if built.ids[position] in renderer.stop_ids:
        return "whitespace" if there[:1].isspace() else "close"
    inside = renderer.decode(built.ids[piece.start : position])
    if (reply is not None and reply.reasoning is not None) or any(one in own for one in _THINK):
        if not any(one in there[: len(own)] for one in _THINK) and (here + inside).count(
            "<think>"
        ) + own.count("</think>"):
            thought = (reply.reasoning or "").strip() if reply else ""
            if not thought or thought not in there[: len(own) + 20]:
                return "thinking_stripped"
        if (
            reply is not None
            and (reply.reasoning or "").strip()
            and (reply.reasoning or "").strip() not in there + inside
        ):
            return "thinking_stripped"
    elif any(there.lstrip().startswith(one) for one in _THINK):
        return "thinking_added"
    if reply is not None and any(call.name and call.name in inside for call in reply.tool_calls):
        return "tool_calls"
    if (
        "".join(here.split())[:40] == "".join(there.split())[:40]
        or here[:1].isspace() != there[:1].isspace()
    ):
        return "whitespace"
    if reply is not None and reply.tool_calls:
        return "tool_calls"
    return "reply"


def _aligned(text: str, sent: str, at: int) -> str:
    """Return the text of the full render where `sent` differs from it."""
    if text[:at] == sent[:at]:
        return text[at : at + 200]
    count = len("".join(sent[:at].split()))  # the comparison skipped white space before it
    for index, char in enumerate(text):
        if count <= 0:
            return text[index : index + 200]
        count -= not char.isspace()
    return ""


def _ends_prompt(
    renderer: ChatRenderer, built: BuiltConversation, piece: OriginRun, position: int
) -> bool:
    """Return whether no message text is between a position and the next reply."""
    rest = renderer.decode(built.ids[position : piece.end])
    texts = [m.text.strip() for m in built.messages if m.role != "assistant" and m.text.strip()]
    return not any(text in rest or rest.strip() in text for text in texts)


def _piece(built: BuiltConversation, position: int) -> tuple[int, OriginRun]:
    number = next(
        (n for n, one in enumerate(built.pieces) if one.start <= position < one.end),
        len(built.pieces) - 1,
    )
    return number, built.pieces[number] if built.pieces else OriginRun(Origin.PROMPT, 0, 0)


def _reply(built: BuiltConversation, piece: OriginRun) -> Message | None:
    """Return the reply of a piece; replies are on the path in the order of the conversation."""
    turns = list(dict.fromkeys(one.turn for one in built.pieces if one.turn >= 0))
    replies = [message for message in built.messages if message.role == "assistant"][-len(turns) :]
    return (
        replies[turns.index(piece.turn)]
        if piece.turn in turns and len(replies) == len(turns)
        else None
    )


def _truncated(built: BuiltConversation, piece: OriginRun) -> bool:
    return (built.finish or {}).get(piece.turn, "stop") == "length"


def _difference(
    renderer: ChatRenderer,
    built: BuiltConversation,
    cause: str,
    position: int,
    at: int,
    text: str,
    error: str = "",
) -> RenderDifference:
    """Return the report, with excerpts of the three texts around a difference."""
    number, piece = _piece(built, position)
    sent = renderer.decode(built.ids)
    back = max(0, at - _CONTEXT)
    lead = sent[back:at]
    start = text.find(lead, max(0, back - 400)) if lead and text[back:at] != lead else back
    canonical = text[max(start, 0) : max(start, 0) + 2 * _CONTEXT]
    model = next(
        (one for one in reversed(built.pieces[: number + 1]) if one.origin is Origin.MODEL), None
    )
    sampled = ""
    if model is not None:
        own = renderer.decode(built.ids[model.start : model.end])
        middle = len(renderer.decode(built.ids[model.start : min(position, model.end)]))
        sampled = own[max(0, middle - _CONTEXT) : middle + _CONTEXT]
    turn = model.turn if model is not None else -1
    return RenderDifference(
        cause,
        position,
        str(piece.origin),
        turn,
        sampled,
        canonical,
        sent[back : at + _CONTEXT],
        error,
    )
