"""Observations before rendering: media intake and truncation.

`truncate_messages` cuts texts to a number of ids. `MediaIntake.take_in` replaces images and videos
by references into the run's store, or by text for a model without vision. `AgentMediaIntake` does
so for the messages of a play function. What follows is in `PromptWriter`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import is_
from typing import Any

from turnwright.envs.threads import run_in_thread
from turnwright.errors import MediaError
from turnwright.media import MediaStore, has_media, media_as_text, store_media
from turnwright.renderers import Branch, Extend, Renderer
from turnwright.renderers.renderer import vision_of
from turnwright.rollouts.timeouts import Deadline
from turnwright.types import ContentPart, Image, Message, Messages, Video, as_messages, is_media

Render = Callable[[tuple[Message, ...]], Extend | Branch]


def truncate_messages(
    renderer: Renderer,
    messages: tuple[Message, ...],
    render: Render,
    rendered: Extend | Branch,
    limit: int,
) -> tuple[tuple[Message, ...], Extend | Branch, int]:
    """Truncate the longest texts so that messages render to at most `limit` ids.

    `rendered` is their current rendering. Ids that the template adds are never truncated; if they
    leave no budget for text, only the truncation markers remain. Return the messages, their
    rendering, and the number of truncated text ids.
    """
    texts = [renderer.encode(message.text) for message in messages]
    sizes = [len(ids) for ids in texts]
    template_size = size_of(renderer, messages, rendered) - sum(sizes)
    text_budget = limit - template_size

    # Truncated texts render to other ids, with the markers among them, so the budget shrinks by
    # what is still over the limit.
    while True:
        share = _share(sizes, text_budget)
        truncated = tuple(
            _truncated(renderer, message, ids, share)
            for message, ids in zip(messages, texts, strict=True)
        )
        rendered = render(truncated)
        over = size_of(renderer, truncated, rendered) - limit
        if over <= 0 or share == 0:
            return truncated, rendered, sum(max(0, size - share) for size in sizes)
        text_size = sum(min(size, share) for size in sizes)
        text_budget = max(0, min(text_budget, text_size) - over)


def size_of(renderer: Renderer, messages: Sequence[Message], rendered: Extend | Branch) -> int:
    """Return the size of an observation in ids.

    These are all appended ids, or only those of its texts where the history is rendered again.
    """
    if isinstance(rendered, Extend):
        return len(rendered.ids)
    return sum(len(renderer.encode(message.text)) for message in messages)


def _truncated(renderer: Renderer, message: Message, ids: Sequence[int], limit: int) -> Message:
    if len(ids) <= limit:
        return message
    text = f"{renderer.decode(ids[:limit])}\n[cut: {limit} of {len(ids)} tokens shown]"
    return replace(message, content=(text, *message.media) if message.media else text)


def _share(sizes: Sequence[int], budget: int) -> int:
    """Return the largest share such that texts truncated to it have at most `budget` ids."""
    left = max(0, budget)
    for number, size in enumerate(sorted(sizes)):
        share = left // (len(sizes) - number)
        if size > share:
            return share
        left -= size
    return max(sizes, default=0)


class MediaIntake:
    """Stores images and videos of messages, or replaces them by alt text where the renderer has no
    vision processor.

    An instance of `of_episode` also counts them. The limits count images and videos together; None
    sets none.
    """

    def __init__(
        self,
        store: MediaStore,
        renderer: Renderer,
        max_per_observation: int = 64,
        max_per_episode: int | None = None,
        blank: bool = False,
    ) -> None:
        self.store = store
        self.has_vision = vision_of(renderer) is not None
        self._renderer = renderer
        self._max_per_observation = max_per_observation
        self._max_per_episode = max_per_episode
        self._blank = blank
        self._count = 0

    def of_episode(self, *, blank: bool = False) -> MediaIntake:
        """Return an intake with the same store and limits, and a count of its own.

        `blank` makes every image gray.
        """
        return MediaIntake(
            self.store, self._renderer, self._max_per_observation, self._max_per_episode, blank
        )

    def reset(self) -> None:
        """Reset the count for another attempt."""
        self._count = 0

    def take_in(self, messages: tuple[Message, ...], *, final: bool = False) -> tuple[Message, ...]:
        """Return an observation as the model receives it.

        With a vision model this decodes images, so run it in a thread. With `final`, no model reads
        them, and an image without alt text becomes `[image]`. Raises `MediaError` for more than one
        observation may have, and for an image that cannot be used.
        """
        if not has_media(messages):
            return messages
        if not self.has_vision:
            self.store.note_unseen()
            return media_as_text(messages, strict=not final)
        count = count_media(messages)
        if count > self._max_per_observation:
            raise MediaError(
                f"{count} images in one observation; at most {self._max_per_observation} "
                "(limits.images)"
            )
        return store_media(messages, self.store, blank=self._blank)

    def check(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """Return messages with references; raise `MediaError` for one that the store lacks."""
        return store_media(messages, self.store, blank=self._blank)

    def count(self, messages: Sequence[Message]) -> None:
        """Count the media of messages from `take_in`; raise `MediaError` above the episode's
        limit."""
        self._count += count_media(messages)
        if self._max_per_episode is not None and self._count > self._max_per_episode:
            raise MediaError(
                f"{self._count} images in one episode; at most {self._max_per_episode} "
                "(limits.episode_images)"
            )


class AgentMediaIntake:
    """Stores media in the messages of an agent function: in a thread, and each `Image` or `Video`
    object once."""

    def __init__(self, intake: MediaIntake, seconds: float) -> None:
        self._intake = intake
        self._seconds = seconds
        self._stored: dict[int, tuple[weakref.ref[Image | Video], ContentPart]] = {}
        """References by the identity of the object, which the weak reference confirms."""
        self._without_media: tuple[Message, ...] = ()
        """The last conversation without media; the next one mostly begins with the same objects,
        which are not read again."""

    async def __call__(
        self, messages_or_ids: Messages | Sequence[int]
    ) -> tuple[Message, ...] | list[int]:
        """Return messages as the model receives them; ids are returned unchanged."""
        single = isinstance(messages_or_ids, (str, Message, Mapping)) or is_media(messages_or_ids)
        items: list[Any] = [] if single else list(messages_or_ids)  # type: ignore[arg-type]
        if items and all(isinstance(item, int) for item in items):
            return items

        # Most conversations go on from the last one, without media.
        intake = self._intake
        last = self._without_media
        if last and len(items) >= len(last) and all(map(is_, items, last)):
            new = items[len(last) :]
            if set(map(type, new)) <= {Message} and not has_media(new):
                self._without_media = tuple(items)
                return self._without_media

        messages = as_messages(items or messages_or_ids)  # type: ignore[arg-type]
        if not has_media(messages):
            self._without_media = messages
            return messages
        if not intake.has_vision:
            return intake.take_in(messages)

        messages = tuple(self._replace_stored(message) for message in messages)
        messages = await self._store_others(messages)
        return intake.check(messages)  # the store may lack foreign references

    def _replace_stored(self, message: Message) -> Message:
        """Return a message with references for the objects that are stored already."""
        if not message.has_raw_media:
            return message
        return replace(message, content=tuple(map(self._stored_part, message.content)))

    def _stored_part(self, part: ContentPart) -> ContentPart:
        source, reference = self._stored.get(id(part), (None, part))
        if source is not None and source() is part:
            return reference
        return part

    async def _store_others(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """Store the media that messages still hold, in a thread."""
        raw_messages = tuple(message for message in messages if message.has_raw_media)
        if not raw_messages:
            return messages

        deadline = Deadline(self._seconds)
        try:
            stored_messages = await deadline.wait(
                run_in_thread(self._intake.take_in, {"messages": raw_messages}, "images"),
                self._seconds,
            )
        finally:
            deadline.close()

        stored = iter(stored_messages)
        completed: list[Message] = []
        for message in messages:
            if message.has_raw_media:
                completed.append(self._record(message, next(stored)))
            else:
                completed.append(message)
        return tuple(completed)

    def _record(self, raw: Message, stored: Message) -> Message:
        """Take note of the references of a message's objects, and count them; return `stored`."""
        references: list[ContentPart] = []
        for part, reference in zip(raw.content, stored.content, strict=True):
            if isinstance(part, (Image, Video)):
                self._stored[id(part)] = weakref.ref(part), reference
                references.append(reference)
        self._intake.count([replace(stored, content=tuple(references))])
        return stored


def count_media(messages: Sequence[Message]) -> int:
    """Return the number of images and videos in messages."""
    total = 0
    for message in messages:
        if not isinstance(message.content, str):
            total += sum(map(is_media, message.content))
    return total
