"""ChatRenderer: prompts, appends and parsed replies for one chat template."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any

from turnwise.errors import TemplateError
from turnwise.renderers.base import Branch, Extend, remember
from turnwise.renderers.contract import TemplateContract, derive_contract
from turnwise.renderers.control_text import ControlText, ControlTextGuard, EncodedMessages, find_template_markers
from turnwise.renderers.parsers import PARSERS, Parser, parser_for_template
from turnwise.renderers.parsers.detect import PROBE_NAME, PROBE_TOOL, render_probe_reply
from turnwise.renderers.probe import AppendProbe, AppendShape, AppendShapes, TemplateProbe, readable
from turnwise.renderers.recompose import ConversationComposer
from turnwise.renderers.template import ChatTemplate, adapt_template, digest
from turnwise.renderers.tokenizer import PrecedingToken, Tokenizer, control_pattern
from turnwise.renderers.vision.media_blocks import MediaExpander
from turnwise.types import ContentPart, ImageRef, MediaPlacement, Message, Tools, VideoRef

if TYPE_CHECKING:
    from turnwise.renderers.vision.base import VisionProcessor


_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_HERMES = PARSERS["hermes"]


class ReplyReader:
    """Parse and encode the replies of one model."""

    def __init__(self, codec: Tokenizer, template: ChatTemplate, outside: Collection[int], chosen: str | None) -> None:
        """`outside` are control ids that no reply contains, or that end it; `chosen` names a format, None detects it."""
        sample = render_probe_reply(template) or ""
        found = parser_for_template(template) if chosen is None else PARSERS[chosen]
        self.parser: Parser = found or _HERMES
        self.unread = sample if found is None and PROBE_NAME in sample else ""
        """Text the template writes for a reply with a call, if no parser reads it back; else empty."""
        prompt = template.try_render((Message("user", "USERMARK"),), generation_prompt=True) or ""
        self.thinking = self.parser.opens_reasoning(prompt.rpartition("USERMARK")[2])
        """Whether the generation prompt opens the thinking, so that replies start inside it."""
        self._plain = codec.encode_plain
        control = codec.control
        self._marks = {t: i for t, i in control.items() if t in _MARKS or (t in sample and i not in outside)}
        self._split = control_pattern(self._marks)

    def parse(self, text: str, tools: Tools, thinking: bool | None) -> Message:
        """Parse a reply's text into a message."""
        return self.parser.parse(text, tools, thinking=self.thinking if thinking is None else thinking)

    def encode(self, text: str, after: PrecedingToken) -> list[int]:
        """Return the ids a model would sample to write `text`; thinking and call marks are control tokens.

        Raises `TemplateError` if calls use the Hermes format but the template's format is a different one.
        """
        if self.parser is not _HERMES and "<tool_call>" in text:
            hermes, own = (parser.parse(text, (PROBE_TOOL,)).tool_calls for parser in (_HERMES, self.parser))
            if any(call.error is None for call in hermes) and not any(call.error is None for call in own):
                raise TemplateError(
                    f"this reply makes a call in Hermes' format, but the template's call format is {self.parser.name!r}, "
                    "in which calls are parsed; write scripts and demonstrations in that format (docs/templates.md)"
                )
        ids: list[int] = []
        for piece in self._split.split(text):
            if piece:
                ids.extend([self._marks[piece]] if piece in self._marks else self._plain(piece, after))
                after = "control"
        return ids


_MAX_SHAPE_MESSAGES = 8
"""Opening prompts with more messages are not cached by shape."""
_MARKUP = re.compile(r"<[^\s<>]+>|\[[^\s\[\]]+\]")
_REPLY = Message("assistant", "reply")


@dataclass(slots=True)
class _AppendPattern:
    """Template text between a reply and the next one, for a reply and messages of certain shapes."""

    append: AppendProbe
    shape: AppendShape
    """From the end of the reply on."""
    head: tuple[int, ...]
    """Ids that close a reply that has no stop id."""
    varies: bool = False
    """Whether it depends on earlier turns, so that it is derived for each conversation."""
    lengths: set[int] = field(default_factory=set)
    """Lengths in messages, up to the reply, of conversations after which the template wrote the same text."""


