"""Compare built ids with a full render of the conversation, and name the cause of a difference.

`compare_with_render` renders a conversation that was built turn by turn as the template writes it
now, and reports where the two first differ. A difference is no fault: sampled ids stay as they are,
and templates rewrite earlier turns. What counts is that its cause (`CAUSES`) is one that a user
knows of. `rollouts/render_check.py` decides when to compare, and what a run does then.
"""

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
_EXCERPT = 200
"""Characters from a difference on that its cause is judged by."""
_THINKING_MARKS = ("<think>", "</think>", "<|channel|>", "[THINK]", "<seed:think>")


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
    """Return the first difference between built ids and a full render of the same conversation.

    None if there is none. Template text after the end of the last reply does not count, because
    nothing is there yet. Never raises.
    """
    try:
        return _compare(renderer, built, level)
    except TemplateError as error:
        end = len(built.ids)
        comparison = _Comparison(renderer, built, text="")
        return comparison.report("template_refuses", end, end, error=str(error)[:500])


def _compare(
    renderer: ChatRenderer, built: BuiltConversation, level: Level
) -> RenderDifference | None:
    text = renderer.template.render(renderer.with_rendered_media(built.messages), built.tools)
    canonical = renderer.codec.encode(text)
    ids = list(built.ids)
    if built.placed and renderer.vision is not None:
        media = media_of(built.messages)
        if [block.media for block in built.placed] != media:
            return _Comparison(renderer, built, text).image_difference(media)
        canonical, text = _with_media_blocks(renderer, canonical, text, built)

    ended = bool(ids) and ids[-1] in renderer.stop_ids
    if ended and canonical[: len(ids)] == ids:
        return None

    comparison = _Comparison(renderer, built, text)
    at = _first_difference(comparison.sent, text, level)
    rest = text[at:]
    contains_all = at >= len(comparison.sent)
    if contains_all and (ended or not rest.strip() or _only_closes(renderer, rest)):
        return comparison.difference_of_ids(canonical)

    position = _position(renderer, ids, at)
    return comparison.report(comparison.cause(at, position), position, at)


