"""Renderer protocol: messages become ids that are appended to those an engine has processed.

`Renderer.open` renders the opening prompt. After each reply, `Renderer.extend` renders what
follows it and nothing else: the close of the reply where the model did not sample it, the next
observation, and the start of the next reply (`Extend`). The ids that were sampled stay as they
are; nobody decodes them and encodes their text again. A prompt that cannot keep all ids of the
path is a `Branch`: it says how many it keeps and why. `Renderer.compose`, which renders the
complete conversation by the model's template, returns one where the template writes earlier
turns differently.

`ChatRenderer` implements the protocol for every chat template. What it relies on is proven by
rendering placeholders: for each shape of messages, that this text follows a reply
(`TemplateProbe.append`); for replies, that one which the template writes is read back from the
ids that an engine would return (`ReplyProof`, reported by `turnwright check`).

Left out here: which messages the next prompt contains (`render_next` in `history.py`), how text
from the world is kept from becoming a control token (`ControlTextGuard`), how a reply is parsed
(`ReplyFormat`), and how an image becomes a block of ids (`MediaExpander`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from turnwright.types import ContentPart, MediaPlacement, Message, Tools

if TYPE_CHECKING:
    from turnwright.renderers.vision_protocol import VisionProcessor


class Extend(NamedTuple):
    """Ids to append to the ids that the engine has processed."""

    ids: list[int]
    close: int = 0
    """Number of leading ids that close the reply: template text after the end token, or in
    its place."""
    neutralised: int = 0
    """Number of control texts in the messages that were encoded as plain text."""
    control_text: Mapping[str, int] = {}
    """Number of control texts found, by role of origin, under every setting."""
    replies: tuple[int, ...] | None = None
    """Start of each sampled reply on the path, -1 where its ids are not on it; None if all keep
    their position."""
    media: tuple[MediaPlacement, ...] = ()
    """Images and videos among `ids`."""
    tool_images_moved: int = 0
    """Number of tool images and videos moved to a user message, because the template drops
    them from tool messages."""


class Branch(NamedTuple):
    """Prompt that keeps only the first `keep` ids of the path.

    The rest of the path becomes a separate leaf of the trajectory.
    """

    keep: int
    ids: list[int]
    reason: str
    """Code under which the branch is counted, such as `thinking_stripped`."""
    neutralised: int = 0
    """As in `Extend`."""
    control_text: Mapping[str, int] = {}
    """As in `Extend`."""
    replies: tuple[int, ...] | None = None
    """As in `Extend`; None if exactly the replies that end within `keep` remain."""
    media: tuple[MediaPlacement, ...] = ()
    """Images and videos among `ids`; `keep` never splits one."""
    tool_images_moved: int = 0
    """As in `Extend`."""


class SampledReply(NamedTuple):
    """Sampled reply of a conversation."""

    message: int
    """Index of its message."""
    ids: Sequence[int]
    """Sampled ids, with the stop id if there is one."""
    start: int
    """Position of the first id on the path; -1 if the ids are not on it."""


@runtime_checkable
class HasCodec(Protocol):
    """Renderer with a public tokenizer, for engines that need its vocabulary size."""

    @property
    def codec(self) -> Any:
        """Tokenizer with `vocab_size` and `control` (control token text to id)."""


@runtime_checkable
class Renderer(Protocol):
    """Convert messages to token ids for one model, and replies back to messages.

    One turn of an episode, with the ids of the path in `path`::

        path = renderer.open([Message("user", "What is 6 * 7?")]).ids
        reply = sample(path)                               # ids, with the stop id
        action = renderer.parse(reply)                     # a message; `reply` stays as it is
        history = [Message("user", "What is 6 * 7?"), action]
        path += reply + renderer.extend(history, reply, [Message("user", "And 7 * 8?")]).ids
    """

    stop_ids: frozenset[int]
    """Ids that end a reply."""
    banned_ids: frozenset[int]
    """Ids that are never sampled (image placeholders)."""
    invalid_ids: frozenset[int]
    """Control ids that no reply may contain; a reply with one ends its episode as
    `invalid_token`."""
    special_ids: frozenset[int]
    """Ids of the tokenizer's special tokens, which plain text lacks."""
    fingerprint: str
    """Hash of template, tokenizer, settings and vision processor; recorded in every trajectory."""
    vision: VisionProcessor | None = None
    """Vision processor: maps images to ids, positions and pixel values; None for a text-only model.

    With one, `Extend.media` and `Branch.media` place each image and video among the expanded ids.
    Each call checks that every pad id is inside a block and that every block has its processor's
    form (`MediaError`). Without one there are no media: the messages describe them in text."""

    def encode(self, text: str) -> list[int]:
        """Encode plain text, in which nothing is a control token."""

    def encode_reply(self, text: str) -> list[int]:
        """Return the ids a model would sample to write `text` and end its turn.

        Scripts and demonstrations use it.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids, control tokens included; invalid UTF-8 becomes U+FFFD."""

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each id alone.

        Bytes that are not valid UTF-8 by themselves are escaped (`\\xe2`).
        """

    def open(self, messages: Sequence[Message], tools: Tools = ()) -> Extend:
        """Render the opening prompt, up to the start of the model's reply.

        Raises:
            TemplateError: if the template cannot render these messages or drops their images.
            MediaError: if the model does not support one of their images.
        """

    def extend(
        self,
        history: Sequence[Message],
        reply_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Tools = (),
    ) -> Extend | Branch:
        """Render what follows a reply: its close, `messages`, and the start of the next reply.

        Args:
            history: the conversation up to and including the reply.
            reply_ids: the sampled reply; without a final stop id, the close is added (mask 0).
            messages: the next observation; empty asks the model for another reply.

        Raises:
            TemplateError, MediaError: as in `open`.
        """

    def inline(
        self, reply_ids: Sequence[int], content: str | Sequence[ContentPart]
    ) -> Extend | Branch:
        """Continue a reply with `content`, without closing it.

        A final stop id is removed, which is a branch (`close_dropped`).

        Args:
            reply_ids: the sampled reply; `keep` of a branch counts these ids alone.
            content: the environment's text, encoded as a continuation (without a
                beginning-of-text prefix); or parts of it and media, each written as the
                template writes it within a message.

        Raises:
            TemplateError, MediaError: as in `open`.
        """

    def compose(
        self,
        messages: Sequence[Message],
        replies: Sequence[SampledReply],
        ids: Sequence[int],
        tools: Tools = (),
        placed: Sequence[MediaPlacement] = (),
    ) -> Extend | Branch:
        """Render the prompt for the next reply by the model's template.

        The prompt is compared with the ids of the path: where it differs, a branch begins.

        Args:
            messages: the complete conversation, with the latest observation.
            replies: the sampled replies, in order; where the template renders one completely,
                its ids are kept.
            ids: the ids that the engine has processed, up to the end of the last reply.
            placed: images and videos among `ids`; positions match where the media are the same.

        Raises:
            TemplateError: if the template cannot render the conversation.
        """

    def parse(
        self,
        ids: Sequence[int],
        tools: Tools = (),
        text: str | None = None,
        thinking: bool | None = None,
    ) -> Message:
        """Parse a reply into text, reasoning and tool calls.

        Never raises: a malformed call carries its `error`.

        Args:
            ids: the sampled reply.
            tools: OpenAI schemas of the tools offered to the model.
            text: the text to parse instead of the decoded ids (for a reply ended by a stop string).
            thinking: whether the reply starts inside the thinking; None: as the generation
                prompt leaves it.
        """


def vision_of(renderer: Renderer) -> VisionProcessor | None:
    """Return the vision processor of a renderer, which a user's renderer need not declare."""
    vision: VisionProcessor | None = getattr(renderer, "vision", None)
    return vision


