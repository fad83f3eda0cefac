"""What tools return, read: content for the model, a reward, metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from turnwise.errors import EnvError
from turnwise.types import ImageRef, Message, Part

Content = str | tuple[Part, ...]
Keeps = Literal["start", "ends", "end"]


@dataclass(frozen=True, slots=True)
class Returned:
    """What a tool gave: `(response, reward, metrics)`, None read as 0.0 and {}."""

    content: Content = ""
    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: bool = False
    """The tool says that the call did not work; the content tells the model why."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How results that are too long are cut: at `chars` characters, keeping the `start`, the `end`, or both `ends`."""

    chars: int | None = 32_768
    keeps: Keeps = "start"

    def __call__(self, content: Content) -> tuple[Content, bool]:
        """The content, cut with a mark that the model can see where its texts are longer together, and whether it was."""
        texts = [content] if isinstance(content, str) else [part for part in content if isinstance(part, str)]
        size = sum(map(len, texts))
        if self.chars is None or size <= self.chars:
            return content, False
        text = self._shortened("".join(texts), self.chars)
        return (text if isinstance(content, str) else (text, *(part for part in content if not isinstance(part, str)))), True

    def _shortened(self, text: str, most: int) -> str:
        mark = f"[cut: {most} of {len(text)} characters shown]"
        if self.keeps == "start":
            return f"{text[:most]}\n{mark}"
        if self.keeps == "end":
            return f"{mark}\n{text[len(text) - most :]}"
        head = most - most // 2
        return f"{text[:head]}\n{mark}\n{text[len(text) - (most - head) :]}"


def read_result(result: Any, name: str) -> Returned:
    """What a tool returned: text, parts, JSON, or verl's (response, reward[, metrics]) with None read as 0.0 and {}.

    Raises:
        EnvError: for metrics that are no dict, or an image that is no `ImageRef`.
    """
    if isinstance(result, Returned):
        return result
    reward: float = 0.0
    metrics: Mapping[str, float] = {}
    if isinstance(result, tuple) and len(result) in (2, 3) and _is_reward(result[1]):
        reward = 0.0 if result[1] is None else float(result[1])
        metrics = (result[2] if len(result) == 3 else None) or {}
        if not isinstance(metrics, Mapping):
            raise EnvError(f"tool {name!r} returned the metrics {metrics!r:.80}; return (response, reward, metrics), a dict")
        result = result[0]
    return Returned(read_content(result, name), reward, dict(metrics))


def read_content(value: Any, name: str) -> Content:
    """Text as it is, None as no text, images and lists with images as parts, anything else as JSON.

    Raises:
        EnvError: for an image that is no `ImageRef`.
    """
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, Message):
        return value.content
    if isinstance(value, ImageRef):
        return (value,)
    if isinstance(value, (list, tuple)) and any(isinstance(part, ImageRef) for part in value):
        return tuple(part if isinstance(part, (str, ImageRef)) else json.dumps(part, default=str) for part in value)
    if type(value).__module__.partition(".")[0] == "PIL":
        raise EnvError(f"tool {name!r} returned a {type(value).__name__} of PIL; images are tw.ImageRef")
    return json.dumps(value, ensure_ascii=False, default=str)


def joined(first: Content, second: Content) -> Content:
    """Two contents as one, texts parted by a line break."""
    if not first or not second:
        return first or second
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n{second}"
    one, two = ((content,) if isinstance(content, str) else content for content in (first, second))
    both_texts = isinstance(one[-1], str) and isinstance(two[0], str)
    return (*one, "\n", *two) if both_texts else (*one, *two)


def _is_reward(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
