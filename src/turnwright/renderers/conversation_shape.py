"""Everything about a conversation that a template may look at, without its texts.

What a template writes after a conversation of placeholders holds for every conversation of the same
shape whose texts contain none of the words that the template looked for (`inspected`). So it is
derived once per shape, and never depends on which conversation came first.
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
    """Return the kinds of a content's parts; a blank text, which templates treat
    differently, is its own shape."""
    content = message.content
    if isinstance(content, str):  # at every turn, so without a call
        return str if content and not content.isspace() else content
    return tuple(
        [
            (part if is_blank(part) else str) if isinstance(part, str) else type(part)
            for part in content
        ]
    )


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
        for message in self.seen(
            messages
        ):  # at every turn over all turns, so most messages take no call
            content = message.content
            is_plain = (
                isinstance(content, str) and message.name is None and message.reasoning is None
            )
            if is_plain and not message.tool_calls and message.tool_call_id is None:
                rows.append((message.role, str if content and not content.isspace() else content))  # type: ignore[union-attr]
            else:
                rows.append(self._row(message))
        return tuple(rows)

    def placeholders(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages of the same shape with a random number in place of each text."""
        return list(map(self._placeholder, messages))

    def _row(self, message: Message) -> Hashable:
        reasoning = (
            message.reasoning if message.reasoning is None or is_blank(message.reasoning) else str
        )
        calls: Hashable = len(message.tool_calls)
        if message.tool_calls:
            with_arguments = tuple([bool(call.arguments) for call in message.tool_calls])
            named = (
                tuple([(call.name, call.id) for call in message.tool_calls])
                if self.renders_ids
                else ()
            )
            calls = with_arguments, named
        call = message.tool_call_id if self.renders_ids else None
        name = message.name if self.renders_ids else message.name is not None
        return message.role, content_shape(message), reasoning, calls, call, name

    def _placeholder(self, message: Message) -> Message:
        if (
            not message.tool_calls
            and message.reasoning is None
            and message.name is None
            and isinstance(message.content, str)
        ):
            return replace(message, content=_masked(message.content))  # most messages
        content = message.content
        if not isinstance(content, str):
            content = tuple(_masked(part) if isinstance(part, str) else part for part in content)
        else:
            content = _masked(content)
        calls = tuple(
            ToolCall(
                self._name(call.name),
                {"x": random_mark()} if call.arguments else {},
                self._id(call.id, number),
            )
            for number, call in enumerate(message.tool_calls)
        )
        return replace(
            message,
            content=content,
            reasoning=None if message.reasoning is None else _masked(message.reasoning),
            tool_calls=calls,
            name=message.name and self._name(message.name),
            tool_call_id=message.tool_call_id and self._id(message.tool_call_id, 0),
        )

    def _name(self, name: str) -> str:
        return name if self.renders_ids else random_mark()

    def _id(self, given: str, number: int) -> str:
        return given if self.renders_ids else call_id(number)


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


class ProvenByShape(Generic[Derived]):
    """What was derived of conversations by their shapes, for as long as it is
    proven for their texts."""

    def __init__(self, shapes: ConversationShapes) -> None:
        self._shapes = shapes
        self._proofs: dict[Hashable, _Proof[Derived]] = {}

    def get(
        self,
        key: Hashable,
        messages: Sequence[Message],
        derive: Callable[[Sequence[Message]], Derived],
    ) -> Derived | None:
        """Return what `derive` returns for placeholders of these messages; None if that is
        not proven for their texts.

        `key` is all else that the result depends on. Exceptions of `derive` are passed
        on, and nothing is kept.
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
