"""Chat messages in OpenAI's format.

`Message.of` and `as_messages` read what users write: texts, dicts, images, and lists of them.
`read_part` reads one part of a content in the forms of OpenAI and Hugging Face. Media stay as they
are given until a rollout stores them (`media/store.py`); a template turns messages into ids
(`renderers/`).
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from turnwright.types.media import Image, ImageRef, Media, Video, VideoRef

ROLES = ("system", "developer", "user", "assistant", "tool")
NO_AUDIO = "audio is not supported, only images and videos; give a transcript"

Tools = Sequence[Mapping[str, Any]]
"""Schemas of tools in OpenAI's format."""

_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call of a reply."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""
    error: str | None = None
    """Why the call cannot be run (unparsable arguments, for example); sent to the model."""
    cause: str | None = None
    """Kind of the error in one word, counted as `malformed_<cause>`; may be set without an
    `error`."""
    raw: str = field(default="", compare=False)
    """Text of arguments that could not be read, as the model wrote it; it is not recorded (the ids
    are)."""

    def to_dict(self) -> dict[str, Any]:
        """Return the call in OpenAI's format, its arguments as an object, as templates expect."""
        row: dict[str, Any] = {
            "type": "function",
            "function": {"name": self.name, "arguments": dict(self.arguments)},
        }
        if self.id:
            row["id"] = self.id
        return row


