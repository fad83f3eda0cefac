"""Chat messages in OpenAI's shape."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.types.media import Image, ImageRef, Media, Video, VideoRef

ROLES = ("system", "developer", "user", "assistant", "tool")


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


Part = str | ImageRef | VideoRef | Image | Video
"""Part of a content: text, or what is seen, by reference or (until the rollout takes it in) as it was given."""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message. A plain dict in OpenAI's shape is accepted wherever a message is."""

    role: str
    content: str | tuple[Part, ...] = ""
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
    def causes(self) -> tuple[str, ...]:
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
    def raw(self) -> bool:
        """Whether the content holds an image or a video as a person gave it."""
        return not isinstance(self.content, str) and any(isinstance(part, (Image, Video)) for part in self.content)

    @classmethod
    def of(cls, value: Message | Mapping[str, Any] | str, role: str = "user") -> Message:
        """Read a message, an OpenAI-style dict, or a string (which gets `role`).

        Raises:
            TypeError: for anything else, or a content part of a kind not known.
            ValueError: for a dict without a role.
        """
        if isinstance(value, Message):
            return value
        if isinstance(value, str):
            return cls(role, value)
        if not isinstance(value, Mapping):
            raise TypeError(f"a message is a str, a dict or a turnwise.Message, not {type(value).__name__}: {value!r:.80}")
        if not isinstance(value.get("role"), str):
            raise ValueError(f"a message needs a 'role' that is a string; this one has the keys {sorted(map(str, value))}")
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


Messages = str | Message | Mapping[str, Any] | Sequence[Message | Mapping[str, Any] | str]


def as_messages(value: Messages | None, role: str = "user") -> tuple[Message, ...]:
    """Read what a user may give for messages: a string, one message, or a sequence of them.

    Raises:
        TypeError, ValueError: as `Message.of`.
    """
    if value is None:
        return ()
    if isinstance(value, (str, Message, Mapping)):
        return (Message.of(value, role),)
    if not isinstance(value, Iterable):
        raise TypeError(f"messages are a str, a message or a list of messages, not {type(value).__name__}")
    return tuple(Message.of(item, role) for item in value)


def _reasoning(value: Mapping[str, Any]) -> str | None:
    found = [value[name] for name in ("reasoning_content", "reasoning", "thinking") if value.get(name) is not None]
    return next((text for text in found if text), found[0] if found else None)


def _content(value: Any) -> str | tuple[Part, ...]:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, Iterable) or isinstance(value, (bytes, Mapping)) or is_picture(value):
        return (_part(value),)
    return tuple(_part(part) for part in value)


def is_picture(value: Any) -> bool:
    """Whether a value is an image in a form that is one without being told so: a PIL image, or an array of numpy."""
    return type(value).__module__.partition(".")[0] in ("PIL", "numpy") and hasattr(value, "tobytes")


def _part(part: Any) -> Part:
    if isinstance(part, (str, ImageRef, VideoRef, Image, Video)):
        return part
    if is_picture(part):
        return Image(part)
    if isinstance(part, Mapping):
        kind = part.get("type")
        if kind == "text":
            return str(part["text"])
        if kind in ("image", "image_url", "input_image"):
            return _image(part)
        if kind == "video" and (frames := part.get("frames", part.get("video"))) is not None:
            return frames if isinstance(frames, (Video, VideoRef)) else Video(frames, part.get("fps"), part.get("times"))
        if str(kind).startswith(("audio", "input_audio")):
            raise TypeError("a content part of audio: models here see images and videos, and hear nothing; give a transcript")
    raise TypeError(f"a content part is text, an image or a video, not {part!r:.120}")


def _image(part: Mapping[str, Any]) -> Part:
    """An image in one of the shapes that are in use: OpenAI's, Hugging Face's."""
    value = next((part[name] for name in ("image", "image_url", "url", "path") if part.get(name) is not None), None)
    if isinstance(value, Mapping):
        value = value.get("url")
    if value is None:
        raise TypeError(f"an image part without an image: {sorted(map(str, part))}; give 'image' or 'image_url'")
    return value if isinstance(value, (ImageRef, Image)) else Image(value, part.get("alt"))


def _tool_call(value: ToolCall | Mapping[str, Any]) -> ToolCall:
    if isinstance(value, ToolCall):
        return value
    function = value.get("function", value)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return ToolCall(name=function["name"], arguments=arguments, id=value.get("id") or "")
