"""Exact byte-level BPE with cached words: ids of ASCII text at a fraction of the cost.

Byte-level BPE splits a text into words by a pattern and encodes each word independently, so the ids
of a text are those of its words in order. Word ids are cached; a new word is encoded by the
tokenizers library. On ASCII text without added tokens, Python's `re` and the library's engine match
the pattern equally, and Unicode normalization changes nothing. The library encodes all other text.
At construction, the ids of difficult texts are compared with the library's; tokenizers of another
kind, or with any difference, are not cached.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import orjson
from tokenizers import Tokenizer

_GPT2 = r" \p{L}+|\p{L}+|'(?:[stmd]|re|ve|ll)| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""Default pattern of `ByteLevel`, with the most frequent words first, which no other alternative
matches."""
_ASCII = {
    "L": "a-zA-Z",
    "Lu": "A-Z",
    "Ll": "a-z",
    "N": "0-9",
    "Nd": "0-9",
    "M": "",
    "Lt": "",
    "Lm": "",
    "Lo": "",
}
"""ASCII characters of Unicode categories."""
_UNICODE_FORMS = {"NFC", "NFD", "NFKC", "NFKD"}
_MAX_WORDS = 200_000
"""Maximum number of cached words, because untrusted text must not fill the memory."""
_TRIALS = 64

Cut = Callable[[str], Sequence[str]]


class WordCache(dict[str, tuple[int, ...]]):
    """Ids by word; a missing word is encoded and added."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, word: str) -> tuple[int, ...]:
        if len(self) >= _MAX_WORDS:
            self.clear()
        ids = tuple(self._tokenizer.encode(word, add_special_tokens=False).ids)
        self[word] = ids
        return ids


class CachedBPE:
    """Encoder of ASCII text without added tokens, exact to the tokenizer."""

    def __init__(self, cuts: Sequence[Cut], words: WordCache, first_characters: str) -> None:
        """`cuts` split a text into words, one after the other; `first_characters` are those with
        which added tokens begin."""
        self._cuts = cuts
        self._first_cut = cuts[0]
        self._has_one_cut = len(cuts) == 1
        self._look_up = words.__getitem__
        self._first_characters = first_characters

    @classmethod
    def of(cls, tokenizer: Tokenizer, definition: Mapping[str, Any]) -> CachedBPE | None:
        """Return the encoder of a tokenizer and its `tokenizer.json`; None for an unknown kind, or
        other ids in a trial."""
        model = definition.get("model") or {}
        if model.get("type") != "BPE" or model.get("dropout"):
            return None
        cuts = _cuts(definition.get("pre_tokenizer"))
        if not cuts or not _keeps_ascii(definition.get("normalizer")):
            return None
        added_tokens = [row["content"] for row in definition.get("added_tokens") or []]
        if not all(added_tokens):
            return None

        # The same merges, for one word at a time.
        pre_tokenizer = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        }
        word_definition = {
            **definition,
            "added_tokens": [],
            "post_processor": None,
            "normalizer": None,
            "pre_tokenizer": pre_tokenizer,
        }
        words = WordCache(Tokenizer.from_str(orjson.dumps(word_definition).decode()))
        encoder = cls(cuts, words, "".join(sorted({text[0] for text in added_tokens})))

        for text in _trials():
            ids = encoder.encode(text)
            if ids is not None and ids != tokenizer.encode(text, add_special_tokens=False).ids:
                return None
        return encoder

    def encode(self, text: str) -> list[int] | None:
        """Encode a text; None if it is not ASCII or may contain an added token, so that the library
        must encode it."""
        if not text.isascii() or any(map(text.__contains__, self._first_characters)):
            return None

        words = self._first_cut(text)
        if not self._has_one_cut:
            for cut in self._cuts[1:]:
                words = [part for word in words for part in cut(word)]
        if len("".join(words)) != len(text):  # the pattern leaves gaps, which are separate words
            return None

        ids: list[int] = []
        add = ids.extend  # with words of one or two ids a fourth faster than `chain`
        for word_ids in map(self._look_up, words):
            add(word_ids)
        return ids


def _keeps_ascii(normalizer: Mapping[str, Any] | None) -> bool:
    """Return whether a normalizer leaves ASCII unchanged."""
    if normalizer is None:
        return True
    if normalizer.get("type") == "Sequence":
        return all(_keeps_ascii(part) for part in normalizer["normalizers"])
    return normalizer.get("type") in _UNICODE_FORMS


def _cuts(pre_tokenizer: Mapping[str, Any] | None) -> list[Cut] | None:
    """Return the split functions of a pre-tokenizer, in order; None if one is unknown."""
    if pre_tokenizer is None:
        return None
    parts = [pre_tokenizer]
    if pre_tokenizer.get("type") == "Sequence":
        parts = pre_tokenizer["pretokenizers"]

    cuts: list[Cut] = []
    is_byte_level = False
    for part in parts:
        if is_byte_level:  # a later part would see the characters that represent bytes
            return None
        pattern = _pattern_of(part)
        if pattern is None:
            return None
        if pattern:
            cut = _compile(pattern)
            if cut is None:
                return None
            cuts.append(cut)
        is_byte_level = part.get("type") == "ByteLevel"
    return cuts if is_byte_level and cuts else None


def _pattern_of(part: Mapping[str, Any]) -> str | None:
    """Return the pattern of a pre-tokenizer's words.

    Empty if it keeps a text whole, None if it is unknown.
    """
    kind = part.get("type")
    if kind == "ByteLevel" and not part.get("add_prefix_space"):
        return _GPT2 if part.get("use_regex", True) else ""
    if kind == "Digits":
        return r"\p{N}|[^\p{N}]+" if part.get("individual_digits") else r"\p{N}+|[^\p{N}]+"
    if kind == "Split" and part.get("behavior") == "Isolated" and not part.get("invert"):
        pattern: str | None = (part.get("pattern") or {}).get("Regex")
        return pattern
    return None


def _compile(pattern: str) -> Cut | None:
    """Return a function that lists a pattern's matches in ASCII text; None if Python's `re` has no
    equivalent."""
    has_equivalent = True

    def characters_of(match: re.Match[str]) -> str:
        nonlocal has_equivalent
        is_negated = match.group(1) == "P"
        characters = _ASCII.get(match.group(2))
        before = pattern[: match.start()]
        in_brackets = before.count("[") > before.count("]")
        if characters is None or is_negated or not (characters or in_brackets):
            has_equivalent = False
            return ""
        return characters if in_brackets else f"[{characters}]"

    text = re.sub(r"\\([pP])\{(\w+)\}", characters_of, pattern)
    has_group = re.search(r"\((?!\?)", text)  # it would change what findall returns
    if not has_equivalent or has_group:
        return None
    try:
        return re.compile(text, re.ASCII).findall
    except re.error:
        return None


_TRIAL_PIECES = (
    *(" ", "  ", "\n", "\n\n", "\t", "\r\n", "\x0b", "\x1c"),
    *("'s", "'LL", "'", "_", "--", "...", "0", "42", "3.14", "("),
    *("word", "Word", "ABC", "x", "don't", "\x00", "\x7f", '{"a": 1}'),
    *("user\n", " a", "a ", "/*", "#!", "\\n", "1st"),
)
"""White space of all kinds, digits, apostrophes, punctuation, control characters."""


def _trials() -> Iterator[str]:
    """Yield difficult texts."""
    rng = random.Random(0)
    for _ in range(_TRIALS):
        size = rng.randint(1, 24)
        yield "".join(rng.choice(_TRIAL_PIECES) for _ in range(size))
