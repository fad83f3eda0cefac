"""Build renderers from a model directory, a template, or built-in parts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import copy
from functools import lru_cache
from pathlib import Path
from typing import Any

from turnwright import files
from turnwright.errors import ModelError
from turnwright.renderers.chat_renderer import ChatRenderer
from turnwright.renderers.control_text import ControlText
from turnwright.renderers.model_files import read_json
from turnwright.renderers.template import (
    CHATML,
    ChatTemplate,
    check_arguments,
    find_source,
    sample_conversations,
    with_preset_variables,
)
from turnwright.renderers.tokenizer import ByteTokenizer, HFTokenizer
from turnwright.renderers.vision.families import load_vision_processor

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>")
"""Control tokens of built-in models and renderers, with Qwen's names."""
MARKUP = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
"""Added tokens that a reply may contain."""
# Texts that look like tokens: <|im_start|>, </think>, [|endofturn|], [INST],
# [e~[, ]~b], ]<]minimax[>[.
_MARKER = re.compile(
    r"<\|\"\|>|<[|\uff5c/]?[^\s<>='\"{}()]{1,60}>|[\[{(][|\uff5c][^\s|\uff5c]{1,60}[|\uff5c][\]})]|\[/?[A-Z_]{3,}\]"
    r"|\[e~\[|\]~!?b\[?\]?|\]<\][a-z]+\[>\["
)
_IMAGE_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")


def byte_renderer(control_text: ControlText = "neutralise") -> ChatRenderer:
    """Return the built-in renderer, ChatML over bytes, for use without a model; its derived
    patterns are shared per process.

    Args:
        control_text: handling of control text in messages: `neutralise`, `reject` or `allow`.
    """
    return copy(_byte_renderer(control_text))  # callers may change its `banned_ids`


@lru_cache(maxsize=3)
def _byte_renderer(control_text: ControlText) -> ChatRenderer:
    template = ChatTemplate(CHATML, origin="built-in ChatML")
    return ChatRenderer(
        ByteTokenizer(SPECIAL, MARKUP), template, banned=_IMAGE_TOKENS, control_text=control_text
    )


def template_renderer(name: str) -> ChatRenderer:
    """Return a renderer of a template alone, by name or file, over bytes; texts that look
    like tokens become tokens.

    Raises `ConfigError` if there is no such template, or its file cannot be read; `TemplateError`
    if the source is not a template, or does not render replies.
    """
    source, origin = find_source(name)
    names = {name: f"<|{name}|>" for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    template = ChatTemplate(source, names, origin=origin)
    found = (token for text in sample_conversations(template) for token in _MARKER.findall(text))
    codec = ByteTokenizer(tuple(dict.fromkeys((*names.values(), *found))))
    return ChatRenderer(codec, template, stop_ids=frozenset((codec.control[names["eos_token"]],)))


def load_renderer(
    path: str | Path,
    *,
    template: str | None = None,
    template_args: Mapping[str, Any] | None = None,
    control_text: ControlText = "neutralise",
    parser: str | None = None,
) -> ChatRenderer:
    """Load the renderer of a Hugging Face model directory: tokenizer, chat
    template and vision processor.

    Args:
        template: another chat template, by name or file (see `turnwright.renderers.template`).
        template_args: variables of the template.
        control_text: handling of control text in messages: `neutralise`, `reject` or `allow`.
        parser: reply format, a name of `PARSERS`; None detects the template's.

    Raises:
        ModelError: if a file is missing or unreadable, or the vision model is of an unknown type.
        ConfigError: if there is no such template, or it does not use these variables.
        TemplateError: if the template does not close an assistant turn.
    """
    root = Path(path)
    if not root.is_dir():
        raise ModelError(f"{root}: no such directory; give a Hugging Face model directory")
    check_model_files(root)
    if not (root / "tokenizer.json").is_file():
        raise ModelError(
            f"{root}: no tokenizer.json; save the tokenizer there with transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    settings = read_json(root / "tokenizer_config.json")
    source, origin = _find_template(root, settings) if template is None else find_source(template)
    names = (
        "bos_token",
        "eos_token",
        "pad_token",
        "unk_token",
        "sep_token",
        "cls_token",
        "mask_token",
    )
    given = {name: settings[name] for name in names if settings.get(name)}
    variables = {
        name: value["content"] if isinstance(value, dict) else str(value)
        for name, value in given.items()
    }
    stop = read_json(root / "generation_config.json").get("eos_token_id")
    stop_ids = frozenset([stop] if isinstance(stop, int) else stop or ())
    if template_args:
        check_arguments(ChatTemplate(source, variables, origin=origin), template_args)
        source = with_preset_variables(
            source, template_args
        )  # so that a saved template keeps these values
    codec = HFTokenizer.load(root / "tokenizer.json")
    found = ChatTemplate(source, variables, origin=origin)
    options: dict[str, Any] = {"stop_ids": stop_ids, "control_text": control_text, "parser": parser}
    options["directory"] = root
    return ChatRenderer(
        codec, found, banned=_IMAGE_TOKENS, vision=load_vision_processor(root, codec), **options
    )


def check_model_files(root: Path) -> None:
    """Raise `ModelError` for a named pipe, a socket or a device in a model directory, whose files
    libraries open by name."""
    try:
        files.check_regular(sorted(root.iterdir()))
    except OSError as error:
        raise ModelError(
            f"{error.filename}: {error.strerror}; copy the model directory again"
        ) from error


def _find_template(root: Path, settings: dict[str, Any]) -> tuple[str, str]:
    file = root / "chat_template.jinja"
    if file.is_file():
        return files.read_text(file), str(file)
    given = settings.get("chat_template") or read_json(root / "chat_template.json").get(
        "chat_template"
    )
    if isinstance(given, list):
        given = next((row["template"] for row in given if row.get("name") == "default"), None)
    if not isinstance(given, str):
        raise ModelError(
            f"{root}: no chat template; name one with model.template, add {file.name}, or use an "
            "instruction-tuned model with its own"
        )
    return given, str(root / "tokenizer_config.json")
