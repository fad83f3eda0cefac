"""Take in observations: media, truncation, counts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from turnwise.envs.user_code import run_in_thread
from turnwise.errors import MediaError
from turnwise.media import MediaStore, media_as_text, store_media
from turnwise.renderers import Branch, Extend, Renderer
from turnwise.rollouts.timeouts import Deadline
from turnwise.types import ContentPart, Image, Message, Messages, Trajectory, Video, as_messages, is_media

Render = Callable[[tuple[Message, ...]], Extend | Branch]


def truncate_messages(
    renderer: Renderer, messages: tuple[Message, ...], render: Render, rendered: Extend | Branch, most: int
) -> tuple[tuple[Message, ...], Extend | Branch, int]:
    """The messages with the longest texts cut, so that what they render to, `rendered` now, keeps to `most` ids.

    What the template writes around them is never cut: where `most` leaves no room beside it, only marks are left.

    Returns:
        The messages, what they render to, and how many ids of their texts were cut.
    """
    texts = [renderer.encode(message.text) for message in messages]
    room = most - (size_of(renderer, messages, rendered) - sum(map(len, texts)))
    while True:
        share = _share([len(ids) for ids in texts], room)
        kept = tuple(_shortened(renderer, m, ids, share) for m, ids in zip(messages, texts, strict=True))
        rendered = render(kept)
        over = size_of(renderer, kept, rendered) - most
        if over <= 0 or share == 0:
            return kept, rendered, sum(max(0, len(ids) - share) for ids in texts)
        room = max(0, min(room, sum(min(len(ids), share) for ids in texts)) - over)


def size_of(renderer: Renderer, messages: Sequence[Message], rendered: Extend | Branch) -> int:
    """How many ids an observation has: all that is appended, or its texts alone where history is shown anew."""
    if isinstance(rendered, Extend):
        return len(rendered.ids)
    return sum(len(renderer.encode(message.text)) for message in messages)


def _shortened(renderer: Renderer, message: Message, ids: Sequence[int], most: int) -> Message:
    if len(ids) <= most:
        return message
    text = f"{renderer.decode(ids[:most])}\n[cut: {most} of {len(ids)} tokens shown]"
    return replace(message, content=(text, *message.media) if message.media else text)


def _share(sizes: Sequence[int], room: int) -> int:
    """The most that each may have, so that all of them, cut to it, have `room` together."""
    left = max(0, room)
    for number, size in enumerate(sorted(sizes)):
        share = left // (len(sizes) - number)
        if size > share:
            return share
        left -= size
    return max(sizes, default=0)


class MediaIntake:
    """Takes images and videos of messages in, for one model and one run; one of `of_episode` counts them too.

    Args:
        store: where they are kept.
        renderer: of the model; without eyes, it is told in words what stands for an image.
        most: images and videos that one observation may hold.
        most_in_episode: images and videos that all observations of an episode may hold together; None sets no limit.
    """

    def __init__(self, store: MediaStore, renderer: Renderer, most: int = 64, most_in_episode: int | None = None) -> None:
        self.store = store
        self.sees = renderer.vision is not None
        self._renderer = renderer
        self._most = most
        self._most_in_episode = most_in_episode
        self._shown = 0

    def of_episode(self) -> MediaIntake:
        """The same, with a count of its own."""
        return MediaIntake(self.store, self._renderer, self._most, self._most_in_episode)

    def reset(self) -> None:
        """The episode begins anew: nothing was shown yet."""
        self._shown = 0

    def has_media(self, messages: Sequence[Message]) -> bool:
        """Whether messages hold anything to be looked at; if not, they stay as they are."""
        for message in messages:  # noqa: SIM110  a generator costs more, and this is asked at every turn
            if not isinstance(message.content, str) and (message.has_raw_media or message.media):
                return True
        return False

    def take_in(self, messages: tuple[Message, ...], *, unanswered: bool = False) -> tuple[Message, ...]:
        """The messages as the model sees them. Decodes images, so it is called off the event loop where the model sees.

        Args:
            messages: an observation.
            unanswered: whether no model is shown them any more: who has no words for an image is told `[image]` then.

        Raises:
            MediaError: for an image that is broken or over a limit; for too many; for one without words, where the model sees
                none.
            UsageError: where numpy or Pillow is missing.
        """
        if not self.has_media(messages):
            return messages
        if not self.sees:
            return media_as_text(messages, strict=not unanswered)
        shown = count_media(messages)
        if shown > self._most:
            raise MediaError(f"{shown} images in one observation; at most {self._most} (limits.images)")
        return store_media(messages, self.store)

    def note(self, messages: Sequence[Message]) -> None:
        """An episode's model is shown these, as `take_in` gave them.

        Raises:
            MediaError: when the episode has shown too many with them.
        """
        self._shown += count_media(messages)
        if self._most_in_episode is not None and self._shown > self._most_in_episode:
            raise MediaError(f"{self._shown} images in one episode; at most {self._most_in_episode} (limits.episode_images)")


class AgentMediaIntake:
    """Takes in what a play function asks its model with: off the event loop, and each `Image` and `Video` object once.

    Args:
        sight: of the episode.
        seconds: how long decoding may take.
    """

    def __init__(self, sight: MediaIntake, seconds: float) -> None:
        self._sight = sight
        self._seconds = seconds
        self._taken: dict[int, tuple[weakref.ref[Image | Video], ContentPart]] = {}

    async def __call__(self, given: Messages | Sequence[int]) -> tuple[Message, ...] | list[int]:
        """Messages as the model sees them; ids as they are.

        Raises:
            MediaError: as `Sight.take_in`; an image that was shown before does not count again.
        """
        items: list[Any] = [] if isinstance(given, (str, Message, Mapping)) or is_media(given) else list(given)  # type: ignore[arg-type]
        if items and all(isinstance(item, int) for item in items):
            return items
        sight = self._sight
        messages = as_messages(items or given)  # type: ignore[arg-type]
        if not sight.has_media(messages):
            return messages
        if not sight.sees:
            return sight.take_in(messages)
        known = tuple(self._known(message) for message in messages)
        raw = tuple(message for message in known if message.has_raw_media)
        if raw:
            seconds = self._seconds
            deadline = Deadline(seconds)
            try:
                shown = iter(await deadline.wait(run_in_thread(sight.take_in, {"messages": raw}, "images"), seconds))
            finally:
                deadline.close()
            known = tuple(self._note(message, next(shown)) if message.has_raw_media else message for message in known)
        return store_media(known, sight.store)  # references of others, which the store may not have

    def _known(self, message: Message) -> Message:
        return replace(message, content=tuple(map(self._found, message.content))) if message.has_raw_media else message

    def _found(self, part: ContentPart) -> ContentPart:
        old, ref = self._taken.get(id(part), (None, part))
        return ref if old is not None and old() is part else part

    def _note(self, raw: Message, shown: Message) -> Message:
        new = [(old, ref) for old, ref in zip(raw.content, shown.content, strict=True) if isinstance(old, (Image, Video))]
        self._taken |= {id(old): (weakref.ref(old), ref) for old, ref in new}
        self._sight.note([replace(shown, content=tuple(ref for _, ref in new))])
        return shown


def count_media(messages: Sequence[Message]) -> int:
    """How many images and videos messages hold."""
    return sum(is_media(part) for m in messages if not isinstance(m.content, str) for part in m.content)


def add_counts(trajectory: Trajectory, *names: str, by: int = 1) -> None:
    """Add to metrics of an episode."""
    for name in names:
        trajectory.metrics[name] = trajectory.metrics.get(name, 0) + by


def count_rendered(trajectory: Trajectory, rendered: Extend | Branch) -> None:
    """Control texts met in messages, by role, and how many were encoded as plain text; what is seen, and the ids it takes."""
    if rendered.neutralised:
        add_counts(trajectory, "neutralised", by=rendered.neutralised)
    for role, met in rendered.control_text.items():
        add_counts(trajectory, "control_text", f"control_text_{role}", by=met)
    if rendered.tool_images_moved:
        add_counts(trajectory, "tool_media_moved", by=rendered.tool_images_moved)
    if rendered.media:
        add_counts(trajectory, "media_shown", by=len(rendered.media))
        add_counts(trajectory, "media_tokens", by=sum(block.length for block in rendered.media))
