"""Renderer protocol; Extend and Branch; small helpers."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from turnwise.errors import ModelError
from turnwise.types import MediaPlacement, Message

if TYPE_CHECKING:
    from turnwise.renderers.vision.base import VisionProcessor


class Extend(NamedTuple):
    """These ids follow what the engine has seen."""

    ids: list[int]
    close: int = 0
    """How many of the first ids close the reply (template text behind or in place of the end token)."""
    neutralised: int = 0
    """Control texts in the messages that were encoded as plain text (invariant 8)."""
    control_text: Mapping[str, int] = {}
    """Control texts met, whatever was done about them, by the role that they came from."""
    replies: tuple[int, ...] | None = None
    """Where each sampled reply of the conversation now begins on the path, -1 where its ids do not stand there; None where they
    all stay."""
    media: tuple[MediaPlacement, ...] = ()
    """Images and videos among `ids`."""
    tool_images_moved: int = 0
    """Images and videos of tools that are shown in a user's message, since the template drops them from a tool's."""


class Branch(NamedTuple):
    """The next prompt keeps only the first `keep` ids of the path; the rest stays in the trajectory as a leaf of its own."""

    keep: int
    ids: list[int]
    reason: str
    """A code that is counted, such as `thinking_stripped`."""
    neutralised: int = 0
    control_text: Mapping[str, int] = {}
    replies: tuple[int, ...] | None = None
    """As in `Extend`; None where every reply that ends within `keep` stays, and no other."""
    media: tuple[MediaPlacement, ...] = ()
    """Images and videos among `ids`; `keep` never cuts one in two."""
    tool_images_moved: int = 0
    """As in `Extend`."""


class SampledReply(NamedTuple):
    """A reply of a conversation that was sampled."""

    message: int
    """Index of its message."""
    ids: Sequence[int]
    """As sampled, the stop id included where there is one."""
    start: int
    """Where they begin on the path; -1 where they do not stand there."""


@runtime_checkable
class HasCodec(Protocol):
    """Renderer whose codec is known, for engines that need the size of its vocabulary."""

    @property
    def codec(self) -> Any:
        """Codec with `vocab_size` and `control`, the ids of the control tokens by their text."""
        ...


@runtime_checkable
class Renderer(Protocol):
    """Turns messages into ids for one model, and its replies back into messages."""

    stop_ids: frozenset[int]
    """Ids that end a reply."""
    banned_ids: frozenset[int]
    """Ids that may never be sampled (image placeholders)."""
    invalid_ids: frozenset[int]
    """Control ids that no reply may hold; a reply that does ends its episode as `invalid_token`."""
    fingerprint: str
    """Hash of template, tokenizer and settings, of the eyes too; recorded in every trajectory."""
    vision: VisionProcessor | None = None
    """What the model sees: how images become ids, positions and pixel values. None for a model of text alone.

    With eyes, `Extend.media` and `Branch.media` say where the images and videos of the messages stand among the ids, which are
    the expanded ones; that each pad is in a block, and each block as its processor makes it, is checked whenever ids are given
    (`MediaError`). Without eyes there are no media: `Sight` tells such a model in words."""

    def encode(self, text: str) -> list[int]:
        """Text alone, in which nothing is a control token."""
        ...

    def encode_reply(self, text: str) -> list[int]:
        """The ids that a model would sample to say `text` and end its turn; for scripts and demonstrations."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens written out; bytes that are no UTF-8 become U+FFFD."""
        ...

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each id alone; bytes that are no UTF-8 by themselves are escaped (`\\xe2`)."""
        ...

    def open(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Extend:
        """The opening prompt, up to where the model's reply begins.

        Raises:
            TemplateError: when the template cannot show these messages, or drops images of theirs.
            MediaError: when the model cannot see one of their images.
        """
        ...

    def extend(
        self,
        history: Sequence[Message],
        reply_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Extend | Branch:
        """What follows a reply: its close, `messages`, and the opening of the next reply.

        Args:
            history: the conversation up to and including the reply.
            reply_ids: the reply as sampled; where it does not end in a stop id, the close is written for it (mask 0).
            messages: what the world says next; empty asks the model to speak again.

        Raises:
            TemplateError, MediaError: as `open`.
        """
        ...

    def inline(self, reply_ids: Sequence[int], text: str) -> Extend | Branch:
        """What goes on inside a reply: `text`, in which nothing is a control token, and no close.

        Where the reply ended in a stop id, the text stands before it, which is a branch (`close_dropped`).

        Args:
            reply_ids: the reply as sampled; `keep` of a branch counts these alone.
            text: what the world writes; not the beginning of a text, so it gets no mark of one.
        """
        ...

    def compose(
        self,
        messages: Sequence[Message],
        replies: Sequence[SampledReply],
        ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
        placed: Sequence[MediaPlacement] = (),
    ) -> Extend | Branch:
        """The prompt for the next reply as the model's own template shows the conversation, against what the engine has seen.

        Args:
            messages: the whole conversation, what the world said last included.
            replies: those of the messages that were sampled, in order; wherever the template shows one whole, its ids stand.
            ids: what the engine has seen, up to the end of the last reply.
            placed: images and videos among them; positions match where the model sees the same.

        Raises:
            TemplateError: when the template cannot show the conversation.
        """
        ...

    def parse(
        self,
        ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
        text: str | None = None,
        thinking: bool | None = None,
    ) -> Message:
        """A reply as a message: text, reasoning, tool calls. Never raises: a malformed call carries its `error`.

        Args:
            ids: the reply as sampled.
            tools: OpenAI schemas of the tools that the model was told of.
            text: what of the ids is read, where that is not all (a reply that ended by a stop text).
            thinking: whether it begins inside the thinking; None: as the generation prompt leaves it.
        """
        ...


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is no such file.

    Raises:
        ModelError: when it holds none.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds no JSON object")
    return value


Decode = Callable[[Sequence[int]], str]


def cut_ids(decode: Decode, ids: Sequence[int], chars: int) -> tuple[int, str]:
    """Where ids are cut so that the first `chars` characters of their text stay.

    Only whole ids stay, and only up to where a character ends, so that what is left over is text: the ids that stay and
    the ids of the text behind them say, byte for byte, what the reply said. (Bytes that are no UTF-8 are read as U+FFFD, by
    the environment too: where the cut lies inside an id that holds some, they are written so.)

    Returns:
        How many ids stay, and the text of the next ones up to the cut.
    """
    kept = decode(ids)[:chars]
    count = bisect_right(range(len(ids) + 1), len(kept), key=lambda n: len(decode(ids[:n]))) - 1
    while not kept.startswith(said := decode(ids[:count])):
        count -= 1
    return count, kept[len(said) :]
