"""Compare built ids with a full render; assistant masks."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from turnwise.errors import TemplateError
from turnwise.renderers.chat_renderer import ChatRenderer
from turnwise.renderers.vision.media_blocks import media_of
from turnwise.types import Media, MediaPlacement, Message, Origin


def template_assistant_mask(
    renderer: ChatRenderer, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[list[int], list[int]]:
    """The ids of a full render, and 1 for each that touches what stands in `{% generation %}`, else 0.

    What is trained never comes from here: a mask by marks knows nothing of what was sampled, and templates differ in whether
    they mark the newline behind a reply's end.

    Raises:
        TemplateError: when the template cannot show the conversation, or changes what it marks.
    """
    text, marked = renderer.template.render_with_assistant_ranges(messages, tools)
    ids: list[int] = []
    mask: list[int] = []
    number = 0
    for token, start, end in renderer.codec.encode_with_offsets(text):
        while number < len(marked) and marked[number][1] <= start:
            number += 1
        inside = number < len(marked) and marked[number][0] < max(end, start + 1)
        ids.append(token)
        mask.append(int(inside))
    return ids, mask


Level = Literal["strict", "ignore_strippable"]
CAUSES: Mapping[str, str] = {
    "thinking_stripped": "The template does not show this thinking any more; what was sampled stays in the context.",
    "thinking_added": "The template writes thinking, or an empty mark of it, where the model wrote none.",
    "prefill": "The generation prompt writes something that a finished turn does not show, such as an opened <think>.",
    "tool_calls": "The template writes the tool calls of a reply in another way than the model did.",
    "retokenised": "The text is the same, the ids are others: the model sampled what the tokenizer would not write.",
    "whitespace": "White space differs: the template trims or adds some.",
    "close": "The template closes a reply in another way in the middle of a conversation.",
    "state": "The template keeps state across turns (a counter, a flag, a window): it shows earlier turns otherwise by now.",
    "tool_folding": "The template puts tool results together that came one by one, or the reverse.",
    "control_text": "Control text from the world was made harmless, so it is encoded as plain text.",
    "truncated": "A reply was cut off; the template writes its end, or shows its parts in another way.",
    "inline": "The conversation goes on inside one assistant message.",
    "history": "History was rewritten, so the conversation is not one of turns behind each other.",
    "image": "A message with an image is shown in another way.",
    "template_refuses": "The template cannot show this conversation as a whole.",
    "reply": "The template writes the reply in another way than it was sampled.",
    "scaffold": "The template writes something else around messages once others follow.",
}
"""Why what was built differs from a full render, each with a sentence."""
_AROUND = 48
"""Characters shown to either side of a difference."""
_THINK = ("<think>", "</think>", "<|channel|>", "[THINK]", "<seed:think>")


class OriginRun(NamedTuple):
    """A run of ids with one origin, as it lies on the path."""

    origin: Origin
    start: int
    end: int
    turn: int = -1
    """The turn whose reply it is, -1 for what was not sampled."""


@dataclass(frozen=True, slots=True)
class BuiltConversation:
    """A conversation as it was built, up to and including a reply."""

    ids: Sequence[int]
    pieces: Sequence[OriginRun]
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    finish: Mapping[int, str] | None = None
    """How the reply of each turn ended, as the engine said."""
    neutralised: bool = False
    """Whether control text was made harmless."""
    inline: bool = False
    rewritten: bool = False
    """Whether a branch was made, or a reply rewound."""
    placed: Sequence[MediaPlacement] = ()
    """Images and videos among the ids."""


@dataclass(frozen=True, slots=True)
class RenderDifference:
    """The first place where what was built is not what a full render writes."""

    cause: str
    """One of `CAUSES`."""
    position: int
    """Of the first id that differs, on the path."""
    origin: str
    """Who wrote that id: prompt, template, model or env."""
    turn: int
    """The turn whose reply holds it or stands last before it; -1 in the opening prompt."""
    sampled: str
    """What the model wrote there, or last before it."""
    canonical: str
    """What a full render writes there."""
    sent: str
    """What the engine was sent there (and what is trained)."""
    said: str = ""
    """What the template said, where it refused."""

    @property
    def description(self) -> str:
        """The cause in a sentence."""
        return CAUSES[self.cause]


def compare_with_render(renderer: ChatRenderer, built: BuiltConversation, level: Level = "strict") -> RenderDifference | None:
    """The first difference between what was built and a full render of the same conversation; None where there is none.

    What the template writes behind the end of the last reply is no difference: nothing stands there yet. Never raises.
    """
    try:
        return _compare(renderer, built, level)
    except TemplateError as error:
        return _difference(renderer, built, "template_refuses", len(built.ids), len(built.ids), "", str(error)[:500])


def _compare(renderer: ChatRenderer, built: BuiltConversation, level: Level) -> RenderDifference | None:
    text = renderer.template.render(renderer.with_shown_media(built.messages), built.tools)
    canonical = renderer.codec.encode(text)
    ids = list(built.ids)
    if built.placed and renderer.vision is not None:
        shown = media_of(built.messages)
        if [block.media for block in built.placed] != shown:
            return _image_difference(renderer, built, text, shown)
        canonical, text = _expanded(renderer, canonical, text, built)
    ended = bool(ids) and ids[-1] in renderer.stop_ids
    size = len(ids)
    if ended and canonical[:size] == ids:
        return None
    sent = renderer.decode(ids)
    at = _first(sent, text, level)
    same = at >= len(sent) and (ended or not text[at:].strip() or _only_closes(renderer, text[at:]))
    if same:
        whole = next((i for i, (a, b) in enumerate(zip(ids, canonical, strict=False)) if a != b), None)
        if whole is None or sent != text[: len(sent)]:
            return None
        _, piece = _piece(built, whole)
        cause = "control_text" if built.neutralised and piece.origin is not Origin.MODEL else "retokenised"
        found = _difference(renderer, built, cause, whole, len(renderer.decode(ids[:whole])), text)
        # The texts are the same, so where the ids part is shown.
        few = slice(max(0, whole - 4), whole + 8)
        return replace(found, canonical=_cut_text(renderer, canonical[few]), sent=_cut_text(renderer, ids[few]))
    position = _position(renderer, ids, at)
    return _difference(renderer, built, _cause(renderer, built, sent, text, at, position), position, at, text)


def _image_difference(renderer: ChatRenderer, built: BuiltConversation, text: str, shown: Sequence[Media]) -> RenderDifference:
    """The first image on the path that is not the one that the conversation shows there."""
    cause = "history" if built.rewritten else "image"
    pairs = zip(built.placed, shown, strict=False)
    block = next(
        (block for block, media in pairs if block.media != media), built.placed[min(len(shown), len(built.placed) - 1)]
    )
    return _difference(renderer, built, cause, block.start, len(renderer.decode(built.ids[: block.start])), text)


def _expanded(renderer: ChatRenderer, canonical: list[int], text: str, built: BuiltConversation) -> tuple[list[int], str]:
    """A full render, as ids and as text, with the blocks of what was built in place of its placeholders."""
    assert renderer.vision is not None
    placeholders = re.compile("|".join({re.escape(renderer.decode(block.compact)) for block in built.placed}))
    blocks = [renderer.decode(built.ids[block.start : block.end]) for block in built.placed]
    if len(placeholders.findall(text)) != len(blocks):
        return canonical, text  # a content holds the text of one, which was made harmless
    ids, _ = renderer.vision.expand(canonical, [block.media for block in built.placed])
    rest = iter(blocks)
    return ids, placeholders.sub(lambda _: next(rest), text)


def _cut_text(renderer: ChatRenderer, ids: Sequence[int]) -> str:
    """The text of ids with a stroke between two of them."""
    return "|".join(renderer.token_texts(ids))


def _only_closes(renderer: ChatRenderer, rest: str) -> bool:
    """Whether a text does nothing but end a reply that was cut off."""
    ids = renderer.codec.encode(rest)
    found = [i for i, token in enumerate(ids) if token in renderer.stop_ids]
    return bool(found) and not renderer.decode(ids[: found[0]]).strip() and not renderer.decode(ids[found[0] + 1 :]).strip()


def _first(sent: str, text: str, level: Level) -> int:
    """Where in `sent` the texts first differ; its length where it is all there."""
    at = next((i for i, (a, b) in enumerate(zip(sent, text, strict=False)) if a != b), min(len(sent), len(text)))
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
    """The id that holds a character."""
    return min(bisect_right(range(len(ids)), at, key=lambda n: len(renderer.decode(ids[: n + 1]))), max(len(ids) - 1, 0))


def _cause(renderer: ChatRenderer, built: BuiltConversation, sent: str, text: str, at: int, position: int) -> str:
    number, piece = _piece(built, position)
    if built.inline:
        return "inline"
    if built.rewritten:
        return "history"
    asked = piece.origin in (Origin.PROMPT, Origin.ENV)
    if asked and built.neutralised:
        return "control_text"
    if asked and any(message.media for message in built.messages):
        return "image"
    here = sent[at : at + 200]
    there = _aligned(text, sent, at)
    if piece.origin is Origin.MODEL:
        return _cause_in_reply(renderer, built, piece, here, there, position)
    before = built.pieces[number - 1] if number else None
    if before is not None and before.origin is Origin.MODEL and _cut(built, before):
        return "truncated"
    if any(there.startswith(one) or there.lstrip().startswith(one) for one in _THINK):
        return "thinking_added"
    if _keeps_state(renderer, built, sent, at, position):
        return "state"
    if before is not None and position == piece.start:
        return "whitespace" if here.lstrip() == there.lstrip() or there[:1].isspace() != here[:1].isspace() else "close"
    if _ends_prompt(renderer, built, piece, position):
        return "prefill"
    folds = asked and any(m.role == "tool" for m in built.messages)
    return "tool_folding" if folds else "whitespace" if here[:1].isspace() or there[:1].isspace() else "scaffold"


def _keeps_state(renderer: ChatRenderer, built: BuiltConversation, sent: str, at: int, position: int) -> bool:
    """Whether a difference in what the template wrote does not come from what follows it at once.

    Either the template showed it as it was sent once another turn followed, and shows it otherwise by now, or it never did
    behind this conversation.
    """
    replies = [number for number, message in enumerate(built.messages) if message.role == "assistant"]
    turns = len({piece.turn for piece in built.pieces if piece.turn >= 0})
    past = len({piece.turn for piece in built.pieces if piece.turn >= 0 and piece.start <= position})
    ends = [*replies[len(replies) - turns :], len(built.messages)]
    then, after = (built.messages[: ends[min(past + more, len(ends) - 1)]] for more in (0, 1))
    try:
        first, second = (
            renderer.template.render(renderer.with_shown_media(rows), built.tools, generation_prompt=True)
            for rows in (then, after)
        )
    except TemplateError:
        return False
    if len(after) == len(built.messages):
        return not first.startswith(sent[: at + 1]) and first.startswith(sent[:at])
    return second.startswith(sent[: at + 1])


def _cause_in_reply(
    renderer: ChatRenderer, built: BuiltConversation, piece: OriginRun, here: str, there: str, position: int
) -> str:
    reply = _reply(built, piece)
    own = renderer.decode(built.ids[piece.start : piece.end])
    if _cut(built, piece) and not (reply and reply.tool_calls):
        return "truncated"
    if built.ids[position] in renderer.stop_ids:
        if there[:1].isspace():
            return "whitespace"
        return "close"
    inside = renderer.decode(built.ids[piece.start : position])
    if (reply is not None and reply.reasoning is not None) or any(one in own for one in _THINK):
        if not any(one in there[: len(own)] for one in _THINK) and (here + inside).count("<think>") + own.count("</think>"):
            shown = (reply.reasoning or "").strip() if reply else ""
            if not shown or shown not in there[: len(own) + 20]:
                return "thinking_stripped"
        if reply is not None and (reply.reasoning or "").strip() and (reply.reasoning or "").strip() not in there + inside:
            return "thinking_stripped"
    elif any(there.lstrip().startswith(one) for one in _THINK):
        return "thinking_added"
    if reply is not None and any(call.name and call.name in inside for call in reply.tool_calls):
        return "tool_calls"
    if "".join(here.split())[:40] == "".join(there.split())[:40] or here[:1].isspace() != there[:1].isspace():
        return "whitespace"
    if reply is not None and reply.tool_calls:
        return "tool_calls"
    return "reply"


def _aligned(text: str, sent: str, at: int) -> str:
    """What the full render writes where `sent` differs from it."""
    if text[:at] == sent[:at]:
        return text[at : at + 200]
    seen = len("".join(sent[:at].split()))  # white space before it was passed over
    for index, char in enumerate(text):
        if seen <= 0:
            return text[index : index + 200]
        seen -= not char.isspace()
    return ""


def _ends_prompt(renderer: ChatRenderer, built: BuiltConversation, piece: OriginRun, position: int) -> bool:
    """Whether nothing that anyone said stands between a position and the reply behind it."""
    rest = renderer.decode(built.ids[position : piece.end])
    spoken = [m.text.strip() for m in built.messages if m.role != "assistant" and m.text.strip()]
    return not any(said in rest or rest.strip() in said for said in spoken)


def _piece(built: BuiltConversation, position: int) -> tuple[int, OriginRun]:
    number = next((n for n, one in enumerate(built.pieces) if one.start <= position < one.end), len(built.pieces) - 1)
    return number, built.pieces[number] if built.pieces else OriginRun(Origin.PROMPT, 0, 0)


def _reply(built: BuiltConversation, piece: OriginRun) -> Message | None:
    """The reply that a piece is of: replies stand on the path in the order of the conversation, the last one last."""
    turns = list(dict.fromkeys(one.turn for one in built.pieces if one.turn >= 0))
    replies = [message for message in built.messages if message.role == "assistant"][-len(turns) :]
    return replies[turns.index(piece.turn)] if piece.turn in turns and len(replies) == len(turns) else None


def _cut(built: BuiltConversation, piece: OriginRun) -> bool:
    return (built.finish or {}).get(piece.turn, "stop") == "length"


def _difference(
    renderer: ChatRenderer, built: BuiltConversation, cause: str, position: int, at: int, text: str, said: str = ""
) -> RenderDifference:
    """The report: windows of the three columns around a difference."""
    number, piece = _piece(built, position)
    sent = renderer.decode(built.ids)
    back = max(0, at - _AROUND)
    lead = sent[back:at]
    start = text.find(lead, max(0, back - 400)) if lead and text[back:at] != lead else back
    canonical = text[max(start, 0) : max(start, 0) + 2 * _AROUND]
    model = next((one for one in reversed(built.pieces[: number + 1]) if one.origin is Origin.MODEL), None)
    sampled = ""
    if model is not None:
        own = renderer.decode(built.ids[model.start : model.end])
        middle = len(renderer.decode(built.ids[model.start : min(position, model.end)]))
        sampled = own[max(0, middle - _AROUND) : middle + _AROUND]
    turn = model.turn if model is not None else -1
    return RenderDifference(cause, position, str(piece.origin), turn, sampled, canonical, sent[back : at + _AROUND], said)
