"""Ids of one tokenizer as ids of another: control tokens by their text, other text by its
bytes, chunk by chunk."""

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
        texts, own = policy.codec.token_bytes, teacher.codec.token_bytes
        if texts is None or own is None:
            which = "teacher's" if own is None else "policy's"
            raise ConfigError(
                f"teacher {name}: the {which} tokenizer is not byte-level, so their ids cannot be "
                "aligned"
            )
        self._texts, self._own, self._codec = texts, own, teacher.codec
        # After "lo", a policy that splits "lookup" is in the middle of a word that the teacher has
        # as one id: their probabilities of what comes next are not of the same events.
        self._begun = {
            *_beginnings(own, texts, policy.codec),
            *_beginnings(texts, own, teacher.codec),
        }
        control = teacher.codec.control
        self._control = {
            i: control[text] for text, i in policy.codec.control.items() if text in control
        }
        ends = sorted(teacher.stop_ids)
        self._control |= {i: ends[0] for i in policy.stop_ids - self._control.keys() if ends}
        opening = policy.preamble_ids
        if missing := [
            policy.token_texts([i])[0]
            for i in opening
            if i in policy.special_ids and i not in self._control
        ]:
            raise ConfigError(
                f"teacher {name}: its tokenizer has no {missing[0]!r}, which begins turns in the "
                "policy's template; a teacher with another tokenizer needs the same marks of turns"
            )

    def align(
        self, ids: Sequence[int], sampled: Collection[int]
    ) -> tuple[list[int], list[AlignedChunk]]:
        """Return the teacher's ids for the policy's, and the chunks of both. Text is
        encoded separately before, in and after sampled ids (at the given positions), as the
        teacher would read it."""
        made: list[int] = []
        chunks: list[AlignedChunk] = []
        start = 0
        for place, token in enumerate(ids):
            mapped = self._control.get(token)
            if mapped is None and (place == start or (place in sampled) == (place - 1 in sampled)):
                continue
            before = self._text(ids, start, place, place - 1 in sampled, made, chunks)
            start = place
            if mapped is not None:
                first, own_first = (
                    before if before is not None and place in sampled else (place, len(made))
                )
                chunks.append(AlignedChunk(first, place + 1, own_first, len(made) + 1))
                made.append(mapped)
                start = place + 1
        self._text(ids, start, len(ids), len(ids) - 1 in sampled, made, chunks)
        return made, chunks

    def _text(
        self,
        ids: Sequence[int],
        start: int,
        end: int,
        sampled: bool,
        made: list[int],
        chunks: list[AlignedChunk],
    ) -> tuple[int, int] | None:
        """Add the teacher's ids of text, and its chunks; return where sampled text begins, in
        both, that may go on."""
        if start == end:
            return None
        pieces = [self._texts[i] for i in ids[start:end]]
        everything = b"".join(pieces)
        own, first = (
            self._codec.encode_plain(everything.decode("utf-8", "replace"), "control"),
            len(made),
        )
        made += own
        theirs = [self._own[i] for i in own]
        if b"".join(theirs) != everything:
            return None  # bytes that are no text, which the teacher cannot read
        ends = {size: n for n, size in enumerate(accumulate(map(len, theirs)), 1)}
        before, own_before, size_before = 0, 0, 0
        for n, size in enumerate(accumulate(map(len, pieces)), 1):
            if size not in ends or not pieces[n - 1]:
                continue
            if everything[size_before:size] in self._begun and (sampled or n < len(pieces)):
                continue
            chunks.append(
                AlignedChunk(start + before, start + n, first + own_before, first + ends[size])
            )
            before, own_before, size_before = n, ends[size], size
        return (start + before, first + own_before) if size_before < len(everything) else None


def _beginnings(
    tokens: Sequence[bytes], others: Sequence[bytes], codec: Tokenizer
) -> Iterator[bytes]:
    """Yield the texts at which another tokenizer, of these ids, splits tokens."""
    for token in {*tokens} - {*others}:
        try:
            pieces = [others[i] for i in codec.encode_plain(token.decode(), "control")]
        except UnicodeDecodeError:
            continue  # half a character
        yield from accumulate(pieces[:-1])
