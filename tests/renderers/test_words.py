"""The word encoder gives the library's ids, or leaves the text to the library."""

from __future__ import annotations

import json
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from turnwright.renderers import HFTokenizer
from turnwright.renderers.bpe_cache import CachedBPE

QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # noqa: E501
LLAMA3 = QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")
MARKS = QWEN2.replace(r"\p{L}+|", r"[\p{L}\p{M}]+|").replace(
    r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"
)
CORPUS = [
    "the quick brown fox's 1234 jumps!! over\n\n  the lazy dog, don't you think? {\"a\": "
    "1}\tdef f(x): return x_1"
] * 20


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    parts = [
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(False, use_regex=False),
    ]
    return pre_tokenizers.Sequence(parts)


def _digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])


KINDS = {
    "gpt2": (pre_tokenizers.ByteLevel(False), None),
    "qwen2": (_split(QWEN2), normalizers.NFC()),
    "llama3": (_split(LLAMA3), None),
    "marks": (_split(MARKS), normalizers.NFC()),
    "digits": (_digits(), None),
}


def _train(pre: pre_tokenizers.PreTokenizer, normalizer: object = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return tokenizer


TOKENIZERS = {name: _train(*kind) for name, kind in KINDS.items()}
ENCODERS = {name: CachedBPE.of(t, json.loads(t.to_str())) for name, t in TOKENIZERS.items()}
ASCII = st.text(st.sampled_from(string.printable + "\x00\x1c\x1f\x7f"), max_size=60)
PIECES = st.lists(
    st.sampled_from(["'s", "'LL", " ", "  ", "\n", "\r\n", "12345", "abc", "A", "_", "!?", "\t"]),
    max_size=20,
)


@pytest.mark.parametrize("name", KINDS)
def test_kinds_in_use_are_taken(name: str) -> None:
    assert ENCODERS[name] is not None


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=150, deadline=None)
@given(
    text=ASCII
    | PIECES.map("".join)
    | st.text(max_size=40)
    | ASCII.map(lambda text: f"{text}<|im_end|>{text}")
)
def test_ids_are_the_library_s(name: str, text: str) -> None:
    encoder = ENCODERS[name]
    assert encoder is not None
    ids = encoder.encode(text)
    assert ids is None or ids == TOKENIZERS[name].encode(text, add_special_tokens=False).ids


def test_text_that_may_hold_an_added_token_is_left_to_the_library() -> None:
    encoder = ENCODERS["qwen2"]
    assert encoder is not None
    assert encoder.encode("a < b") is None
    assert encoder.encode("caf\u00e9") is None
    assert encoder.encode("plain text") is not None


@pytest.mark.parametrize(
    "tokenizer",
    [
        _train(pre_tokenizers.ByteLevel(add_prefix_space=True)),
        _train(pre_tokenizers.ByteLevel(False), normalizers.Lowercase()),
        _train(
            pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(False)])
        ),
        _train(_split(r"\p{Greek}+|\P{L}|\p{L}+")),
        _train(_split(r"(a|b)+|[^ab]+")),
    ],
    ids=["prefix space", "lower case", "white space dropped", "unknown category", "group"],
)
def test_other_kinds_are_left_to_the_library(tokenizer: Tokenizer) -> None:
    assert CachedBPE.of(tokenizer, json.loads(tokenizer.to_str())) is None
    codec = HFTokenizer(tokenizer)
    assert codec.encode("Hello a b") == tokenizer.encode("Hello a b", add_special_tokens=False).ids


def test_a_pattern_that_leaves_gaps_is_left_to_the_library() -> None:
    tokenizer = _train(_split(r"\p{L}+"))
    codec = HFTokenizer(tokenizer)
    for text in ("abc def", "12", "a1b"):
        assert codec.encode(text) == tokenizer.encode(text, add_special_tokens=False).ids


def test_a_tokenizer_file_that_truncates_does_not_cut_prompts() -> None:
    tokenizer = _train(pre_tokenizers.ByteLevel(False))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    text = "the quick brown fox jumps over the lazy dog"
    assert (
        HFTokenizer(Tokenizer.from_str(tokenizer.to_str())).decode(
            HFTokenizer(tokenizer).encode(text)
        )
        == text
    )


@pytest.mark.parametrize("odd", ["\u4e2d", "\u0080x", "\xad"])
def test_a_token_that_spells_no_bytes_is_left_to_the_library(odd: str) -> None:
    letters = {
        char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    made = Tokenizer(models.BPE(vocab=letters | {odd: len(letters)}, merges=[]))
    made.pre_tokenizer, made.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    ids = [letters["a"], len(letters), letters["b"]]
    assert HFTokenizer(made).decode(ids) == made.decode(ids, skip_special_tokens=False)
