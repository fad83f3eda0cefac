"""Media in messages: replaced by stored references, by text, or by file contents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from io import BytesIO
from typing import Any

from turnwright.errors import MediaError, UsageError
from turnwright.media.images import MediaLimits, content_of, decode
from turnwright.media.store import MediaStore
from turnwright.types import Image, ImageRef, Message, Video, VideoRef

AnyMedia = Image | Video | ImageRef | VideoRef


def has_media(messages: Sequence[Message]) -> bool:
    """Return whether messages hold media, stored or raw."""
    for message in messages:
        if not isinstance(message.content, str) and (message.has_raw_media or message.media):
            return True
    return False


def store_media(
    messages: Sequence[Message], store: MediaStore, *, blank: bool = False
) -> tuple[Message, ...]:
    """Return messages with references in place of raw media, gray ones if `blank`.

    Messages without media stay as they are.

    Raises `MediaError` for an image that is broken or over a limit, or an unknown reference;
    `UsageError` where numpy or Pillow is missing.
    """
    put = partial(store.put, blank=blank)
    return tuple(
        message if isinstance(message.content, str) else _replace_media(message, put)
        for message in messages
    )


def media_as_text(messages: Sequence[Message], *, strict: bool = True) -> tuple[Message, ...]:
    """Return messages for a text-only model, with the `alt` text of each image.

    Raises `MediaError` for an image without one if `strict`, else it becomes `[image]`.
    """
    texts = []
    for message in messages:
        if not isinstance(message.content, str):
            message = replace(message, content=_text_content(message, strict))
        texts.append(message)
    return tuple(texts)


def media_as_bytes(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return messages that another process can read, with file contents in place of raw images.

    Raw images are arrays, PIL images and paths.

    Raises `MediaError` for an image that is broken or over the default limits.
    """
    return tuple(
        _replace_media(message, _as_bytes) if message.has_raw_media else message
        for message in messages
    )


def _replace_media(message: Message, convert: Callable[[AnyMedia], AnyMedia]) -> Message:
    content = tuple(part if isinstance(part, str) else convert(part) for part in message.content)
    is_same = all(new is old for new, old in zip(content, message.content, strict=True))
    return message if is_same else replace(message, content=content)


def _text_content(message: Message, strict: bool) -> str:
    for part in message.content:
        if not isinstance(part, str) and part.alt is None and strict:
            kind = "video" if isinstance(part, (Video, VideoRef)) else "image"
            raise MediaError(
                f"the model sees no {kind}s, and a message of role {message.role} has one; "
                f"describe it with tw.{kind.title()}(..., alt=...), or use a vision-language model",
                bug=True,
            )
    return message.text_with_alt


def _as_bytes(part: AnyMedia) -> AnyMedia:
    if isinstance(part, Image):
        return replace(part, value=_file(part.value, part.alt))
    if isinstance(part, Video):
        frames = [
            frame if isinstance(frame, ImageRef) else Image(_file(frame, part.alt))
            for frame in part.frames
        ]
        # Plain numbers, since times and rates of numpy would need numpy in the other process.
        times = None if part.times is None else [float(seconds) for seconds in part.times]
        fps = None if part.fps is None else float(part.fps)
        return replace(part, frames=frames, times=times, fps=fps)
    return part


def _file(value: Any, alt: str | None) -> bytes:
    """Return an image as the content of a file.

    It is empty if the image has an `alt` text and no decoder is installed.
    """
    while isinstance(value, Image):
        value = value.value

    limits = MediaLimits()
    if isinstance(value, (bytes, bytearray, memoryview, str)) or hasattr(value, "__fspath__"):
        return content_of(value, limits)

    try:
        pixels = decode(value, limits)
    except UsageError:
        if alt is None:
            raise
        return b""

    from PIL import Image as Pillow

    file = BytesIO()
    Pillow.fromarray(pixels).save(file, "BMP")  # uncompressed, since it is decoded again at once
    return file.getvalue()
