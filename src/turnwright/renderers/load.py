"""Build renderers from a model directory, a template, or built-in parts.

`load_renderer` is for a model, `byte_renderer` for use without one, `template_renderer` for looking
at a template alone.
"""

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
# Texts that look like tokens: <|im_start|>, </think>, [|endofturn|], [INST], [e~[, ]~b],
# ]<]minimax[>[.
_MARKER = re.compile(
    r"<\|\"\|>|<[|\uff5c/]?[^\s<>='\"{}()]{1,60}>|[\[{(][|\uff5c][^\s|\uff5c]{1,60}[|\uff5c][\]})]|\[/?[A-Z_]{3,}\]"
    r"|\[e~\[|\]~!?b\[?\]?|\]<\][a-z]+\[>\["
)
_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "pad_token",
    "unk_token",
    "sep_token",
    "cls_token",
    "mask_token",
)
"""Names of tokens that a template may use, as in `tokenizer_config.json`."""
_IMAGE_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")


def byte_renderer(control_text: ControlText = "neutralise") -> ChatRenderer:
    """Return the built-in renderer, ChatML over bytes, for use without a model.

    What it derives of the template is shared in the process.

    Args:
        control_text: handling of control text in messages: `neutralise`, `reject` or `allow`.

    Example::

        >>> renderer = tw.byte_renderer()
        >>> prompt = renderer.open([tw.Message("user", "Hi")])
        >>> renderer.decode(prompt.ids)
        '<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n'
    """
    return copy(_byte_renderer(control_text))  # callers may change its `banned_ids`


@lru_cache(maxsize=3)
def _byte_renderer(control_text: ControlText) -> ChatRenderer:
    template = ChatTemplate(CHATML, origin="built-in ChatML")
    return ChatRenderer(
        ByteTokenizer(SPECIAL, MARKUP), template, banned=_IMAGE_TOKENS, control_text=control_text
    )


def template_renderer(name: str) -> ChatRenderer:
    """Return a renderer of a template alone, by name or file, over bytes.

    Texts that look like tokens become tokens.

    Raises `ConfigError` if there is no such template, or its file cannot be read; `TemplateError`
    if the source is not a template, or does not render replies.
    """
    source, origin = find_source(name)
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    variables = {name: f"<|{name}|>" for name in names}
    template = ChatTemplate(source, variables, origin=origin)

    tokens = list(variables.values())
    for text in sample_conversations(template):
        tokens += _MARKER.findall(text)
    codec = ByteTokenizer(tuple(dict.fromkeys(tokens)))
    end_of_sequence = codec.control[variables["eos_token"]]
    return ChatRenderer(codec, template, stop_ids=frozenset([end_of_sequence]))


def load_renderer(
    path: str | Path,
    *,
    template: str | None = None,
    template_args: Mapping[str, Any] | None = None,
    control_text: ControlText = "neutralise",
    parser: str | None = None,
) -> ChatRenderer:
    """Load the renderer of a Hugging Face model directory: tokenizer, chat template and vision
    processor.

    Example::

        renderer = tw.load_renderer("path/to/Qwen3-0.6B", template_args={"enable_thinking": False})
        prompt = renderer.open([tw.Message("user", "Hi")])
        print(renderer.decode(prompt.ids))

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
    variables: dict[str, str] = {}
    for name in _TOKEN_NAMES:
        token = settings.get(name)
        if token:
            variables[name] = token["content"] if isinstance(token, dict) else str(token)
    stop = read_json(root / "generation_config.json").get("eos_token_id")
    stop_ids = [stop] if isinstance(stop, int) else stop or ()

    if template_args:
        check_arguments(ChatTemplate(source, variables, origin=origin), template_args)
        # In the source, so that a saved template keeps these values.
        source = with_preset_variables(source, template_args)
    codec = HFTokenizer.load(root / "tokenizer.json")
    return ChatRenderer(
        codec,
        ChatTemplate(source, variables, origin=origin),
        stop_ids=frozenset(stop_ids),
        banned=_IMAGE_TOKENS,
        control_text=control_text,
        vision=load_vision_processor(root, codec),
        parser=parser,
        directory=root,
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
    """Return the source of a model's own template, and the file that it is from."""
    file = root / "chat_template.jinja"
    if file.is_file():
        return files.read_text(file), str(file)

    source = settings.get("chat_template")
    if not source:
        source = read_json(root / "chat_template.json").get("chat_template")
    if isinstance(source, list):  # several, by name
        defaults = [row["template"] for row in source if row.get("name") == "default"]
        source = defaults[0] if defaults else None
    if not isinstance(source, str):
        raise ModelError(
            f"{root}: no chat template; name one with model.template, add {file.name}, or use an "
            "instruction-tuned model with its own"
        )
    return source, str(root / "tokenizer_config.json")
