"""Conversion of tool return values to content, reward and metrics.

`read_result` reads what a tool returns, `read_content` what of it the model sees, and `ResultLimit`
truncates that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal

from turnwright.envs.user_code import number_of
from turnwright.errors import EnvError, MediaError
from turnwright.types import (
    NO_AUDIO,
    ContentPart,
    Image,
    ImageRef,
    Message,
    Video,
    VideoRef,
    is_audio,
    is_image_object,
    merge_texts,
    read_part,
)

Content = str | tuple[ContentPart, ...]
Keeps = Literal["start", "ends", "end"]

_RESPONSE = frozenset(("text", "image", "images", "video", "videos", "audio"))
"""Keys of a tool response in verl's format."""

_FILES = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"BM", b"II*\0", b"MM\0*")
"""Magic numbers of image files."""

_TEXT_TYPES = ("text", "input_text", "output_text")
_MEDIA_TYPES = (
    "image",
    "image_url",
    "input_image",
    "video",
    "video_url",
    "input_video",
    "audio",
    "input_audio",
)
"""Types of content parts with media, in all chat formats."""

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]{4,}")
"""Memory address in the default repr of an object."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """Result of a tool: `(response, reward, metrics)`, with None read as 0.0 and {}."""

    content: Content = ""
    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: bool = False
    """The tool reports a failed call; the content has the reason."""


@dataclass(frozen=True, slots=True)
class ResultLimit:
    """Truncation of long results to `chars` characters, keeping the `start`, the `end`, or both
    `ends`."""

    chars: int | None = 32_768
    keeps: Keeps = "start"

    def __call__(self, content: Content) -> tuple[Content, bool]:
        """Truncate content whose texts are too long together, with a visible marker; return it and
        whether it was truncated.

        Media keep their positions among the texts.
        """
        parts = (content,) if isinstance(content, str) else content
        size = sum(len(part) for part in parts if isinstance(part, str))
        if self.chars is None or size <= self.chars:
            return content, False

        head_size = {"start": self.chars, "end": 0}.get(self.keeps, self.chars - self.chars // 2)
        tail_size = self.chars - head_size
        head: list[ContentPart] = []
        tail: list[ContentPart] = []
        position = 0  # characters of texts up to the part
        for part in parts:
            if not isinstance(part, str):
                media_side = head if position <= head_size else tail
                media_side.append(part)
                continue
            if position < head_size:
                head.append(part[: head_size - position])
            if position + len(part) > size - tail_size:
                tail.append(part[max(0, size - tail_size - position) :])
            position += len(part)

        marker: list[ContentPart] = [f"[cut: {self.chars} of {size} characters shown]"]
        if head_size:
            marker.insert(0, "\n")
        if tail_size:
            marker.append("\n")
        kept = merge_texts([*head, *marker, *tail])
        return (kept[0] if isinstance(content, str) else kept), True  # type: ignore[return-value]


def read_result(result: Any, name: str) -> ToolResult:
    """Read a tool's return value: text, parts, JSON, or verl's (response, reward[, metrics]) with
    None read as 0.0 and {}.

    A response is text, a dict, an object in verl's format, an image, parts with an image, or None.
    Other tuples, such as two numbers, and named tuples are data and become JSON. Metrics that are
    not a dict are an `EnvError`.

    Example::

        >>> read_result(("found it", 1.0), "search")
        ToolResult(content='found it', reward=1.0, metrics={}, error=False)
        >>> read_result({"hits": 2}, "search").content
        '{"hits": 2}'
    """
    if isinstance(result, ToolResult):
        return result

    reward: float = 0.0
    metrics: Mapping[str, float] = {}
    if _has_reward(result):
        reward = number_of(result[1]) or 0.0
        metrics = (result[2] if len(result) == 3 else None) or {}
        if not isinstance(metrics, Mapping):
            raise EnvError(
                f"tool {name!r} returned the metrics {metrics!r:.80}; return (response, reward, "
                "metrics), a dict"
            )
        result = result[0]

    numbers = {}
    for key, value in metrics.items():
        number = number_of(value)
        numbers[key] = value if number is None else number
    return ToolResult(read_content(result, name), reward, numbers)


def _has_reward(result: Any) -> bool:
    """Whether a return value is (response, reward) or (response, reward, metrics), rather than
    data."""
    if type(result) is not tuple or len(result) not in (2, 3):
        return False
    has_number = result[1] is None or number_of(result[1]) is not None
    return has_number and _is_response(result[0])


def _is_response(value: Any) -> bool:
    """Whether the first item of a tuple can be a tool response rather than plain data."""
    if value is None or isinstance(value, (str, Mapping, Message)):
        return True
    if _is_media(value) or _response(value) is not None:
        return True
    return isinstance(value, (list, tuple)) and any(map(_is_media, value))


def read_content(value: Any, name: str) -> Content:
    """Convert a value to content: text unchanged, None to empty text, media and content parts to
    parts, others to JSON.

    A list of content parts has media, or nothing but parts of type text. Media are `tw.Image`,
    `tw.Video`, PIL images, arrays [height, width, 3 or 4], bytes of image files, and content parts
    of type image or video. A dict or object with `text`, `image` and `video` (as verl's tools
    return) contributes each of these.
    """
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, Message):
        return value.content
    if _is_media(value):
        return (_part(value, name),)
    response = _response(value)
    if response is not None:
        return _of_response(response, name)

    # (instance_id, response), as `create` of verl's tools returns it
    is_pair = type(value) is tuple and len(value) == 2 and isinstance(value[0], str)
    if is_pair and _is_object(value[1]):
        return read_content(value[1], name)

    if not isinstance(value, (list, tuple)) or not value:
        return _json(value, name)
    if any(map(_is_media, value)) or all(map(_is_text_part, value)):
        return tuple(_part(part, name) if _is_part(part) else _json(part, name) for part in value)
    return _json(value, name)


def _is_part(value: Any) -> bool:
    return isinstance(value, str) or _is_media(value) or _is_text_part(value)


def _is_text_part(value: Any) -> bool:
    """Whether a value is a content part of type text as chat formats have it, rather than data with
    such keys."""
    if not isinstance(value, Mapping) or value.get("type") not in _TEXT_TYPES:
        return False
    keys = {key for key, item in value.items() if item is not None}
    part_keys = {"type", "text", "annotations", "cache_control"}
    return isinstance(value.get("text"), str) and keys <= part_keys


def _is_media(value: Any) -> bool:
    """Whether a value is an image or video; an array is one only with the shape [height, width, 3
    or 4]."""
    if isinstance(value, (Image, ImageRef, Video, VideoRef)):
        return True
    if is_image_object(value):
        shape = getattr(value, "shape", None)
        return shape is None or (len(shape) == 3 and shape[2] in (3, 4))
    if isinstance(value, (bytes, bytearray)):
        return value.startswith(_FILES) or value[8:12] == b"WEBP"
    return isinstance(value, Mapping) and _is_content_part(value)


def _is_content_part(part: Mapping[str, Any]) -> bool:
    """Whether a dict is a content part with media, rather than data about a file."""
    if part.get("type") not in _MEDIA_TYPES:
        return False
    for key in ("image", "image_url", "video", "frames", "audio", "input_audio"):
        value = part.get(key)
        if value is None:
            continue
        if isinstance(value, Mapping):
            value = value.get("url", value)
        if not isinstance(value, str) or value.startswith("data:"):
            return True
    return False


def _part(value: Any, name: str) -> ContentPart:
    if isinstance(value, Mapping) and is_audio(value):
        raise MediaError(f"tool {name!r} returned audio: {NO_AUDIO}", bug=True)
    try:
        return Image(bytes(value)) if isinstance(value, (bytes, bytearray)) else read_part(value)
    except (TypeError, ValueError) as error:
        raise MediaError(f"tool {name!r} returned {error}", bug=True) from error


def _response(value: Any) -> Mapping[str, Any] | None:
    """Return the value as a response in verl's format if it is one: an object, or a dict with
    media."""
    if not isinstance(value, Mapping):
        if not _is_object(value):
            return None
        return {key: getattr(value, key, None) for key in _RESPONSE}

    if not _RESPONSE.issuperset(value):
        return None
    media = [value[key] for key in _RESPONSE - {"text"} if value.get(key) is not None]
    if not media or any(isinstance(item, (str, int, float)) for item in media):
        return None
    return value


def _is_object(value: Any) -> bool:
    """Whether a value is an object like verl's `ToolResponse`."""
    if isinstance(value, (Mapping, type)):
        return False
    return all(hasattr(value, key) for key in ("text", "image", "video"))


