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
    """Return the base of a LoRA adapter's directory, or None for another; raise `ModelError`
    when the base is missing."""
    path = directory / ADAPTER_FILE
    if not path.is_file():
        return None
    named = read_json(path, "it is no adapter").get("base_model_name_or_path")
    if not isinstance(named, str) or "\0" in named:
        named = None
    # A moved run has its model next to its checkpoints.
    for base in (Path(named or ""), *(above / "model" for above in directory.parents[1:3])):
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
    template, root, own = config.template, source, source / "chat_template.jinja"
    if (
        base := base_model_of(source)
    ) is not None:  # an adapter has a template of its own but no image processor
        root, template = base, str(own) if template is None and own.is_file() else template
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

    try:
        files.check_regular([root / "tokenizer.json"])
        vocabulary = Tokenizer.from_file(str(root / "tokenizer.json")).get_vocab(
            with_added_tokens=True
        )
    except Exception as error:  # the library raises bare Exception
        raise ModelError(
            f"{root / 'tokenizer.json'} cannot be read ({error}); save the tokenizer again"
        ) from error
    return 1 + max(vocabulary.values(), default=-1)


def row_count(root: Path) -> int:
    """Return the rows of a model's embedding matrix by its config.json; 0 if not given there."""
    config = read_json(root / "config.json", "it is no Hugging Face model directory")
    text = config.get("text_config")
    return (
        config.get("vocab_size")
        or (text.get("vocab_size") if isinstance(text, dict) else None)
        or 0
    )


def read_json(path: Path, otherwise: str) -> dict[str, Any]:
    """Read a JSON object of a model directory, else raise `ModelError`; `otherwise` is what
    a missing file means."""
    try:
        value = files.read_json(path)
    except FileNotFoundError as error:
        raise ModelError(f"{path.parent}: no {path.name}; {otherwise}") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}); copy the file again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} contains no JSON object; copy the file again")
    return value
