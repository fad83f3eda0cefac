"""Tokenizers of every kind that the guard is held to: trained here from a small corpus, and
real ones where at hand."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from functools import lru_cache

from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as RustTokenizer

from kit.real_tokenizers import sentencepiece, tekken
from turnwright.renderers import MARKUP, SPECIAL, ByteTokenizer, HFTokenizer
from turnwright.renderers.tokenizer import Tokenizer

_WORDS = "the|of|and|to|in|is|you|that|it|he|was|for|on|are|as|with|his|they|at|be|this|have|from|or|one|had|by|word"  # noqa: E501
WORDS = re.findall(r"\w+", _WORDS)
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # noqa: E501
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _texts(marked: bool = False) -> list[str]:
    rng = random.Random(0)
    texts = [
        " ".join(rng.choice(WORDS) for _ in range(40)) + '\n{"key": 1}, (x); don\'t\n\n### User:\n'
        for _ in range(150)
    ]
    return [f"{text}<think>{text}</think><|im_end|><pad>" for text in texts] if marked else texts


def _add(
    tokenizer: RustTokenizer, special: Sequence[str], other: Sequence[str], **flags: bool
) -> RustTokenizer:
    flags = {"normalized": False} | flags
    tokenizer.add_special_tokens([AddedToken(text, special=True, **flags) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False, **flags) for text in other])
    return tokenizer


@lru_cache
def _byte_level(marked: bool = False, cut: bool = True) -> str:
    tokenizer = RustTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = [
        part
        for text in _texts(marked)
        for part in ([text] if cut else text.replace(">", "> ").split(" "))
    ]
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    return tokenizer.to_str()


@lru_cache
def _spm_bpe(marked: bool = False) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Vocabulary and merges of SentencePiece's BPE: `<unk>`, bytes, then pieces
    with word-start marks."""
    tokenizer = RustTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=800, special_tokens=["<unk>", *BYTES], show_progress=False
    )
    tokenizer.train_from_iterator([text.replace(">", "> ") for text in _texts(marked)], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return json.dumps(model["vocab"]), tuple(tuple(merge) for merge in model["merges"])


def _spm(*, prefix: str, marked: bool = True) -> RustTokenizer:
    vocab, merges = _spm_bpe(marked)
    tokenizer = RustTokenizer(
        models.BPE(
            vocab=json.loads(vocab),
            merges=list(merges),
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tail = [decoders.ByteFallback(), decoders.Fuse()]
    if prefix in ("prepend", "replace"):
        replace = normalizers.Replace(" ", "\u2581")
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), replace] if prefix == "prepend" else [replace]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
    strip = [] if prefix in ("replace", "never") else [decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), *tail, *strip])
    tokenizer.add_special_tokens(["<unk>"])
    return tokenizer


@lru_cache
def _unigram() -> str:
    tokenizer = RustTokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "<pad>", "<think>", "<|im_end|>"],
        unk_token="<unk>",
        show_progress=False,
        initial_alphabet=[chr(c) for c in range(32, 127)],
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    return json.dumps(json.loads(tokenizer.to_str())["model"])


def _unigram_kind(prefix: str, special: Sequence[str], other: Sequence[str]) -> RustTokenizer:
    model = json.loads(_unigram())
    tokenizer = RustTokenizer(
        models.Unigram([tuple(row) for row in model["vocab"]], model["unk_id"], False)
    )
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prefix)
    tokenizer.add_special_tokens(["<unk>", "<pad>"])
    return _add(tokenizer, special, other)


def _bpe(special: Sequence[str], other: Sequence[str], **flags: bool) -> RustTokenizer:
    return _add(RustTokenizer.from_str(_byte_level()), special, other, **flags)


def _qwen(special: Sequence[str], other: Sequence[str]) -> RustTokenizer:
    tokenizer = RustTokenizer.from_str(_byte_level())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(QWEN), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    return _add(tokenizer, special, other)


def _nfkc(special: Sequence[str], other: Sequence[str]) -> RustTokenizer:
    tokenizer = RustTokenizer.from_str(_byte_level())
    tokenizer.normalizer = normalizers.NFKC()
    return _add(tokenizer, special, other, normalized=True)


def _prefix_space(special: Sequence[str], other: Sequence[str]) -> RustTokenizer:
    tokenizer = RustTokenizer.from_str(_byte_level())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return _add(tokenizer, special, other)


