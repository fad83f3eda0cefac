"""ChatRenderer: prompts, appends and parsed replies for one chat template.

`ChatRenderer.extend` runs at every turn. What the template writes between two replies is derived
once for each shape of reply and messages (`_derive_pattern`), with random numbers in place of all
texts; from then on only contents are encoded. The derived text holds as long as no text contains a
word that the template looks for; otherwise this conversation is rendered (`_pattern_of`).

How the text is found and proven is in `probe.py`; which control texts a content may not become, in
`control_text.py`; `compose`, for `history = "template"`, in `template_history.py`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
        detected = parser_for_template(template) if chosen is None else parser_named(chosen)
        self.parser: Parser = detected or _HERMES
        sample = render_probe_reply(template) or ""
        self.unread = sample if detected is None and PROBE_NAME in sample else ""
        """Text that the template writes for a reply with a call, if no parser reads it back; else
        empty."""

        prompt = template.try_render((Message("user", "USERMARK"),), generation_prompt=True) or ""
        self.thinking = self.parser.opens_reasoning(prompt.rpartition("USERMARK")[2])
        """Whether the generation prompt opens the thinking, so that replies start inside it."""
        self._header = _sampled_header(template)

        self._plain = codec.encode_plain
        outside_replies = {*invalid_ids, *stop_ids}
        self._marks: dict[str, int] = {}
        """Control tokens that a written reply contains: marks of thinking and calls."""
        self._call_ends: dict[int, str] = {}
        """Stop ids that are also, or end, a mark that ends calls (Apertus' `<|tools_suffix|>`),
        with their texts."""
        for token_text, token in codec.control.items():
            if token_text in _MARKS or (token_text in sample and token not in outside_replies):
                self._marks[token_text] = token
            if token in stop_ids and any(m.endswith(token_text) for m in self.parser.closes):
                self._call_ends[token] = token_text
        self._split = control_pattern(self._marks)

    def parse(self, text: str, tools: Tools, thinking: bool | None) -> Message:
        """Parse a reply's text into a message, without a header that the model has to sample."""
        if thinking is None:
            thinking = self.thinking
        return self.parser.parse(text.removeprefix(self._header), tools, thinking=thinking)

    def with_call_end(self, text: str, stop: int) -> str:
        """Return the text of a reply that ended with this stop id.

        It includes the stop's text if that is the end mark of a call.
        """
        end = self._call_ends.get(stop)
        if end is None:
            return text
        with_end = f"{text}{end}"
        is_call_end = any(with_end.endswith(mark) for mark in self.parser.closes)
        return with_end if is_call_end else text

    def without_call_end(self, text: str) -> tuple[str, int | None]:
        """Split a reply's text that ends with a call's end mark at its stop.

        The stop is None if no stop ends the text so.
        """
        for stop, end in self._call_ends.items():
            before = text.removesuffix(end)
            if text.endswith(end) and self.with_call_end(before, stop) == text:
                return before, stop
        return text, None

    def encode(self, text: str, after: PrecedingToken) -> list[int]:
        """Return the ids a model would sample to write `text`.

        Marks of thinking and calls are control tokens.

        Raises `TemplateError` if calls use the Hermes format but the template's format is a
        different one.
        """
        if self.parser is not _HERMES and "<tool_call>" in text:
            self._check_call_format(text)

        ids: list[int] = []
        for piece in self._split.split(text):
            if not piece:
                continue
            if piece in self._marks:
                ids.append(self._marks[piece])
            else:
                ids += self._plain(piece, after)
            after = "control"
        return ids

    def _check_call_format(self, text: str) -> None:
        """Raise `TemplateError` for a call that only Hermes' format reads."""

        def reads_a_call(parser: Parser) -> bool:
            return any(call.error is None for call in parser.parse(text, (PROBE_TOOL,)).tool_calls)

        if reads_a_call(_HERMES) and not reads_a_call(self.parser):
            raise TemplateError(
                "this reply makes a call in Hermes' format, but the template's call format is "
                f"{self.parser.name!r}, in which calls are parsed; write scripts and "
                "demonstrations in that format (docs/templates.md)"
            )


_SAME_END = 8
"""Characters at the end of a text, of at most four ids each, that show whether it is the
complete text of a reply."""


def _sampled_header(template: ChatTemplate) -> str:
    """Return the text that opens a reply where the template writes no generation prompt.

    There the model samples it. Empty where the template writes one.
    """
    answer = random_mark()
    question = (Message("user", random_mark()),)
    alone = template.try_render(question)
    prompted = template.try_render(question, generation_prompt=True)
    answered = template.try_render((*question, Message("assistant", answer))) or ""
    if alone is None or alone != prompted or not answered.startswith(alone):
        return ""

    header, found, _ = answered[len(alone) :].partition(answer)
    return header if found else ""


_MAX_SHAPE_MESSAGES = 8
"""Opening prompts with more messages are not cached by shape."""
_MARKUP = re.compile(r"<[^\s<>]+>|\[[^\s\[\]]+\]")
_REPLY = Message("assistant", "reply")
_SOME_TEXT = "text"
"""Stands for every text that is not blank in the key of a shape."""


class _OpeningShape(NamedTuple):
    """Template text of an opening prompt, for messages of certain shapes."""

    shape: AppendShape
    inspected: Inspected
    """What the template inspected of the messages."""


@dataclass(frozen=True, slots=True)
class _AppendPattern:
    """Template text between a reply and the next one, for a reply and messages of certain shapes.

    One that was made from a conversation's own texts (`_pattern_of`) holds for that conversation
    and has no `shape.pieces`, so that its messages are rendered.
    """

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
    """Renderer for one tokenizer and one chat template; proves each kind of append before using
    it."""

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
            stop_ids: ids that end a reply; the tokens that close the template's assistant turns
                are added.
            banned: texts of control tokens that are never sampled (image placeholders).
            control_text: how control text in messages is handled.
            vision: the vision processor of a vision-language model; its placeholder ids are
                banned too.
            parser: reply format, a name of `PARSERS`; None detects the template's.
            directory: where the tokenizer was read, for user code that loads it too.

        Raises `TemplateError` if the template does not render replies, or a reply would never end.
        """
        control = codec.control
        if vision is not None:
            placeholders = [text for text, i in control.items() if i in vision.placeholder_ids]
            banned = [*banned, *placeholders]
        self.codec = codec
        self.vision = vision
        self.directory = directory
        self._encode_segment = codec.encode_segment
        self.template = template = adapt_template(template)
        self._guard = ControlTextGuard(codec, control_text, banned)

        # How a reply ends.
        declared_ids = stop_ids or frozenset()
        declared = frozenset(text for text, i in control.items() if i in declared_ids)
        self._probe = probe = TemplateProbe(template, control, self._guard.split, declared)
        self.stop_ids = declared_ids | {control[text] for text in probe.stops}
        _check_close(probe, bool(self.stop_ids))
        stops = [text for text in probe.text.stops if control[text] in self.stop_ids]
        stop = stops[0] if stops else ""
        self._end = [control[stop]] if stop else sorted(declared_ids)[:1]
        """The stop id of a written reply; empty where plain text ends it."""
        before_end = probe.text.close_in_last.removesuffix(stop)
        is_sampled = (stop or probe.part_ends) and before_end.strip()
        self._before_end = before_end if is_sampled else ""
        """Text that the template writes between a reply's content and its stop."""

        # How prompts and appends are written.
        self._media = MediaExpander(vision, probe, self._guard.template_control_ids, codec.encode)
        self._shapes = AppendShapes(codec, self._guard, template.origin)
        self._open_shapes: dict[Any, _OpeningShape] = {}
        self._append_patterns: dict[Any, _AppendPattern] = {}
        self._conversations = ConversationShapes(template.source)
        self._alone = self._conversations.reach == "none"
        """Whether the template looks at no earlier message when it writes a later one."""
        self._composer = ConversationComposer(codec, self._guard, probe, self.stop_ids, self._media)
        self.compose = self._composer.compose

        # What a reply may contain, and how it is read.
        self.banned_ids = frozenset(control[text] for text in banned if text in control)
        markers = find_template_markers(
            template.try_render, self._guard.split, control, template.source
        )
        self._guard.observe_template(markers)
        inside_replies = {control[text] for text in markers.assistant_control}
        around_others = {control[text] for text in markers.incoming_control}
        self.special_ids = codec.special
        self.invalid_ids = (
            (codec.special - inside_replies) | around_others | self.banned_ids
        ) - self.stop_ids
        self._replies = ReplyReader(codec, template, self.invalid_ids, self.stop_ids, parser)
        prompt = template.try_render((Message("user", "u"),), generation_prompt=True)
        ends_in_text = prompt is not None and self._guard.split.split(prompt)[-1]
        self._prompt_end: PrecedingToken = "text" if ends_in_text else "control"

        settings: dict[str, Any] = {"stop_ids": sorted(self.stop_ids), "control_text": control_text}
        if parser is not None:
            settings["parser"] = parser
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
        """Behavior of the template that rollouts depend on.

        Derived on first access, which takes about 30 ms.
        """
        return derive_contract(self._probe, self.codec, thinks=self._replies.thinking)

    @property
    def call_format(self) -> tuple[str, str]:
        """Name of the reply parser, and the template's text for a call if no parser reads it
        back."""
        return self._replies.parser.name, self._replies.unread

    @cached_property
    def unread_replies(self) -> tuple[UnreadReply, ...]:
        """Kinds of replies that the template does not write, or that are read as something else.

        Derived on first access.
        """
        opens_reasoning = self._replies.parser.opens_reasoning
        proof = ReplyProof(self._probe, self.codec, self.stop_ids, self.parse, opens_reasoning)
        return proof.unread()

    def with_rendered_media(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages with tool images where the template renders them.

        Where it drops them from tool messages, that is a user message after the results.
        """
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
        """See `Renderer.parse`.

        The end token is not part of the text, except where it is the end mark of a call.
        """
        ended = bool(ids) and ids[-1] in self.stop_ids
        if text is None:
            text = self.codec.decode(ids[:-1] if ended else ids)
        elif ended:
            # Where a stop text cut the text before the reply's end, the text ends otherwise.
            last_text = self.codec.decode(ids[-1 - 4 * _SAME_END : -1])
            ended = last_text.endswith(text[-_SAME_END:])

        if ended:
            text = text.removesuffix(self._before_end)
            text = self._replies.with_call_end(text, ids[-1])
        return self._replies.parse(text, tools, thinking)

    def encode_reply(self, text: str) -> list[int]:
        """See `Renderer.encode_reply`; marks of thinking and calls are control tokens."""
        before_stop, stop = self._replies.without_call_end(text)
        if stop is not None:
            return [*self._replies.encode(before_stop, self._prompt_end), stop]

        content = text.removesuffix(self._before_end)
        return [
            *self._replies.encode(content, self._prompt_end),
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

        has_replies = any(message.role == "assistant" for message in messages)
        if len(messages) <= _MAX_SHAPE_MESSAGES and not has_replies:
            shape, inspected = self._open_shape(messages, render, tools)
            if shape.pieces and inspected.allows(texts_in(messages)):
                shape_ids = self._shapes.fill_ids(shape, shape.contents(messages), [])
                if shape_ids is not None:
                    ids, media = self._media.expand(shape_ids, messages)
                    return Extend(ids, media=media, tool_images_moved=moved)

        return self._prompt(self._guard.encode(messages, render, tools), messages, moved)

    def preamble(self, messages: Sequence[Message]) -> Extend:
        """Render messages that precede a conversation, without the start of a reply.

        Raises:
            TemplateError: if the template cannot render them.
            ControlTextError: for control text where `control_text` is `reject`.
        """
        messages, moved, _ = self._media.move_tool_images(messages)
        return self._prompt(self._guard.encode(messages, self.template.render), messages, moved)

    def _prompt(self, encoded: EncodedMessages, messages: Sequence[Message], moved: int) -> Extend:
        ids, media = self._media.expand(encoded.ids, messages)
        return Extend(
            ids,
            neutralised=encoded.neutralised,
            control_text=encoded.control,
            media=media,
            tool_images_moved=moved,
        )

    def _open_shape(
        self, messages: Sequence[Message], render: GuardRender, tools: Tools
    ) -> _OpeningShape:
        """Return how messages of this shape are rendered as an opening, derived once."""
        key = (json.dumps(tools, default=repr) if tools else "", self._rows(messages))
        opening = self._open_shapes.get(key)
        if opening is None:
            with watch_placeholders() as inspected:
                shape = self._shapes.find(messages, render, tools)
            if any(map(is_blank, texts_of(messages))):
                shape = AppendShape()  # templates may omit a blank text: each is rendered
            opening = _OpeningShape(shape, inspected)
            remember(self._open_shapes, key, opening)
        return opening

    def _with_all_of_demonstrations(
        self, messages: Sequence[Message], tools: Tools
    ) -> Sequence[Message]:
        """Return an opening's messages in a form in which the template shows all of a
        demonstration.

        Thinking and calls that it has no place for become text, in the format in which replies are
        parsed; results become a user's words.

        Raises `TemplateError` if the template drops a result in every form.
        """
        messages = [
            self._composer.demonstration(message)
            if message.tool_calls or message.reasoning
            else message
            for message in messages
        ]
        if not any(message.role == "tool" or message.tool_calls for message in messages):
            return messages

        # Each result that is not blank gets a text of its own, so that a dropped one shows.
        marked = [
            replace(message, content=random_mark())
            if message.role == "tool" and message.text.strip()
            else message
            for message in messages
        ]
        results = [message.text for message in marked if message.role == "tool"]
        forms = self._probe.result_forms(messages)
        for form in forms:
            adapt = ADAPT[form]
            text = self.template.try_render(adapt(marked), tools, generation_prompt=True)
            if text is not None and all(result in text for result in results):
                return adapt(messages)
            if text is None and form == forms[-1]:
                return adapt(messages)  # rendering it gives the reason of the template
        raise TemplateError(
            f"{self.template.origin}: drops the result of a tool from the opening messages"
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
        append = pattern.append
        shape = pattern.shape

        # A stop that is the header of the next message closes the reply only if that is the header
        # which follows.
        last_id = reply_ids[-1] if reply_ids else None
        is_closed = last_id in self.stop_ids
        if is_closed and append.heads:
            is_closed = last_id == pattern.head[-1]
        ids: list[int] = []
        if not is_closed:
            ids += (
                self._thinking_close(append.head, history, reply, reply_ids, messages, tools)
                or pattern.head
            )
        close = len(ids)

        if append.adapt:
            messages = append.adapted(messages)
        if shape.pieces:
            # None where a content holds a control text, which has no place in a shape: the guard
            # encodes it.
            shape_ids = self._shapes.fill_ids(shape, shape.contents(messages), ids)
            if shape_ids is not None:
                all_ids, media = self._media.expand(shape_ids, messages)
                # By position, since most turns end here: by keyword it takes 0.3 us more.
                return Extend(all_ids, close, forged.total(), forged, None, media, moved)

        encoded = self._encode_append(append, shape.after, messages)
        all_ids, media = self._media.expand(ids + encoded.ids, messages)
        return Extend(
            all_ids,
            close,
            neutralised=encoded.neutralised + forged.total(),
            control_text=forged + Counter(encoded.control),
            media=media,
            tool_images_moved=moved,
        )

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
        continued = self.codec.decode(reply_ids) + "x"
        if self._replies.parse(continued, tools, None).text:
            return []

        before = self._before(history) if len(history) > 1 else (ASKED,)
        folds = self._composer.folds
        close = self._probe.close_of_thinking(before, messages, tools, folds=folds, head=head)
        return self._encode_segment(close)

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

    # How messages of one shape follow a reply of one shape

    def _pattern_after(
        self, history: Sequence[Message], reply: Message, messages: Sequence[Message], tools: Tools
    ) -> _AppendPattern:
        """Return how messages follow the reply in this conversation."""
        reasoning_shape = reply.reasoning
        if reasoning_shape and not reasoning_shape.isspace():
            reasoning_shape = _SOME_TEXT
        calls: tuple[tuple[str, str | None], ...] = ()
        if reply.tool_calls:
            calls = tuple([(call.name, self._rendered_id(call.id)) for call in reply.tool_calls])
        # Cheaper than full schemas; appends proven with tools also compare the schemas.
        tool_names = tuple([tool.get("function", tool).get("name") for tool in tools])
        key = (content_shape(reply), reasoning_shape, calls, tool_names, self._rows(messages))

        pattern = self._append_patterns.get(key)
        if pattern is None or (pattern.append.tools and pattern.append.tools != tools):
            pattern = self._derive_pattern(key, reply, messages, tools)
        if pattern.conditional and not pattern.inspected.allows(texts_in((reply, *messages))):
            return self._pattern_of(history, reply, messages, tools) or pattern
        if self._alone or len(history) < 2:
            return pattern

        # The template looks at earlier messages: prove it for their shape too.
        def derive(placeholders: Sequence[Message]) -> _AppendPattern | None:
            try:
                append = self._probe.append(reply, messages, tools, placeholders)
            except TemplateError:
                return None
            if any(map(holds_placeholder, append.pieces)):
                return None  # the template moves a text of an earlier turn here
            return pattern if append.pieces == pattern.append.pieces else self._make_pattern(append)

        assert pattern.after is not None
        proven = pattern.after.get((), self._before(history), derive)
        return proven or self._pattern_of(history, reply, messages, tools) or pattern

    def _derive_pattern(
        self, key: Any, reply: Message, messages: Sequence[Message], tools: Tools
    ) -> _AppendPattern:
        """Derive how messages of this shape follow a reply of this shape after a single
        question."""
        with watch_placeholders() as inspected:
            append = self._probe.append(reply, messages, tools)
            pattern = self._make_pattern(append)
            shape = pattern.shape
            if not any(map(is_blank, texts_of(messages))):
                render = partial(self._probe.rendered, append)
                shape = self._shapes.find(append.adapted(messages), render, after=shape.after)

        pattern = replace(
            pattern,
            shape=shape,
            inspected=inspected,
            conditional=bool(inspected.words or inspected.unprovable),
            after=ProvenByShape(self._conversations),
        )
        remember(self._append_patterns, key, pattern)
        return pattern

    def _pattern_of(
        self, history: Sequence[Message], reply: Message, messages: Sequence[Message], tools: Tools
    ) -> _AppendPattern | None:
        """Derive how messages follow the reply from this conversation's own texts.

        None if the template rejects it.
        """
        before = self._before(history) if len(history) > 1 else (ASKED,)
        try:
            append = self._probe.append(reply, messages, tools, before, verbatim=True)
        except TemplateError:
            return None
        return self._make_pattern(append)

    def _before(self, history: Sequence[Message]) -> list[Message]:
        """Return the conversation before its last reply, such that every call in it can be
        rendered."""
        return readable(self._media.move_tool_images(history).messages[:-1])

    def _make_pattern(self, append: AppendProbe) -> _AppendPattern:
        control_texts = self._guard.split.findall(append.head)
        stop = control_texts[-1] if control_texts else ""
        # A reply with calls lacks at most its stop: the marks that end the call are part of it.
        head = stop if stop and append.base[-1].tool_calls else append.head
        return _AppendPattern(append, AppendShape(after=stop), tuple(self._encode_segment(head)))

    def _encode_append(
        self, append: AppendProbe, after: str, messages: Sequence[Message]
    ) -> EncodedMessages:
        """Encode adapted messages as the template writes them at the end of a conversation."""

        def render(given: Sequence[Message], tools: Tools = ()) -> str:
            return self.template.render(given, tools, generation_prompt=True)

        def after_reply(text: str) -> list[tuple[int, int, str]]:
            return [(self._probe.end_of_reply(append, text), len(text), after)]

        conversation = [*append.base, *messages]
        (ids,), encoded = self._guard.encode_cut(
            conversation, render, after_reply, append.tools, first_new=len(append.base)
        )
        return encoded._replace(ids=ids)

    def _rows(self, messages: Sequence[Message]) -> tuple[Any, ...]:
        """Return everything but the texts of messages that may change how they are rendered."""
        rows = []
        for message in messages:
            answered = self._rendered_id(message.tool_call_id) if message.tool_call_id else None
            demonstrates = bool(message.tool_calls or message.reasoning)
            rows.append(
                (message.role, message.name, content_shape(message), demonstrates, answered)
            )
        return tuple(rows)

    def _rendered_id(self, call_id: str) -> str | None:
        """Return a call id if the template may write it."""
        return call_id if self._conversations.renders_ids else None


@lru_cache(maxsize=8)
def _shared(ids: frozenset[int]) -> frozenset[int]:
    """Return the first of equal sets: caches compare 150,000 ids of another one at every call."""
    return ids


def _check_close(probe: TemplateProbe, ends: bool) -> None:
    """Reject a template whose replies would never end with this tokenizer."""
    ending = probe.text
    if not ending.stops and (not ends or _MARKUP.search(ending.head)):
        raise TemplateError(
            f"{probe.template.origin}: closes an assistant turn with "
            f"{ending.last or ending.head!r}, which contains no special token of the tokenizer, "
            "so a reply would never end; use the template that belongs to this tokenizer"
        )
