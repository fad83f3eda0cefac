"""Chat messages in OpenAI's shape."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.types.media import Image, ImageRef, Media, Video, VideoRef

ROLES = ("system", "developer", "user", "assistant", "tool")
NO_AUDIO = "models here see images and videos, and hear nothing; give a transcript"

_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that a reply asked for."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""
    error: str | None = None
    """Why the call cannot be run (unreadable arguments, say); the model is told this."""
    cause: str | None = None
    """What is wrong with the call, in one word that is counted (`malformed_<cause>`); may stand without an `error`."""

    def to_dict(self) -> dict[str, Any]:
        """The call in OpenAI's shape, its arguments as an object (what chat templates expect)."""
        row: dict[str, Any] = {"type": "function", "function": {"name": self.name, "arguments": dict(self.arguments)}}
        return row | {"id": self.id} if self.id else row


ContentPart = str | ImageRef | VideoRef | Image | Video
"""Part of a content: text, or what is seen, by reference or (until the rollout takes it in) as it was given."""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message. A plain dict in OpenAI's shape is accepted wherever a message is."""

    role: str
    content: str | tuple[ContentPart, ...] = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None
    calls_in_thinking: int = 0
    """Tool calls that a reply wrote while it was thinking; they are none, and only counted."""

    @property
    def text(self) -> str:
        """The text of the content, what is seen left out."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part for part in self.content if isinstance(part, str))

    @property
    def text_with_alt(self) -> str:
        """The content in words: what is seen stands as its `alt`, else as `[image]` or `[video]`."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part if isinstance(part, str) else alt_text(part) for part in self.content)

    @property
    def call_error_kinds(self) -> tuple[str, ...]:
        """What is wrong with the calls of a reply, one word each; calls that it wrote while thinking are `in_thinking`."""
        if not self.tool_calls and not self.calls_in_thinking:
            return ()
        found = [call.cause for call in self.tool_calls if call.cause is not None]
        return (*found, *("in_thinking",) * self.calls_in_thinking)

    @property
    def images(self) -> tuple[ImageRef, ...]:
        """The images of the content, in order."""
        if isinstance(self.content, str):
            return ()
        return tuple(part for part in self.content if isinstance(part, ImageRef))

    @property
    def media(self) -> tuple[Media, ...]:
        """Images and videos of the content, in order."""
        if isinstance(self.content, str):
            return ()
        return tuple(part for part in self.content if isinstance(part, (ImageRef, VideoRef)))

    @property
    def has_raw_media(self) -> bool:
        """Whether the content holds an image or a video as a person gave it."""
        return not isinstance(self.content, str) and any(isinstance(part, (Image, Video)) for part in self.content)

    @classmethod
    def of(cls, value: Message | Mapping[str, Any] | ContentPart, role: str = "user") -> Message:
        """Read a message, an OpenAI-style dict, or a string, an image or a video (which get `role`).

        Raises:
            TypeError: for anything else, or a content part of a kind not known.
            ValueError: for a dict without a role.
        """
        if isinstance(value, Message):
            return value
        if isinstance(value, str):
            return cls(role, value)
        if is_media(value):
            return cls(role, (_part(value),))
        if not isinstance(value, Mapping):
            raise TypeError(f"a message is a str, a dict or a turnwise.Message, not {type(value).__name__}: {value!r:.80}")
        if not isinstance(value.get("role"), str):
            raise ValueError(f"a message needs a 'role' that is a string; this one has the keys {sorted(map(str, value))}")
        if value.get("audio") is not None:
            raise TypeError(f"a message with audio: {NO_AUDIO}")
        return cls(
            role=value["role"],
            content=_content(value.get("content")),
            tool_calls=tuple(_tool_call(call) for call in value.get("tool_calls") or ()),
            tool_call_id=value.get("tool_call_id"),
            name=value.get("name"),
            reasoning=_reasoning(value),
        )

    def to_dict(self) -> dict[str, Any]:
        """The message in OpenAI's shape; fields that are empty are left out, what is seen is a part of type image or video."""
        content: Any = self.content
        if not isinstance(content, str):
            content = [{"type": "text", "text": part} if isinstance(part, str) else part.to_dict() for part in content]
        row: dict[str, Any] = {"role": self.role, "content": content}
        if self.tool_calls:
            row["tool_calls"] = [call.to_dict() for call in self.tool_calls]
        if self.tool_call_id is not None:
            row["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            row["name"] = self.name
        if self.reasoning is not None:
            row["reasoning_content"] = self.reasoning
        return row


Messages = str | Message | Mapping[str, Any] | ContentPart | Sequence[Message | Mapping[str, Any] | ContentPart]


def as_messages(value: Messages | None, role: str = "user") -> tuple[Message, ...]:
    """Read what a user may give for messages: a string, an image, one message, or a sequence of them.

    Texts and images side by side, with no message among them, are the parts of one message.

    Raises:
        TypeError, ValueError: as `Message.of`.
    """
    if value is None:
        return ()
    if isinstance(value, (str, Message, Mapping)) or is_media(value):
        return (Message.of(value, role),)  # type: ignore[arg-type]
    if not isinstance(value, Iterable):
        raise TypeError(f"messages are a str, a message or a list of messages, not {type(value).__name__}")
    items = tuple(value)
    if any(map(is_media, items)) and all(isinstance(item, str) or is_media(item) for item in items):
        return (Message(role, tuple(map(_part, items))),)
    return tuple(Message.of(item, role) for item in items)


def _reasoning(value: Mapping[str, Any]) -> str | None:
    found = [value[name] for name in ("reasoning_content", "reasoning", "thinking") if value.get(name) is not None]
    return next((text for text in found if text), found[0] if found else None)


def _content(value: Any) -> str | tuple[ContentPart, ...]:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, Iterable) or isinstance(value, (bytes, Mapping)) or is_image_object(value):
        return (_part(value),)
    return tuple(_part(part) for part in value)