class ChatRenderer:
    """Renderer for one tokenizer and one chat template; proves each kind of append before using it."""

    def __init__(
        self,
        codec: Tokenizer,
        template: ChatTemplate,
        *,
        stop_ids: frozenset[int] | None = None,
        banned: Sequence[str] = (),
        control_text: ControlText = "neutralise",
        vision: VisionProcessor | None = None,
        parser: str | None = None,
    ) -> None:
        """
        Args:
            stop_ids: ids that end a reply; the tokens that close the template's assistant turns are added.
            banned: texts of control tokens that are never sampled (image placeholders).
            control_text: how control text in messages is handled.
            vision: the vision processor of a vision-language model; its placeholder ids are banned too.
            parser: reply format, a name of `PARSERS`; None detects the template's.

        Raises `TemplateError` if the template does not render replies, or a reply would never end.
        """
        self.codec = codec
        self.vision = vision
        self._encode_segment = codec.encode_segment
        if vision is not None:
            banned = [*banned, *(text for text, token in codec.control.items() if token in vision.placeholder_ids)]
        self.template = template = adapt_template(template)
        self._guard = ControlTextGuard(codec, control_text, banned)
        self._open_shapes: dict[Any, AppendShape] = {}
        self._append_patterns: dict[Any, _AppendPattern] = {}
        self._renders_ids = "tool_call_id" in template.source or ".id" in template.source or "['id']" in template.source
        given = stop_ids or frozenset()
        declared = frozenset(text for text, i in codec.control.items() if i in given)
        self._probe = TemplateProbe(template, codec.control, self._guard.split, declared)
        self.stop_ids = given | {codec.control[text] for text in self._probe.stops}
        _check_close(self._probe, bool(self.stop_ids))
        self._end = [codec.control[text] for text in self._probe.text.stops] or sorted(given)[:1]
        stop = self._probe.text.stops[0] if self._probe.text.stops else ""
        before = self._probe.text.close_in_last.removesuffix(stop)
        self._before_end = before if stop and before.strip() else ""
        self._media = MediaExpander(vision, self._probe, self._guard.template_control_ids, codec.encode)
        self._shapes = AppendShapes(codec, self._guard, template.origin)
        self.compose = ConversationComposer(codec, self._guard, self._probe, self.stop_ids, self._media).compose
        prompt = template.try_render((Message("user", "u"),), generation_prompt=True)
        self._prompt_end: PrecedingToken = "text" if prompt is not None and self._guard.split.split(prompt)[-1] else "control"
        self.banned_ids = frozenset(codec.control[text] for text in banned if text in codec.control)
        markers = find_template_markers(template.try_render, self._guard.split, codec.control, template.source)
        self._guard.observe_template(markers)
        assistant, incoming = (
            {codec.control[text] for text in texts} for texts in (markers.assistant_control, markers.incoming_control)
        )
        self.special_ids = codec.special
        self.invalid_ids = ((codec.special - assistant) | incoming | self.banned_ids) - self.stop_ids
        self._replies = ReplyReader(codec, template, self.invalid_ids | self.stop_ids, parser)
        settings: dict[str, Any] = {"stop_ids": sorted(self.stop_ids), "control_text": control_text}
        settings |= {"parser": parser} if parser is not None else {}
        self.fingerprints = {"template": template.fingerprint, "tokenizer": codec.fingerprint, "settings": digest(settings)}
        """Parts of `fingerprint`, to report which one differs."""
        if vision is not None:
            self.fingerprints["vision"] = vision.fingerprint
        self.fingerprint = digest(self.fingerprints)

    def ban(self, ids: Iterable[int]) -> None:
        """Ban more ids, such as rows of the model that have no text in its tokenizer."""
        self.banned_ids = _shared(self.banned_ids | frozenset(ids))

    @cached_property
    def contract(self) -> TemplateContract:
        """Behavior of the template that rollouts depend on; derived on first access (about 30 ms)."""
        return derive_contract(self._probe, self.codec, thinks=self._replies.thinking)

    @property
    def call_format(self) -> tuple[str, str]:
        """Name of the reply parser, and the template's text for a call if no parser reads it back."""
        return self._replies.parser.name, self._replies.unread

    def with_rendered_media(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages with tool images where the template renders them, in a user message if necessary."""
        return self._media.move_tool_images(messages).messages

    @cached_property
    def preamble_ids(self) -> list[int]:
        """Ids of a user message before a reply: the marks of turns."""
        return list(self.open((Message("user", "u"),)).ids)

    # Text and ids

    def encode(self, text: str) -> list[int]:
        """See `Renderer.encode`."""
        return self.codec.encode_plain(text, "control")

    def decode(self, ids: Sequence[int]) -> str:
        """See `Renderer.decode`."""
        return self.codec.decode(ids)

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """See `Renderer.token_texts`."""
        texts = self.codec.token_texts
        return [texts[i] for i in ids]

    def parse(self, ids: Sequence[int], tools: Tools = (), text: str | None = None, thinking: bool | None = None) -> Message:
        """See `Renderer.parse`; the end token is not part of its text."""
        if text is None:
            ended = bool(ids) and ids[-1] in self.stop_ids
            text = self.codec.decode(ids[:-1] if ended else ids)
            if ended:
                text = text.removesuffix(self._before_end)
        return self._replies.parse(text, tools, thinking)

    def encode_reply(self, text: str) -> list[int]:
        """See `Renderer.encode_reply`; thinking and call marks are control tokens."""
        return [*self._replies.encode(text, self._prompt_end), *self._encode_segment(self._before_end), *self._end]

    # Opening

    def open(self, messages: Sequence[Message], tools: Tools = ()) -> Extend:
        """See `Renderer.open`."""
        if not messages:
            raise TemplateError("an episode opens with at least one message: return it from reset, or put it in the task")

        messages, moved, _ = self._media.move_tool_images(messages)

        def render(given: Sequence[Message], offered: Tools = tools) -> str:
            return self.template.render(given, offered, generation_prompt=True)

        if len(messages) <= _MAX_SHAPE_MESSAGES and all(m.role != "assistant" for m in messages):
            key = (json.dumps(tools, default=repr) if tools else "", self._rows(messages))
            shape = self._open_shapes.get(key)
            if shape is None:
                shape = self._shapes.find(messages, render, tools)
                remember(self._open_shapes, key, shape)
            if shape.pieces and (known := self._shapes.fill_ids(shape, shape.contents(messages), [])) is not None:
                ids, placed = self._media.expand(known, messages)
                return Extend(ids, media=placed, tool_images_moved=moved)
        found = self._guard.encode(messages, render, tools)
        ids, placed = self._media.expand(found.ids, messages)
        return Extend(ids, 0, found.neutralised, found.control, media=placed, tool_images_moved=moved)

    def preamble(self, messages: Sequence[Message]) -> Extend:
        """Render messages that precede a conversation, without the start of a reply; raise `TemplateError` if the template
        cannot, `ControlTextError` for control text where `control_text` is `reject`."""
        messages, moved, _ = self._media.move_tool_images(messages)
        found = self._guard.encode(messages, self.template.render)
        ids, placed = self._media.expand(found.ids, messages)
        return Extend(ids, 0, found.neutralised, found.control, media=placed, tool_images_moved=moved)

    # After a reply

    def extend(
        self, history: Sequence[Message], reply_ids: Sequence[int], messages: Sequence[Message], tools: Tools = ()
    ) -> Extend | Branch:
        """Render what follows a reply: its close, `messages`, and the start of the next reply.

        The text is what the template writes after this conversation. Earlier turns keep their ids, even where the template
        would strip them. The text is derived once per shape of reply and messages, after a placeholder. It is compared with
        the text after the real conversation once per shape and length. For a template that keeps state across turns (a
        counter, a flag, a window) it is derived for each conversation.

        Raises `TemplateError` if the template cannot append these messages.
        """
        reply, forged = self._guard.sanitize_reply(history[-1] if history else _REPLY)
        messages, moved, _ = self._media.move_tool_images(messages)
        pattern = self._pattern(reply, messages, tools)
        if pattern.varies or len(history) not in pattern.lengths:
            pattern = self._pattern_after(pattern, history, reply, messages, tools)
        append, shape = pattern.append, pattern.shape
        ids: list[int] = []
        if not reply_ids or (last := reply_ids[-1]) not in self.stop_ids or (append.heads and last != pattern.head[-1]):
            ids.extend(pattern.head)
        close = len(ids)
        if append.adapt:
            messages = append.adapted(messages)
        if shape.pieces and (known := self._shapes.fill_ids(shape, shape.contents(messages), ids)) is not None:
            known, placed = self._media.expand(known, messages)
            return Extend(known, close, forged.total(), forged, None, placed, moved)
        found = self._encode_append(append, shape.after, messages)
        known, placed = self._media.expand(ids + found.ids, messages)
        met = forged + Counter(found.control)
        return Extend(known, close, found.neutralised + forged.total(), met, None, placed, moved)

    def inline(self, reply_ids: Sequence[int], content: str | Sequence[ContentPart]) -> Extend | Branch:
        """See `Renderer.inline`."""
        ids: list[int] = []
        placed: list[MediaPlacement] = []
        neutralised = 0
        control_text: Counter[str] = Counter()

        for part in (content,) if isinstance(content, str) else content:
            if isinstance(part, str):
                text = self._guard.encode_continuation(part)
                ids += text.ids
                neutralised += text.neutralised
                control_text.update(text.control)
            elif isinstance(part, (ImageRef, VideoRef)):
                block, placement = self._media.inside_message(part)
                placed.append(placement.shifted(len(ids)))
                ids += block

        media = tuple(placed)
        if reply_ids and reply_ids[-1] in self.stop_ids:
            keep = len(reply_ids) - 1
            return Branch(keep, ids, "close_dropped", neutralised, control_text, media=media)
        return Extend(ids, 0, neutralised, control_text, media=media)

    def _pattern(self, reply: Message, messages: Sequence[Message], tools: Tools) -> _AppendPattern:
        """Return how messages of this shape follow a reply of this shape, derived once."""
        key = (
            bool(reply.content),
            reply.reasoning is None,
            tuple([(call.name, self._rendered_id(call.id)) for call in reply.tool_calls]) if reply.tool_calls else (),
            # Cheaper than full schemas; appends proven with tools also compare the schemas.
            tuple([tool.get("function", tool).get("name") for tool in tools]),
            self._rows(messages),
        )
        found = self._append_patterns.get(key)
        if found is None or (found.append.tools and found.append.tools != tools):
            append = self._probe.append(reply, messages, tools)
            found = self._make_pattern(append)
            found.varies = self._probe.varies(append, reply, messages, tools)
            rendered = partial(self._probe.rendered, append)
            found.shape = self._shapes.find(append.adapted(messages), rendered, after=found.shape.after)
            remember(self._append_patterns, key, found)
        return found

    def _pattern_after(
        self, known: _AppendPattern, history: Sequence[Message], reply: Message, messages: Sequence[Message], tools: Tools
    ) -> _AppendPattern:
        """Return how messages follow the reply in this conversation: `known` where the template writes the same."""
        if len(history) > 1:
            try:
                before = readable(self._media.move_tool_images(history).messages[:-1])
                append = self._probe.append(reply, messages, tools, before)
            except TemplateError:
                return known  # the template rejects the conversation; only the placeholder's text is available
            if append.pieces != known.append.pieces:
                known.varies = True
                return self._make_pattern(append)
        known.lengths.add(len(history))
        return known

    def _make_pattern(self, append: AppendProbe) -> _AppendPattern:
        close = self._guard.split.findall(append.head)
        # A reply with calls lacks at most its stop: the marks that end the call are part of the reply.
        head = close[-1] if append.base[-1].tool_calls and close else append.head
        return _AppendPattern(append, AppendShape(after=close[-1] if close else ""), tuple(self._encode_segment(head)))

    def _encode_append(self, append: AppendProbe, after: str, messages: Sequence[Message]) -> EncodedMessages:
        """Encode adapted messages as the template writes them at the end of a conversation."""

        def render(given: Sequence[Message], tools: Tools = ()) -> str:
            return self.template.render(given, tools, generation_prompt=True)

        def cut(text: str) -> list[tuple[int, int, str]]:
            return [(self._probe.end_of_reply(append, text), len(text), after)]

        (ids,), found = self._guard.encode_cut([*append.base, *messages], render, cut, append.tools, len(append.base))
        return found._replace(ids=ids)

    def _rows(self, messages: Sequence[Message]) -> tuple[Any, ...]:
        """Return everything but the texts of messages that may change how they are rendered."""
        rows = []
        for m in messages:
            kinds = str if isinstance(m.content, str) else tuple([type(part) for part in m.content])
            called = m.tool_call_id and self._rendered_id(m.tool_call_id)
            rows.append((m.role, m.name, kinds, bool(m.tool_calls or m.reasoning), called))
        return tuple(rows)

    def _rendered_id(self, name: str) -> str | None:
        """Return a call id if the template may write it."""
        return name if self._renders_ids else None


@lru_cache(maxsize=8)
def _shared(ids: frozenset[int]) -> frozenset[int]:
    """Return the first of equal sets: caches compare 150,000 ids of another one at every call."""
    return ids


def _check_close(probe: TemplateProbe, ends: bool) -> None:
    """Reject a template whose replies would never end with this tokenizer."""
    closing = probe.text
    if not closing.stops and (not ends or _MARKUP.search(closing.head)):
        raise TemplateError(
            f"{probe.template.origin}: closes an assistant turn with {closing.last or closing.head!r}, which contains no "
            "special token of the tokenizer, so a reply would never end; use the template that belongs to this tokenizer"
        )
