"""What the model reads: prompts and observations, rendered and appended to the episode's record.

`PromptWriter.append_observation` is the way of most observations: render, truncate to the limit,
append. `insert` writes into the model's own message, `rewrite` replaces the conversation.

How messages become ids is in `renderers.history.render_next`, how an observation is truncated in
`observations.truncate_messages`. What is sampled after it is in `ReplySampler`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from turnwright.config import Limits
from turnwright.envs import InlineObservation, NewHistory
from turnwright.errors import EnvError, LimitReached
from turnwright.renderers import Branch, Extend, Renderer, SampledReply
from turnwright.renderers.history import History, render_from_scratch, render_next
from turnwright.renderers.renderer import Decode, common_prefix_length, cut_ids
from turnwright.rollouts.budget import Budget
from turnwright.rollouts.conversation import ConversationPath
from turnwright.rollouts.counts import add_counts, count_branch, count_rendered
from turnwright.rollouts.episode_journal import EpisodeJournal
from turnwright.rollouts.observations import Render, size_of, truncate_messages
from turnwright.rollouts.replies import reply_decoder, with_placed_media
from turnwright.types import (
    ContentPart,
    Message,
    Origin,
    Tools,
    Trajectory,
    ids_with_media_keys,
    merge_texts,
    placements_between,
)


class PromptWriter:
    """Opens the conversations of an episode, and appends to them what is not sampled.

    An observation follows a reply as messages (`append_observation`), inside the reply's own
    message (`insert`), or in a conversation that it replaces (`rewrite`). Where a renderer cannot
    append, the path branches off at an earlier position, and the reason is counted.
    """

    def __init__(
        self,
        trajectory: Trajectory,
        renderer: Renderer,
        history: History,
        limits: Limits,
        budget: Budget,
        journal: EpisodeJournal,
    ) -> None:
        self._trajectory = trajectory
        self._renderer = renderer
        self._history = history
        self._limits = limits
        self._budget = budget
        self._journal = journal

    def open(
        self, messages: Sequence[Message], tools: Tools, agent: str, seed: int
    ) -> ConversationPath:
        """Start a conversation; `seed` is that of its calls."""
        self._journal.offer(tools)
        prompt = self.render_conversation(messages, (), tools)
        path = ConversationPath(
            self._trajectory, -1, [], list(messages), tools, agent, seed, self._history
        )
        path.append(Origin.PROMPT, prompt.ids, prompt.media)
        return path

    def render_conversation(
        self, messages: Sequence[Message], replies: Sequence[SampledReply], tools: Tools
    ) -> Extend:
        """Render the prompt of a conversation that extends no recorded path."""
        prompt = render_from_scratch(self._history, self._renderer, messages, replies, tools)
        count_rendered(self._trajectory, prompt)
        return prompt

    # Observations that follow a reply

    def append_observation(self, path: ConversationPath, messages: tuple[Message, ...]) -> None:
        """Append an observation after the last reply of a path."""
        rendered, messages = self.render_observation(path, messages)
        self.append(path, rendered, messages)

    def render_observation(
        self, path: ConversationPath, messages: tuple[Message, ...]
    ) -> tuple[Extend | Branch, tuple[Message, ...]]:
        """Render an observation, truncated to the limit; return it with the messages that remain.

        The path is unchanged, so a worker thread may call this.
        """
        render = partial(render_next, path.history, self._renderer, path.conversation)
        messages, rendered = self._truncated(messages, render)
        return rendered, messages

    def _truncated(
        self, messages: tuple[Message, ...], render: Render
    ) -> tuple[tuple[Message, ...], Extend | Branch]:
        """Return messages truncated to `limits.observation_tokens`, and what they render to."""
        rendered = render(messages)
        limit = self._limits.observation_tokens
        if limit is None or size_of(self._renderer, messages, rendered) <= limit:
            return messages, rendered

        messages, rendered, tokens_cut = truncate_messages(
            self._renderer, messages, render, rendered, limit
        )
        if tokens_cut:
            self._journal.mark_changed()
            add_counts(self._trajectory, "observation_tokens_cut", by=tokens_cut)
        return messages, rendered

    def append(
        self, path: ConversationPath, rendered: Extend | Branch, messages: tuple[Message, ...] = ()
    ) -> None:
        """Append rendered ids to a path, or branch off at an earlier position.

        Raises `LimitReached` for an observation over `limits.episode_tokens`, which is counted and
        not recorded.
        """
        if path.ids:
            self.observe(len(rendered.ids))
        count_rendered(self._trajectory, rendered)

        # The end of the path, and where on it the replies are.
        close = 0
        reply_starts = rendered.replies
        if isinstance(rendered, Extend):
            close = rendered.close
        else:
            count_branch(self._trajectory, rendered.reason)
            path.branch(rendered.keep)
            if reply_starts is None:
                reply_starts = _starts_within(path.replies, rendered.keep)
        if reply_starts is not None:
            path.replies = [
                reply._replace(start=start)
                for reply, start in zip(path.replies, reply_starts, strict=True)
            ]

        # What the template writes to close the reply has an origin of its own.
        ids = rendered.ids
        media = rendered.media
        if close:
            path.append(Origin.TEMPLATE, ids[:close])
            if media:
                media = placements_between(media, close, len(ids))
            ids = ids[close:]
        if ids:
            path.append(Origin.ENV if path.ids else Origin.PROMPT, ids, media)

        path.messages.extend(messages)
        path.new_messages = messages

    def observe(self, tokens: int) -> None:
        """Count observed tokens as used.

        If the episode has fewer left, count them as left out, and raise `LimitReached`.
        """
        try:
            self._budget.check_observation(len(self._trajectory.turns), tokens)
        except LimitReached:
            add_counts(self._trajectory, "observation_tokens_left_out", by=tokens)
            raise
        self._budget.used += tokens

    # Observations inside the reply's message

    def insert(self, path: ConversationPath, inline: InlineObservation) -> None:
        """Insert text into the model's last message, after the part of its reply that remains.

        The next reply continues the message.
        """
        trajectory = self._trajectory
        renderer = self._renderer
        turn = trajectory.turns[path.turn]

        # What remains of the reply. An id may be cut in two: its first part is text then.
        reply = path.ids[turn.context :]
        has_end = bool(reply) and reply[-1] in renderer.stop_ids
        content = reply[:-1] if has_end else reply
        decode = reply_decoder(renderer, turn.inserted is not None)
        kept, cut_text = _kept(decode, content, inline)
        rewound = kept < len(content)

        def render(messages: tuple[Message, ...]) -> Extend | Branch:
            inserted = messages[0].content
            if isinstance(inserted, str):
                text: str | tuple[ContentPart, ...] = cut_text + inserted
            else:
                text = merge_texts((cut_text, *inserted))
            rendered = renderer.inline(reply[:kept] if rewound else reply, text)
            if isinstance(rendered, Branch):
                return rendered._replace(keep=turn.context + rendered.keep)
            if not rewound:
                return rendered
            return Branch(
                keep=turn.context + kept,
                ids=rendered.ids,
                reason="rewound",
                neutralised=rendered.neutralised,
                control_text=rendered.control_text,
                media=rendered.media,
            )

        # Append it. The turn records the inserted text, so images are only in the journal's row.
        (message,), rendered = self._truncated((inline.message,), render)
        changed = rewound or inline.keep_chars is not None or inline.tail == "untrained"
        if changed or message.media:
            self._journal.mark_changed()
        self.append(path, rendered)
        if inline.tail == "untrained":
            self._journal.mark_untrained(turn.spans, turn.context + kept)

        # Let the next reply go on in the message. A parser takes what follows an open thinking
        # block for thinking, so a letter after it is no text.
        start = trajectory.reply_start(path.turn)
        message_ids = path.ids[start:]
        grown = with_placed_media(renderer.parse(message_ids), renderer, path, start)
        text_with_letter = renderer.parse((), (), f"{renderer.decode(message_ids)}x").text
        path.continue_last(
            grown,
            inserted=message.text_with_alt,
            kept=kept,
            thinking=not text_with_letter.endswith("x"),
        )

    # Observations that replace the conversation

    def rewrite(self, path: ConversationPath, history: NewHistory) -> None:
        """Go on with another conversation, as a branch from where its ids part from those of the
        path.

        Raises `EnvError` for indices that the conversation does not have, for one that begins with
        a reply, and within a message of the model (`rollout.history = "inline"`).
        """
        if self._history == "inline":
            raise EnvError(
                'NewHistory needs messages; with rollout.history = "inline" the conversation is '
                "one message"
            )
        history.check(len(path.messages))

        # Messages that stay are given by index, and replies among them keep their ids.
        replies_by_message = {reply.message: reply for reply in path.replies}
        messages: list[Message] = []
        replies: list[SampledReply] = []
        for item in history.messages:
            if not isinstance(item, int):
                messages.append(item)
                continue
            if item in replies_by_message:
                if not messages:
                    raise EnvError(
                        "NewHistory begins with a reply; keep or write a message before it"
                    )
                reply = replies_by_message[item]
                replies.append(reply._replace(message=len(messages), start=-1))
            messages.append(path.messages[item])

        # What both conversations begin with is not sent again.
        prompt = render_from_scratch(path.history, self._renderer, messages, replies, path.tools)
        sent_ids = ids_with_media_keys(path.ids, path.placed)
        keep = common_prefix_length(ids_with_media_keys(prompt.ids, prompt.media), sent_ids)
        branch = Branch(
            keep=keep,
            ids=prompt.ids[keep:],
            reason="rewritten",
            neutralised=prompt.neutralised,
            control_text=prompt.control_text,
            replies=prompt.replies or (-1,) * len(replies),
            media=placements_between(prompt.media, keep, len(prompt.ids)),
            tool_images_moved=prompt.tool_images_moved,
        )
        path.replies = replies
        self.append(path, branch)
        path.restart(messages)
        self._journal.mark_changed()


def _starts_within(replies: Sequence[SampledReply], keep: int) -> tuple[int, ...]:
    """Return where replies start that are within the first `keep` ids of a path, -1 for others."""
    starts: list[int] = []
    for reply in replies:
        end = reply.start + len(reply.ids)
        starts.append(reply.start if end <= keep else -1)
    return tuple(starts)


def _kept(decode: Decode, reply: Sequence[int], inline: InlineObservation) -> tuple[int, str]:
    """Return how many ids of a reply remain, and the remaining text of an id cut in two."""
    if inline.keep_tokens is None and inline.keep_chars is None:
        return len(reply), ""

    inline.check(len(decode(reply)), len(reply))
    if inline.keep_tokens is not None:
        return inline.keep_tokens, ""
    assert inline.keep_chars is not None
    return cut_ids(decode, reply, inline.keep_chars)
