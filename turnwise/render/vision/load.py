"""The eyes of a model directory: one row of a table per family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from turnwise.errors import ModelError
from turnwise.render.codec import Codec
from turnwise.render.vision.eyes import Eyes
from turnwise.render.vision.files import ModelFiles, read_files
from turnwise.render.vision.fixed import LlavaEyes
from turnwise.render.vision.qwen import QWEN2, QWEN2_5, QWEN3, QwenEyes
from turnwise.render.vision.tiles import TileEyes

FAMILIES: Mapping[str, Callable[[str, ModelFiles], Eyes]] = {
    "qwen2_vl": partial(QwenEyes, kind=QWEN2),
    "qwen2_5_vl": partial(QwenEyes, kind=QWEN2_5),
    "qwen3_vl": partial(QwenEyes, kind=QWEN3),
    "qwen3_vl_moe": partial(QwenEyes, kind=QWEN3),
    "llava": LlavaEyes,
    "smolvlm": TileEyes,
    "idefics3": TileEyes,
}
"""By `model_type` of `config.json`."""


def load_eyes(root: str | Path, codec: Codec) -> Eyes | None:
    """The vision side of a Hugging Face model directory; None for a model of text alone.

    Read are `config.json` and the settings of the processors (`preprocessor_config.json`, `video_preprocessor_config.json`,
    `processor_config.json`); where they are silent, transformers' defaults hold.

    Args:
        root: the directory.
        codec: its tokenizer.

    Raises:
        ModelError: for a vision-language model of a type that is not known here, or whose files contradict each other.
    """
    files = read_files(Path(root), codec)
    kind = files.config.get("model_type")
    if not isinstance(kind, str) or not files.vision:
        return None
    if kind not in FAMILIES:
        raise ModelError(
            f"{root}: a model of type {kind!r} with a vision tower; what is seen is known for {', '.join(FAMILIES)}. "
            "A model of text alone has no vision_config in its config.json"
        )
    return FAMILIES[kind](kind, files)
