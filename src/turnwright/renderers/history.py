"""History modes (`append`, `template`) and policies: what the next prompt contains of a
conversation.

`render_next` is called at every turn. `append` renders what follows the last reply
(`Renderer.extend`), `template` the complete conversation (`Renderer.compose`). A policy selects
messages first; what it keeps unchanged of the sampled replies keeps its ids (`_arrange`), and the
prompt branches off the path where the selection departs from it. The built-in policies are at the
end (`POLICIES`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from turnwright.errors import ConfigError, UsageError
from turnwright.renderers.renderer import (
    Branch,
    Extend,
    Renderer,
    SampledReply,
    common_prefix_length,
)
from turnwright.types import (
    ContentPart,
    ImageRef,
    Media,
    MediaPlacement,
    Message,
    Tools,
    VideoRef,
    ids_with_media_keys,
    limit_pixels,
    placements_between,
)


class HistoryPolicy(Protocol):
    """Chooses the messages of the next prompt: a function `(conversation, replies) -> messages`.

    A reply returned as the same object keeps its sampled ids. An edited or new assistant message is
    rendered by the template and never trained. A policy must be deterministic: the same
    conversation gives the same messages.

    Example: a policy that keeps the first message and the last four::

        >>> def recent(conversation, replies):
        ...     return [*conversation[:1], *conversation[1:][-4:]]
        >>> recent(["system", 1, 2, 3, 4, 5, 6], replies=[2, 4])
        ['system', 3, 4, 5, 6]
    """

    def __call__(
        self, conversation: Sequence[Message], replies: Sequence[int]
    ) -> Sequence[Message]:
        """Return the messages of the next prompt.

        Args:
            conversation: all messages, with the latest observation; never the result of an
                earlier call.
            replies: indices of the sampled messages.
        """


History = str | HistoryPolicy
"""`append`, `template`, or a policy."""


class ConversationState(NamedTuple):
    """A conversation up to its last reply, with the ids that the engine has processed."""

    messages: Sequence[Message]
    replies: Sequence[SampledReply]
    ids: Sequence[int]
    tools: Tools
    placed: Sequence[MediaPlacement] = ()
    """Images and videos among the ids."""


def render_next(
    history: History, renderer: Renderer, state: ConversationState, messages: Sequence[Message]
) -> Extend | Branch:
    """Render what the engine receives when `messages` follow the last reply of a conversation.

    Raises `TemplateError` if the template cannot render it; `UsageError` if a policy's
    messages cannot be rendered.
    """
    if history == "append":
        return renderer.extend(state.messages, state.replies[-1].ids, messages, state.tools)
    conversation = (*state.messages, *messages)
    if history == "template":
        return renderer.compose(conversation, state.replies, state.ids, state.tools, state.placed)
    if isinstance(history, str):
        raise UsageError(f"history = {history!r} is not a mode of this renderer")

    name = policy_name(history)
    selected = _apply_policy(history, name, conversation, state.replies)
    prompt = _arrange(renderer, selected, conversation, state, first_new=len(state.messages))

    # Keys of media take part, because the placeholder ids of all images are the same.
    keep = common_prefix_length(
        ids_with_media_keys(prompt.ids, prompt.media), ids_with_media_keys(state.ids, state.placed)
    )
    ids = prompt.ids[keep:]
    media = placements_between(prompt.media, keep, len(prompt.ids))
    if keep == len(state.ids):
        return prompt._replace(ids=ids, media=media)
    return Branch(
        keep,
        ids,
        reason=f"policy:{name}",
        neutralised=prompt.neutralised,
        control_text=prompt.control_text,
        replies=prompt.replies,
        media=media,
        tool_images_moved=prompt.tool_images_moved,
    )


def render_from_scratch(
    history: History,
    renderer: Renderer,
    messages: Sequence[Message],
    replies: Sequence[SampledReply],
    tools: Tools,
) -> Extend:
    """Render the prompt of a conversation that is on no path; replies sampled elsewhere keep their
    ids.

    Raises `TemplateError` if the template cannot render it; `UsageError` if a policy's
    messages cannot be rendered.
    """
    if isinstance(history, str) and (not replies or replies[0].message == 0):
        return renderer.open(messages, tools)

    if history == "template":
        prompt = renderer.compose(messages, replies, (), tools)
        return Extend(
            prompt.ids,
            close=0,
            neutralised=prompt.neutralised,
            control_text=prompt.control_text,
            replies=prompt.replies,
            media=prompt.media,
            tool_images_moved=prompt.tool_images_moved,
        )

    selected = messages
    if not isinstance(history, str):
        selected = _apply_policy(history, policy_name(history), messages, replies)
    state = ConversationState((), replies, (), tools)
    return _arrange(renderer, selected, messages, state, first_new=0)


def _apply_policy(
    policy: HistoryPolicy,
    name: str,
    conversation: Sequence[Message],
    replies: Sequence[SampledReply],
) -> list[Message]:
    """Return the messages that a policy selects; raise `UsageError` if no prompt can be made of
    them."""
    selected = list(policy(conversation, tuple(reply.message for reply in replies)))
    for message in selected:
        if not isinstance(message, Message):
            raise UsageError(
                f"history policy {name}: returned {message!r:.60} among its messages, which are "
                "turnwright.Message"
            )

    sampled = {id(conversation[reply.message]) for reply in replies}
    if not selected or id(selected[0]) in sampled:
        raise UsageError(
            f"history policy {name}: no message before the first reply; keep at least one there"
        )
    return selected


def _arrange(
    renderer: Renderer,
    selected: Sequence[Message],
    conversation: Sequence[Message],
    state: ConversationState,
    first_new: int,
) -> Extend:
    """Render the complete prompt of the selected messages.

    Kept replies, which are the same objects as in the conversation, keep their ids; the messages
    between are appended. Control texts are counted in messages from index `first_new` on, `close`
    for a last reply that ends the path.
    """
    reply_numbers = {
        id(conversation[reply.message]): number for number, reply in enumerate(state.replies)
    }
    new_messages = {id(message) for message in conversation[first_new:]}
    reply_indices = [i for i, message in enumerate(selected) if id(message) in reply_numbers]

    opening = selected[: reply_indices[0]] if reply_indices else selected
    rendered: Extend | Branch = renderer.open(opening, state.tools)
    parts: list[tuple[Sequence[Message], Extend | Branch]] = [(opening, rendered)]
    ids = list(rendered.ids)
    placed = list(rendered.media)
    close = 0
    starts = [-1] * len(state.replies)

    ends = [*reply_indices[1:], len(selected)]
    for index, end in zip(reply_indices, ends[: len(reply_indices)], strict=True):
        number = reply_numbers[id(selected[index])]
        reply_ids = state.replies[number].ids
        starts[number] = len(ids)
        ids += reply_ids

        following = selected[index + 1 : end]
        rendered = renderer.extend(selected[: index + 1], reply_ids, following, state.tools)
        if isinstance(rendered, Branch):
            del ids[rendered.keep :]
            placed = [block for block in placed if block.end <= rendered.keep]
        ends_path = len(ids) == len(state.ids)
        close = rendered.close if isinstance(rendered, Extend) and ends_path else 0
        placed += [block.shifted(len(ids)) for block in rendered.media]
        ids += rendered.ids
        parts.append((following, rendered))

    # What earlier messages hold was counted when they were new.
    neutralised = 0
    control_text: Counter[str] = Counter()
    moved = 0
    for messages, rendered in parts:
        if any(id(message) in new_messages for message in messages):
            neutralised += rendered.neutralised
            control_text.update(rendered.control_text)
            moved += rendered.tool_images_moved
    return Extend(ids, close, neutralised, control_text, tuple(starts), tuple(placed), moved)


# Built-in policies


def keep_images(count: int) -> HistoryPolicy:
    """Keep the last `count` images and videos; replace each earlier one by a short text.

    Raises `ConfigError` for a count under 0.
    """

    def shortened(media: Media) -> ContentPart:
        kind = "video" if isinstance(media, VideoRef) else "image"
        return f"[{kind} no longer shown]"

    def policy(conversation: Sequence[Message], replies: Sequence[int]) -> list[Message]:
        return _with_older_media_changed(conversation, count, shortened)

    return _named(policy, "keep_images", count)


def downscale_images(count: int) -> HistoryPolicy:
    """Keep the last `count` images and videos at full size; reduce earlier ones to a quarter of
    their area.

    Raises `ConfigError` for a count under 0.
    """

    def policy(conversation: Sequence[Message], replies: Sequence[int]) -> list[Message]:
        return _with_older_media_changed(conversation, count, _quarter)

    return _named(policy, "downscale_images", count)


def _with_older_media_changed(
    conversation: Sequence[Message], count: int, change: Callable[[Media], ContentPart]
) -> list[Message]:
    """Change all but the last `count` images and videos.

    Messages without one that changes stay the same objects.
    """
    left = max(0, sum(len(message.media) for message in conversation) - count)
    changed = []
    for message in conversation:
        if left and message.media:
            parts: list[ContentPart] = []
            for part in message.content:
                if left and isinstance(part, (ImageRef, VideoRef)):
                    parts.append(change(part))
                    left -= 1
                else:
                    parts.append(part)
            message = replace(message, content=tuple(parts))
        changed.append(message)
    return changed


def _quarter(media: Any) -> Any:
    """Reduce an image, or each frame of a video, to a quarter of its area."""
    if isinstance(media, VideoRef):
        return replace(media, frames=tuple(map(_quarter, media.frames)))
    area = media.width * media.height
    if media.max_pixels:
        area = min(area, media.max_pixels)
    return limit_pixels(media, max(1, area // 4))


def drop_reasoning(turns: int) -> HistoryPolicy:
    """Keep the reasoning of the last `turns` replies; render earlier replies without it.

    Raises `ConfigError` for a number under 0.
    """

    def policy(conversation: Sequence[Message], replies: Sequence[int]) -> list[Message]:
        messages = list(conversation)
        for index in replies[: max(0, len(replies) - turns)]:
            if messages[index].reasoning is not None:
                messages[index] = replace(messages[index], reasoning=None)
        return messages

    return _named(policy, "drop_reasoning", turns)


POLICIES: dict[str, Callable[[int], HistoryPolicy]] = {
    "keep_images": keep_images,
    "downscale_images": downscale_images,
    "drop_reasoning": drop_reasoning,
}


def policy_name(policy: HistoryPolicy) -> str:
    """Return the name that branches of a policy are counted under: its `name`, else its Python
    name."""
    return str(
        getattr(policy, "name", None) or getattr(policy, "__name__", None) or type(policy).__name__
    )


def _named(policy: Any, name: str, count: int) -> HistoryPolicy:
    """Name a policy `NAME:COUNT`, after checking the count."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ConfigError(f"{name}({count!r}): needs an integer of at least 0")
    policy.name = f"{name}:{count}"
    return policy  # type: ignore[no-any-return]
