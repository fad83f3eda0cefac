"""Tokenizer wrapper that encodes control tokens only where the caller puts them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, Protocol

import orjson
from tokenizers import Tokenizer as RustTokenizer

from turnwright.errors import ModelError
from turnwright.renderers.bpe_cache import CachedBPE

Definition = Mapping[str, Any]
"""Parsed `tokenizer.json`."""
_RARE = "\ue000\u0b83\U0001f9ff\u2e3b\x01"
"""Characters that small vocabularies lack."""


def _from_definition(definition: Definition) -> RustTokenizer:
    return RustTokenizer.from_str(orjson.dumps(definition).decode())


def without_added_tokens(
    definition: Definition, keep: Sequence[Mapping[str, Any]]
) -> RustTokenizer:
    """Return the tokenizer with only the added tokens in `keep` and without a post-processor."""
    made = _from_definition({**definition, "added_tokens": list(keep), "post_processor": None})
    if all(made.token_to_id(row["content"]) == row["id"] for row in keep):
        return made
    # Ids of added tokens are consecutive: without the others these would change.
    return without_added_tokens(definition, ())


def without_prefix(definition: Definition, *, first_only: bool) -> dict[str, Any]:
    """Return the definition without the word-start mark that texts gain: every mark, or only that
    of a prompt's beginning."""

    def changed(part: Any) -> Any:
        if isinstance(part, list):
            return [changed(item) for item in part if first_only or not _prepends(item)]
        if not isinstance(part, dict):
            return part
        part = {
            key: changed(value) if isinstance(value, (dict, list)) else value
            for key, value in part.items()
        }
        if "prepend_scheme" in part and (not first_only or part["prepend_scheme"] == "first"):
            part |= {"prepend_scheme": "never"}
        if not first_only and part.get("add_prefix_space"):
            part |= {"add_prefix_space": False}
        return part

    normalizer = definition.get("normalizer")
    if not first_only and _prepends(normalizer):
        normalizer = None
    return {
        **definition,
        "normalizer": changed(normalizer),
        "pre_tokenizer": changed(definition.get("pre_tokenizer")),
    }


