"""Ids of one tokenizer as ids of another: control tokens by their text, other text by its bytes,
chunk by chunk.

`Translation.align` makes a teacher's ids of a policy's, and the chunks in which both can be
compared. What a chunk's score does to the policy's ids is in `aligned.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from turnwright.errors import ConfigError
from turnwright.renderers.chat_renderer import ChatRenderer
from turnwright.renderers.tokenizer import Tokenizer


class AlignedChunk(NamedTuple):
    """The shortest stretch of text that is complete ids of both tokenizers and that no id of one
    continues for the other, or one control token, with such text before it."""

    start: int
    """First position in the policy's ids."""
    end: int
    own_start: int
    """First position in the teacher's ids."""
    own_end: int


class Translation:
    """From the policy's ids to those of a teacher with another tokenizer."""

    def __init__(self, policy: ChatRenderer, teacher: ChatRenderer, name: str) -> None:
        """Compare two renderers; raise `ConfigError` for one whose ids are not bytes, or whose
        turns are marked otherwise."""
        texts = policy.codec.token_bytes
        teacher_texts = teacher.codec.token_bytes
        if texts is None or teacher_texts is None:
            which = "teacher's" if teacher_texts is None else "policy's"
            raise ConfigError(
                f"teacher {name}: the {which} tokenizer is not byte-level, so their ids cannot be "
                "aligned"
            )
        self._texts = texts
        self._teacher_texts = teacher_texts
        self._codec = teacher.codec

        # After "lo", a policy that splits "lookup" is in the middle of a word that the teacher has
        # as one id: their probabilities of what comes next are not of the same events.
        self._begun = {
            *_beginnings(teacher_texts, texts, policy.codec),
            *_beginnings(texts, teacher_texts, teacher.codec),
        }

        # The teacher's control token of the same text; any of its stop tokens for one of the
        # policy's.
        control = teacher.codec.control
        self._control: dict[int, int] = {}
        for text, token_id in policy.codec.control.items():
            if text in control:
                self._control[token_id] = control[text]
        if teacher.stop_ids:
            end = min(teacher.stop_ids)
            for token_id in policy.stop_ids - self._control.keys():
                self._control[token_id] = end

        for token_id in policy.preamble_ids:
            if token_id in policy.special_ids and token_id not in self._control:
                (mark,) = policy.token_texts([token_id])
                raise ConfigError(
                    f"teacher {name}: its tokenizer has no {mark!r}, which begins turns in the "
                    "policy's template; a teacher with another tokenizer needs the same marks of "
                    "turns"
                )

    def align(
        self, ids: Sequence[int], sampled: Collection[int]
    ) -> tuple[list[int], list[AlignedChunk]]:
        """Return the teacher's ids for the policy's, and the chunks of both.

        Text is encoded separately before, in and after sampled ids (at the given positions), as the
        teacher would read it.
        """
        own_ids: list[int] = []
        chunks: list[AlignedChunk] = []
        start = 0
        for place, token in enumerate(ids):
            control = self._control.get(token)
            is_boundary = place != start and (place in sampled) != (place - 1 in sampled)
            if control is None and not is_boundary:
                continue

            open_at = self._text(ids, start, place, place - 1 in sampled, own_ids, chunks)
            start = place
            if control is not None:
                # Sampled text that may go on ends with the control token, in one chunk.
                begin, own_begin = place, len(own_ids)
                if open_at is not None and place in sampled:
                    begin, own_begin = open_at
                chunks.append(AlignedChunk(begin, place + 1, own_begin, len(own_ids) + 1))
                own_ids.append(control)
                start = place + 1
        self._text(ids, start, len(ids), len(ids) - 1 in sampled, own_ids, chunks)
        return own_ids, chunks

    def _text(
        self,
        ids: Sequence[int],
        start: int,
        end: int,
        sampled: bool,
        own_ids: list[int],
        chunks: list[AlignedChunk],
    ) -> tuple[int, int] | None:
        """Add the teacher's ids of text, and its chunks; return where sampled text begins, in both,
        that may go on."""
        if start == end:
            return None

        pieces = [self._texts[token_id] for token_id in ids[start:end]]
        text = b"".join(pieces)
        first = len(own_ids)
        encoded = self._codec.encode_plain(text.decode("utf-8", "replace"), "control")
        own_ids += encoded
        own_pieces = [self._teacher_texts[token_id] for token_id in encoded]
        if b"".join(own_pieces) != text:
            return None  # bytes that are no text, which the teacher cannot read

        # How many of the teacher's ids end at each size of the text.
        own_counts = {size: count for count, size in enumerate(accumulate(map(len, own_pieces)), 1)}
        done = 0
        own_done = 0
        done_size = 0
        for count, size in enumerate(accumulate(map(len, pieces)), 1):
            if size not in own_counts or not pieces[count - 1]:
                continue
            may_go_on = sampled or count < len(pieces)
            if may_go_on and text[done_size:size] in self._begun:
                continue
            chunks.append(
                AlignedChunk(
                    start + done, start + count, first + own_done, first + own_counts[size]
                )
            )
            done = count
            own_done = own_counts[size]
            done_size = size
        return (start + done, first + own_done) if done_size < len(text) else None


def _beginnings(
    tokens: Sequence[bytes], others: Sequence[bytes], codec: Tokenizer
) -> Iterator[bytes]:
    """Yield the texts at which another tokenizer, of these ids, splits tokens."""
    for token in {*tokens} - {*others}:
        try:
            encoded = codec.encode_plain(token.decode(), "control")
        except UnicodeDecodeError:
            continue  # half a character
        pieces = [others[token_id] for token_id in encoded]
        yield from accumulate(pieces[:-1])
