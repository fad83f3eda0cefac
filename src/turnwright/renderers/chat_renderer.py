"""ChatRenderer: prompts, appends and parsed replies for one chat template."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwright.errors import TemplateError
from turnwright.renderers.contract import TemplateContract, derive_contract
from turnwright.renderers.control_text import (
    ControlText,
    ControlTextGuard,
    EncodedMessages,
    GuardRender,
    find_template_markers,
)
from turnwright.renderers.conversation_shape import (
    ConversationShapes,
    ProvenByShape,
    content_shape,
    is_blank,
    texts_in,
)
from turnwright.renderers.inspected import Inspected, holds_placeholder, watch_placeholders
from turnwright.renderers.model_files import remember
from turnwright.renderers.parsers import PARSERS, Parser, parser_for_template, parser_named
from turnwright.renderers.parsers.detect import PROBE_NAME, PROBE_TOOL, render_probe_reply
from turnwright.renderers.probe import (
    AppendProbe,
    AppendShape,
    AppendShapes,
    TemplateProbe,
    readable,
    texts_of,
)
from turnwright.renderers.renderer import Branch, Extend
from turnwright.renderers.reply_proof import ReplyProof, UnreadReply
from turnwright.renderers.template import (
    ADAPT,
    ASKED,
    ChatTemplate,
    adapt_template,
    digest,
    random_mark,
)
from turnwright.renderers.template_history import ConversationComposer
from turnwright.renderers.tokenizer import PrecedingToken, Tokenizer, control_pattern
from turnwright.renderers.vision.media_blocks import MediaExpander
from turnwright.types import ContentPart, ImageRef, MediaPlacement, Message, Tools, VideoRef

if TYPE_CHECKING:
    from turnwright.renderers.vision_protocol import VisionProcessor


_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_HERMES = PARSERS["hermes"]


class ReplyReader:
    """Parse and encode the replies of one model."""

    def __init__(
        self,
        codec: Tokenizer,
        template: ChatTemplate,
        invalid_ids: Collection[int],
        stop_ids: Collection[int],
        chosen: str | None,
    ) -> None:
        """`chosen` names a format, None detects it."""
        sample = render_probe_reply(template) or ""
        found = parser_for_template(template) if chosen is None else parser_named(chosen)
        self.parser: Parser = found or _HERMES
        self.unread = sample if found is None and PROBE_NAME in sample else ""
        """Text the template writes for a reply with a call, if no parser
        reads it back; else empty."""
        prompt = template.try_render((Message("user", "USERMARK"),), generation_prompt=True) or ""
        self.thinking = self.parser.opens_reasoning(prompt.rpartition("USERMARK")[2])
        """Whether the generation prompt opens the thinking, so that replies start inside it."""
        self._header = _sampled_header(template)
        self._plain = codec.encode_plain
        control = codec.control
        outside = {*invalid_ids, *stop_ids}
        self._marks = {
            t: i for t, i in control.items() if t in _MARKS or (t in sample and i not in outside)
        }
        self._split = control_pattern(self._marks)
        self._call_ends = {
            stop: text
            for text, stop in control.items()
            if stop in stop_ids and any(mark.endswith(text) for mark in self.parser.closes)
        }
        """Stop ids that are also, or end, a mark that ends calls (Apertus'
        `<|tools_suffix|>`), with their texts."""

    def parse(self, text: str, tools: Tools, thinking: bool | None) -> Message:
        """Parse a reply's text into a message, without a header that the model has to sample."""
        text = text.removeprefix(self._header)
        return self.parser.parse(
            text, tools, thinking=self.thinking if thinking is None else thinking
        )

    def with_call_end(self, text: str, stop: int) -> str:
        """Return the text of a reply that ended with this stop id, with the stop's text if it is
        the end mark of a call."""
        end = self._call_ends.get(stop)
        closed = (
            any(f"{text}{end}".endswith(mark) for mark in self.parser.closes)
            if end is not None
            else False
        )
        return f"{text}{end}" if closed else text

    def without_call_end(self, text: str) -> tuple[str, int | None]:
        """Split a reply's text that ends with a call's end mark at its stop; None
        if no stop ends it so."""
        for stop, end in self._call_ends.items():
            if text.endswith(end) and self.with_call_end(text.removesuffix(end), stop) == text:
                return text.removesuffix(end), stop
        return text, None

    def encode(self, text: str, after: PrecedingToken) -> list[int]:
        """Return the ids a model would sample to write `text`; thinking and call
        marks are control tokens.

        Raises `TemplateError` if calls use the Hermes format but the template's
        format is a different one.
        """
        if self.parser is not _HERMES and "<tool_call>" in text:
            hermes, own = (
                parser.parse(text, (PROBE_TOOL,)).tool_calls for parser in (_HERMES, self.parser)
            )
            if any(call.error is None for call in hermes) and not any(
                call.error is None for call in own
            ):
                raise TemplateError(
                    "this reply makes a call in Hermes' format, but the template's call format is "
                    f"{self.parser.name!r}, in which calls are parsed; write scripts and "
                    "demonstrations in that format (docs/templates.md)"
                )
        ids: list[int] = []
        for piece in self._split.split(text):
            if piece:
                ids.extend(
                    [self._marks[piece]] if piece in self._marks else self._plain(piece, after)
                )
                after = "control"
        return ids


