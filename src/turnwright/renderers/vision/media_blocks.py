"""Replace image placeholders by media blocks, and move tool images that a template drops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from turnwright.errors import TemplateError
from turnwright.renderers.probe import TemplateProbe
from turnwright.renderers.template import PROBE_CALL, probe_result
from turnwright.types import ImageRef, Media, MediaPlacement, Message, VideoRef

if TYPE_CHECKING:
    from turnwright.renderers.vision_protocol import VisionProcessor


PROBE_TEXTS = ("probebefore", "probeafter")


class MovedToolImages(NamedTuple):
    """Messages with tool images moved to a user message after them."""

    messages: Sequence[Message]
    moved: int = 0
    """Number of moved images and videos."""
    where: Sequence[int] = ()
    """Index in `messages` of each given message; empty if nothing moved."""


class MediaExpander:
    """Places images and videos for one template and one model."""

    def __init__(
        self,
        vision: VisionProcessor | None,
        probe: TemplateProbe,
        template_control_ids: Callable[[str], Sequence[int]],
        encode: Callable[[str], list[int]],
    ) -> None:
        """`vision` is None for a text-only model, whose template handles images itself.

        `encode` encodes text that the template wrote, control tokens included.
        """
        self.vision = vision
        self._encode = encode
        self._inside_texts: dict[bool, str] = {}
        """What the template writes for an image within a message, and for a video (True)."""
        self._probe = probe
        self._template_control_ids = template_control_ids

    def expand(
        self, ids: list[int], messages: Sequence[Message]
    ) -> tuple[list[int], tuple[MediaPlacement, ...]]:
        """Replace each placeholder that the template wrote by the block of its image or video.

        Raises `TemplateError` if the template does not write one placeholder for each; `MediaError`
        if the model does not support one of them.
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
                raise TemplateError(
                    f"{self._probe.template.origin}: {error} (a conversation of {roles})"
                ) from None
        self.vision.check(ids, placed)
        return ids, placed

    def move_tool_images(self, messages: Sequence[Message]) -> MovedToolImages:
        """Move tool images to where the template renders them.

        If the template drops them from tool messages, they go before the text of the
        next user message, in order.
        """
        if (
            self.vision is None
            or not any(m.role == "tool" and m.media for m in messages)
            or self.shows_tool_images
        ):
            return MovedToolImages(messages)
        rows: list[Message] = []
        where: list[int] = []
        held: list[Media] = []
        count = 0
        for message in messages:
            if held and message.role != "tool":
                count += len(held)
                if message.role == "user":
                    parts = (
                        (message.content,) if isinstance(message.content, str) else message.content
                    )
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

    def inside_message(self, media: Media) -> tuple[list[int], MediaPlacement]:
        """Return the ids of an image or video within a message, with the marks that the
        template writes around it.

        Raises `TemplateError` if the template does not write one placeholder there;
        `MediaError` as `expand`.
        """
        if self.vision is None:
            raise TemplateError(
                f"{self._probe.template.origin}: images inside a reply need a vision model"
            )
        is_video = isinstance(media, VideoRef)
        if is_video not in self._inside_texts:
            before, after = PROBE_TEXTS
            message = Message("user", (before, media, after))
            text = self._probe.template.render([message], ())
            self._inside_texts[is_video] = text.partition(before)[2].rpartition(after)[0]
        ids, (placement,) = self.vision.expand(self._encode(self._inside_texts[is_video]), [media])
        self.vision.check(ids, [placement])
        return ids, placement

    @cached_property
    def shows_tool_images(self) -> bool:
        """Whether the template writes a placeholder for an image in a tool result."""
        answer = replace(probe_result("t"), content=(ImageRef("0" * 64, 64, 64), "t"))
        try:
            append = self._probe.append(
                Message("assistant", "", (PROBE_CALL,)), (probe_result("t"),)
            )
            text = self._probe.rendered(append, append.adapted((answer,)))
        except TemplateError:
            return False
        assert self.vision is not None
        return sum(token in self.vision.pad_ids for token in self._template_control_ids(text)) == 1


def media_of(messages: Sequence[Message]) -> list[Media]:
    """Return the images and videos of messages, in order."""
    return [
        one for message in messages if not isinstance(message.content, str) for one in message.media
    ]
