"""Tokenizer wrapper: control tokens only where the caller puts them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, Protocol

from tokenizers import Tokenizer as RustTokenizer

from turnwise.errors import ModelError
from turnwise.renderers.bpe_cache import CachedBPE

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
        unknown = unknown_token_id(definition)
        self._ordinary = [row for row in added if is_plain_added_token(row, unknown)]
        control = [row for row in added if row not in self._ordinary]
        self.control: dict[str, int] = {row["content"]: row["id"] for row in control}
        self.special = frozenset(row["id"] for row in control if row.get("special"))
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self.fingerprint = _digest([tokenizer.to_str()])
        self.inexact_reason = inexact_append_reason(control)
        self._control_ids = frozenset(self.control.values())
        self._split = control_pattern(self.control)
        self._leans = depends_on_preceding_token(definition)
        self._decoder = ByteLevelDecoder.of(tokenizer, definition, self._control_ids)

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
        return without_added_tokens(self._definition, self._ordinary)

    @cached_property
    def _bare_behind(self) -> RustTokenizer:
        """The bare tokenizer for text behind a control token, which gains no mark that only the beginning of a text has."""
        return self._bare_of(without_prefix(self._definition, first_only=True))

    @cached_property
    def _bare_middle(self) -> RustTokenizer:
        """The bare tokenizer for text that goes on within a word or a line: it gains no word-start mark at all."""
        return self._bare_of(without_prefix(self._definition, first_only=False))

    def _bare_of(self, definition: Definition) -> RustTokenizer:
        return self._bare if definition == self._definition else without_added_tokens(definition, self._ordinary)

    @cached_property
    def _behind(self) -> RustTokenizer:
        """The tokenizer, control tokens and all, for text behind a control token."""
        changed = without_prefix(self._definition, first_only=True)
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
