"""ChatRenderer: prompts, appends and parsed replies for one chat template."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from turnwise.errors import TemplateError
from turnwise.renderers.base import Branch, Extend
from turnwise.renderers.contract import TemplateContract, derive_contract
from turnwise.renderers.control_text import ControlText, ControlTextGuard, EncodedMessages, find_template_markers, random_mark
from turnwise.renderers.parsers import PARSERS, Parser, parser_for_template
from turnwise.renderers.parsers.detect import PROBE_TOOL, render_probe_reply, shows_calls
from turnwise.renderers.probe import AppendProbe, AppendShape, AppendShapes, TemplateProbe, readable
from turnwise.renderers.recompose import ConversationComposer
from turnwise.renderers.template import ChatTemplate, adapt_template, digest
from turnwise.renderers.tokenizer import PrecedingToken, Tokenizer, control_pattern
from turnwise.renderers.vision.media_blocks import MediaExpander
from turnwise.types import Message

if TYPE_CHECKING:
    from turnwise.renderers.vision.base import VisionProcessor


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


_MOST_PROBED = 8
"""Messages of an opening prompt up to which its shape is worth keeping."""
_MOST_SHAPES = 1024
_MARKUP = re.compile(r"<[^\s<>]+>|\[[^\s\[\]]+\]")
_SAID = Message("assistant", "said")


@dataclass(slots=True)
class _AppendPattern:
    """What stands between a reply and the next one, for a reply and messages of certain shapes."""

    append: AppendProbe
    shape: AppendShape
    """From the end of the reply on."""
    head: tuple[int, ...]
    """Ids that close a reply which did not close itself."""
    varies: bool = False
    """Whether it depends on the conversation before, so that it is worked out behind each one."""
    lengths: set[int] = field(default_factory=set)
    """Messages up to the reply, in the conversations behind which the template was seen to write the same."""


class ChatRenderer:
    """Renders for one tokenizer and one chat template, and proves each kind of append before it uses it."""

    def __init__(
        self,
        codec: Tokenizer,
        template: ChatTemplate,
        *,
        stop_ids: frozenset[int] | None = None,
        banned: Sequence[str] = (),
        control_text: ControlText = "neutralise",
        eyes: VisionProcessor | None = None,
    ) -> None:
        """
        Args:
            codec: the tokenizer.
            template: the chat template.
            stop_ids: ids that end a reply; what closes the template's assistant turns is always one.
            banned: texts of control tokens that may never be sampled (image placeholders).
            control_text: what becomes of control text in messages.
            eyes: what the model sees, where it is one of vision and language; its ids are banned too.

        Raises:
            TemplateError: when the template does not show replies, or a reply would never end.
        """
        self.codec = self._codec = codec
        self.vision = eyes
        self._encode_stretch = codec.encode_segment
        if eyes is not None:
            banned = [*banned, *(text for text, token in codec.control.items() if token in eyes.placeholder_ids)]
        template = adapt_template(template)
        self._template = template
        self._guard = ControlTextGuard(codec, control_text, banned)
        self._opened: dict[Any, AppendShape] = {}
        self._followed: dict[Any, _AppendPattern] = {}
        self._shows_ids = "tool_call_id" in template.source or ".id" in template.source or "['id']" in template.source
        given = stop_ids or frozenset()
        declared = frozenset(text for text, i in codec.control.items() if i in given)
        self._probe = TemplateProbe(template, codec.control, self._guard.split, declared)
        self.stop_ids = given | {codec.control[text] for text in self._probe.stops}
        _check_close(self._probe, bool(self.stop_ids))
        self._end = [codec.control[text] for text in self._probe.text.stops] or sorted(given)[:1]
        stop = self._probe.text.stops[0] if self._probe.text.stops else ""
        before = self._probe.text.close_in_last.removesuffix(stop)
        self._before_end = before if stop and before.strip() else ""
        self._seen = MediaExpander(eyes, self._probe, self._guard.template_control_ids)
        self._shapes = AppendShapes(codec, self._guard, template.origin)
        self.compose = ConversationComposer(codec, self._guard, self._probe, self.stop_ids, self._seen).compose
        self._prompt_ends = self._end_of_prompt()
        self.banned_ids = frozenset(codec.control[text] for text in banned if text in codec.control)
        seen = find_template_markers(template.render, self._guard.split, codec.control, random_mark, template.source)
        self._guard.observe_template(seen)
        said, heard = ({codec.control[text] for text in texts} for texts in (seen.assistant_control, seen.incoming_control))
        self.invalid_ids = ((codec.special - said) | heard | self.banned_ids) - self.stop_ids
        self._replies = ReplyReader(codec, template, self.invalid_ids | self.stop_ids)
        settings = {"stop_ids": sorted(self.stop_ids), "control_text": control_text}
        self.fingerprints = {
            "template": template.fingerprint,
            "tokenizer": codec.fingerprint,
            "settings": digest(settings),
            **({} if eyes is None else {"vision": eyes.fingerprint}),
        }
        """What `fingerprint` is made of, to say which of them is another one."""
        self.fingerprint = digest(self.fingerprints)

    def ban(self, ids: Iterable[int]) -> None:
        """Ban further ids, such as rows of the model that its tokenizer has no text for."""
        self.banned_ids |= frozenset(ids)

    @property
    def template(self) -> ChatTemplate:
        """The chat template."""
        return self._template

    @cached_property
    def contract(self) -> TemplateContract:
        """What the template does, as far as a rollout must know it; found when it is first asked for (about 30 ms)."""
        return derive_contract(self._probe, self._codec, thinks=self._replies.thinking)

    @property
    def call_format(self) -> tuple[str, str]:
        """The parser that reads replies, and what the template writes for a call where no parser reads that back."""
        return self._replies.parser.name, self._replies.unread

    def with_shown_media(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages in the form in which the template shows their images: those of tools perhaps in a user's message."""
        return self._seen.move_tool_images(messages).messages

    # Text and ids

    def encode(self, text: str) -> list[int]:
        """Ids of a text in which nothing is a control token."""
        return self._codec.encode_plain(text, "control")

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens written out."""
        return self._codec.decode(ids)

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each id alone; bytes that are no UTF-8 by themselves are escaped (`\\xe2`)."""
        pieces = self._codec.token_texts
        return [pieces[i] for i in ids]

    def parse(
        self,
        ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
        text: str | None = None,
        thinking: bool | None = None,
    ) -> Message:
        """A reply as a message, see `Renderer.parse`; the end token is no part of its text."""
        if text is None:
            ended = bool(ids) and ids[-1] in self.stop_ids
            text = self._codec.decode(ids[:-1] if ended else ids)
            if ended:
                text = text.removesuffix(self._before_end)
        return self._replies.parse(text, tools, thinking)

    def encode_reply(self, text: str) -> list[int]:
        """The ids that a model would sample to say `text` and end; thinking and tool-call marks count as tokens."""
        return [*self._replies.encode(text, self._prompt_ends), *self._encode_stretch(self._before_end), *self._end]

    def _end_of_prompt(self) -> PrecedingToken:
        """What a reply stands behind: a control token, or text of the prompt that it goes on from."""
        try:
            prompt = self._template.render((Message("user", "u"),), generation_prompt=True)
        except TemplateError:
            return "control"
        return "text" if self._guard.split.split(prompt)[-1] else "control"

    # Opening

    def open(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Extend:
        """The opening prompt, up to where the model's reply begins.

        Raises:
            TemplateError: when there are no messages, or the template cannot show them.
        """
        if not messages:
            raise TemplateError("an episode opens with at least one message: return it from reset, or put it in the task")

        messages, moved, _ = self._seen.move_tool_images(messages)

        def render(given: Sequence[Message], told: Sequence[Mapping[str, Any]] = tools) -> str:
            return self._template.render(given, told, generation_prompt=True)

        if len(messages) <= _MOST_PROBED and all(m.role != "assistant" for m in messages):
            key = (json.dumps(tools, default=repr) if tools else "", self._rows(messages))
            shape = self._opened.get(key)
            if shape is None:
                shape = self._shapes.find(messages, render, tools)
                _keep(self._opened, key, shape)
            if shape.pieces and (known := self._shapes.fill_ids(shape, shape.contents(messages), [])) is not None:
                ids, placed = self._seen.expand(known, messages)
                return Extend(ids, media=placed, tool_images_moved=moved)
        found = self._guard.encode(messages, render, tools)
        ids, placed = self._seen.expand(found.ids, messages)
        return Extend(ids, 0, found.neutralised, found.control, media=placed, tool_images_moved=moved)

    # What follows a reply

    def extend(
        self,
        history: Sequence[Message],
        reply_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Extend | Branch:
        """What follows a reply: its close, `messages`, and the opening of the next reply.

        The text behind the reply is what the template writes behind this conversation; earlier turns stay as they were,
        whatever the template would strip from them. Once per shape of reply and messages it is found behind a stand-in, and
        once per shape and length compared with what stands behind the real conversation; a template that keeps state across
        turns (a counter, a flag, a window) is asked behind each conversation.

        Raises:
            TemplateError: when the template cannot append these messages.
        """
        reply, forged = self._guard.sanitize_reply(history[-1] if history else _SAID)
        messages, moved, _ = self._seen.move_tool_images(messages)
        behind = self._behind(reply, messages, tools)
        if behind.varies or len(history) not in behind.lengths:
            behind = self._behind_all(behind, history, reply, messages, tools)
        append, shape = behind.append, behind.shape
        ids: list[int] = []
        if not reply_ids or (last := reply_ids[-1]) not in self.stop_ids or (append.heads and last != behind.head[-1]):
            ids.extend(behind.head)
        close = len(ids)
        if append.adapt:
            messages = append.adapted(messages)
        if shape.pieces and (known := self._shapes.fill_ids(shape, shape.contents(messages), ids)) is not None:
            known, placed = self._seen.expand(known, messages)
            return Extend(known, close, forged.total(), forged, None, placed, moved)
        found = self._encode_behind(append, shape.behind, messages)
        known, placed = self._seen.expand(ids + found.ids, messages)
        met = forged + Counter(found.control)
        return Extend(known, close, found.neutralised + forged.total(), met, None, placed, moved)

    def inline(self, reply_ids: Sequence[int], text: str) -> Extend | Branch:
        """What goes on inside a reply: `text`, in which nothing is a control token, before the stop id where there is one."""
        found = self._guard.encode_continuation(text)
        if reply_ids and reply_ids[-1] in self.stop_ids:
            return Branch(len(reply_ids) - 1, found.ids, "close_dropped", found.neutralised, found.control)
        return Extend(found.ids, 0, found.neutralised, found.control)

    def _behind(self, reply: Message, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> _AppendPattern:
        """How messages of this shape follow a reply of this shape, found out once."""
        key = (
            bool(reply.content),
            reply.reasoning is None,
            tuple([(call.name, self._shown_id(call.id)) for call in reply.tool_calls]) if reply.tool_calls else (),
            _key_of(tools) if tools else (),
            self._rows(messages),
        )
        found = self._followed.get(key)
        if found is None or (found.append.tools and found.append.tools != tools):
            append = self._probe.append(reply, messages, tools)
            found = self._found(append)
            found.varies = self._probe.varies(append, reply, messages, tools)
            found.shape = self._shapes.find(
                append.adapted(messages), partial(self._probe.rendered, append), behind=found.shape.behind
            )
            _keep(self._followed, key, found)
        return found

    def _behind_all(
        self,
        known: _AppendPattern,
        history: Sequence[Message],
        reply: Message,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
    ) -> _AppendPattern:
        """How messages follow the reply at the end of this very conversation: as they are known to, where that is so."""
        if len(history) > 1:
            try:
                append = self._probe.append(
                    reply, messages, tools, readable(self._seen.move_tool_images(history).messages[:-1])
                )
            except TemplateError:
                return known  # nothing but a stand-in tells what it would write behind a conversation that it refuses
            if append.pieces != known.append.pieces:
                known.varies = True
                return self._found(append)
        known.lengths.add(len(history))
        return known

    def _found(self, append: AppendProbe) -> _AppendPattern:
        close = self._guard.split.findall(append.head)
        # Of a call's end only the stop is missing where none was sampled: its marks are in the reply.
        head = close[-1] if append.with_calls and close else append.head
        return _AppendPattern(append, AppendShape(behind=close[-1] if close else ""), tuple(self._encode_stretch(head)))

    def _encode_behind(self, append: AppendProbe, behind: str, messages: Sequence[Message]) -> EncodedMessages:
        """Ids of messages, adapted, as the template writes them at the end of a conversation."""

        def render(given: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
            return self._template.render(given, tools, generation_prompt=True)

        def cut(text: str) -> list[tuple[int, int, str]]:
            return [(self._probe.end_of_reply(append, text), len(text), behind)]

        whole = [*append.base, *messages]
        (ids,), found = self._guard.encode_cut(whole, render, cut, append.tools, len(append.base))
        return found._replace(ids=ids)

    def _rows(self, messages: Sequence[Message]) -> tuple[Any, ...]:
        """What of messages, but for their texts, may change how they are shown."""
        return tuple(
            [
                (
                    m.role,
                    m.name,
                    _kinds_of(m),
                    bool(m.tool_calls or m.reasoning),
                    m.tool_call_id and self._shown_id(m.tool_call_id),
                )
                for m in messages
            ]
        )

    def _shown_id(self, name: str) -> str | None:
        """The id of a call, where the template may write it."""
        return name if self._shows_ids else None


def _kinds_of(message: Message) -> type | tuple[type, ...]:
    """What the content of a message is made of."""
    return str if isinstance(message.content, str) else tuple([type(part) for part in message.content])


def _key_of(tools: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
    """Names of tools, which is quicker than all of them; where an append was proven with tools, they are compared whole."""
    return tuple([tool.get("function", tool).get("name") for tool in tools])


def _keep(known: dict[Any, Any], key: Any, value: Any) -> None:
    if len(known) >= _MOST_SHAPES:
        known.clear()
    known[key] = value


def _check_close(probe: TemplateProbe, ends: bool) -> None:
    """Refuse a template whose replies would never end with this tokenizer."""
    closing = probe.text
    if closing.stops:
        return
    if not ends or _MARKUP.search(closing.head):
        raise TemplateError(
            f"{probe.template.origin}: closes an assistant turn with {closing.last or closing.head!r}, which holds no special "
            "token of the tokenizer, so a reply would never end; use the template that belongs to this tokenizer"
        )
