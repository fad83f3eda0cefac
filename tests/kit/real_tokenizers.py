"""Real tokenizers out of mistral-common's wheel: a SentencePiece model and Tekken, as
tokenizers of the tokenizers library.

`PYTHONPATH=tests python -m kit.real_tokenizers` fetches the wheel into `.cache/wheels`; only its
data is read. An installed mistral-common does as well. It is no dependency of the tests, because it
asks for an older numpy than they run with.
"""

from __future__ import annotations

import base64
import json
import os
import struct
import zipfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from kit.packages import download

PACKAGE = "mistral-common==1.13.1"
CACHE = Path(
    os.environ.get("TURNWRIGHT_WHEELS") or Path(__file__).resolve().parents[2] / ".cache" / "wheels"
)
SENTENCEPIECE = "mistral_instruct_tokenizer_240323.model.v3"
TEKKEN = "tekken_240718.json"


def fetch() -> None:
    """Download the wheel from the package index; says so where it cannot be had."""
    fault = download(PACKAGE, CACHE)
    print(f"{PACKAGE} was not fetched: {fault}" if fault else f"{PACKAGE} fetched")


def _data(name: str) -> bytes | None:
    found = find_spec("mistral_common")
    for folder in (found.submodule_search_locations if found else None) or ():
        file = Path(folder) / "data" / name
        if file.is_file():
            return file.read_bytes()
    for wheel in sorted(CACHE.glob("mistral_common-*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            if f"mistral_common/data/{name}" in archive.namelist():
                return archive.read(f"mistral_common/data/{name}")
    return None


class Real:
    """A real tokenizer, made from a file of the wheel once and kept beside it."""

    def __init__(self, name: str, make: Callable[..., str]) -> None:
        self.at_hand = _data(name) is not None
        self._name = name
        self._make = make

    def __call__(self, *args: str) -> Tokenizer:
        kept = CACHE / "-".join([self._name, *args, "tokenizer.json"])
        if not kept.is_file():
            data = _data(self._name)
            assert data is not None, f"{self._name} is not here; `make setup` fetches it"
            CACHE.mkdir(parents=True, exist_ok=True)
            draft = kept.with_suffix(f".{os.getpid()}")
            draft.write_text(self._make(data, *args), encoding="utf-8")
            draft.replace(kept)
        return Tokenizer.from_file(str(kept))


def _fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    """The fields of a protocol buffer's message: (number, value)."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
            continue
        size = {1: 8, 5: 4}.get(key & 7) or varint()
        yield key >> 3, data[at : at + size]
        at += size


def _from_sentencepiece(data: bytes, scheme: str) -> str:
    """A BPE model of SentencePiece: pieces in order of their ids, a merge for each pair that
    makes a piece, by score."""
    rows = [dict(_fields(value)) for number, value in _fields(data) if number == 1]  # type: ignore[arg-type]
    pieces = [(row[1].decode(), struct.unpack("<f", row[2])[0], row.get(3, 1)) for row in rows]
    ids = {text: number for number, (text, _, _) in enumerate(pieces)}
    merges = []
    for text, score, kind in pieces:
        if kind == 1:
            cuts = [
                (text[:i], text[i:])
                for i in range(1, len(text))
                if text[:i] in ids and text[i:] in ids
            ]
            merges += [(-score, ids[a], ids[b], (a, b)) for a, b in cuts]
    pairs = [pair for *_, pair in sorted(merges, key=lambda row: row[:3])]
    tokenizer = Tokenizer(
        models.BPE(ids, pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tail = [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), *tail])
    control = [text for text, _, kind in pieces if kind in (2, 3)]
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in control]
    )
    return tokenizer.to_str()


def _from_tekken(data: bytes) -> str:
    """A byte-level BPE by ranks: the merge of a token is the last one that
    its own encoding makes."""
    file = json.loads(data)
    config = file["config"]
    first = config["default_num_special_tokens"]
    ranks = {
        base64.b64decode(row["token_bytes"]): row["rank"]
        for row in file["vocab"][: config["default_vocab_size"] - first]
    }
    alphabet = _stand_ins()
    names = {token: "".join(alphabet[byte] for byte in token) for token in ranks}
    named = {row["token_str"]: row["rank"] for row in file.get("special_tokens") or _SPECIAL}
    special = {number: text for text, number in named.items()}
    vocab = {special.get(i, f"<SPECIAL_{i}>"): i for i in range(first)}
    vocab |= {names[token]: first + rank for token, rank in ranks.items()}
    merges = []
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            left, right = _halves(token, ranks)
            merges.append((names[left], names[right]))
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    split = pre_tokenizers.Split(Regex(config["pattern"]), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in list(vocab)[:first]]
    )
    return tokenizer.to_str()


_SPECIAL = [
    {"rank": rank, "token_str": text}
    for rank, text in enumerate(
        ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
    )
]


def _halves(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two parts that byte pair encoding joins last into a token."""
    own = ranks[token]
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [(ranks.get(parts[i] + parts[i + 1], own), i) for i in range(len(parts) - 1)]
        rank, i = min(pairs)
        if rank >= own:
            break
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    assert len(parts) == 2, token
    return parts[0], parts[1]


def _stand_ins() -> list[str]:
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = iter(range(256, 512))
    return [chr(byte) if byte in set(printable) else chr(next(rest)) for byte in range(256)]


sentencepiece = Real(SENTENCEPIECE, _from_sentencepiece)
tekken = Real(TEKKEN, _from_tekken)

if __name__ == "__main__":
    fetch()
