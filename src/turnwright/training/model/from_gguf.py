"""Make a model directory of a GGUF file:
`python -m turnwright.training.model.from_gguf FILE DIRECTORY`.

transformers reads the file, with weights of any quantization as float32. What it leaves out is how
text is split before it is merged into tokens (`tokenizer.ggml.pre`), which is taken from a table
here: a wrong split gives ids that the model never saw, and nothing fails. The process ends with
status 1 and one line for a file that cannot be read so.

`turnwright.config.snapshots` runs this in a process of its own: its memory is given back, and
whatever a damaged file does ends there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from turnwright.training.model.gguf_files import HEADER, copy_header

DIGITS = {"type": "Digits", "individual_digits": True}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def _split(pattern: str) -> dict[str, Any]:
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return {"type": "Sequence", "pretokenizers": [split, BYTES | {"use_regex": False}]}


SPLITS: dict[str, dict[str, Any]] = {
    "gpt-2": BYTES,
    "default": BYTES,
    "smollm": {"type": "Sequence", "pretokenizers": [DIGITS, BYTES]},
    "qwen2": _split(QWEN2),
    "llama-bpe": _split(LLAMA3),
}
"""How a byte-level tokenizer splits text, by the name that GGUF files use.

Both patterns are those that transformers has for these tokenizers (a test compares them); the rule
of SmolLM2 was not compared with its published file.
"""


def convert(file: Path, directory: Path) -> None:
    """Write a model directory.

    Raises:
        ImportError: without transformers or gguf.
        ValueError: for a file that is no GGUF file, an architecture that transformers does not
            read, or a tokenizer whose splits are not known.
    """
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    fields = GGUFReader(file).fields
    kind = _text(fields, "tokenizer.ggml.model")
    name = _text(fields, "tokenizer.ggml.pre")
    if kind == "gpt2" and name not in SPLITS:
        how = "does not say how it splits text"
        if name:
            how = f"splits text as {name!r}, which is not known here"
        known = ", ".join(SPLITS)
        raise ValueError(
            f"its tokenizer {how} (known are {known}); name the directory of the original model"
        )

    source = {
        "pretrained_model_name_or_path": str(file.parent),
        "gguf_file": file.name,
        "local_files_only": True,
    }
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype="float32", trust_remote_code=False)
    # The weights are plain numbers now.
    model.hf_quantizer = None
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)

    if kind == "gpt2":
        path = directory / "tokenizer.json"
        content = json.loads(path.read_text(encoding="utf-8"))
        content["pre_tokenizer"] = SPLITS[name]
        path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    copy_header(file, directory / HEADER)


def _text(fields: Any, key: str) -> str:
    return str(fields[key].contents()) if key in fields else ""


def main(words: list[str]) -> int:
    """Convert, and return the exit status."""
    file, directory = map(Path, words)
    try:
        convert(file, directory)
    except Exception as error:
        # Many kinds, of a file that anyone may have made.
        print(" ".join(str(error).split()) or type(error).__name__, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