class _Comparison:
    """Built ids beside the text of a full render that differs from theirs.

    In all methods `position` is that of the first differing id on the path, and `at` that of the
    first differing character in `sent`.
    """

    def __init__(self, renderer: ChatRenderer, built: BuiltConversation, text: str) -> None:
        self._renderer = renderer
        self._built = built
        self._text = text
        """Text of the full render."""
        self.sent = renderer.decode(built.ids)
        """Text of the built ids."""

    def report(self, cause: str, position: int, at: int, *, error: str = "") -> RenderDifference:
        """Return the report, with excerpts of the three texts around a difference."""
        run_number, run = self._run_at(position)
        start = max(0, at - _CONTEXT)

        # The text before the difference may be further back in the full render, where white space
        # was skipped.
        lead = self.sent[start:at]
        canonical_start = start
        if lead and self._text[start:at] != lead:
            canonical_start = self._text.find(lead, max(0, start - 400))
        canonical_start = max(canonical_start, 0)

        turn = -1
        sampled = ""
        for earlier in reversed(self._built.pieces[: run_number + 1]):
            if earlier.origin is Origin.MODEL:
                turn = earlier.turn
                reply = self._decode(earlier.start, earlier.end)
                middle = len(self._decode(earlier.start, min(position, earlier.end)))
                sampled = reply[max(0, middle - _CONTEXT) : middle + _CONTEXT]
                break

        return RenderDifference(
            cause,
            position,
            origin=str(run.origin),
            turn=turn,
            sampled=sampled,
            canonical=self._text[canonical_start : canonical_start + 2 * _CONTEXT],
            sent=self.sent[start : at + _CONTEXT],
            said=error,
        )

    def image_difference(self, expected: Sequence[Media]) -> RenderDifference:
        """Return the first image on the path that differs from the conversation's image there."""
        built = self._built
        cause = "image"
        if built.inline:
            cause = "inline"
        elif built.rewritten:
            cause = "history"

        differing = built.placed[min(len(expected), len(built.placed) - 1)]
        for block, media in zip(built.placed, expected, strict=False):
            if block.media != media:
                differing = block
                break
        return self.report(cause, differing.start, len(self._decode(0, differing.start)))

    def difference_of_ids(self, canonical: Sequence[int]) -> RenderDifference | None:
        """Return the first difference from the full render's ids where the texts are equal."""
        ids = self._built.ids
        positions = (
            index
            for index, (built_id, other_id) in enumerate(zip(ids, canonical, strict=False))
            if built_id != other_id
        )
        position = next(positions, None)
        if position is None or self.sent != self._text[: len(self.sent)]:
            return None

        _, run = self._run_at(position)
        neutralised = self._built.neutralised and run.origin is not Origin.MODEL
        cause = "control_text" if neutralised else "retokenised"
        difference = self.report(cause, position, len(self._decode(0, position)))

        # The texts are equal: show the ids around the difference.
        nearby = slice(max(0, position - 4), position + 8)
        return replace(
            difference,
            canonical="|".join(self._renderer.token_texts(canonical[nearby])),
            sent="|".join(self._renderer.token_texts(ids[nearby])),
        )

    def cause(self, at: int, position: int) -> str:
        """Return the cause of a difference between the texts, one of `CAUSES`."""
        built = self._built
        run_number, run = self._run_at(position)
        if built.inline:
            return "inline"
        if built.rewritten:
            return "history"
        is_input = run.origin in (Origin.PROMPT, Origin.ENV)
        if is_input and built.neutralised:
            return "control_text"
        if is_input and any(message.media for message in built.messages):
            return "image"

        if run.origin is Origin.MODEL:
            return self._cause_in_reply(run, at, position)
        return self._cause_between_replies(run_number, run, at, position)

    def _cause_between_replies(
        self, run_number: int, run: OriginRun, at: int, position: int
    ) -> str:
        """Return the cause of a difference in what the template or the environment wrote."""
        here = self.sent[at : at + _EXCERPT]
        there = _aligned(self._text, self.sent, at)
        before = self._built.pieces[run_number - 1] if run_number else None
        if before is not None and before.origin is Origin.MODEL and self._is_truncated(before):
            return "truncated"
        if _starts_thinking(there):
            return "thinking_added"
        if self._keeps_state(at, position):
            return "state"

        if before is not None and position == run.start:
            same_but_for_space = here.lstrip() == there.lstrip()
            one_is_space = here[:1].isspace() != there[:1].isspace()
            return "whitespace" if same_but_for_space or one_is_space else "close"
        if self._ends_prompt(run, position):
            return "prefill"

        is_input = run.origin in (Origin.PROMPT, Origin.ENV)
        if is_input and any(message.role == "tool" for message in self._built.messages):
            return "tool_folding"
        if here[:1].isspace() or there[:1].isspace():
            return "whitespace"
        return "scaffold"

    def _cause_in_reply(self, run: OriginRun, at: int, position: int) -> str:
        """Return the cause of a difference within a reply."""
        here = self.sent[at : at + _EXCERPT]
        there = _aligned(self._text, self.sent, at)
        reply = self._reply_of(run)
        calls = reply.tool_calls if reply is not None else ()
        if self._is_truncated(run) and not calls:
            return "truncated"
        if self._built.ids[position] in self._renderer.stop_ids:
            return "whitespace" if there[:1].isspace() else "close"

        reply_text = self._decode(run.start, run.end)
        before = self._decode(run.start, position)
        reasoning = reply.reasoning if reply is not None else None
        if reasoning is not None or any(mark in reply_text for mark in _THINKING_MARKS):
            # Stripped: the marks are gone and the thought with them, or the thought alone.
            thought = (reasoning or "").strip()
            marks_written = any(mark in there[: len(reply_text)] for mark in _THINKING_MARKS)
            marks_sampled = "<think>" in here + before or "</think>" in reply_text
            thought_in_place = thought and thought in there[: len(reply_text) + 20]
            if marks_sampled and not marks_written and not thought_in_place:
                return "thinking_stripped"
            if thought and thought not in there + before:
                return "thinking_stripped"
        elif _starts_thinking(there):
            return "thinking_added"

        if any(call.name and call.name in before for call in calls):
            return "tool_calls"
        same_but_for_space = "".join(here.split())[:40] == "".join(there.split())[:40]
        if same_but_for_space or here[:1].isspace() != there[:1].isspace():
            return "whitespace"
        return "tool_calls" if calls else "reply"

    def _keeps_state(self, at: int, position: int) -> bool:
        """Return whether a difference in template text is not due to the messages right after it.

        Either the template rendered it as sent when one more turn followed, and renders it
        differently by now. Or it never rendered it as sent after this conversation.
        """
        messages = self._built.messages
        reply_indices = [i for i, message in enumerate(messages) if message.role == "assistant"]
        sampled = [run for run in self._built.pieces if run.turn >= 0]
        turns = len({run.turn for run in sampled})
        turns_before = len({run.turn for run in sampled if run.start <= position})

        # The conversation as it was before the next reply, and one turn later.
        ends = [*reply_indices[len(reply_indices) - turns :], len(messages)]
        then = messages[: ends[min(turns_before, len(ends) - 1)]]
        later = messages[: ends[min(turns_before + 1, len(ends) - 1)]]
        try:
            text_then = self._render(then)
            text_later = self._render(later)
        except TemplateError:
            return False

        if len(later) == len(messages):
            is_as_sent = text_then.startswith(self.sent[: at + 1])
            return not is_as_sent and text_then.startswith(self.sent[:at])
        return text_later.startswith(self.sent[: at + 1])

    def _render(self, messages: Sequence[Message]) -> str:
        shown = self._renderer.with_rendered_media(messages)
        return self._renderer.template.render(shown, self._built.tools, generation_prompt=True)

    def _ends_prompt(self, run: OriginRun, position: int) -> bool:
        """Return whether no message text is between a position and the next reply."""
        rest = self._decode(position, run.end)
        for message in self._built.messages:
            text = message.text.strip()
            if message.role != "assistant" and text and (text in rest or rest.strip() in text):
                return False
        return True

    def _run_at(self, position: int) -> tuple[int, OriginRun]:
        """Return the number of the run of ids that contains a position, and the run."""
        runs = self._built.pieces
        if not runs:
            return -1, OriginRun(Origin.PROMPT, 0, 0)
        for number, run in enumerate(runs):
            if run.start <= position < run.end:
                return number, run
        return len(runs) - 1, runs[-1]

    def _reply_of(self, run: OriginRun) -> Message | None:
        """Return the reply of a run; replies are on the path in the order of the conversation."""
        turns = list(dict.fromkeys(other.turn for other in self._built.pieces if other.turn >= 0))
        replies = [message for message in self._built.messages if message.role == "assistant"]
        replies = replies[-len(turns) :]
        if run.turn not in turns or len(replies) != len(turns):
            return None
        return replies[turns.index(run.turn)]

    def _is_truncated(self, run: OriginRun) -> bool:
        return (self._built.finish or {}).get(run.turn, "stop") == "length"

    def _decode(self, start: int, end: int) -> str:
        return self._renderer.decode(self._built.ids[start:end])


