"""What a reply says: as text, as a message, as the message that it goes on in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from turnwise.engine import StopText
from turnwise.render import Renderer
from turnwise.render.inline import Decode
from turnwise.rollout.path import ConversationPath
from turnwise.types import Message, Trajectory, Turn


def reply_text(renderer: Renderer, ids: Sequence[int], *, inside: bool = False) -> str:
    """All that sampled ids say, thinking and calls included, without the end token.

    Args:
        inside: whether they go on inside a message, so that their text keeps a space that it begins with.
    """
    return reply_decoder(renderer, inside)(ids[:-1] if ids and ids[-1] in renderer.stop_ids else ids)


def read_reply(renderer: Renderer, path: ConversationPath, stop: StopText | None, ids: Sequence[int]) -> Message:
    """A reply as a message, its text cut right behind a stop text; the ids stay as they were sampled."""
    inside = path.inserted is not None
    if stop is None and not inside:
        return renderer.parse(ids, path.tools)
    text = reply_text(renderer, ids, inside=inside)
    return renderer.parse(ids, path.tools, text if stop is None else stop.cut(text), path.thinking if inside else None)


def extend_message(
    trajectory: Trajectory, renderer: Renderer, path: ConversationPath, turn: Turn, stop: StopText | None
) -> None:
    """A reply that went on inside a message: the message as it has grown."""
    body = path.ids[trajectory.reply_start(turn.parent) :]
    text = reply_text(renderer, body)
    if stop is not None:
        said = reply_text(renderer, path.ids[turn.context :], inside=True)
        text = text[: len(text) - len(said) + len(stop.cut(said))]
    calls = turn.reply.tool_calls
    # Calls are the model's own: one that the world wrote, or that was answered before, is text and no more.
    turn.grown = replace(renderer.parse(body, path.tools if calls else (), text), tool_calls=calls)
    turn.inserted, turn.kept = path.inserted, path.kept
    path.inserted = path.kept = None


def reply_decoder(renderer: Renderer, inside: bool) -> Decode:
    """Decodes sampled ids, those that go on `inside` a message as what stands there."""
    if not inside:
        return renderer.decode
    before = renderer.encode("x")  # tokenizers with word-start marks drop the space that a text begins with
    skip = len(renderer.decode(before))
    return lambda ids: renderer.decode([*before, *ids])[skip:]
