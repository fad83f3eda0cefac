"""A small tokenizer, trained from an environment's own texts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>")
"""Special as in Qwen's tokenizers: never part of a reply's text."""
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Added, but not special, as in Qwen's tokenizers: a reply's text may hold them."""
END_TOKEN, PAD_TOKEN = "<|im_end|>", "<|endoftext|>"

MAX_VOCABULARY = 1024
"""Most ids, control tokens left out. Small environments stay far below: merges end with the pairs that occur twice."""


def train_tokenizer(texts: Iterable[str], extra: Iterable[str] = ()) -> Tokenizer:
    """Train a byte-level BPE tokenizer (Sennrich et al., arXiv 1508.07909) that can encode any text.

    Every digit is a token of its own. A word behind a space and the same word without one are different tokens, so an
    environment whose words are to be copied should write them in one form. The same texts give the same tokenizer.

    Args:
        texts: what the model will read and write; control tokens in them are left out of the training.
        extra: further special tokens.
    """
    special = (*SPECIAL_TOKENS, *(token for token in extra if token not in (*SPECIAL_TOKENS, *MARKUP_TOKENS)))
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=MAX_VOCABULARY,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(_pieces(texts, (*special, *MARKUP_TOKENS)), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS])
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, directory: Path, template: str, context: int) -> None:
    """Write a tokenizer in the layout that transformers reads: tokenizer.json, tokenizer_config.json, chat_template.jinja."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_TOKEN,
        "pad_token": PAD_TOKEN,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


def _pieces(texts: Iterable[str], control: Iterable[str]) -> Iterator[str]:
    """The texts between control tokens; merges across one could never be used."""
    between = re.compile("|".join(map(re.escape, control)))
    for text in texts:
        yield from filter(None, between.split(text))