def _prepends(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "Prepend"


def unknown_token_id(definition: Definition) -> int | None:
    """Return the id of characters outside the vocabulary, if they have one; it carries no text and
    is not a control token."""
    model = definition.get("model") or {}
    unknown = model.get("unk_id")
    if unknown is None and isinstance(model.get("vocab"), dict):
        unknown = model["vocab"].get(model.get("unk_token"))
    if unknown is None:
        return None
    return (
        unknown
        if unknown
        in without_added_tokens(definition, ()).encode(_RARE, add_special_tokens=False).ids
        else None
    )


def is_plain_added_token(row: Mapping[str, Any], unknown: int | None) -> bool:
    """Return whether an added token is vocabulary, not control: white space,
    digits, or the unknown token."""
    text = row["content"].replace("\u2581", " ")
    return row["id"] == unknown or (not row.get("special") and (text.isspace() or text.isdigit()))


def depends_on_preceding_token(definition: Definition) -> bool:
    """Return whether the ids of a text may depend on the control token before it."""
    rows = definition.get("added_tokens") or []
    eats = any(row.get("lstrip") or row.get("rstrip") or row.get("single_word") for row in rows)
    joined = definition.get("normalizer") is not None and any(row.get("normalized") for row in rows)
    return eats or joined or without_prefix(definition, first_only=True) != dict(definition)


class ByteLevelDecoder:
    """Bytes of each id, for byte-level and SentencePiece-like tokenizers."""

    def __init__(
        self, table: Sequence[bytes], control: frozenset[int], *, space: bool, strict: bool
    ) -> None:
        self._table = table
        self._control = control
        self._space = space
        self._strict = strict

    @classmethod
    def of(
        cls, tokenizer: RustTokenizer, definition: Definition, control: frozenset[int]
    ) -> ByteLevelDecoder | None:
        """Return the decoder of a tokenizer; None for other kinds, which
        the library must decode."""
        parts = _flat(definition.get("decoder"), "decoders")
        names = [part.get("type") for part in parts]
        added = {row["content"] for row in definition.get("added_tokens") or []}
        if names == ["ByteLevel"]:
            alphabet = _byte_alphabet()
            to_latin, known = (
                str.maketrans({char: chr(byte) for char, byte in alphabet.items()}),
                frozenset(alphabet),
            )

            def bytes_of(token: str) -> bytes | None:
                return (
                    token.translate(to_latin).encode("latin-1") if known.issuperset(token) else None
                )

            table = _table(tokenizer, added, bytes_of)
            return (
                cls(table, control, space=_adds_space(definition), strict=True)
                if table is not None
                else None
            )
        mark = _word_start(parts)
        if mark is None or not set(names) <= {
            "Metaspace",
            "Replace",
            "ByteFallback",
            "Fuse",
            "Strip",
        }:
            return None
        falls_back = "ByteFallback" in names

        def text_of(token: str) -> bytes:
            if falls_back and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                return bytes([int(token[3:5], 16)])
            return token.replace(mark, " ").encode()

        table = _table(tokenizer, added, text_of)
        return (
            cls(table, control, space=_adds_space(definition), strict=False)
            if table is not None
            else None
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids that follow a control token; invalid UTF-8 becomes U+FFFD.

        Raises `IndexError` for unknown ids of a byte-level tokenizer; other kinds skip
        them, as the library does.
        """
        table = self._table
        if self._strict and not self._space:
            found = itemgetter(*ids)(table) if len(ids) > 1 else [table[i] for i in ids]
            return b"".join(found).decode("utf-8", "replace")
        texts: list[bytes] = []
        begins = self._space
        for i in ids:
            text = table[i] if self._strict or i < len(table) else b""
            texts.append(text[1:] if begins and text.startswith(b" ") else text)
            begins = self._space and i in self._control
        return b"".join(texts).decode("utf-8", "replace")

    def token_bytes(self) -> Sequence[bytes] | None:
        """Return the bytes of each id; None where a word-start mark at the beginning is no text."""
        return self._table if self._strict and not self._space else None

    def token_texts(self) -> list[str]:
        """Return the text of each id alone, with bytes that are not valid UTF-8 escaped."""
        return [text.decode("utf-8", "backslashreplace") for text in self._table]


def _table(tokenizer: RustTokenizer, added: set[str], text_of: Any) -> list[bytes] | None:
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * max(
        max(vocab.values(), default=-1) + 1, tokenizer.get_vocab_size(with_added_tokens=True)
    )
    for token, index in vocab.items():
        text = token.encode() if token in added else text_of(token)
        if text is None:
            return None
        table[index] = text
    return table


def _adds_space(definition: Definition) -> bool:
    """Return whether a text after a control token gains a space, which decoding removes.

    If only the beginning of a prompt gains one, none is removed: ids are decoded as
    ids after a control token.
    """
    normal = _flat(definition.get("normalizer"), "normalizers")
    cuts = _flat(definition.get("pre_tokenizer"), "pretokenizers")
    always = any(
        part.get("prepend_scheme") == "always" or part.get("add_prefix_space") for part in cuts
    )
    return always or any(map(_prepends, normal))


def _word_start(parts: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the character that represents a space in a SentencePiece-like vocabulary."""
    for part in parts:
        if part.get("type") == "Metaspace":
            return str(part.get("replacement"))
        if part.get("type") == "Replace" and part.get("content") == " ":
            return str((part.get("pattern") or {}).get("String") or "") or None
    return None


def _flat(part: Any, inner: str) -> list[Mapping[str, Any]]:
    if not part:
        return []
    return (
        [leaf for item in part[inner] for leaf in _flat(item, inner)]
        if part.get("type") == "Sequence"
        else [part]
    )


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's printable characters for bytes: printable Latin-1 bytes keep theirs, the
    rest follow from 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(rest)}


PrecedingToken = Literal["nothing", "control", "text"]
"""What precedes a text: nothing (it begins a prompt), a control token, or other
text that it continues."""


class Tokenizer(Protocol):
    """Tokenizer interface of the renderer."""

    special: frozenset[int]
    """Control tokens that no reply may contain except as its end."""
    fingerprint: str
    vocab_size: int
    """Number of ids, added tokens included."""

    @property
    def control(self) -> Mapping[str, int]:
        """Ids of all control tokens by text: special ones and other added ones (`<tool_call>`)."""

    @property
    def token_texts(self) -> Sequence[str]:
        """Text of each id alone, with bytes that are not valid UTF-8 escaped."""

    @property
    def token_bytes(self) -> Sequence[bytes] | None:
        """Bytes of each id; None where they depend on the ids before it."""

    def encode(self, text: str) -> list[int]:
        """Encode a text, control tokens included."""

    def encode_segment(self, text: str) -> list[int]:
        """Encode text between two control tokens, without the mark of a prompt's beginning."""

    def encode_after(self, text: str, before: str) -> list[int]:
        """Encode a text that follows the control token `before`, with the ids that it
        has in the joint text."""

    @property
    def appends_exactly(self) -> bool:
        """Whether every text after a control token has the same ids as in the complete text."""

    @property
    def inexact_reason(self) -> str:
        """Why `appends_exactly` is false; empty if it is true."""

    def encode_with_offsets(self, text: str) -> list[tuple[int, int, int]]:
        """Encode a text, control tokens included; return (id, start, end)
        with character offsets."""

    def encode_plain(self, text: str, after: PrecedingToken = "nothing") -> list[int]:
        """Encode plain text, in which nothing is a control token."""

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids that follow a control token; control tokens are included."""


class ByteTokenizer:
    """Tokenizer with one id per UTF-8 byte and control tokens from 256 on; needs no file."""

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
        self.token_bytes = self._texts

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in self._split.split(text):
            if piece in self.control:
                ids.append(self.control[piece])
            else:
                ids.extend(piece.encode("utf-8", "replace"))
        return ids

    encode_segment = encode

    def encode_after(self, text: str, before: str) -> list[int]:
        return self.encode(text)

    def encode_with_offsets(self, text: str) -> list[tuple[int, int, int]]:
        rows: list[tuple[int, int, int]] = []
        at = 0
        for piece in self._split.split(text):
            if piece in self.control:
                rows.append((self.control[piece], at, at + len(piece)))
            else:
                for offset, char in enumerate(piece):
                    rows.extend(
                        (byte, at + offset, at + offset + 1)
                        for byte in char.encode("utf-8", "replace")
                    )
            at += len(piece)
        return rows

    def encode_plain(self, text: str, after: PrecedingToken = "nothing") -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def decode(self, ids: Sequence[int]) -> str:
        texts = self._texts
        return b"".join([texts[i] for i in ids]).decode("utf-8", "replace")


class HFTokenizer:
    """Tokenizer of a Hugging Face `tokenizer.json`."""

    def __init__(self, tokenizer: RustTokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        text = tokenizer.to_str()
        definition = orjson.loads(text)
        added = definition.get("added_tokens") or []
        self._tokenizer = tokenizer
        self._words = CachedBPE.of(tokenizer, definition)
        self._definition = definition
        self._plain_after: dict[PrecedingToken, RustTokenizer] = {}
        unknown = unknown_token_id(definition)
        self._ordinary = [row for row in added if is_plain_added_token(row, unknown)]
        control = [row for row in added if row not in self._ordinary]
        self.control: dict[str, int] = {row["content"]: row["id"] for row in control}
        self.special = frozenset(row["id"] for row in control if row.get("special"))
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self.fingerprint = _digest([text])
        words = ", ".join([row["content"] for row in control if row.get("single_word")][:3])
        between = (
            f"{words} match only between other words (single_word), which depends on the "
            "adjacent text"
        )
        self.inexact_reason = between if words else ""
        self._control_ids = frozenset(self.control.values())
        self._split = control_pattern(self.control)
        self._depends_on_preceding = depends_on_preceding_token(definition)
        self._decoder = ByteLevelDecoder.of(tokenizer, definition, self._control_ids)

    @classmethod
    def load(cls, path: Path) -> HFTokenizer:
        """Read a `tokenizer.json`.

        Raises `ModelError` if the file cannot be read as a tokenizer.
        """
        try:
            return cls(RustTokenizer.from_file(str(path)))
        except Exception as error:  # tokenizers raises bare Exception
            raise ModelError(
                f"{path}: not a tokenizer that the tokenizers library can read ({error})"
            ) from error

    def _plain(self, after: PrecedingToken) -> RustTokenizer:
        """Return the tokenizer without control tokens.

        After a control token, text gets no mark of a prompt's beginning; after text that it
        continues, no word-start mark.
        """
        if after not in self._plain_after:
            definition = self._definition
            changed = (
                definition
                if after == "nothing"
                else without_prefix(definition, first_only=after == "control")
            )
            same = after != "nothing" and changed == definition
            self._plain_after[after] = (
                self._plain("nothing") if same else without_added_tokens(changed, self._ordinary)
            )
        return self._plain_after[after]

    @cached_property
    def _after_control(self) -> RustTokenizer:
        """Tokenizer with control tokens for text after a control token."""
        changed = without_prefix(self._definition, first_only=True)
        return self._tokenizer if changed == self._definition else _from_definition(changed)

    @cached_property
    def token_texts(self) -> list[str]:
        if self._decoder is not None:
            return self._decoder.token_texts()
        last = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        return [self._tokenizer.id_to_token(i) or "" for i in range(last + 1)]

    @property
    def token_bytes(self) -> Sequence[bytes] | None:
        return None if self._decoder is None else self._decoder.token_bytes()

    @property
    def appends_exactly(self) -> bool:
        return not self.inexact_reason

    def encode(self, text: str) -> list[int]:
        if self._words is not None and (ids := self._by_words(self._words, text)) is not None:
            return ids
        # The fast call omits offsets: about 15% cheaper than `encode`, with the same ids.
        return self._fast(self._tokenizer, text)

    def _by_words(self, words: CachedBPE, text: str) -> list[int] | None:
        """Encode the text between control tokens by cached words; None if
        the library must encode it.

        For a conversation of 128 messages this costs a quarter of encoding the complete text.
        """
        if self._depends_on_preceding or not self.appends_exactly:
            # Then text next to a control token has other ids.
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
        return self._fast(self._after_control, text)

    def encode_after(self, text: str, before: str) -> list[int]:
        if not self._depends_on_preceding or not before:
            return self.encode(text)
        ids, token = self._fast(self._tokenizer, before + text), self.control.get(before)
        if token in ids:
            return ids[ids.index(token) + 1 :]
        return self._fast(self._after_control, text)

    @staticmethod
    def _fast(tokenizer: RustTokenizer, text: str) -> list[int]:
        try:
            return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except (UnicodeEncodeError, TypeError):  # a lone surrogate
            return tokenizer.encode_batch_fast(
                [replace_surrogates(text)], add_special_tokens=False
            )[0].ids

    def encode_with_offsets(self, text: str) -> list[tuple[int, int, int]]:
        encoding = self._tokenizer.encode(replace_surrogates(text), add_special_tokens=False)
        return [
            (i, start, end) for i, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
        ]

    def encode_plain(self, text: str, after: PrecedingToken = "nothing") -> list[int]:
        ids: list[int] = []
        pieces = [replace_surrogates(text)]
        while pieces:
            piece = pieces.pop()
            encoding = self._plain(after).encode(piece, add_special_tokens=False)
            leak = next(
                (i for i, token in enumerate(encoding.ids) if token in self._control_ids), None
            )
            if leak is None:
                ids.extend(encoding.ids)
                after = "text"
                continue
            # The text of an added token can also be in the model's own vocabulary: split it.
            start, end = encoding.offsets[leak]
            if end - start > 1:
                pieces.extend((piece[start + 1 :], piece[: start + 1]))
            else:  # one character that is a control token by itself cannot be encoded: drop it
                pieces.extend(part for part in (piece[end:], piece[:start]) if part)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        if self._decoder is not None:
            return self._decoder.decode(ids)
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which no tokenizer accepts, by question marks."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


def control_pattern(control: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that splits a text at control tokens, longest first, and keeps them."""
    texts = sorted(control, key=len, reverse=True)
    return re.compile(
        "(" + "|".join(re.escape(text) for text in texts) + ")" if texts else r"((?!))"
    )


def _digest(parts: Iterable[str]) -> str:
    return sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:16]
