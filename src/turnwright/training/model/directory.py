"""Model directory without its weights: the base of an adapter, number of ids, renderer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from turnwright import files
from turnwright.config import ModelConfig
from turnwright.errors import ModelError
from turnwright.renderers import load_renderer
from turnwright.renderers.chat_renderer import ChatRenderer
from turnwright.renderers.control_text import ControlText

ADAPTER_FILE = "adapter_config.json"
"""File that names an adapter's base model."""


def base_model_of(directory: Path) -> Path | None:
    """Return the base of a LoRA adapter's directory, or None for another; raise `ModelError` when
    the base is missing."""
    path = directory / ADAPTER_FILE
    if not path.is_file():
        return None
    named = read_json(path, "it is no adapter").get("base_model_name_or_path")
    if not isinstance(named, str) or "\0" in named:
        named = None

    # A moved run has its model next to its checkpoints.
    beside = [parent / "model" for parent in directory.parents[1:3]]
    for base in (Path(named or ""), *beside):
        if (base / "config.json").is_file() and base != directory:
            return base
    raise ModelError(
        f"{directory} is a LoRA adapter of {named or 'a model without a name'}, which is no model "
        f"directory here: set base_model_name_or_path of {ADAPTER_FILE} to the model's directory"
    )


def renderer_of(
    source: Path, config: ModelConfig, control_text: ControlText = "neutralise"
) -> ChatRenderer:
    """Load the renderer of a model directory, or of an adapter's base with the adapter's own
    template, if it has one."""
    root = source
    template = config.template

    # An adapter has a template of its own, but no image processor.
    base = base_model_of(source)
    if base is not None:
        root = base
        own_template = source / "chat_template.jinja"
        if template is None and own_template.is_file():
            template = str(own_template)
    return load_renderer(
        root,
        template=template,
        template_args=config.template_args,
        control_text=control_text,
        parser=config.parser,
    )


def token_count(root: Path) -> int:
    """Return one more than the highest id of a tokenizer, which may leave ids unused; raise
    `ModelError` without one."""
    from tokenizers import Tokenizer

    path = root / "tokenizer.json"
    try:
        files.check_regular([path])
        vocabulary = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    except Exception as error:
        # The library raises bare Exception.
        raise ModelError(f"{path} cannot be read ({error}); save the tokenizer again") from error
    return 1 + max(vocabulary.values(), default=-1)


def row_count(root: Path) -> int:
    """Return the rows of a model's embedding matrix by its config.json; 0 if not given there."""
    config = read_json(root / "config.json", "it is no Hugging Face model directory")
    rows = config.get("vocab_size")
    text = config.get("text_config")
    if not rows and isinstance(text, dict):
        rows = text.get("vocab_size")
    return rows or 0


def read_json(path: Path, otherwise: str) -> dict[str, Any]:
    """Read a JSON object of a model directory, else raise `ModelError`; `otherwise` is what a
    missing file means."""
    try:
        value = files.read_json(path)
    except FileNotFoundError as error:
        raise ModelError(f"{path.parent}: no {path.name}; {otherwise}") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}); copy the file again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} contains no JSON object; copy the file again")
    return value
