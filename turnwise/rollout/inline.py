"""Going on inside the model's own message: what the world inserts, and what is rewound."""

from __future__ import annotations

from collections.abc import Sequence

from turnwise.env import InlineObservation
from turnwise.errors import EnvError
from turnwise.render import Branch, Extend
from turnwise.render.inline import Decode, cut_ids
from turnwise.rollout.path import ConversationPath
from turnwise.rollout.recorder import Recorder
from turnwise.rollout.replies import reply_decoder, reply_text
from turnwise.rollout.sight import MediaIntake
from turnwise.types import Message, Messages, Turn, as_messages


def to_inline(observation: Messages | InlineObservation | None, sight: MediaIntake) -> InlineObservation:
    """Return an observation as text inside the model's message (`history = "inline"`).

    A text-only model reads the `alt` text of an image, as in every other history mode.

    Raises:
        EnvError: for a role that cannot be part of a reply, and for an image where the model sees images.
        MediaError: for an image without `alt` where the model is text-only.
    """
    if isinstance(observation, InlineObservation):
        return observation
    messages = as_messages(observation)
    for message in messages:
        if message.role not in ("user", "tool"):
            raise EnvError(
                f'a message of role {message.role!r} cannot stand inside the reply (rollout.history = "inline"): return text, '
                'or messages of role "user" or "tool"; or use rollout.history = "append"'
            )
    if sight.has_media(messages):
        if sight.sees:
            raise EnvError(
                'an image or a video cannot be part of the reply (rollout.history = "inline"): return text, or use '
                'rollout.history = "append"'
            )
        messages = sight.take_in(messages)
    return InlineObservation("\n".join(message.text for message in messages))


def raw_text(recorder: Recorder, turn: Turn) -> str:
    """All that the reply of a turn says, cut behind a stop text of the episode."""
    spans = recorder.trajectory.spans
    ids = [i for index in turn.spans for i in spans[index].ids]
    text = reply_text(recorder.renderer, ids, inside=turn.inserted is not None)
    return text if recorder.stop is None else recorder.stop.cut(text)


def continue_reply(recorder: Recorder, path: ConversationPath, inline: InlineObservation) -> None:
    """Let the model speak on inside its last message, behind what stays of its reply and what the world inserts.

    Raises:
        EnvError: when the reply is shorter than what should stay.
        ControlTextError: when the text holds control text and the renderer rejects it.
    """
    trajectory, renderer = recorder.trajectory, recorder.renderer
    turn = trajectory.turns[path.turn]
    reply = path.ids[turn.context :]
    said = reply[:-1] if reply and reply[-1] in renderer.stop_ids else reply
    count, rest = _kept(reply_decoder(renderer, turn.inserted is not None), said, inline)
    rewound = count < len(said)
    kept = reply[:count] if rewound else reply

    def render(given: tuple[Message, ...]) -> Extend | Branch:
        rendered = renderer.inline(kept, rest + given[0].text)
        if isinstance(rendered, Branch):
            return rendered._replace(keep=turn.context + rendered.keep)
        if not rewound:
            return rendered
        return Branch(turn.context + count, rendered.ids, "rewound", rendered.neutralised, rendered.control_text)

    (message,), rendered = recorder.truncate_observation((Message("user", inline.text),), render)
    recorder.entries.changed |= rewound or inline.keep_chars is not None or inline.tail == "untrained"
    recorder.append(path, rendered)
    if inline.tail == "untrained":
        recorder.mark_untrained(turn, turn.context + count)
    path.inserted, path.kept, path.fresh = message.text, count, ()
    body = path.ids[trajectory.reply_start(path.turn) :]
    path.messages[-1] = renderer.parse(body)
    path.thinking = not renderer.parse((), (), f"{renderer.decode(body)}x").text.endswith("x")


def _kept(decode: Decode, said: Sequence[int], inline: InlineObservation) -> tuple[int, str]:
    """How many ids of a reply stay, and the text behind them that stays too, of an id that is cut."""
    if inline.keep_tokens is None and inline.keep_chars is None:
        return len(said), ""
    inline.check(len(decode(said)), len(said))
    if inline.keep_tokens is not None:
        return inline.keep_tokens, ""
    assert inline.keep_chars is not None
    return cut_ids(decode, said, inline.keep_chars)
