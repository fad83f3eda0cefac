"""What the next prompt shows of a conversation: everything appended, the model's own template, or a policy's choice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from turnwise.errors import ConfigError, UsageError
from turnwise.renderers.base import Branch, Extend, Renderer, SampledReply
from turnwise.renderers.recompose import common_prefix_length
from turnwise.types import (
    ContentPart,
    ImageRef,
    Media,
    MediaPlacement,
    Message,
    VideoRef,
    ids_with_media_keys,
    limit_pixels,
    placements_between,
)

Tools = Sequence[Mapping[str, Any]]


class HistoryPolicy(Protocol):
    """Chooses what the model sees next; a plain function `(conversation, replies) -> messages`.

    A reply that is returned as the very object that was given keeps the ids that were sampled; one that was edited or made
    anew is written as text, in the template's own form, and never trained. A policy must give the same answer for the same
    conversation.
    """

    def __call__(self, conversation: Sequence[Message], replies: Sequence[int]) -> Sequence[Message]:
        """The messages to show.

        Args:
            conversation: all that was said, the world's last answer included; never what an earlier call made of it.
            replies: indices of the messages that the model sampled.
        """
        ...


History = str | HistoryPolicy
"""`append`, `template`, or a policy."""


class ConversationState(Protocol):
    """A conversation up to its last reply, and what the engine has seen of it."""

    @property
    def messages(self) -> Sequence[Message]:
        """All that was said."""

    @property
    def replies(self) -> Sequence[SampledReply]:
        """Those of the messages that were sampled."""

    @property
    def ids(self) -> Sequence[int]:
        """What the engine has seen."""

    @property
    def tools(self) -> Tools:
        """What the model was told of."""

    @property
    def placed(self) -> Sequence[MediaPlacement]:
        """Images and videos among the ids."""


class StaticConversation(NamedTuple):
    """A conversation that is written down at once."""

    messages: Sequence[Message]
    replies: Sequence[SampledReply]
    ids: Sequence[int]
    tools: Tools
    placed: Sequence[MediaPlacement] = ()


def render_next(history: History, renderer: Renderer, talk: ConversationState, messages: Sequence[Message]) -> Extend | Branch:
    """What the engine sees when `messages` follow the last reply of a conversation.

    Raises:
        TemplateError: when the template cannot show it.
        UsageError: when a policy returns what cannot be shown.
    """
    if history == "append":
        return renderer.extend(talk.messages, talk.replies[-1].ids, messages, talk.tools)
    whole = (*talk.messages, *messages)
    if history == "template":
        return renderer.compose(whole, talk.replies, talk.ids, talk.tools, talk.placed)
    if isinstance(history, str):
        raise UsageError(f"history = {history!r} is no mode of this renderer")
    name = policy_name(history)
    shown = _ask(history, name, whole, talk.replies)
    prompt = _arrange(renderer, shown, whole, talk, len(talk.messages))
    keep = common_prefix_length(ids_with_media_keys(prompt.ids, prompt.media), ids_with_media_keys(talk.ids, talk.placed))
    ids, media = prompt.ids[keep:], placements_between(prompt.media, keep, len(prompt.ids))
    if keep == len(talk.ids):
        return prompt._replace(ids=ids, media=media)
    met = prompt.neutralised, prompt.control_text
    return Branch(keep, ids, f"policy:{name}", *met, prompt.replies, media, prompt.tool_images_moved)


def render_from_scratch(
    history: History, renderer: Renderer, messages: Sequence[Message], replies: Sequence[SampledReply], tools: Tools
) -> Extend:
    """The prompt of a conversation that no path leads to, replies that were sampled elsewhere as the ids that they have.

    Raises:
        TemplateError: when the template cannot show it.
        UsageError: when a policy returns what cannot be shown.
    """
    talk = StaticConversation((), replies, (), tools)
    if isinstance(history, str) and (not replies or replies[0].message == 0):
        return renderer.open(messages, tools)
    if history == "template":
        found = renderer.compose(messages, replies, (), tools)
        return Extend(found.ids, 0, found.neutralised, found.control_text, found.replies, found.media, found.tool_images_moved)
    shown = messages if isinstance(history, str) else _ask(history, policy_name(history), messages, replies)
    return _arrange(renderer, shown, messages, talk, 0)


def _ask(policy: HistoryPolicy, name: str, whole: Sequence[Message], replies: Sequence[SampledReply]) -> list[Message]:
    shown = list(policy(whole, tuple(reply.message for reply in replies)))
    for message in shown:
        if not isinstance(message, Message):
            raise UsageError(f"history policy {name}: returned {message!r:.60} among its messages, which are turnwise.Message")
    sampled = {id(whole[reply.message]) for reply in replies}
    if not shown or id(shown[0]) in sampled:
        raise UsageError(f"history policy {name}: nothing stands before the first reply; keep at least one message there")
    return shown


def _arrange(
    renderer: Renderer, shown: Sequence[Message], whole: Sequence[Message], talk: ConversationState, said: int
) -> Extend:
    """The whole prompt of messages to show, kept replies as they were sampled; what stands between is appended.

    Control texts are counted where something was said just now, `close` for a last reply that ends the path.
    """
    own = {id(whole[reply.message]): number for number, reply in enumerate(talk.replies)}
    fresh = {id(message) for message in whole[said:]}
    starts = [-1] * len(talk.replies)
    cuts = [at for at, message in enumerate(shown) if id(message) in own]
    opening = shown[: cuts[0]] if cuts else shown
    parts: list[tuple[Sequence[Message], Extend | Branch]] = [(opening, renderer.open(opening, talk.tools))]
    ids, close = list(parts[0][1].ids), 0
    placed = list(parts[0][1].media)
    for at, following in zip(cuts, [*cuts[1:], len(shown)][: len(cuts)], strict=True):
        number = own[id(shown[at])]
        reply = talk.replies[number].ids
        starts[number] = len(ids)
        ids += reply
        between = shown[at + 1 : following]
        rendered = renderer.extend(shown[: at + 1], reply, between, talk.tools)
        if isinstance(rendered, Branch):
            del ids[rendered.keep :]
            placed = [block for block in placed if block.end <= rendered.keep]
        close = rendered.close if isinstance(rendered, Extend) and len(ids) == len(talk.ids) else 0
        placed += [block.shifted(len(ids)) for block in rendered.media]
        ids += rendered.ids
        parts.append((between, rendered))
    new = [rendered for given, rendered in parts if any(id(message) in fresh for message in given)]
    met: Counter[str] = Counter()
    for rendered in new:
        met.update(rendered.control_text)
    neutralised, moved = (sum(getattr(rendered, name) for rendered in new) for name in ("neutralised", "tool_images_moved"))
    return Extend(ids, close, neutralised, met, tuple(starts), tuple(placed), moved)


# Policies that come with the package


def keep_images(count: int) -> HistoryPolicy:
    """Shows the last `count` images and videos; in place of an earlier one stands a text that says so.

    Raises:
        ConfigError: for a count under 0.
    """
    _at_least(0, count, "keep_images")

    def policy(conversation: Sequence[Message], replies: Sequence[int]) -> list[Message]:
        return _older(conversation, count, lambda m: f"[{'video' if isinstance(m, VideoRef) else 'image'} no longer shown]")

    return _named(policy, f"keep_images:{count}")


def downscale_images(count: int) -> HistoryPolicy:
    """Shows the last `count` images and videos as they are, and earlier ones at a quarter of their area.

    Raises:
        ConfigError: for a count under 0.
    """
    _at_least(0, count, "downscale_images")

    def policy(conversation: Sequence[Message], replies: Sequence[int]) -> list[Message]:
        return _older(conversation, count, _quarter)

    return _named(policy, f"downscale_images:{count}")


def _older(conversation: Sequence[Message], count: int, change: Callable[[Media], ContentPart]) -> list[Message]:
    """The conversation with all but the last `count` images and videos changed; messages without such are the very objects."""
    left = max(0, sum(len(message.media) for message in conversation) - count)
    shown = []
    for message in conversation:
        if left and message.media:
            parts: list[ContentPart] = []
            for part in message.content:
                older = isinstance(part, (ImageRef, VideoRef)) and left > 0
                left -= older
                parts.append(change(part) if older else part)  # type: ignore[arg-type]
            message = replace(message, content=tuple(parts))
        shown.append(message)
    return shown


def _quarter(media: Media) -> Media:
    if isinstance(media, VideoRef):
        return replace(media, frames=tuple(map(_quartered, media.frames)))
    return _quartered(media)


def _quartered(ref: ImageRef) -> ImageRef:
    area = min(ref.width * ref.height, ref.max_pixels or ref.width * ref.height)
    return limit_pixels(ref, max(1, area // 4))


def drop_reasoning(turns: int) -> HistoryPolicy:
    """Shows the reasoning of the last `turns` replies alone; an earlier reply that has some is written without it.

    Raises:
        ConfigError: for a number under 0.
    """
    _at_least(0, turns, "drop_reasoning")

    def policy(conversation: Sequence[Message], replies: Sequence[int]) -> list[Message]:
        shown = list(conversation)
        for index in replies[: max(0, len(replies) - turns)]:
            if shown[index].reasoning is not None:
                shown[index] = replace(shown[index], reasoning=None)
        return shown

    return _named(policy, f"drop_reasoning:{turns}")


POLICIES: dict[str, Callable[[int], HistoryPolicy]] = {
    "keep_images": keep_images,
    "downscale_images": downscale_images,
    "drop_reasoning": drop_reasoning,
}


def policy_name(policy: HistoryPolicy) -> str:
    """What branches of a policy are counted under: its `name`, else what it is called in Python."""
    return str(getattr(policy, "name", None) or getattr(policy, "__name__", None) or type(policy).__name__)


def _named(policy: Any, name: str) -> HistoryPolicy:
    policy.name = name
    named: HistoryPolicy = policy
    return named


def _at_least(least: int, value: int, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name}({value!r}): needs a whole number of at least {least}")
