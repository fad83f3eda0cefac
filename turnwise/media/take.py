"""Messages with images as people give them, taken in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from turnwise.errors import MediaError
from turnwise.media.store import MediaStore
from turnwise.types import Image, Message, Part, Video, VideoRef


def take_in(messages: Sequence[Message], store: MediaStore) -> tuple[Message, ...]:
    """The messages with references in place of images and videos; messages without any are the very objects.

    Raises:
        MediaError: for an image that is broken or over a limit.
    """
    return tuple(
        replace(m, content=tuple(store.take(p) if isinstance(p, (Image, Video)) else p for p in m.content))
        if m.raw or (store.blank and m.media)
        else m
        for m in messages
    )


def told(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages for a model that sees nothing: what stands for each image (`alt`) as text.

    Raises:
        MediaError: for an image without such a text.
    """
    return tuple(m if isinstance(m.content, str) else replace(m, content=_told(m)) for m in messages)


def _told(message: Message) -> str | tuple[Part, ...]:
    parts: list[Part] = []
    for part in message.content:
        if isinstance(part, str):
            parts.append(part)
        elif part.alt is not None:
            parts.append(part.alt)
        else:
            kind = "video" if isinstance(part, (Video, VideoRef)) else "image"
            raise MediaError(
                f"the model sees no {kind}s, and a message of role {message.role} holds one; say what it is told instead by "
                f"tw.{kind.title()}(..., alt=...), or take a vision-language model"
            )
    return tuple(parts) if len(parts) > 1 or not message.content else "".join(map(str, parts))
