"""What the world shows, as this model sees it: stored once and by reference, or in words."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from turnwise.env.calling import in_thread
from turnwise.errors import MediaError
from turnwise.media import MediaStore, take_in, told
from turnwise.render import Renderer
from turnwise.rollout.waiting import Deadline
from turnwise.types import Image, Message, Messages, Part, Video, as_messages, seen


class Sight:
    """Takes images and videos of messages in, for one model and one run; one of `of_episode` counts them too.

    Args:
        store: where they are kept.
        renderer: of the model; without eyes, it is told in words what stands for an image.
        most: images and videos that one observation may hold.
        most_in_episode: images and videos that all observations of an episode may hold together; None sets no limit.
    """

    def __init__(self, store: MediaStore, renderer: Renderer, most: int = 64, most_in_episode: int | None = None) -> None:
        self.store = store
        self.sees = renderer.eyes is not None
        self._renderer = renderer
        self._most = most
        self._most_in_episode = most_in_episode
        self._shown = 0

    def of_episode(self) -> Sight:
        """The same, with a count of its own."""
        return Sight(self.store, self._renderer, self._most, self._most_in_episode)

    def begin_anew(self) -> None:
        """The episode begins anew: nothing was shown yet."""
        self._shown = 0

    def needed(self, messages: Sequence[Message]) -> bool:
        """Whether messages hold anything to be looked at; if not, they stay as they are."""
        for message in messages:  # noqa: SIM110  a generator costs more, and this is asked at every turn
            if not isinstance(message.content, str) and (message.raw or message.media):
                return True
        return False

    def look(self, messages: tuple[Message, ...], *, unanswered: bool = False) -> tuple[Message, ...]:
        """The messages as the model sees them. Decodes images, so it is called off the event loop where the model sees.

        Args:
            messages: an observation.
            unanswered: whether no model is shown them any more: who has no words for an image is told `[image]` then.

        Raises:
            MediaError: for an image that is broken or over a limit; for too many; for one without words, where the model sees
                none.
            UsageError: where numpy or Pillow is missing.
        """
        if not self.needed(messages):
            return messages
        if not self.sees:
            return told(messages, strict=not unanswered)
        shown = count(messages)
        if shown > self._most:
            raise MediaError(f"{shown} images in one observation; at most {self._most} (limits.images)")
        return take_in(messages, self.store)

    def note(self, messages: Sequence[Message]) -> None:
        """An episode's model is shown these, as `look` gave them.

        Raises:
            MediaError: when the episode has shown too many with them.
        """
        self._shown += count(messages)
        if self._most_in_episode is not None and self._shown > self._most_in_episode:
            raise MediaError(f"{self._shown} images in one episode; at most {self._most_in_episode} (limits.episode_images)")


class Look:
    """Takes in what a play function asks its model with: off the event loop, and each `Image` and `Video` object once.

    Args:
        sight: of the episode.
        seconds: how long decoding may take.
    """

    def __init__(self, sight: Sight, seconds: float) -> None:
        self._sight = sight
        self._seconds = seconds
        self._taken: dict[int, tuple[weakref.ref[Image | Video], Part]] = {}

    async def __call__(self, given: Messages | Sequence[int]) -> tuple[Message, ...] | list[int]:
        """Messages as the model sees them; ids as they are.

        Raises:
            MediaError: as `Sight.look`; an image that was shown before does not count again.
        """
        items: list[Any] = [] if isinstance(given, (str, Message, Mapping)) or seen(given) else list(given)  # type: ignore[arg-type]
        if items and all(isinstance(item, int) for item in items):
            return items
        sight = self._sight
        messages = as_messages(items or given)  # type: ignore[arg-type]
        if not sight.needed(messages):
            return messages
        if not sight.sees:
            return sight.look(messages)
        known = tuple(self._known(message) for message in messages)
        raw = tuple(message for message in known if message.raw)
        if raw:
            seconds = self._seconds
            deadline = Deadline(seconds)
            try:
                shown = iter(await deadline.wait(in_thread(sight.look, {"messages": raw}, "images"), seconds))
            finally:
                deadline.close()
            known = tuple(self._note(message, next(shown)) if message.raw else message for message in known)
        return take_in(known, sight.store)  # references of others, which the store may not have

    def _known(self, message: Message) -> Message:
        return replace(message, content=tuple(map(self._found, message.content))) if message.raw else message

    def _found(self, part: Part) -> Part:
        old, ref = self._taken.get(id(part), (None, part))
        return ref if old is not None and old() is part else part

    def _note(self, raw: Message, shown: Message) -> Message:
        new = [(old, ref) for old, ref in zip(raw.content, shown.content, strict=True) if isinstance(old, (Image, Video))]
        self._taken |= {id(old): (weakref.ref(old), ref) for old, ref in new}
        self._sight.note([replace(shown, content=tuple(ref for _, ref in new))])
        return shown


def count(messages: Sequence[Message]) -> int:
    """How many images and videos messages hold."""
    return sum(seen(part) for m in messages if not isinstance(m.content, str) for part in m.content)
