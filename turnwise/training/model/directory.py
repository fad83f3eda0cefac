"""What a model directory says without its weights: whose adapter it is, how many ids it has, how it renders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from turnwise.config import ModelConfig
from turnwise.errors import ModelError
from turnwise.renderers import load_renderer
from turnwise.renderers.chat_renderer import ChatRenderer
from turnwise.renderers.control_text import ControlText

ADAPTER_FILE = "adapter_config.json"
"""Names the model that an adapter belongs to."""


def base_model_of(directory: Path) -> Path | None:
    """The model directory that an adapter's directory belongs to; None where it holds no adapter.

    Raises:
        ModelError: when it is not there.
    """
    path = directory / ADAPTER_FILE
    if not path.is_file():
        return None
    named = read_json(path, "it is no adapter").get("base_model_name_or_path")
    if not isinstance(named, str) or "\0" in named:
        named = None
    # A run that was moved has its model beside its checkpoints.
    for base in (Path(named or ""), directory.parent.parent / "model"):
        if (base / "config.json").is_file() and base != directory:
            return base
    raise ModelError(
        f"{directory} is a LoRA adapter of {named or 'a model without a name'}, which is no model directory here: put the "
        f"model's directory into base_model_name_or_path of {ADAPTER_FILE}"
    )


def renderer_of(source: Path, config: ModelConfig, control_text: ControlText = "neutralise") -> ChatRenderer:
    """The renderer of a model directory, or of an adapter's: with the adapter's own template where it has one.

    Raises:
        ModelError, TemplateError: when it cannot be made.
    """
    template, root, own = config.template, source, source / "chat_template.jinja"
    if (base := base_model_of(source)) is not None:  # an adapter has a template of its own and nothing to see by
        root, template = base, str(own) if template is None and own.is_file() else template
    return load_renderer(root, template=template, template_args=config.template_args, control_text=control_text)


def token_count(root: Path) -> int:
    """One more than the highest id of a tokenizer, which may leave ids unused.

    Raises:
        ModelError: when it cannot be read.
    """
    from tokenizers import Tokenizer

    try:
        vocabulary = Tokenizer.from_file(str(root / "tokenizer.json")).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{root / 'tokenizer.json'} cannot be read ({error}); save the tokenizer anew") from error
    return 1 + max(vocabulary.values(), default=-1)


def row_count(root: Path) -> int:
    """Rows of a model's embedding matrix by its config.json; 0 where that does not say.

    Raises:
        ModelError: when it cannot be read.
    """
    config = read_json(root / "config.json", "it is no Hugging Face model directory")
    text = config.get("text_config")
    return config.get("vocab_size") or (text.get("vocab_size") if isinstance(text, dict) else None) or 0


def read_json(path: Path, otherwise: str) -> dict[str, Any]:
    """The object of a JSON file of a model directory.

    Args:
        otherwise: what it means when the file is not there.

    Raises:
        ModelError: when it is not there, or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path.parent}: no {path.name}; {otherwise}") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}); copy the file anew") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object; copy the file anew")
    return value
