"""Tasks: immutable dataset rows."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from turnwise.types.media import Image, ImageRef
from turnwise.types.message import Message, Messages, as_messages


@dataclass(frozen=True, slots=True)
class Task:
    """One immutable row of a dataset: what to do, and what the right answer is.

    Example::

        Task("What is 6 * 7?", answer="42")
        Task([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], info={"level": 2})
    """

    messages: tuple[Message, ...] = ()
    """The conversation so far; a string becomes one user message. An environment may put its own in place."""
    answer: Any = None
    """What a reward compares with; the model never sees it."""
    id: str = ""
    """Names the row for good; derived from the content when not given, so equal rows are equal tasks."""
    images: tuple[ImageRef | Image, ...] = ()
    """For the environment; what the model is shown stands in `messages`."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Every other column of the row."""
    env: str = ""
    """Name of the environment that this row is for, where a run has several."""

    def __init__(
        self,
        messages: Messages | None = None,
        answer: Any = None,
        *,
        id: str = "",
        images: Sequence[Any] = (),
        info: Mapping[str, Any] | None = None,
        env: str = "",
    ) -> None:
        put = object.__setattr__
        put(self, "messages", as_messages(messages))
        put(self, "answer", answer)
        put(self, "images", tuple(i if isinstance(i, (ImageRef, Image)) else Image(i) for i in images))
        put(self, "info", dict(info or {}))
        put(self, "env", env)
        put(self, "id", id or self._content_id())

    def _content_id(self) -> str:
        content = [
            [m.to_dict() for m in self.messages],
            self.answer,
            [i.to_dict()["image"] for i in self.images],
            self.info,
            self.env,
        ]
        try:
            text = json.dumps(content, sort_keys=True, default=_name, ensure_ascii=False)
        except (TypeError, ValueError):  # keys that cannot be sorted, or a value that holds itself
            text = _name(content)
        return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()

    def __hash__(self) -> int:
        return hash(self.id)


def _name(value: Any) -> str:
    """A value's repr without what differs from process to process: addresses, and the order of sets."""
    if isinstance(value, (set, frozenset)):
        return repr(sorted(map(_name, value)))
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
