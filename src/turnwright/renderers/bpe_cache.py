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
"""Default pattern of `ByteLevel`, with the most frequent words first, which no
other alternative matches."""
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
        ids = self[word] = tuple(self._tokenizer.encode(word, add_special_tokens=False).ids)
        return ids


class CachedBPE:
    """Encoder of ASCII text without added tokens, exact to the tokenizer."""

    def __init__(self, cuts: Sequence[Cut], words: WordCache, marks: str) -> None:
        self._cuts = cuts
        self._first = cuts[0]
        self._single = len(cuts) == 1
        self._look_up = words.__getitem__
        self._marks = marks

    @classmethod
    def of(cls, tokenizer: Tokenizer, definition: Mapping[str, Any]) -> CachedBPE | None:
        """Return the encoder of a tokenizer and its `tokenizer.json`; None for an unknown kind, or
        other ids in a trial."""
        model, cuts = definition.get("model") or {}, _cuts(definition.get("pre_tokenizer"))
        if (
            model.get("type") != "BPE"
            or model.get("dropout")
            or not cuts
            or not _harmless(definition.get("normalizer"))
        ):
            return None
        added = [row["content"] for row in definition.get("added_tokens") or []]
        if not all(added):
            return None
        plain = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        }
        changes: dict[str, Any] = {
            "added_tokens": [],
            "post_processor": None,
            "normalizer": None,
            "pre_tokenizer": plain,
        }
        words = WordCache(Tokenizer.from_str(orjson.dumps(dict(definition) | changes).decode()))
        encoder = cls(cuts, words, "".join(sorted({text[0] for text in added})))
        for text in _trials():
            ids = encoder.encode(text)
            if ids is not None and ids != tokenizer.encode(text, add_special_tokens=False).ids:
                return None
        return encoder

    def encode(self, text: str) -> list[int] | None:
        """Encode a text; None if it is not ASCII or may contain an added token, so that the
        library must encode it."""
        if not text.isascii() or any(map(text.__contains__, self._marks)):
            return None
        words = self._first(text)
        if not self._single:
            for cut in self._cuts[1:]:
                words = [part for word in words for part in cut(word)]
        if len("".join(words)) != len(text):  # the pattern leaves gaps, which are separate words
            return None
        ids: list[int] = []
        add = ids.extend  # with words of one or two ids a fourth faster than `chain`
        for known in map(self._look_up, words):
            add(known)
        return ids


def _harmless(normalizer: Mapping[str, Any] | None) -> bool:
    """Return whether a normalizer leaves ASCII unchanged."""
    if normalizer is None:
        return True
    if normalizer.get("type") == "Sequence":
        return all(_harmless(part) for part in normalizer["normalizers"])
    return normalizer.get("type") in _UNICODE_FORMS


def _cuts(pre_tokenizer: Mapping[str, Any] | None) -> list[Cut] | None:
    """Return the split functions of a pre-tokenizer, in order; None if one is unknown."""
    if pre_tokenizer is None:
        return None
    parts = (
        pre_tokenizer["pretokenizers"]
        if pre_tokenizer.get("type") == "Sequence"
        else [pre_tokenizer]
    )
    cuts: list[Cut] = []
    byte_level = False
    for part in parts:
        kind = part.get("type")
        pattern: str | None
        if byte_level:  # a later part would see the characters that represent bytes
            return None
        if kind == "ByteLevel":
            byte_level = True
            if part.get("add_prefix_space"):
                return None
            pattern = _GPT2 if part.get("use_regex", True) else ""
        elif kind == "Digits":
            pattern = r"\p{N}|[^\p{N}]+" if part.get("individual_digits") else r"\p{N}+|[^\p{N}]+"
        elif kind == "Split" and part.get("behavior") == "Isolated" and not part.get("invert"):
            pattern = (part.get("pattern") or {}).get("Regex")
        else:
            return None
        if pattern is None:
            return None
        if pattern:
            cut = _compile(pattern)
            if cut is None:
                return None
            cuts.append(cut)
    return cuts if byte_level and cuts else None


def _compile(pattern: str) -> Cut | None:
    """Return a function that lists a pattern's matches in ASCII text; None if Python's
    `re` has no equivalent."""
    unknown = False

    def category(match: re.Match[str]) -> str:
        nonlocal unknown
        found = _ASCII.get(match.group(2))
        before = pattern[: match.start()]
        inside = before.count("[") > before.count("]")
        unknown |= found is None or match.group(1) == "P" or not (found or inside)
        return (found or "") if inside else f"[{found}]"

    text = re.sub(r"\\([pP])\{(\w+)\}", category, pattern)
    if unknown or re.search(r"\((?!\?)", text):  # a group would change what findall returns
        return None
    try:
        return re.compile(text, re.ASCII).findall
    except re.error:
        return None


def _trials() -> Iterator[str]:
    """Yield difficult texts: all kinds of white space, digits, apostrophes,
    punctuation, control characters."""
    rng = random.Random(0)
    pieces = [
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        "\r\n",
        "\x0b",
        "\x1c",
        "'s",
        "'LL",
        "'",
        "_",
        "--",
        "...",
        "0",
        "42",
        "3.14",
        "(",
    ]
    pieces += [
        "word",
        "Word",
        "ABC",
        "x",
        "don't",
        "\x00",
        "\x7f",
        '{"a": 1}',
        "user\n",
        " a",
        "a ",
        "/*",
        "#!",
        "\\n",
        "1st",
    ]
    for _ in range(_TRIALS):
        yield "".join(rng.choice(pieces) for _ in range(rng.randint(1, 24)))