def _of_response(value: Mapping[str, Any], name: str) -> Content:
    """Convert a verl response: images, then videos, then text, in verl's order."""
    if value.get("audio") is not None:
        raise MediaError(f"tool {name!r} returned audio: {NO_AUDIO}", bug=True)
    images = [
        *_as_list(value.get("image"), is_image_object),
        *_as_list(value.get("images"), is_image_object),
    ]
    videos = [*_as_list(value.get("video"), _is_clip), *_as_list(value.get("videos"), _is_clip)]
    media: list[ContentPart] = [_named(image, "image", name) for image in images]
    media += [_named(video, "video", name) for video in videos]

    text = value.get("text")
    if text is None:
        text = ""
    elif not isinstance(text, str):
        text = _json(text, name)
    if not media:
        return text
    return (*media, text) if text else tuple(media)


def _as_list(value: Any, is_single: Callable[[Any], bool]) -> list[Any]:
    """Return the items of a list, or a single value as a list."""
    if value is None:
        return []
    if isinstance(value, (list, tuple)) and not is_single(value):
        return list(value)
    return [value]


def _is_clip(value: Any) -> bool:
    """Whether a value is one clip (a list of images) rather than a list of clips."""
    if not isinstance(value, (list, tuple)) or not value:
        return False
    return all(isinstance(item, Image) or is_image_object(item) for item in value)


