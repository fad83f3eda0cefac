"""What is seen in messages: blocks in place of placeholders, and images of tools where a template drops them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from turnwise.errors import TemplateError
from turnwise.renderers.probe import TemplateProbe
from turnwise.renderers.template import call_id
from turnwise.types import ImageRef, Media, MediaPlacement, Message, ToolCall

if TYPE_CHECKING:
    from turnwise.renderers.vision.base import VisionProcessor


class MovedToolImages(NamedTuple):
    """Messages whose tools' images stand in a user's message behind them."""

    messages: Sequence[Message]
    moved: int = 0
    """Images and videos that were moved."""
    where: Sequence[int] = ()
    """The index of each message that was given, in `messages`; empty where nothing moved."""


class MediaExpander:
    """Places images and videos for one template and one model."""

    def __init__(self, eyes: VisionProcessor | None, probe: TemplateProbe, owned: Callable[[str], Sequence[int]]) -> None:
        """
        Args:
            eyes: the model's; None for a model of text alone, where images are whatever the template makes of them.
            owned: the control ids of a text that is all the template's own.
        """
        self.vision = eyes
        self._probe = probe
        self._owned = owned

    def expand(self, ids: list[int], messages: Sequence[Message]) -> tuple[list[int], tuple[MediaPlacement, ...]]:
        """Ids as a template writes them, with the block of each image and video of the messages in its place.

        Raises:
            TemplateError: when the template does not write one placeholder for each.
            MediaError: when the model cannot see one of them.
        """
        if self.vision is None:
            return ids, ()
        media = media_of(messages)
        placed: tuple[MediaPlacement, ...] = ()
        if media:
            try:
                ids, placed = self.vision.expand(ids, media)
            except TemplateError as error:
                roles = ", ".join(m.role for m in messages)
                raise TemplateError(f"{self._probe.template.origin}: {error} (a conversation of {roles})") from None
        self.vision.check(ids, placed)
        return ids, placed

    def move_tool_images(self, messages: Sequence[Message]) -> MovedToolImages:
        """The messages in the form in which the template shows their images.

        Where it drops those of tools, they stand in front of what the user says behind the results, in order.
        """
        if self.vision is None or not any(m.role == "tool" and m.media for m in messages) or self.shows_tool_images:
            return MovedToolImages(messages)
        rows: list[Message] = []
        where: list[int] = []
        held: list[Media] = []
        count = 0
        for message in messages:
            if held and message.role != "tool":
                count += len(held)
                if message.role == "user":
                    parts = (message.content,) if isinstance(message.content, str) else message.content
                    message = replace(message, content=(*held, *parts))
                else:
                    rows.append(Message("user", tuple(held)))
                held = []
            if message.role == "tool" and message.media:
                held += message.media
                message = replace(message, content=message.text)
            where.append(len(rows))
            rows.append(message)
        if held:
            rows.append(Message("user", tuple(held)))
        return MovedToolImages(rows, count + len(held), where)

    @cached_property
    def shows_tool_images(self) -> bool:
        """Whether the template writes a placeholder for an image in the result of a tool."""
        call = ToolCall("f", {"x": "1"}, call_id(0))
        answer = Message("tool", (ImageRef("0" * 64, 64, 64), "t"), tool_call_id=call.id, name="f")
        try:
            append = self._probe.append(Message("assistant", "", (call,)), (replace(answer, content="t"),))
            text = self._probe.rendered(append, append.adapted((answer,)))
        except TemplateError:
            return False
        assert self.vision is not None
        return sum(token in self.vision.pad_ids for token in self._owned(text)) == 1


def media_of(messages: Sequence[Message]) -> list[Media]:
    """Images and videos of messages, in order."""
    return [one for message in messages if not isinstance(message.content, str) for one in message.media]
