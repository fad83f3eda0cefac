"""Everything about a conversation that a template may look at, without its texts.

What a template writes after a conversation of placeholders holds for every conversation of the same
shape whose texts contain none of the words that the template looked for (`inspected`). So it is
derived once per shape (`ProvenByShape.get`), and never depends on which conversation came first.

How far back a template looks is read from its source (`reach_of`): where it looks at no earlier
message when it writes a later one, every conversation has the same shape.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

from turnwright.renderers.inspected import Inspected, watch_placeholders
from turnwright.renderers.locality import reach_of
from turnwright.renderers.model_files import remember
from turnwright.renderers.template import call_id, random_mark
from turnwright.types import Message, ToolCall

Derived = TypeVar("Derived")


def is_blank(text: str) -> bool:
    """Return whether a text is empty or white space, which templates often omit."""
    return not text or text.isspace()


def content_shape(message: Message) -> Hashable:
    """Return the kinds of a content's parts; a blank text, which templates treat differently, is
    its own shape."""
    content = message.content
    if isinstance(content, str):  # at every turn, so without a call of `is_blank`
        return str if content and not content.isspace() else content

    kinds: list[Any] = []
    for part in content:
        if not isinstance(part, str):
            kinds.append(type(part))
        elif is_blank(part):
            kinds.append(part)
        else:
            kinds.append(str)
    return tuple(kinds)


class ConversationShapes:
    """Shapes of conversations as one template can tell them apart."""

    def __init__(self, source: str) -> None:
        self.reach = reach_of(source)
        # Ids appear in the text, or join results to calls, only where the template reads them.
        self.renders_ids = (
            "tool_call_id" in source or ".id" in source or "['id']" in source or '["id"]' in source
        )

    def seen(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the earlier messages that the template looks at when it writes later ones."""
        if self.reach == "none":
            return ()
        return messages[:1] if self.reach == "first" else messages

    def of(self, messages: Sequence[Message]) -> Hashable:
        """Return the shape of the messages that the template looks at."""
        rows: list[Hashable] = []
        # This runs at every turn over all turns, so most messages take no call.
        for message in self.seen(messages):
            content = message.content
            if (
                isinstance(content, str)
                and message.name is None
                and message.reasoning is None
                and not message.tool_calls
                and message.tool_call_id is None
            ):
                rows.append((message.role, str if content and not content.isspace() else content))
            else:
                rows.append(self._row(message))
        return tuple(rows)

    def placeholders(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages of the same shape with a random number in place of each text."""
        return list(map(self._placeholder, messages))

    def _row(self, message: Message) -> Hashable:
        """Return the shape of a message with thinking, calls, a name or parts."""
        reasoning: Hashable = message.reasoning
        if message.reasoning is not None and not is_blank(message.reasoning):
            reasoning = str

        calls: Hashable = len(message.tool_calls)
        if message.tool_calls:
            with_arguments = tuple([bool(call.arguments) for call in message.tool_calls])
            names_and_ids: Hashable = ()
            if self.renders_ids:
                names_and_ids = tuple([(call.name, call.id) for call in message.tool_calls])
            calls = with_arguments, names_and_ids

        answered: Hashable = None
        name: Hashable = message.name is not None
        if self.renders_ids:
            answered = message.tool_call_id
            name = message.name
        return message.role, content_shape(message), reasoning, calls, answered, name

    def _placeholder(self, message: Message) -> Message:
        content = message.content
        if isinstance(content, str):
            masked_content: str | tuple[Any, ...] = _masked(content)
        else:
            masked_content = tuple(
                [_masked(part) if isinstance(part, str) else part for part in content]
            )
        has_text_alone = isinstance(content, str) and message.reasoning is None
        if has_text_alone and not message.tool_calls and message.name is None:
            return replace(message, content=masked_content)  # most messages

        reasoning = message.reasoning
        if reasoning is not None:
            reasoning = _masked(reasoning)

        # Where the template writes them, names and ids stay: they join results to calls.
        calls = []
        for number, call in enumerate(message.tool_calls):
            arguments = {"x": random_mark()} if call.arguments else {}
            if self.renders_ids:
                calls.append(ToolCall(call.name, arguments, call.id))
            else:
                calls.append(ToolCall(random_mark(), arguments, call_id(number)))
        name = message.name
        answered = message.tool_call_id
        if not self.renders_ids:
            name = name and random_mark()
            answered = answered and call_id(0)
        return replace(
            message,
            content=masked_content,
            reasoning=reasoning,
            tool_calls=tuple(calls),
            name=name,
            tool_call_id=answered,
        )


def _masked(text: str) -> str:
    return text if is_blank(text) else random_mark()


def texts_in(messages: Sequence[Message]) -> Iterator[str]:
    """Yield every text of messages that a template may look at."""
    for message in messages:
        if isinstance(message.content, str):
            yield message.content
        else:
            yield from (part for part in message.content if isinstance(part, str))
        if message.reasoning:
            yield message.reasoning
        if message.name:
            yield message.name
        for call in message.tool_calls:
            yield call.name
            yield from _texts_of_value(call.arguments)


def _texts_of_value(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _texts_of_value(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts_of_value(item)


class _Proof(NamedTuple, Generic[Derived]):
    derived: Derived
    inspected: Inspected
    """What the template inspected of the placeholders meanwhile."""


class ProvenByShape(Generic[Derived]):
    """What was derived of conversations by their shapes, where it is proven for their texts."""

    def __init__(self, shapes: ConversationShapes) -> None:
        self._shapes = shapes
        self._proofs: dict[Hashable, _Proof[Derived]] = {}

    def get(
        self,
        key: Hashable,
        messages: Sequence[Message],
        derive: Callable[[Sequence[Message]], Derived],
    ) -> Derived | None:
        """Return what `derive` returns for placeholders of these messages; None if that is not
        proven for their texts.

        `key` is all else that the result depends on. Exceptions of `derive` are passed on, and
        nothing is kept.
        """
        full_key = (key, self._shapes.of(messages))
        proof = self._proofs.get(full_key)
        if proof is None:
            with watch_placeholders() as inspected:
                derived = derive(self._shapes.placeholders(messages))
            proof = _Proof(derived, inspected)
            remember(self._proofs, full_key, proof)
        texts = texts_in(self._shapes.seen(messages))
        return proof.derived if proof.inspected.allows(texts) else None
