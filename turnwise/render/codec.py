"""Text to ids and back, with control tokens only where the caller put them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Literal, Protocol

from tokenizers import Tokenizer as RustTokenizer

from turnwise.errors import ModelError
from turnwise.render import kinds
from turnwise.render.words import CachedBPE

PrecedingToken = Literal["nothing", "control", "text"]
"""What stands before a text: nothing (it begins a prompt), a control token, or other text that it goes on from."""


class Tokenizer(Protocol):
    """A tokenizer, seen from the renderer."""

    special: frozenset[int]
    """The control tokens that no reply may hold except as its end."""
    fingerprint: str

    @property
    def control(self) -> Mapping[str, int]:
        """Every control token: those called special, and all other added ones (`<tool_call>`), by their text."""
        ...

    @property
    def token_texts(self) -> Sequence[str]:
        """The text of each id alone, bytes that are no UTF-8 escaped."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of a text in which control tokens count."""
        ...

    def encode_segment(self, text: str) -> list[int]:
        """As `encode`, for what stands between two control tokens: no mark that only the beginning of a text has."""
        ...

    def encode_after(self, text: str, behind: str) -> list[int]:
        """As `encode`, for a text right behind the control token `behind`: the ids that the two together have there."""
        ...

    @property
    def appends_exactly(self) -> bool:
        """Whether a text behind a control token has the ids that it has in the whole, for every text."""
        ...

    @property
    def inexact_reason(self) -> str:
        """What keeps it from being exact; empty where nothing does."""
        ...

    def encode_with_offsets(self, text: str) -> list[tuple[int, int, int]]:
        """As `encode`, each id with the characters (start, end) that it covers."""
        ...

    def encode_plain(self, text: str, behind: PrecedingToken = "nothing") -> list[int]:
        """Ids of a text in which nothing is a control token, whatever it says."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens written out; they are read as ids that stand behind a control token."""
        ...


class ByteTokenizer:
    """One id per UTF-8 byte, and control tokens from 256 on; needs no file."""

    appends_exactly = True
    inexact_reason = ""

    def __init__(self, special: Sequence[str], other: Sequence[str] = ()) -> None:
        self.control = {text: 256 + i for i, text in enumerate((*special, *other))}
        self.special = frozenset(self.control[text] for text in special)
        self.vocab_size = 256 + len(self.control)
        self.fingerprint = _digest(["bytes", *special, "", *other])
        self._split = control_pattern(self.control)
        self._texts = [bytes([i]) for i in range(256)] + [text.encode() for text in self.control]
        self.token_texts = [text.decode("utf-8", "backslashreplace") for text in self._texts]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in self._split.split(text):
            if piece in self.control:
                ids.append(self.control[piece])
            else:
                ids.extend(piece.encode("utf-8", "replace"))
        return ids

    encode_segment = encode

    def encode_after(self, text: str, behind: str) -> list[int]:
        return self.encode(text)

    def encode_with_offsets(self, text: str) -> list[tuple[int, int, int]]:
        rows: list[tuple[int, int, int]] = []
        at = 0
        for piece in self._split.split(text):
            if piece in self.control:
                rows.append((self.control[piece], at, at + len(piece)))
            else:
                for offset, char in enumerate(piece):
                    rows.extend((byte, at + offset, at + offset + 1) for byte in char.encode("utf-8", "replace"))
            at += len(piece)
        return rows

    def encode_plain(self, text: str, behind: PrecedingToken = "nothing") -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def decode(self, ids: Sequence[int]) -> str:
        texts = self._texts
        return b"".join([texts[i] for i in ids]).decode("utf-8", "replace")