_SAME_END = 8
"""Characters at the end of a text, of at most four ids each, that show whether it is the
complete text of a reply."""


def _sampled_header(template: ChatTemplate) -> str:
    """Return the text that opens a reply where the template writes no generation prompt, so that
    the model samples it."""
    asked, answer = random_mark(), random_mark()
    question = (Message("user", asked),)
    alone, prompted = (
        template.try_render(question),
        template.try_render(question, generation_prompt=True),
    )
    answered = template.try_render((*question, Message("assistant", answer))) or ""
    if alone is None or alone != prompted or not answered.startswith(alone):
        return ""
    header, found, _ = answered[len(alone) :].partition(answer)
    return header if found else ""


_MAX_SHAPE_MESSAGES = 8
"""Opening prompts with more messages are not cached by shape."""
_MARKUP = re.compile(r"<[^\s<>]+>|\[[^\s\[\]]+\]")
_REPLY = Message("assistant", "reply")


@dataclass(slots=True)
class _AppendPattern:
    """Template text between a reply and the next one, for a reply and
    messages of certain shapes."""

    append: AppendProbe
    shape: AppendShape
    """From the end of the reply on."""
    head: tuple[int, ...]
    """Ids that close a reply that has no stop id."""
    inspected: Inspected = field(default_factory=Inspected)
    """What the template inspected of the reply and the messages."""
    conditional: bool = False
    """Whether it holds for some texts only."""
    after: ProvenByShape[_AppendPattern | None] | None = None
    """Patterns of the same reply and messages after other conversations than a single question."""


