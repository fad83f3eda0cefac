"""What the world shows, as this model sees it: stored once and by reference, or in words."""

from __future__ import annotations

from collections.abc import Sequence

from turnwise.errors import MediaError
from turnwise.media import MediaStore, take_in, told
from turnwise.render import Renderer
from turnwise.types import Message


class Sight:
    """Takes images and videos of messages in, for one model and one run.

    Args:
        store: where they are kept.
        renderer: of the model; without eyes, it is told in words what stands for an image.
        most: images and videos that one observation may hold.
    """

    def __init__(self, store: MediaStore, renderer: Renderer, most: int = 64) -> None:
        self.store = store
        self.sees = getattr(renderer, "eyes", None) is not None
        self._most = most

    def needed(self, messages: Sequence[Message]) -> bool:
        """Whether messages hold anything to be looked at; if not, they stay as they are."""
        return any(not isinstance(m.content, str) and (m.raw or m.media) for m in messages)

    def look(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """The messages as the model sees them. Decodes images, so it is called off the event loop.

        Raises:
            MediaError: for an image that is broken or over a limit; for too many; for one without words, where the model sees
                none.
        """
        if not self.needed(messages):
            return messages
        if not self.sees:
            return told(messages)
        shown = sum(not isinstance(part, str) for m in messages if not isinstance(m.content, str) for part in m.content)
        if shown > self._most:
            raise MediaError(f"{shown} images in one observation; at most {self._most} (limits.images)")
        return take_in(messages, self.store)