class HFTokenizer:
    """A Hugging Face `tokenizer.json`."""

    def __init__(self, tokenizer: RustTokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        definition = json.loads(tokenizer.to_str())
        added = definition.get("added_tokens") or []
        self._tokenizer = tokenizer
        self._words = CachedBPE.of(tokenizer, definition)
        self._definition = definition
        unknown = kinds.unknown_token_id(definition)
        self._ordinary = [row for row in added if kinds.is_plain_added_token(row, unknown)]
        control = [row for row in added if row not in self._ordinary]
        self.control: dict[str, int] = {row["content"]: row["id"] for row in control}
        self.special = frozenset(row["id"] for row in control if row.get("special"))
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self.fingerprint = _digest([tokenizer.to_str()])
        self.inexact_reason = kinds.inexact_append_reason(control)
        self._control_ids = frozenset(self.control.values())
        self._split = control_pattern(self.control)
        self._leans = kinds.depends_on_preceding_token(definition)
        self._decoder = kinds.ByteLevelDecoder.of(tokenizer, definition, self._control_ids)

    @classmethod
    def load(cls, path: Path) -> HFTokenizer:
        """Read a `tokenizer.json`.

        Raises:
            ModelError: when the file cannot be read as one.
        """
        try:
            return cls(RustTokenizer.from_file(str(path)))
        except Exception as error:  # tokenizers raises bare Exception
            raise ModelError(f"{path}: not a tokenizer that the tokenizers library can read ({error})") from error

    @cached_property
    def _bare(self) -> RustTokenizer:
        """The tokenizer without control tokens, for text in which nothing may be control."""
        return kinds.without_added_tokens(self._definition, self._ordinary)

    @cached_property
    def _bare_behind(self) -> RustTokenizer:
        """The bare tokenizer for text behind a control token, which gains no mark that only the beginning of a text has."""
        return self._bare_of(kinds.without_prefix(self._definition, first_only=True))

    @cached_property
    def _bare_middle(self) -> RustTokenizer:
        """The bare tokenizer for text that goes on within a word or a line: it gains no word-start mark at all."""
        return self._bare_of(kinds.without_prefix(self._definition, first_only=False))

    def _bare_of(self, definition: kinds.Definition) -> RustTokenizer:
        return self._bare if definition == self._definition else kinds.without_added_tokens(definition, self._ordinary)

    @cached_property
    def _behind(self) -> RustTokenizer:
        """The tokenizer, control tokens and all, for text behind a control token."""
        changed = kinds.without_prefix(self._definition, first_only=True)
        return self._tokenizer if changed == self._definition else RustTokenizer.from_str(json.dumps(changed))

    @cached_property
    def token_texts(self) -> list[str]:
        if self._decoder is not None:
            return self._decoder.token_texts()
        last = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        return [self._tokenizer.id_to_token(i) or "" for i in range(last + 1)]

    @property
    def appends_exactly(self) -> bool:
        return not self.inexact_reason

    def encode(self, text: str) -> list[int]:
        if self._words is not None and (ids := self._by_words(self._words, text)) is not None:
            return ids
        # The fast call leaves offsets out: about 15% cheaper than `encode`, with the same ids.
        return self._fast(self._tokenizer, text)

    def _by_words(self, words: CachedBPE, text: str) -> list[int] | None:
        """Encode a text between its control tokens by known words; None where the library has to look at it.

        A conversation of 128 messages costs a quarter of what it costs whole.
        """
        if self._leans or not self.appends_exactly:  # then what is beside a control token counts
            return words.encode(text)
        ids: list[int] = []
        for piece in self._split.split(text):
            if piece in self.control:
                ids.append(self.control[piece])
            elif (found := words.encode(piece)) is not None:
                ids += found
            else:
                return None
        return ids

    def encode_segment(self, text: str) -> list[int]:
        if self._words is not None and (ids := self._words.encode(text)) is not None:
            return ids
        return self._fast(self._behind, text)

    def encode_after(self, text: str, behind: str) -> list[int]:
        if not self._leans or not behind:
            return self.encode(text)
        ids, token = self._fast(self._tokenizer, behind + text), self.control.get(behind)
        if token in ids:
            return ids[ids.index(token) + 1 :]
        return self._fast(self._behind, text)

    @staticmethod
    def _fast(tokenizer: RustTokenizer, text: str) -> list[int]:
        try:
            return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except (UnicodeEncodeError, TypeError):  # a lone surrogate is no text
            return tokenizer.encode_batch_fast([replace_surrogates(text)], add_special_tokens=False)[0].ids

    def encode_with_offsets(self, text: str) -> list[tuple[int, int, int]]:
        encoding = self._tokenizer.encode(replace_surrogates(text), add_special_tokens=False)
        return [(i, start, end) for i, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)]

    def encode_plain(self, text: str, behind: PrecedingToken = "nothing") -> list[int]:
        ids: list[int] = []
        pieces = [replace_surrogates(text)]
        while pieces:
            piece = pieces.pop()
            bare = self._bare if behind == "nothing" else self._bare_behind if behind == "control" else self._bare_middle
            encoding = bare.encode(piece, add_special_tokens=False)
            leak = next((i for i, token in enumerate(encoding.ids) if token in self._control_ids), None)
            if leak is None:
                ids.extend(encoding.ids)
            else:
                # The text of an added token can also stand in the model's own vocabulary: cut it apart.
                start, end = encoding.offsets[leak]
                cut = start + 1 if end - start > 1 else end
                if cut == end:  # one character that is a control token by itself cannot be shown: it is left out
                    pieces.extend(part for part in (piece[end:], piece[:start]) if part)
                else:
                    pieces.extend((piece[cut:], piece[:cut]))
                continue
            behind = "text"
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        if self._decoder is not None:
            return self._decoder.decode(ids)
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def replace_surrogates(text: str) -> str:
    """The text with lone surrogates, which no tokenizer takes, as question marks."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


def control_pattern(control: Iterable[str]) -> re.Pattern[str]:
    """A pattern that splits a text at control tokens, longest first, and keeps them."""
    texts = sorted(control, key=len, reverse=True)
    return re.compile("(" + "|".join(re.escape(text) for text in texts) + ")" if texts else r"((?!))")


def _digest(parts: Iterable[str]) -> str:
    return sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:16]