ContentPart = str | ImageRef | VideoRef | Image | Video
"""Part of a content: text, or media by reference or (until the rollout stores it) as given."""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message. A dict in OpenAI's format is accepted wherever a message is.

    Example::

        >>> tw.Message("user", "What is 6 * 7?").to_dict()
        {'role': 'user', 'content': 'What is 6 * 7?'}
        >>> call = tw.ToolCall("multiply", {"a": 6, "b": 7})
        >>> tw.Message("assistant", tool_calls=(call,)).tool_calls[0].arguments["a"]
        6
    """

    role: str
    content: str | tuple[ContentPart, ...] = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None
    calls_in_thinking: int = 0
    """Tool calls written inside a reply's thinking; they are only counted."""

    @property
    def text(self) -> str:
        """Text of the content, without media; several texts are joined by `join_texts`."""
        if isinstance(self.content, str):
            return self.content
        return join_texts([part for part in self.content if isinstance(part, str)])

    @property
    def text_with_alt(self) -> str:
        """Text of the content with media as their `alt`, else as `[image]` or `[video]`.

        Several texts are joined by `join_texts`.
        """
        if isinstance(self.content, str):
            return self.content
        return join_texts(
            [part if isinstance(part, str) else alt_text(part) for part in self.content]
        )

    @property
    def call_error_kinds(self) -> tuple[str, ...]:
        """Error kinds of a reply's calls, one word each; calls inside its thinking are
        `in_thinking`."""
        if not self.tool_calls and not self.calls_in_thinking:
            return ()
        kinds = [call.cause for call in self.tool_calls if call.cause is not None]
        kinds += ["in_thinking"] * self.calls_in_thinking
        return tuple(kinds)

    @property
    def images(self) -> tuple[ImageRef, ...]:
        """Images of the content, in order."""
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
        """Whether the content has an image or a video that is not stored yet."""
        return not isinstance(self.content, str) and any(
            isinstance(part, (Image, Video)) for part in self.content
        )

    @classmethod
    def of(cls, value: Message | Mapping[str, Any] | ContentPart, role: str = "user") -> Message:
        """Read a message, an OpenAI-style dict, or a text, an image or a video, which get `role`.

        Raises `TypeError` for anything else, or an unknown kind of content part; `ValueError` for a
        dict without a role, without content (unless it has tool calls or reasoning), or with
        content under a key that is not read.

        Example::

            >>> tw.Message.of({"role": "system", "content": "Be brief."}).text
            'Be brief.'
            >>> tw.Message.of("What is 6 * 7?").role
            'user'
        """
        if isinstance(value, Message):
            return value
        if isinstance(value, str):
            return cls(role, value)
        if is_media(value):
            return cls(role, (read_part(value),))
        if not isinstance(value, Mapping):
            raise TypeError(
                "a message must be a str, a dict or a turnwright.Message, not "
                f"{type(value).__name__}: {value!r:.80}"
            )

        if not isinstance(value.get("role"), str):
            raise ValueError(
                "a message needs a 'role' that is a string; this one has the keys "
                f"{sorted(map(str, value))}"
            )
        if value.get("audio") is not None:
            raise TypeError(f"a message with audio: {NO_AUDIO}")
        if not value.keys() <= _READ_KEYS:
            _check_keys(value)
        if value.get("content") is None:
            _check_has_something_else(value)

        return cls(
            role=value["role"],
            content=_content(value.get("content")),
            tool_calls=tuple(_tool_call(call) for call in value.get("tool_calls") or ()),
            tool_call_id=value.get("tool_call_id"),
            name=value.get("name"),
            reasoning=_reasoning(value),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the message in OpenAI's format, without empty fields.

        Media become parts of type image or video.
        """
        content: Any = self.content
        if not isinstance(content, str):
            content = [
                {"type": "text", "text": part} if isinstance(part, str) else part.to_dict()
                for part in content
            ]

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


Messages = (
    str
    | Message
    | Mapping[str, Any]
    | ContentPart
    | Sequence[Message | Mapping[str, Any] | ContentPart]
)


def as_messages(value: Messages | None, role: str = "user") -> tuple[Message, ...]:
    """Read messages: a string, an image, one message, or a sequence of them.

    A sequence of texts and images without a message becomes the parts of one message.

    Raises `TypeError` or `ValueError` as `Message.of`.

    Example::

        >>> [message.role for message in as_messages("Hi")]
        ['user']
        >>> (message,) = as_messages([tw.Image("data:image/png;base64,"), "What is this?"])
        >>> len(message.content)
        2
    """
    if value is None:
        return ()
    if isinstance(value, str):
        return (Message(role, value),)
    if isinstance(value, (Message, Mapping)) or is_media(value):
        return (Message.of(value, role),)  # type: ignore[arg-type]
    if not isinstance(value, Iterable):
        raise TypeError(
            f"messages must be a str, a message or a list of messages, not {type(value).__name__}"
        )

    items = tuple(value)
    if set(map(type, items)) == {Message}:  # a long conversation, at each of its calls
        return items  # type: ignore[return-value]
    if any(map(is_media, items)) and all(isinstance(item, str) or is_media(item) for item in items):
        return (Message(role, tuple(map(read_part, items))),)
    return tuple(Message.of(item, role) for item in items)


_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_READ_KEYS = frozenset({"role", "content", "tool_calls", "tool_call_id", "name", *_REASONING_KEYS})
_INSTEAD_OF_CONTENT = ("tool_calls", *_REASONING_KEYS)
_UNREAD_CONTENT = {
    **dict.fromkeys(
        ("text", "value", "message", "msg", "parts", "body", "prompt", "response", "output"),
        "content",
    ),
    **dict.fromkeys(
        ("image", "images", "image_url", "video", "videos", "audios", "media"), "content"
    ),
    **dict.fromkeys(("function_call", "function_calls", "calls", "tools_called"), "tool_calls"),
    **dict.fromkeys(("thought", "thoughts", "analysis", "chain_of_thought"), "reasoning_content"),
}
"""Keys under which other formats have what a model reads, and ours for it."""


def _check_keys(value: Mapping[str, Any]) -> None:
    """Refuse a message with content under a key that is not read, such as `text`.

    The model would never see it. Other keys of data sets (`id`, `weight`, `train`, `language`,
    scores) are no content, and neither is null.
    """
    for key, item in value.items():
        if key in _READ_KEYS or not _holds_something(item):
            continue
        meant = _UNREAD_CONTENT.get(key)
        if meant is None:
            near = difflib.get_close_matches(str(key).lower(), _READ_KEYS, n=1, cutoff=0.8)
            meant = near[0] if near else None
        if meant is not None:
            raise ValueError(
                f"a message of role {value['role']!r} has the unknown key {key!r}; did you mean "
                f"{meant!r}?"
            )


def _check_has_something_else(value: Mapping[str, Any]) -> None:
    """Refuse a message that has neither a content nor what may stand in its place."""
    if any(_holds_something(value.get(key)) for key in _INSTEAD_OF_CONTENT):
        return
    others = sorted(str(key) for key, item in value.items() if key != "role" and item is not None)
    hint = "an empty one is ''"
    if others:
        hint = f"its other keys are {', '.join(map(repr, others))}"
    raise ValueError(f"a message of role {value['role']!r} has no 'content'; {hint}")


def _holds_something(value: Any) -> bool:
    """Whether a value could be content: a text, parts, calls.

    Null, numbers and what is empty could not.
    """
    if value is None or isinstance(value, (bool, int, float)):
        return False
    is_empty = hasattr(value, "__len__") and not len(value)
    return not is_empty


def _reasoning(value: Mapping[str, Any]) -> Any:
    """Return the first reasoning that is not empty, else an empty one that is given."""
    texts = [value[name] for name in _REASONING_KEYS if value.get(name) is not None]
    for text in texts:
        if text:
            return text
    return texts[0] if texts else None


def _content(value: Any) -> str | tuple[ContentPart, ...]:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    is_single = not isinstance(value, Iterable) or isinstance(value, (bytes, Mapping))
    if is_single or is_image_object(value):
        return (read_part(value),)
    return tuple(read_part(part) for part in value)


def is_image_object(value: Any) -> bool:
    """Return whether a value is an image object: a PIL image or a numpy array."""
    # By the name of its package, since neither is a dependency of this module.
    kind: type = type(value)
    packages = _packages(kind)
    if "PIL" in packages and hasattr(value, "tobytes"):
        return True
    return "numpy" in packages and getattr(value, "ndim", 0) > 0


# Cached, since long conversations ask for the same few types at each call.
@lru_cache(maxsize=256)
def _packages(kind: type) -> frozenset[str]:
    """Return the packages of a type and its bases."""
    return frozenset(base.__module__.partition(".")[0] for base in kind.__mro__[:-1])


def is_media(value: Any) -> bool:
    """Return whether a value is an image or a video.

    These are references, `Image`, `Video`, and image objects.
    """
    return isinstance(value, (ImageRef, VideoRef, Image, Video)) or is_image_object(value)


def join_texts(texts: Sequence[str]) -> str:
    """Join the texts of one message: by a line break where no white space separates two.

    Example::

        >>> print(join_texts(["Look:", "a cat", " and ", "a dog"]))
        Look:
        a cat and a dog
    """
    joined = ""
    for text in texts:
        separated = not joined or not text or joined[-1].isspace() or text[0].isspace()
        joined += text if separated else f"\n{text}"
    return joined


def merge_texts(parts: Iterable[ContentPart]) -> tuple[ContentPart, ...]:
    """Join adjacent texts as they are and drop empty ones.

    A tokenizer may encode the same texts differently one by one.
    """
    merged: list[ContentPart] = []
    for part in parts:
        previous = merged[-1] if merged else None
        if isinstance(part, str) and isinstance(previous, str):
            merged[-1] = previous + part
        elif part != "":
            merged.append(part)
    return tuple(merged)


def alt_text(part: ImageRef | VideoRef | Image | Video) -> str:
    """Return the text that replaces an image or a video for a text-only model."""
    if part.alt is not None:
        return part.alt
    return "[video]" if isinstance(part, (Video, VideoRef)) else "[image]"


def read_part(part: Any) -> ContentPart:
    """Read a content part: a text, an image, a video, or a dict for one.

    Dicts may have OpenAI's or Hugging Face's format.

    Raises `TypeError` for anything else; the message names audio.
    """
    if isinstance(part, (str, ImageRef, VideoRef, Image, Video)):
        return part
    if is_image_object(part):
        return Image(part)
    if isinstance(part, Mapping):
        kind = part.get("type")
        if kind in ("text", "input_text", "output_text"):
            return _text(part)
        if kind in ("image", "image_url", "input_image"):
            return _image(part)
        if kind in ("video", "video_url", "input_video"):
            return _video(part)
        if is_audio(part):
            raise TypeError(f"a content part of audio: {NO_AUDIO}")
    raise TypeError(f"a content part must be text, an image or a video, not {part!r:.120}")


def _text(part: Mapping[str, Any]) -> str:
    """Read a text in OpenAI's formats."""
    text = part.get("text")
    if text is None:
        keys = sorted(str(key) for key, value in part.items() if value is not None)
        raise TypeError(
            f"a content part of type {part['type']!r} without a text (its keys are {keys}); give "
            "'text'"
        )
    return str(text)


def is_audio(part: Mapping[str, Any]) -> bool:
    """Return whether a content part is audio."""
    if str(part.get("type")).startswith(("audio", "input_audio")):
        return True
    return part.get("audio") is not None


def _first_of(part: Mapping[str, Any], names: Iterable[str]) -> Any:
    """Return the first of these keys that is not null; None if there is none."""
    for name in names:
        if part.get(name) is not None:
            return part[name]
    return None


def _image(part: Mapping[str, Any]) -> ContentPart:
    """Read an image in a common format: OpenAI's, Hugging Face's, or a recorded reference."""
    value = _first_of(part, ("image", "image_url", "url", "path"))
    if isinstance(value, Mapping):
        data = value.get("bytes")
        value = value.get("url", value.get("path")) if data is None else data
    if value is None:
        raise TypeError(
            f"an image part without an image: {sorted(map(str, part))}; give 'image' or 'image_url'"
        )

    if isinstance(value, (ImageRef, Image)):
        return value
    if isinstance(value, str) and _SHA256.fullmatch(value):
        return ImageRef(
            value,
            part.get("width") or 0,
            part.get("height") or 0,
            part.get("max_pixels") or 0,
            part.get("alt"),
        )
    return Image(value, part.get("alt"), part.get("max_pixels") or 0)


def _video(part: Mapping[str, Any]) -> ContentPart:
    """Read a video as a list of frames, or a recorded reference; video files are not supported."""
    value = _first_of(part, ("frames", "video", "video_url"))
    if isinstance(value, (Video, VideoRef)):
        return value
    if isinstance(value, Mapping) and "frames" in value:
        # `{"video": {"frames": ...}, "fps": ...}`: what stands outside counts first.
        outside = {
            key: entry for key, entry in part.items() if entry is not None and key != "video"
        }
        part = {**value, **outside}
        value = value["frames"]
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, bytearray, Mapping)):
        kind = type(value).__name__
        raise TypeError(
            f"a content part of video must be a list of frames with 'fps' or 'times', not {kind}: "
            "decode files yourself"
        )

    frames: list[Any] = [_image(frame) if isinstance(frame, Mapping) else frame for frame in value]
    times = part.get("times")
    alt = part.get("alt")
    are_stored = bool(frames) and all(isinstance(frame, ImageRef) for frame in frames)
    if are_stored and times is not None:
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
