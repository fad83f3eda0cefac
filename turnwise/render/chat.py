"""The renderer of a chat template: opening prompts, what follows a reply, and replies read back."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

from turnwise.errors import TemplateError
from turnwise.render.base import Branch, Extend
from turnwise.render.codec import Behind, Codec
from turnwise.render.compose import Composer
from turnwise.render.contents import SHOWN, passes_through, probe_contents, weave
from turnwise.render.contract import Contract, derive
from turnwise.render.forms import fitted
from turnwise.render.guard import ControlText, Guard, Render, mark
from turnwise.render.markers import survey
from turnwise.render.probe import Append, Probe
from turnwise.render.replies import Replies
from turnwise.render.template import Template, digest
from turnwise.types import Message

_MOST_PROBED = 8
"""Messages of an opening prompt up to which its shape is worth keeping."""
_MOST_SHAPES = 1024
_MARKUP = re.compile(r"<[^\s<>]+>|\[[^\s\[\]]+\]")
_SAID = Message("assistant", "said")


@dataclass(frozen=True, slots=True)
class _Shape:
    """What a template writes between a reply and the next one, for messages of certain roles; proven by probing.

    Added tokens cut a text before anything else happens to it, so what stands between two of them is encoded by itself:
    only the stretches that hold a content are encoded per turn, the rest is known.
    """

    pieces: tuple[str, ...] = ()
    """Template text before, between and behind the contents; the first begins right behind the reply's end token. Empty
    where contents do not stand in the text as they are, so that every append is rendered for real."""
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
        """The contents as the template shows them."""
        texts = [m.text for m in messages]
        return list(map(SHOWN[self.shown], texts)) if self.shown else texts


class _Behind(NamedTuple):
    """What stands between a reply and the next one, for a reply and messages of certain shapes."""

    append: Append
    shape: _Shape
    """From the end of the reply on."""
    head: tuple[int, ...]
    """Ids that close a reply which did not close itself."""


class ChatRenderer:
    """Renders for one tokenizer and one chat template, and proves each kind of append before it uses it."""

    def __init__(
        self,
        codec: Codec,
        template: Template,
        *,
        stop_ids: frozenset[int] | None = None,
        banned: Sequence[str] = (),
        control_text: ControlText = "neutralise",
    ) -> None:
        """
        Args:
            codec: the tokenizer.
            template: the chat template.
            stop_ids: ids that end a reply; what closes the template's assistant turns is always one.
            banned: texts of control tokens that may never be sampled (image placeholders).
            control_text: what becomes of control text in messages.

        Raises:
            TemplateError: when the template does not show replies, or a reply would never end.
        """
        self.codec = self._codec = codec
        self._encode_stretch = codec.stretch
        template = fitted(template)
        self._template = template
        self._guard = Guard(codec, control_text, banned)
        self._opened: dict[Any, _Shape] = {}
        self._followed: dict[Any, _Behind] = {}
        self._shows_ids = "tool_call_id" in template.source or ".id" in template.source or "['id']" in template.source
        given = stop_ids or frozenset()
        declared = frozenset(text for text, i in codec.control.items() if i in given)
        self._probe = Probe(template, codec.control, self._guard.split, declared)
        self.stop_ids = given | {codec.control[text] for text in self._probe.stops}
        _check_close(self._probe, bool(self.stop_ids))
        self._end = [codec.control[text] for text in self._probe.text.stops] or sorted(given)[:1]
        self.compose = Composer(codec, self._guard, self._probe, self.stop_ids).compose
        self._prompt_ends = self._end_of_prompt()
        self.banned_ids = frozenset(codec.control[text] for text in banned if text in codec.control)
        seen = survey(template.render, self._guard.split, codec.control, mark, template.source)
        self._guard.learn(seen)
        said, heard = ({codec.control[text] for text in texts} for texts in (seen.said, seen.heard))
        self.invalid_ids = ((codec.special - said) | heard | self.banned_ids) - self.stop_ids
        self._replies = Replies(codec, template, self.invalid_ids | self.stop_ids)
        settings = {"stop_ids": sorted(self.stop_ids), "control_text": control_text}
        self.fingerprints = {
            "template": template.fingerprint,
            "tokenizer": codec.fingerprint,
            "settings": digest(settings),
        }
        """What `fingerprint` is made of, to say which of them is another one."""
        self.fingerprint = digest(self.fingerprints)

    @property
    def template(self) -> Template:
        """The chat template."""
        return self._template

    @cached_property
    def contract(self) -> Contract:
        """What the template does, as far as a rollout must know it; found when it is first asked for (about 30 ms)."""
        return derive(self._probe, self._codec, thinks=self._replies.thinking)

    # Text and ids

    def encode(self, text: str) -> list[int]:
        """Ids of a text in which nothing is a control token."""
        return self._codec.plain(text, "control")

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens written out."""
        return self._codec.decode(ids)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each id alone; bytes that are no UTF-8 by themselves are escaped (`\\xe2`)."""
        pieces = self._codec.pieces
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
            text = self._codec.decode(ids[:-1] if ids and ids[-1] in self.stop_ids else ids)
        return self._replies.parse(text, tools, thinking)

    def encode_reply(self, text: str) -> list[int]:
        """The ids that a model would sample to say `text` and end; thinking and tool-call marks count as tokens."""
        return [*self._replies.encode(text, self._prompt_ends), *self._end]

    def _end_of_prompt(self) -> Behind:
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

        def render(given: Sequence[Message], told: Sequence[Mapping[str, Any]] = tools) -> str:
            return self._template.render(given, told, generation_prompt=True)

        if len(messages) <= _MOST_PROBED and all(m.role != "assistant" for m in messages):
            key = (json.dumps(tools, default=repr) if tools else "", self._rows(messages))
            shape = self._opened.get(key)
            if shape is None:
                shape = self._find_shape(messages, render, tools)
                _keep(self._opened, key, shape)
            if shape.pieces and (ids := self._weave_ids(shape, shape.contents(messages), [])) is not None:
                return Extend(ids)
        found = self._guard.encode(messages, render, tools)
        return Extend(found.ids, 0, found.neutralised, found.control)

    # What follows a reply

    def extend(
        self,
        history: Sequence[Message],
        reply_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Extend | Branch:
        """What follows a reply: its close, `messages`, and the opening of the next reply.

        The text behind the reply is what the template writes behind a stand-in reply of the same shape, proven to be an
        append once per shape of message; earlier turns stay as they were, whatever the template would strip from them.

        Raises:
            TemplateError: when the template cannot append these messages.
        """
        reply, forged = self._guard.tame(history[-1] if history else _SAID)
        behind = self._behind(reply, messages, tools)
        append, shape = behind.append, behind.shape
        ids: list[int] = []
        if not reply_ids or (last := reply_ids[-1]) not in self.stop_ids or (append.heads and last != behind.head[-1]):
            ids.extend(behind.head)
        close = len(ids)
        if append.adapt:
            messages = append.adapted(messages)
        if shape.pieces and (known := self._weave_ids(shape, shape.contents(messages), ids)) is not None:
            return Extend(known, close, forged.total(), forged) if forged else Extend(known, close)
        found = self._guard.encode(messages, partial(self._probe.rendered, append), behind=shape.behind)
        return Extend(ids + found.ids, close, found.neutralised + forged.total(), forged + Counter(found.control))

    def inline(self, reply_ids: Sequence[int], text: str) -> Extend | Branch:
        """What goes on inside a reply: `text`, in which nothing is a control token, before the stop id where there is one."""
        found = self._guard.inside(text)
        if reply_ids and reply_ids[-1] in self.stop_ids:
            return Branch(len(reply_ids) - 1, found.ids, "close_dropped", found.neutralised, found.control)
        return Extend(found.ids, 0, found.neutralised, found.control)

    def _behind(self, reply: Message, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> _Behind:
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
            close = self._guard.split.findall(append.head)
            render = partial(self._probe.rendered, append)
            shape = self._find_shape(append.adapted(messages), render, behind=close[-1] if close else "")
            # Of a call's end only the stop is missing where none was sampled: its marks are in the reply.
            head = close[-1] if append.with_calls and close else append.head
            found = _Behind(append, shape, tuple(self._encode_stretch(head)))
            _keep(self._followed, key, found)
        return found

    def _weave_ids(self, shape: _Shape, contents: Sequence[str], close: list[int]) -> list[int] | None:
        """Ids of a shape with these contents behind `close`; None where a control token came out that the template did not
        write, or a marker of its that is no token stands in a content."""
        if self._guard.marks(contents):
            return None
        if not shape.edges:
            ids = self._codec.follow(weave(shape.pieces, contents), shape.behind)
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

    def _rows(self, messages: Sequence[Message]) -> tuple[Any, ...]:
        """What of messages, but for their texts, may change how they are shown."""
        return tuple(
            [
                (
                    m.role,
                    m.name,
                    type(m.content),
                    bool(m.tool_calls or m.reasoning),
                    m.tool_call_id and self._shown_id(m.tool_call_id),
                )
                for m in messages
            ]
        )

    def _shown_id(self, name: str) -> str | None:
        """The id of a call, where the template may write it."""
        return name if self._shows_ids else None

    def _find_shape(
        self, messages: Sequence[Message], render: Render, tools: Sequence[Mapping[str, Any]] = (), behind: str = ""
    ) -> _Shape:
        """Find the template text around the contents, and whether contents pass through it unchanged."""
        harmless = [replace(m, content="x" if isinstance(m.content, str) else ("x",)) for m in messages]
        if self._guard.encode(harmless, render, tools, behind).control:
            return _Shape(behind=behind)  # names, ids and schemas are the world's too, and none of the template's own text
        if any(not isinstance(m.content, str) or m.tool_calls or m.reasoning for m in messages):
            render([replace(m, content=m.text) for m in messages])
            return _Shape(behind=behind)
        marks = [mark() for _ in messages]
        text = render([replace(m, content=own) for m, own in zip(messages, marks, strict=True)])
        pieces: list[str] = []
        for own in marks:
            before, found, text = text.partition(own)
            if not found or own in text:
                roles = [m.role for m in messages]
                raise TemplateError(f"{self._template.origin}: drops or repeats a message of roles {roles}")
            pieces.append(before)
        pieces.append(text)
        for shown in SHOWN:
            if passes_through(messages, pieces, shown, render):
                return self._cut(tuple(pieces), shown, behind)
        return _Shape(behind=behind)

    def _cut(self, pieces: tuple[str, ...], shown: str, behind: str) -> _Shape:
        """Cut the template text at its control tokens into what is known and what touches a content.

        Each cut is compared with the whole, encoded at once, over the probes: tokenizers whose pieces are not independent
        (word-start marks, tokens that eat white space) keep to the whole.
        """
        expected = tuple(i for piece in pieces for i in self._guard.owned(piece))
        whole = _Shape(pieces, shown, expected, behind=behind)
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
        cut = _Shape(
            pieces,
            shown,
            expected,
            (tuple(self._codec.follow(fixed[0], behind)), *(tuple(self._encode_stretch(text)) for text in fixed[1:])),
            behind,
            tuple(zip(edges[::2], edges[1::2], strict=True)),
        )
        for contents in probe_contents(len(pieces) - 1):
            if self._weave_ids(cut, contents, []) != self._weave_ids(whole, contents, []):
                return whole
        return cut


def _key_of(tools: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
    """Names of tools, which is quicker than all of them; where an append was proven with tools, they are compared whole."""
    return tuple([tool.get("function", tool).get("name") for tool in tools])


def _keep(known: dict[Any, Any], key: Any, value: Any) -> None:
    if len(known) >= _MOST_SHAPES:
        known.clear()
    known[key] = value


def _check_close(probe: Probe, ends: bool) -> None:
    """Refuse a template whose replies would never end with this tokenizer."""
    closing = probe.text
    if closing.stops:
        return
    if not ends or _MARKUP.search(closing.head):
        raise TemplateError(
            f"{probe.template.origin}: closes an assistant turn with {closing.last or closing.head!r}, which holds no special "
            "token of the tokenizer, so a reply would never end; use the template that belongs to this tokenizer"
        )
