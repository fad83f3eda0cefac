"""Observations that are too long: cut, with a mark that the model can see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from turnwise.render import Branch, Extend, Renderer
from turnwise.types import Message

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
