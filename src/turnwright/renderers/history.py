"""History modes (`append`, `template`) and policies: what the next prompt
contains of a conversation."""

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
    """Chooses the messages of the next prompt; a plain function
    `(conversation, replies) -> messages`.

    A reply returned as the same object keeps its sampled ids. An edited or new assistant message is
    rendered by the template and never trained. A policy must be deterministic: the same
    conversation gives the same messages.
    """

    def __call__(
        self, conversation: Sequence[Message], replies: Sequence[int]
    ) -> Sequence[Message]:
        """Return the messages of the next prompt.

        Args:
            conversation: all messages, with the latest observation; never the
                result of an earlier call.
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
    prompt = _arrange(renderer, selected, conversation, state, len(state.messages))
    keep = common_prefix_length(
        ids_with_media_keys(prompt.ids, prompt.media), ids_with_media_keys(state.ids, state.placed)
    )
    ids, media = prompt.ids[keep:], placements_between(prompt.media, keep, len(prompt.ids))
    if keep == len(state.ids):
        return prompt._replace(ids=ids, media=media)
    met = prompt.neutralised, prompt.control_text
    return Branch(
        keep, ids, f"policy:{name}", *met, prompt.replies, media, prompt.tool_images_moved
    )


def render_from_scratch(
    history: History,
    renderer: Renderer,
    messages: Sequence[Message],
    replies: Sequence[SampledReply],
    tools: Tools,
) -> Extend:
    """Render the prompt of a conversation that is on no path; replies sampled
    elsewhere keep their ids.

    Raises `TemplateError` if the template cannot render it; `UsageError` if a policy's
    messages cannot be rendered.
    """
    if isinstance(history, str) and (not replies or replies[0].message == 0):
        return renderer.open(messages, tools)
    if history == "template":
        found = renderer.compose(messages, replies, (), tools)
        return Extend(
            found.ids,
            0,
            found.neutralised,
            found.control_text,
            found.replies,
            found.media,
            found.tool_images_moved,
        )
    selected = (
        messages
        if isinstance(history, str)
        else _apply_policy(history, policy_name(history), messages, replies)
    )
    return _arrange(renderer, selected, messages, ConversationState((), replies, (), tools), 0)


def _apply_policy(
    policy: HistoryPolicy,
    name: str,
    conversation: Sequence[Message],
    replies: Sequence[SampledReply],
) -> list[Message]:
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
    """Render the complete prompt of the selected messages; kept replies keep their ids, the
    messages between are appended.

    Control texts are counted in messages from index `first_new` on, `close` for a last
    reply that ends the path.
    """
    reply_numbers = {
        id(conversation[reply.message]): number for number, reply in enumerate(state.replies)
    }
    new_messages = {id(message) for message in conversation[first_new:]}
    starts = [-1] * len(state.replies)
    cuts = [at for at, message in enumerate(selected) if id(message) in reply_numbers]
    opening = selected[: cuts[0]] if cuts else selected
    parts: list[tuple[Sequence[Message], Extend | Branch]] = [
        (opening, renderer.open(opening, state.tools))
    ]
    ids, close = list(parts[0][1].ids), 0
    placed = list(parts[0][1].media)
    for at, following in zip(cuts, [*cuts[1:], len(selected)][: len(cuts)], strict=True):
        number = reply_numbers[id(selected[at])]
        reply = state.replies[number].ids
        starts[number] = len(ids)
        ids += reply
        between = selected[at + 1 : following]
        rendered = renderer.extend(selected[: at + 1], reply, between, state.tools)
        if isinstance(rendered, Branch):
            del ids[rendered.keep :]
            placed = [block for block in placed if block.end <= rendered.keep]
        close = rendered.close if isinstance(rendered, Extend) and len(ids) == len(state.ids) else 0
        placed += [block.shifted(len(ids)) for block in rendered.media]
        ids += rendered.ids
        parts.append((between, rendered))
    new = [
        rendered
        for given, rendered in parts
        if any(id(message) in new_messages for message in given)
    ]
    met: Counter[str] = Counter()
    for rendered in new:
        met.update(rendered.control_text)
    neutralised = sum(rendered.neutralised for rendered in new)
    moved = sum(rendered.tool_images_moved for rendered in new)
    return Extend(ids, close, neutralised, met, tuple(starts), tuple(placed), moved)


# Built-in policies


def keep_images(count: int) -> HistoryPolicy:
    """Keep the last `count` images and videos; replace each earlier one by a short text.

    Raises `ConfigError` for a count under 0.
    """

    def policy(conversation: Sequence[Message], replies: Sequence[int]) -> list[Message]:
        return _older(
            conversation,
            count,
            lambda m: f"[{'video' if isinstance(m, VideoRef) else 'image'} no longer shown]",
        )

    return _named(policy, "keep_images", count)


def downscale_images(count: int) -> HistoryPolicy:
    """Keep the last `count` images and videos at full size; reduce earlier ones to
    a quarter of their area.

    Raises `ConfigError` for a count under 0.
    """

    def policy(conversation: Sequence[Message], replies: Sequence[int]) -> list[Message]:
        return _older(conversation, count, _quarter)

    return _named(policy, "downscale_images", count)


def _older(
    conversation: Sequence[Message], count: int, change: Callable[[Media], ContentPart]
) -> list[Message]:
    """Change all but the last `count` images and videos; messages without media
    stay the same objects."""
    left = max(0, sum(len(message.media) for message in conversation) - count)
    changed = []
    for message in conversation:
        if left and message.media:
            parts: list[ContentPart] = []
            for part in message.content:
                older = isinstance(part, (ImageRef, VideoRef)) and left > 0
                left -= older
                parts.append(change(part) if older else part)  # type: ignore[arg-type]
            message = replace(message, content=tuple(parts))
        changed.append(message)
    return changed


def _quarter(ref: Any) -> Any:
    if isinstance(ref, VideoRef):
        return replace(ref, frames=tuple(map(_quarter, ref.frames)))
    area = min(ref.width * ref.height, ref.max_pixels or ref.width * ref.height)
    return limit_pixels(ref, max(1, area // 4))


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
    """Return the name that branches of a policy are counted under: its `name`,
    else its Python name."""
    return str(
        getattr(policy, "name", None) or getattr(policy, "__name__", None) or type(policy).__name__
    )


def _named(policy: Any, name: str, count: int) -> HistoryPolicy:
    """Name a policy `NAME:COUNT`, after checking the count."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ConfigError(f"{name}({count!r}): needs an integer of at least 0")
    policy.name = f"{name}:{count}"
    return policy  # type: ignore[no-any-return]