class ChatRenderer:
    """Renderer for one tokenizer and one chat template; proves each kind of
    append before using it."""

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
        directory: Path | None = None,
    ) -> None:
        """
        Args:
            stop_ids: ids that end a reply; the tokens that close the template's
                assistant turns are added.
            banned: texts of control tokens that are never sampled (image placeholders).
            control_text: how control text in messages is handled.
            vision: the vision processor of a vision-language model; its
                placeholder ids are banned too.
            parser: reply format, a name of `PARSERS`; None detects the template's.
            directory: where the tokenizer was read, for user code that loads it too.

        Raises `TemplateError` if the template does not render replies, or a reply would never end.
        """
        self.codec = codec
        self.vision = vision
        self.directory = directory
        self._encode_segment = codec.encode_segment
        if vision is not None:
            banned = [
                *banned,
                *(text for text, token in codec.control.items() if token in vision.placeholder_ids),
            ]
        self.template = template = adapt_template(template)
        self._guard = ControlTextGuard(codec, control_text, banned)
        self._open_shapes: dict[Any, tuple[AppendShape, Inspected]] = {}
        self._append_patterns: dict[Any, _AppendPattern] = {}
        self._conversations = ConversationShapes(template.source)
        self._alone = self._conversations.reach == "none"
        given = stop_ids or frozenset()
        declared = frozenset(text for text, i in codec.control.items() if i in given)
        self._probe = TemplateProbe(template, codec.control, self._guard.split, declared)
        self.stop_ids = given | {codec.control[text] for text in self._probe.stops}
        _check_close(self._probe, bool(self.stop_ids))
        stop = next(
            (text for text in self._probe.text.stops if codec.control[text] in self.stop_ids), ""
        )
        self._end = [codec.control[stop]] if stop else sorted(given)[:1]
        before = self._probe.text.close_in_last.removesuffix(stop)
        self._before_end = before if (stop or self._probe.part_ends) and before.strip() else ""
        self._media = MediaExpander(
            vision, self._probe, self._guard.template_control_ids, codec.encode
        )
        self._shapes = AppendShapes(codec, self._guard, template.origin)
        self._composer = ConversationComposer(
            codec, self._guard, self._probe, self.stop_ids, self._media
        )
        self.compose = self._composer.compose
        prompt = template.try_render((Message("user", "u"),), generation_prompt=True)
        self._prompt_end: PrecedingToken = (
            "text" if prompt is not None and self._guard.split.split(prompt)[-1] else "control"
        )
        self.banned_ids = frozenset(codec.control[text] for text in banned if text in codec.control)
        markers = find_template_markers(
            template.try_render, self._guard.split, codec.control, template.source
        )
        self._guard.observe_template(markers)
        assistant, incoming = (
            {codec.control[text] for text in texts}
            for texts in (markers.assistant_control, markers.incoming_control)
        )
        self.special_ids = codec.special
        self.invalid_ids = (
            (codec.special - assistant) | incoming | self.banned_ids
        ) - self.stop_ids
        self._replies = ReplyReader(codec, template, self.invalid_ids, self.stop_ids, parser)
        settings: dict[str, Any] = {"stop_ids": sorted(self.stop_ids), "control_text": control_text}
        settings |= {"parser": parser} if parser is not None else {}
        self.fingerprints = {
            "template": template.fingerprint,
            "tokenizer": codec.fingerprint,
            "settings": digest(settings),
        }
        """Parts of `fingerprint`, to report which one differs."""
        if vision is not None:
            self.fingerprints["vision"] = vision.fingerprint
        self.fingerprint = digest(self.fingerprints)

    def ban(self, ids: Iterable[int]) -> None:
        """Ban more ids, such as rows of the model that have no text in its tokenizer."""
        self.banned_ids = _shared(self.banned_ids | frozenset(ids))

    @cached_property
    def contract(self) -> TemplateContract:
        """Behavior of the template that rollouts depend on; derived on first
        access (about 30 ms)."""
        return derive_contract(self._probe, self.codec, thinks=self._replies.thinking)

    @property
    def call_format(self) -> tuple[str, str]:
        """Name of the reply parser, and the template's text for a call if no
        parser reads it back."""
        return self._replies.parser.name, self._replies.unread

    @cached_property
    def unread_replies(self) -> tuple[UnreadReply, ...]:
        """Kinds of replies that the template does not write, or that are read as something else;
        derived on first access."""
        opens = self._replies.parser.opens_reasoning
        return ReplyProof(self._probe, self.codec, self.stop_ids, self.parse, opens).unread()

    def with_rendered_media(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages with tool images where the template renders them, in a user
        message if necessary."""
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

    def parse(
        self,
        ids: Sequence[int],
        tools: Tools = (),
        text: str | None = None,
        thinking: bool | None = None,
    ) -> Message:
        """See `Renderer.parse`; the end token is not part of its text, except where it is
        the end mark of a call."""
        ended = bool(ids) and ids[-1] in self.stop_ids
        if text is None:
            text = self.codec.decode(ids[:-1] if ended else ids)
        elif ended and not self.codec.decode(ids[-1 - 4 * _SAME_END : -1]).endswith(
            text[-_SAME_END:]
        ):
            ended = False  # a stop text cut the text before the reply's end
        if ended:
            text = text.removesuffix(self._before_end)
            text = self._replies.with_call_end(text, ids[-1])
        return self._replies.parse(text, tools, thinking)

    def encode_reply(self, text: str) -> list[int]:
        """See `Renderer.encode_reply`; thinking and call marks are control tokens."""
        before, stop = self._replies.without_call_end(text)
        if stop is not None:
            return [*self._replies.encode(before, self._prompt_end), stop]
        before = text.removesuffix(self._before_end)
        return [
            *self._replies.encode(before, self._prompt_end),
            *self._encode_segment(self._before_end),
            *self._end,
        ]

    # Opening

    def open(self, messages: Sequence[Message], tools: Tools = ()) -> Extend:
        """See `Renderer.open`."""
        if not messages:
            raise TemplateError(
                "an episode opens with at least one message: return it from reset, or put it in "
                "the task"
            )

        messages, moved, _ = self._media.move_tool_images(messages)
        messages = self._with_all_of_demonstrations(messages, tools)

        def render(given: Sequence[Message], offered: Tools = tools) -> str:
            return self.template.render(given, offered, generation_prompt=True)

        if len(messages) <= _MAX_SHAPE_MESSAGES and all(m.role != "assistant" for m in messages):
            shape, inspected = self._open_shape(messages, render, tools)
            if shape.pieces and inspected.allows(texts_in(messages)):
                known = self._shapes.fill_ids(shape, shape.contents(messages), [])
                if known is not None:
                    ids, placed = self._media.expand(known, messages)
                    return Extend(ids, media=placed, tool_images_moved=moved)
        found = self._guard.encode(messages, render, tools)
        ids, placed = self._media.expand(found.ids, messages)
        return Extend(
            ids, 0, found.neutralised, found.control, media=placed, tool_images_moved=moved
        )

    def _open_shape(
        self, messages: Sequence[Message], render: GuardRender, tools: Tools
    ) -> tuple[AppendShape, Inspected]:
        """Return how messages of this shape are rendered as an opening, derived once."""
        key = (json.dumps(tools, default=repr) if tools else "", self._rows(messages))
        known = self._open_shapes.get(key)
        if known is None:
            with watch_placeholders() as inspected:
                shape = self._shapes.find(messages, render, tools)
            if any(map(is_blank, texts_of(messages))):
                shape = AppendShape()  # templates may omit a blank text: each is rendered
            known = shape, inspected
            remember(self._open_shapes, key, known)
        return known

    def _with_all_of_demonstrations(
        self, messages: Sequence[Message], tools: Tools
    ) -> Sequence[Message]:
        """Return an opening's messages in a form in which the template
        shows all of a demonstration.

        Thinking and calls that it has no place for become text, in the format in which replies are
        parsed; results become a user's words.

        Raises `TemplateError` if the template drops a result in every form.
        """
        messages = [
            self._composer.demonstration(m) if m.tool_calls or m.reasoning else m for m in messages
        ]
        if not any(m.role == "tool" or m.tool_calls for m in messages):
            return messages
        forms = self._probe.result_forms(messages)
        for name in forms:
            adapted = ADAPT[name](messages)
            # Text of its own for each result that is not blank, so that a dropped one shows.
            marked = [
                replace(m, content=random_mark()) if m.role == "tool" and m.text.strip() else m
                for m in messages
            ]
            text = self.template.try_render(ADAPT[name](marked), tools, generation_prompt=True)
            if text is not None and all(m.text in text for m in marked if m.role == "tool"):
                return adapted
            if text is None and name == forms[-1]:
                return adapted  # rendering it gives the reason of the template
        raise TemplateError(
            f"{self.template.origin}: drops the result of a tool from the opening messages"
        )

    def preamble(self, messages: Sequence[Message]) -> Extend:
        """Render messages that precede a conversation, without the start of a reply; raise
        `TemplateError` if the template cannot, `ControlTextError` for control text where
        `control_text` is `reject`."""
        messages, moved, _ = self._media.move_tool_images(messages)
        found = self._guard.encode(messages, self.template.render)
        ids, placed = self._media.expand(found.ids, messages)
        return Extend(
            ids, 0, found.neutralised, found.control, media=placed, tool_images_moved=moved
        )

    # After a reply

    def extend(
        self,
        history: Sequence[Message],
        reply_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Tools = (),
    ) -> Extend | Branch:
        """Render what follows a reply: its close, `messages`, and the start of the next reply.

        The text is what the template writes after this conversation. Earlier turns keep their ids,
        even where the template would strip them. The text is derived once, after a placeholder, for
        replies, messages and earlier turns of the same shape, and used as long as none of them
        contains a word that the template looks for. Otherwise, and where the template inspects
        texts in another way, this conversation is rendered.

        Raises `TemplateError` if the template cannot append these messages.
        """
        reply, forged = self._guard.sanitize_reply(history[-1] if history else _REPLY)
        messages, moved, _ = self._media.move_tool_images(messages)
        pattern = self._pattern_after(history, reply, messages, tools)
        append, shape = pattern.append, pattern.shape
        ids: list[int] = []
        if (
            not reply_ids
            or (last := reply_ids[-1]) not in self.stop_ids
            or (append.heads and last != pattern.head[-1])
        ):
            ids.extend(
                self._thinking_close(append.head, history, reply, reply_ids, messages, tools)
                or pattern.head
            )
        close = len(ids)
        if append.adapt:
            messages = append.adapted(messages)
        # Contents of a control text have no place in a shape: `fill_ids` gives
        # them to the guard below.
        if (
            shape.pieces
            and (known := self._shapes.fill_ids(shape, shape.contents(messages), ids)) is not None
        ):
            known, placed = self._media.expand(known, messages)
            return Extend(known, close, forged.total(), forged, None, placed, moved)
        found = self._encode_append(append, shape.after, messages)
        known, placed = self._media.expand(ids + found.ids, messages)
        met = forged + Counter(found.control)
        return Extend(known, close, found.neutralised + forged.total(), met, None, placed, moved)

    def _thinking_close(
        self,
        head: str,
        history: Sequence[Message],
        reply: Message,
        reply_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Tools,
    ) -> list[int]:
        """Return the ids that end a reply that was cut off while thinking, which `head` ends
        otherwise; empty if it was not."""
        if not reply.reasoning or reply.reasoning.isspace() or reply.text or reply.tool_calls:
            return []
        # What follows open thinking is thinking too.
        if self._replies.parse(self.codec.decode(reply_ids) + "x", tools, None).text:
            return []
        before = self._before(history) if len(history) > 1 else (ASKED,)
        folds = self._composer.folds
        return self._encode_segment(
            self._probe.close_of_thinking(before, messages, tools, folds=folds, head=head)
        )

    def inline(
        self, reply_ids: Sequence[int], content: str | Sequence[ContentPart]
    ) -> Extend | Branch:
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

    def _pattern_after(
        self, history: Sequence[Message], reply: Message, messages: Sequence[Message], tools: Tools
    ) -> _AppendPattern:
        """Return how messages follow the reply in this conversation."""
        key = (
            content_shape(reply),
            reply.reasoning if not reply.reasoning or reply.reasoning.isspace() else str,
            tuple([(call.name, self._rendered_id(call.id)) for call in reply.tool_calls])
            if reply.tool_calls
            else (),
            # Cheaper than full schemas; appends proven with tools also compare the schemas.
            tuple([tool.get("function", tool).get("name") for tool in tools]),
            self._rows(messages),
        )
        pattern = self._append_patterns.get(key)
        if pattern is None or (pattern.append.tools and pattern.append.tools != tools):
            pattern = self._derive_pattern(key, reply, messages, tools)
        if pattern.conditional and not pattern.inspected.allows(texts_in((reply, *messages))):
            return self._pattern_of(history, reply, messages, tools) or pattern
        if self._alone or len(history) < 2:
            return pattern

        before = self._before(history)

        def derive(placeholders: Sequence[Message]) -> _AppendPattern | None:
            try:
                append = self._probe.append(reply, messages, tools, placeholders)
            except TemplateError:
                return None
            if any(map(holds_placeholder, append.pieces)):
                return None  # the template moves a text of an earlier turn here
            return pattern if append.pieces == pattern.append.pieces else self._make_pattern(append)

        assert pattern.after is not None
        known = pattern.after.get((), before, derive)
        return known or self._pattern_of(history, reply, messages, tools) or pattern

    def _derive_pattern(
        self, key: Any, reply: Message, messages: Sequence[Message], tools: Tools
    ) -> _AppendPattern:
        """Derive how messages of this shape follow a reply of this shape
        after a single question."""
        with watch_placeholders() as inspected:
            append = self._probe.append(reply, messages, tools)
            found = self._make_pattern(append)
            if not any(map(is_blank, texts_of(messages))):
                rendered = partial(self._probe.rendered, append)
                found.shape = self._shapes.find(
                    append.adapted(messages), rendered, after=found.shape.after
                )
        found.inspected, found.after = inspected, ProvenByShape(self._conversations)
        found.conditional = bool(inspected.words or inspected.unprovable)
        remember(self._append_patterns, key, found)
        return found

    def _pattern_of(
        self, history: Sequence[Message], reply: Message, messages: Sequence[Message], tools: Tools
    ) -> _AppendPattern | None:
        """Derive how messages follow the reply from this conversation's own texts; None if
        the template rejects it."""
        before = self._before(history) if len(history) > 1 else (ASKED,)
        try:
            return self._make_pattern(
                self._probe.append(reply, messages, tools, before, verbatim=True)
            )
        except TemplateError:
            return None

    def _before(self, history: Sequence[Message]) -> list[Message]:
        """Return the conversation before its last reply, such that every call
        in it can be rendered."""
        return readable(self._media.move_tool_images(history).messages[:-1])

    def _make_pattern(self, append: AppendProbe) -> _AppendPattern:
        close = self._guard.split.findall(append.head)
        # A reply with calls lacks at most its stop: the marks that end the call
        # are part of the reply.
        head = close[-1] if append.base[-1].tool_calls and close else append.head
        return _AppendPattern(
            append, AppendShape(after=close[-1] if close else ""), tuple(self._encode_segment(head))
        )

    def _encode_append(
        self, append: AppendProbe, after: str, messages: Sequence[Message]
    ) -> EncodedMessages:
        """Encode adapted messages as the template writes them at the end of a conversation."""

        def render(given: Sequence[Message], tools: Tools = ()) -> str:
            return self.template.render(given, tools, generation_prompt=True)

        def cut(text: str) -> list[tuple[int, int, str]]:
            return [(self._probe.end_of_reply(append, text), len(text), after)]

        (ids,), found = self._guard.encode_cut(
            [*append.base, *messages], render, cut, append.tools, len(append.base)
        )
        return found._replace(ids=ids)

    def _rows(self, messages: Sequence[Message]) -> tuple[Any, ...]:
        """Return everything but the texts of messages that may change how they are rendered."""
        rows = []
        for m in messages:
            called = self._rendered_id(m.tool_call_id) if m.tool_call_id else None
            rows.append(
                (m.role, m.name, content_shape(m), bool(m.tool_calls or m.reasoning), called)
            )
        return tuple(rows)

    def _rendered_id(self, name: str) -> str | None:
        """Return a call id if the template may write it."""
        return name if self._conversations.renders_ids else None


@lru_cache(maxsize=8)
def _shared(ids: frozenset[int]) -> frozenset[int]:
    """Return the first of equal sets: caches compare 150,000 ids of another one at every call."""
    return ids


def _check_close(probe: TemplateProbe, ends: bool) -> None:
    """Reject a template whose replies would never end with this tokenizer."""
    closing = probe.text
    if not closing.stops and (not ends or _MARKUP.search(closing.head)):
        raise TemplateError(
            f"{probe.template.origin}: closes an assistant turn with "
            f"{closing.last or closing.head!r}, which contains no special token of the tokenizer, "
            "so a reply would never end; use the template that belongs to this tokenizer"
        )
