"""Kinds of tokenizers: what in a `tokenizer.json` makes a text's ids depend on where it stands, and how its ids read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

Definition = Mapping[str, Any]
"""A `tokenizer.json` as read."""
_RARE = "\ue000\u0b83\U0001f9ff\u2e3b\x01"
"""Characters that small vocabularies do not know."""


def without_added_tokens(definition: Definition, keep: Sequence[Mapping[str, Any]]) -> RustTokenizer:
    """The tokenizer with no added tokens but these, and nothing written around a text."""
    made = RustTokenizer.from_str(json.dumps({**definition, "added_tokens": list(keep), "post_processor": None}))
    if all(made.token_to_id(row["content"]) == row["id"] for row in keep):
        return made
    return without_added_tokens(
        definition, ()
    )  # ids of added tokens follow one another: without the others these would get new ones


def without_prefix(definition: Definition, *, first_only: bool) -> dict[str, Any]:
    """The definition without the word-start mark that a text gains: all of it, or only where the whole begins."""

    def changed(part: Any) -> Any:
        if isinstance(part, list):
            return [changed(item) for item in part if first_only or not _prepends(item)]
        if not isinstance(part, dict):
            return part
        part = {key: changed(value) if isinstance(value, (dict, list)) else value for key, value in part.items()}
        if "prepend_scheme" in part and (not first_only or part["prepend_scheme"] == "first"):
            part |= {"prepend_scheme": "never"}
        if not first_only and part.get("add_prefix_space"):
            part |= {"add_prefix_space": False}
        return part

    normalizer = definition.get("normalizer")
    if not first_only and _prepends(normalizer):
        normalizer = None
    return {**definition, "normalizer": changed(normalizer), "pre_tokenizer": changed(definition.get("pre_tokenizer"))}


def _prepends(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "Prepend"


def unknown_token_id(definition: Definition) -> int | None:
    """The id that characters outside the vocabulary become, if any do: such an id says nothing, and is no control token."""
    model = definition.get("model") or {}
    unknown = model.get("unk_id")
    if unknown is None and isinstance(model.get("vocab"), dict):
        unknown = model["vocab"].get(model.get("unk_token"))
    if unknown is None:
        return None
    return unknown if unknown in without_added_tokens(definition, ()).encode(_RARE, add_special_tokens=False).ids else None


def is_plain_added_token(row: Mapping[str, Any], unknown: int | None) -> bool:
    """Whether an added token is vocabulary rather than control: white space, digits, or what unknown characters become."""
    text = row["content"].replace("\u2581", " ")
    return row["id"] == unknown or (not row.get("special") and (text.isspace() or text.isdigit()))


def depends_on_preceding_token(definition: Definition) -> bool:
    """Whether the ids of a text may depend on the control token before it."""
    rows = definition.get("added_tokens") or []
    eats = any(row.get("lstrip") or row.get("rstrip") or row.get("single_word") for row in rows)
    joined = definition.get("normalizer") is not None and any(row.get("normalized") for row in rows)
    return eats or joined or without_prefix(definition, first_only=True) != dict(definition)


def inexact_append_reason(control: Sequence[Mapping[str, Any]]) -> str:
    """Why appends may have other ids than they have in the whole; empty where they may not."""
    words = [row["content"] for row in control if row.get("single_word")]
    if words:
        return f"{', '.join(words[:3])} count only between other words (single_word), which depends on the text beside them"
    return ""


class ByteLevelDecoder:
    """The bytes of each id, for byte-level and SentencePiece-like tokenizers."""

    def __init__(self, table: Sequence[bytes], control: frozenset[int], *, space: bool, strict: bool) -> None:
        self._table = table
        self._control = control
        self._space = space
        self._strict = strict

    @classmethod
    def of(cls, tokenizer: RustTokenizer, definition: Definition, control: frozenset[int]) -> ByteLevelDecoder | None:
        """The decoder of a tokenizer; None for other kinds, which the library has to decode."""
        parts = _flat(definition.get("decoder"), "decoders")
        names = [part.get("type") for part in parts]
        added = {row["content"] for row in definition.get("added_tokens") or []}
        if names == ["ByteLevel"]:
            alphabet = _byte_alphabet()
            table = _table(tokenizer, added, lambda token: _bytes_of(token, alphabet))
            return cls(table, control, space=_adds_space(definition), strict=True) if table is not None else None
        mark = _word_start(parts)
        if mark is None or not set(names) <= {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}:
            return None
        falls_back = "ByteFallback" in names

        def text_of(token: str) -> bytes:
            if falls_back and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                return bytes([int(token[3:5], 16)])
            return token.replace(mark, " ").encode()

        table = _table(tokenizer, added, text_of)
        if table is None:
            return None
        return cls(table, control, space=_adds_space(definition), strict=False)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids that stand behind a control token; bytes that are no UTF-8 become U+FFFD.

        Raises:
            IndexError: for ids that are none, of a byte-level tokenizer; others have no text for them, as in the library.
        """
        table = self._table
        if self._strict and not self._space:
            return b"".join(map(table.__getitem__, ids)).decode("utf-8", "replace")
        texts: list[bytes] = []
        begins = self._space
        for i in ids:
            text = table[i] if self._strict or i < len(table) else b""
            texts.append(text[1:] if begins and text.startswith(b" ") else text)
            begins = self._space and i in self._control
        return b"".join(texts).decode("utf-8", "replace")

    def token_texts(self) -> list[str]:
        """The text of each id alone, bytes that are no UTF-8 escaped."""
        return [text.decode("utf-8", "backslashreplace") for text in self._table]


def _table(tokenizer: RustTokenizer, added: set[str], text_of: Any) -> list[bytes] | None:
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * max(max(vocab.values(), default=-1) + 1, tokenizer.get_vocab_size(with_added_tokens=True))
    for token, index in vocab.items():
        text = token.encode() if token in added else text_of(token)
        if text is None:
            return None
        table[index] = text
    return table


def _adds_space(definition: Definition) -> bool:
    """Whether a text behind a control token gains a space, which reading takes away again.

    Where only the beginning of a whole prompt gains one, none is taken away: ids are read as ids behind a control token.
    """
    normal = _flat(definition.get("normalizer"), "normalizers")
    cuts = _flat(definition.get("pre_tokenizer"), "pretokenizers")
    always = any(part.get("prepend_scheme") == "always" or part.get("add_prefix_space") for part in cuts)
    return always or any(map(_prepends, normal))


def _word_start(parts: Sequence[Mapping[str, Any]]) -> str | None:
    """The character that stands for a space in a vocabulary of SentencePiece's kind."""
    for part in parts:
        if part.get("type") == "Metaspace":
            return str(part.get("replacement"))
        if part.get("type") == "Replace" and part.get("content") == " ":
            return str((part.get("pattern") or {}).get("String") or "") or None
    return None


def _flat(part: Any, inner: str) -> list[Mapping[str, Any]]:
    if not part:
        return []
    return [leaf for item in part[inner] for leaf in _flat(item, inner)] if part.get("type") == "Sequence" else [part]


def _bytes_of(token: str, alphabet: Mapping[str, int]) -> bytes | None:
    return bytes(alphabet[char] for char in token) if all(char in alphabet for char in token) else None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: the printable Latin-1 ones stand for themselves, the rest follow from 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(rest)}