def _leaky(special: Sequence[str], other: Sequence[str]) -> RustTokenizer:
    """Merges of the model itself lead to the texts of added tokens."""
    return _add(RustTokenizer.from_str(_byte_level(True, False)), special, other)


def _bos(special: Sequence[str], other: Sequence[str]) -> RustTokenizer:
    tokenizer = _bpe(special, other)
    bos = special[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos} $B",
        special_tokens=[(bos, tokenizer.token_to_id(bos))],
    )
    return tokenizer


def _word_piece(special: Sequence[str], other: Sequence[str]) -> RustTokenizer:
    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789.,:;!?'\"(){}<>|/_-#\n"]
    vocab = ["[UNK]", *letters, *[f"##{c}" for c in letters], *[w for w in WORDS if len(w) > 1]]
    tokenizer = RustTokenizer(
        models.WordPiece({text: i for i, text in enumerate(vocab)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]"])
    return _add(tokenizer, special, other)


def _spaces(special: Sequence[str], other: Sequence[str]) -> RustTokenizer:
    """Runs of white space and digits are added tokens, as in GPT-NeoX."""
    tokenizer = RustTokenizer.from_str(_byte_level())
    tokenizer.add_tokens(
        [AddedToken(" " * n, normalized=False) for n in range(2, 9)]
        + [AddedToken("7", normalized=False)]
    )
    return _add(tokenizer, special, other)


Make = Callable[[Sequence[str], Sequence[str]], RustTokenizer]
TRAINED: dict[str, Make] = {
    "byte-level BPE": _bpe,
    "byte-level BPE, Qwen's cuts, NFC": _qwen,
    "byte-level BPE, NFKC, normalized added tokens": _nfkc,
    "byte-level BPE, prefix space": _prefix_space,
    "byte-level BPE, added tokens eat white space": lambda s, o: _bpe(
        s, o, lstrip=True, rstrip=True
    ),
    "byte-level BPE, added tokens are single words": lambda s, o: _add(
        _bpe(s, ()), (), o, single_word=True
    ),
    "byte-level BPE, markers in the model's vocabulary": _leaky,
    "byte-level BPE, BOS added by a post-processor": _bos,
    "byte-level BPE, white space as added tokens": _spaces,
    "SentencePiece BPE, Prepend and Replace (Llama 2)": lambda s, o: _add(
        _spm(prefix="prepend"), s, o
    ),
    "SentencePiece BPE, Replace (Gemma)": lambda s, o: _add(_spm(prefix="replace"), s, o),
    "SentencePiece BPE, Metaspace always": lambda s, o: _add(_spm(prefix="always"), s, o),
    "SentencePiece BPE, Metaspace first": lambda s, o: _add(_spm(prefix="first"), s, o),
    "Unigram, NFKC, Metaspace always (T5)": lambda s, o: _unigram_kind("always", s, o),
    "Unigram, NFKC, Metaspace first": lambda s, o: _unigram_kind("first", s, o),
    "Unigram, NFKC, Metaspace never": lambda s, o: _unigram_kind("never", s, o),
    "WordPiece (BERT)": _word_piece,
}
REAL: dict[str, Make] = {
    "Mistral v3 SentencePiece (real)": lambda s, o: _add(sentencepiece("always"), s, o),
    "Mistral v3 SentencePiece, Metaspace first (real)": lambda s, o: _add(
        sentencepiece("first"), s, o
    ),
    "Mistral Tekken (real)": lambda s, o: _add(tekken(), s, o),
}
KINDS = (
    "one id a byte",
    *TRAINED,
    *(
        name
        for name, there in zip(REAL, (sentencepiece, sentencepiece, tekken), strict=True)
        if there.at_hand
    ),
)
SINGLE_WORDS = "byte-level BPE, added tokens are single words"


def tokenizer(
    kind: str, special: Sequence[str] = SPECIAL, other: Sequence[str] = MARKUP
) -> RustTokenizer:
    """A tokenizer of this kind with these added tokens."""
    return (TRAINED | REAL)[kind](special, other)


@lru_cache(maxsize=64)
def codec(
    kind: str, special: tuple[str, ...] = SPECIAL, other: tuple[str, ...] = MARKUP
) -> Tokenizer:
    """The codec of a kind; `one id a byte` is the built-in one."""
    return (
        ByteTokenizer(special, other)
        if kind == "one id a byte"
        else HFTokenizer(tokenizer(kind, special, other))
    )
