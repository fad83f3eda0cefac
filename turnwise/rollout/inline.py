"""Going on inside the model's own message: what the world inserts, what is rewound, and the message that grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from turnwise.engine import StopText
from turnwise.env import Inline
from turnwise.errors import EnvError
from turnwise.render import Branch, Extend, Renderer
from turnwise.render.inline import Decode, cut_ids
from turnwise.rollout.path import Path
from turnwise.types import Message, Messages, Trajectory, Turn, as_messages

if TYPE_CHECKING:
    from turnwise.rollout.recorder import Recorder


def as_inline(observation: Messages | Inline | None) -> Inline:
    """An observation as text inside the model's message (`history = "inline"`).

    Raises:
        EnvError: for an observation that is no text of the world's.
    """
    if isinstance(observation, Inline):
        return observation
    messages = as_messages(observation)
    for message in messages:
        if message.role not in ("user", "tool"):
            raise EnvError(
                f'a message of role {message.role!r} cannot stand inside the reply (rollout.history = "inline"): return text, '
                'or messages of role "user" or "tool"; or use rollout.history = "append"'
            )
        if message.media:
            raise EnvError(
                'an image cannot stand inside the reply (rollout.history = "inline"); use rollout.history = "append"'
            )
    return Inline("\n".join(message.text for message in messages))


def text_of(renderer: Renderer, ids: Sequence[int], *, inside: bool = False) -> str:
    """All that sampled ids say, thinking and calls included, without the end token.

    Args:
        inside: whether they go on inside a message, so that their text keeps a space that it begins with.
    """
    return _decoder(renderer, inside)(ids[:-1] if ids and ids[-1] in renderer.stop_ids else ids)


def read_reply(renderer: Renderer, path: Path, stop: StopText | None, ids: Sequence[int]) -> Message:
    """A reply as a message, its text cut right behind a stop text; the ids stay as they were sampled."""
    inside = path.inserted is not None
    if stop is None and not inside:
        return renderer.parse(ids, path.tools)
    text = text_of(renderer, ids, inside=inside)
    return renderer.parse(ids, path.tools, text if stop is None else stop.cut(text), path.thinking if inside else None)


def raw_text(recorder: Recorder, turn: Turn) -> str:
    """All that the reply of a turn says, cut behind a stop text of the episode."""
    spans = recorder.trajectory.spans
    ids = [i for index in turn.spans for i in spans[index].ids]
    text = text_of(recorder.renderer, ids, inside=turn.inserted is not None)
    return text if recorder.stop is None else recorder.stop.cut(text)


def go_on(recorder: Recorder, path: Path, inline: Inline) -> None:
    """Let the model speak on inside its last message, behind what stays of its reply and what the world inserts.

    Raises:
        EnvError: when the reply is shorter than what should stay.
        ControlTextError: when the text holds control text and the renderer rejects it.
    """
    trajectory, renderer = recorder.trajectory, recorder.renderer
    turn = trajectory.turns[path.turn]
    reply = path.ids[turn.context :]
    said = reply[:-1] if reply and reply[-1] in renderer.stop_ids else reply
    count, rest = _kept(_decoder(renderer, turn.inserted is not None), said, inline)
    rewound = count < len(said)
    kept = reply[:count] if rewound else reply

    def render(given: tuple[Message, ...]) -> Extend | Branch:
        rendered = renderer.inline(kept, rest + given[0].text)
        if isinstance(rendered, Branch):
            return rendered._replace(keep=turn.context + rendered.keep)
        if not rewound:
            return rendered
        return Branch(turn.context + count, rendered.ids, "rewound", rendered.neutralised, rendered.control_text)

    (message,), rendered = recorder.fitting((Message("user", inline.text),), render)
    recorder.entries.changed |= rewound or inline.keep_chars is not None or inline.tail == "untrained"
    recorder.append(path, rendered)
    if inline.tail == "untrained":
        recorder.leave_out(turn, turn.context + count)
    path.inserted, path.kept, path.fresh = message.text, count, ()
    body = path.ids[trajectory.begins(path.turn) :]
    path.messages[-1] = renderer.parse(body)
    path.thinking = not renderer.parse((), (), f"{renderer.decode(body)}x").text.endswith("x")


def grow(trajectory: Trajectory, renderer: Renderer, path: Path, turn: Turn, stop: StopText | None) -> None:
    """A reply that went on inside a message: the message as it has grown."""
    body = path.ids[trajectory.begins(turn.parent) :]
    text = text_of(renderer, body)
    if stop is not None:
        said = text_of(renderer, path.ids[turn.context :], inside=True)
        text = text[: len(text) - len(said) + len(stop.cut(said))]
    calls = turn.reply.tool_calls
    # Calls are the model's own: one that the world wrote, or that was answered before, is text and no more.
    turn.grown = replace(renderer.parse(body, path.tools if calls else (), text), tool_calls=calls)
    turn.inserted, turn.kept = path.inserted, path.kept
    path.inserted = path.kept = None


def _decoder(renderer: Renderer, inside: bool) -> Decode:
    if not inside:
        return renderer.decode
    before = renderer.encode("x")  # tokenizers with word-start marks drop the space that a text begins with
    skip = len(renderer.decode(before))
    return lambda ids: renderer.decode([*before, *ids])[skip:]


def _kept(decode: Decode, said: Sequence[int], inline: Inline) -> tuple[int, str]:
    """How many ids of a reply stay, and the text behind them that stays too, of an id that is cut."""
    if inline.keep_tokens is None and inline.keep_chars is None:
        return len(said), ""
    inline.check(len(decode(said)), len(said))
    if inline.keep_tokens is not None:
        return inline.keep_tokens, ""
    assert inline.keep_chars is not None
    return cut_ids(decode, said, inline.keep_chars)