def _named(value: Any, kind: str, name: str) -> ContentPart:
    """Convert a value under the key of an image or a video."""
    is_part = isinstance(value, Mapping) and "type" in value
    if is_part or isinstance(value, (Image, ImageRef, Video, VideoRef)):
        return _part(value, name)
    if kind == "image":
        return Image(value)
    video = value if isinstance(value, Mapping) else {"frames": value}
    return _part({"type": "video", **video}, name)


def _json(value: Any, name: str) -> str:
    """Format data as JSON; raise an error for what no model can read."""

    def plain(inner: Any) -> Any:
        if _is_media(inner):
            kind = type(inner).__name__
            raise MediaError(
                f"tool {name!r} returned an image ({kind}) nested in other data, which cannot be "
                "rendered; return [text, image], or a dict with 'text' and 'image'",
                bug=True,
            )
        number = number_of(inner)
        if number is not None:  # NumPy scalar
            return int(number) if isinstance(inner, Integral) else number
        text = str(inner)
        if _ADDRESS.search(text):
            raise EnvError(
                f"tool {name!r} returned {text:.120}, a memory address without meaning to a model; "
                "return text, numbers, lists or dicts of them, or give the class a __str__"
            )
        return text

    return json.dumps(value, ensure_ascii=False, default=plain)


def join_content(first: Content, second: Content) -> Content:
    """Join two contents, with a line break between texts."""
    if not first or not second:
        return first or second
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n{second}"

    first_parts = (first,) if isinstance(first, str) else first
    second_parts = (second,) if isinstance(second, str) else second
    last = first_parts[-1]
    next_part = second_parts[0]
    if isinstance(last, str) and isinstance(next_part, str):
        return (*first_parts[:-1], f"{last}\n{next_part}", *second_parts[1:])
    return (*first_parts, *second_parts)