def common_prefix_length(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Return the length of the common prefix of two sequences."""
    shorter = min(len(left), len(right))

    # Mostly one is a prefix of the other, and comparing whole lists takes no loop in Python.
    if list(left[:shorter]) == list(right[:shorter]):
        return shorter
    return next(index for index in range(shorter) if left[index] != right[index])


Decode = Callable[[Sequence[int]], str]


def cut_ids(decode: Decode, ids: Sequence[int], chars: int) -> tuple[int, str]:
    """Cut ids such that the first `chars` characters of their text remain.

    Return the number of ids to keep, and the text that they lack. The kept ids end at a character
    boundary. Their text and the text that they lack reproduce the reply byte for byte. Invalid
    UTF-8 reads as U+FFFD, as for the environment; an id with such bytes that is cut is written so.
    """
    kept_text = decode(ids)[:chars]

    def length_of_first(count: int) -> int:
        return len(decode(ids[:count]))

    count = bisect_right(range(len(ids) + 1), len(kept_text), key=length_of_first) - 1
    prefix = decode(ids[:count])

    # The last of these ids may hold the first bytes of a character alone: U+FFFD, which is
    # not in the text.
    while not kept_text.startswith(prefix):
        count -= 1
        prefix = decode(ids[:count])
    return count, kept_text[len(prefix) :]