def _with_media_blocks(
    renderer: ChatRenderer, canonical: list[int], text: str, built: BuiltConversation
) -> tuple[list[int], str]:
    """Replace the placeholders of a full render, as ids and text, by the built media blocks."""
    assert renderer.vision is not None
    placeholders = {re.escape(renderer.decode(block.compact)) for block in built.placed}
    pattern = re.compile("|".join(placeholders))
    blocks = [renderer.decode(built.ids[block.start : block.end]) for block in built.placed]
    if len(pattern.findall(text)) != len(blocks):
        # A content contains a placeholder's text, which was encoded as plain text.
        return canonical, text

    ids, _ = renderer.vision.expand(canonical, [block.media for block in built.placed])
    remaining = iter(blocks)
    return ids, pattern.sub(lambda _: next(remaining), text)


def _only_closes(renderer: ChatRenderer, rest: str) -> bool:
    """Return whether a text only closes a truncated reply."""
    ids = renderer.codec.encode(rest)
    for index, token in enumerate(ids):
        if token in renderer.stop_ids:
            before = renderer.decode(ids[:index])
            after = renderer.decode(ids[index + 1 :])
            return not before.strip() and not after.strip()
    return False


def _first_difference(sent: str, text: str, level: Level) -> int:
    """Return the position in `sent` where the texts first differ; its length if `text` contains
    all of it."""
    here = common_prefix_length(sent, text)
    if level == "strict":
        return here

    there = here
    while here < len(sent):
        if there < len(text) and sent[here] == text[there]:
            here += 1
            there += 1
        elif sent[here].isspace():
            here += 1
        elif there < len(text) and text[there].isspace():
            there += 1
        else:
            return here
    return len(sent)


def _position(renderer: ChatRenderer, ids: Sequence[int], at: int) -> int:
    """Return the position of the id that contains a character."""

    def end_of(index: int) -> int:
        return len(renderer.decode(ids[: index + 1]))

    position = bisect_right(range(len(ids)), at, key=end_of)
    return min(position, max(len(ids) - 1, 0))


def _starts_thinking(text: str) -> bool:
    return text.lstrip().startswith(_THINKING_MARKS)


def _aligned(text: str, sent: str, at: int) -> str:
    """Return the text of the full render where `sent` differs from it."""
    if text[:at] == sent[:at]:
        return text[at : at + _EXCERPT]

    # The comparison skipped white space before it.
    left = len("".join(sent[:at].split()))
    for index, char in enumerate(text):
        if left <= 0:
            return text[index : index + _EXCERPT]
        if not char.isspace():
            left -= 1
    return ""