def is_image_object(value: Any) -> bool:
    """Whether a value is an image in a form that is one without being told so: a PIL image, or an array of numpy."""
    rooms = {base.__module__.partition(".")[0] for base in type(value).__mro__[:-1]}
    return ("PIL" in rooms and hasattr(value, "tobytes")) or ("numpy" in rooms and getattr(value, "ndim", 0) > 0)


def is_media(value: Any) -> bool:
    """Whether a value is an image or a video: by reference, as a person gave it, or in a form that says so itself."""
    return isinstance(value, (ImageRef, VideoRef, Image, Video)) or is_image_object(value)


def alt_text(part: ImageRef | VideoRef | Image | Video) -> str:
    """What stands for an image or a video where there are only words."""
    if part.alt is not None:
        return part.alt
    return "[video]" if isinstance(part, (Video, VideoRef)) else "[image]"


def read_part(part: Any) -> ContentPart:
    """A part of a content: a text, an image or a video, or a dict that tells of one in OpenAI's or Hugging Face's shape.

    Raises:
        TypeError: for anything else; audio by its name.
    """
    return _part(part)


def _part(part: Any) -> ContentPart:
    if isinstance(part, (str, ImageRef, VideoRef, Image, Video)):
        return part
    if is_image_object(part):
        return Image(part)
    if isinstance(part, Mapping):
        kind = part.get("type")
        if kind == "text":
            return str(part["text"])
        if kind in ("image", "image_url", "input_image"):
            return _image(part)
        if kind in ("video", "video_url", "input_video"):
            return _video(part)
        if is_audio(part):
            raise TypeError(f"a content part of audio: {NO_AUDIO}")
    raise TypeError(f"a content part is text, an image or a video, not {part!r:.120}")


def is_audio(part: Mapping[str, Any]) -> bool:
    """Whether a content part is a sound."""
    return str(part.get("type")).startswith(("audio", "input_audio")) or part.get("audio") is not None


def _image(part: Mapping[str, Any]) -> ContentPart:
    """An image in one of the shapes that are in use: OpenAI's, Hugging Face's, a reference as a record has it."""
    value = next((part[name] for name in ("image", "image_url", "url", "path") if part.get(name) is not None), None)
    if isinstance(value, Mapping):
        found = value.get("bytes")
        value = value.get("url", value.get("path")) if found is None else found
    if value is None:
        raise TypeError(f"an image part without an image: {sorted(map(str, part))}; give 'image' or 'image_url'")
    if isinstance(value, (ImageRef, Image)):
        return value
    if isinstance(value, str) and _SHA256.fullmatch(value):
        return ImageRef(value, part.get("width") or 0, part.get("height") or 0, part.get("max_pixels") or 0, part.get("alt"))
    return Image(value, part.get("alt"), part.get("max_pixels") or 0)


def _video(part: Mapping[str, Any]) -> ContentPart:
    """A clip as a list of its frames, or a reference as a record has it; files of video are not read here."""
    value = next((part[name] for name in ("frames", "video", "video_url") if part.get(name) is not None), None)
    if isinstance(value, (Video, VideoRef)):
        return value
    if isinstance(value, Mapping) and "frames" in value:
        part = {**value, **{key: told for key, told in part.items() if told is not None and key != "video"}}
        value = value["frames"]
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, bytearray, Mapping)):
        kind = type(value).__name__
        raise TypeError(f"a content part of video is a list of frames with 'fps' or 'times', not {kind}: decode files yourself")
    frames: list[Any] = [_image(frame) if isinstance(frame, Mapping) else frame for frame in value]
    times, alt = part.get("times"), part.get("alt")
    if frames and times is not None and all(isinstance(frame, ImageRef) for frame in frames):
        return VideoRef(tuple(frames), tuple(map(float, times)), alt)
    return Video(frames, part.get("fps"), times, alt)


def _tool_call(value: ToolCall | Mapping[str, Any]) -> ToolCall:
    if isinstance(value, ToolCall):
        return value
    function = value.get("function", value)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return ToolCall(name=function["name"], arguments=arguments, id=value.get("id") or "")
