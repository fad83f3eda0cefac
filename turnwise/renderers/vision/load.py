"""The eyes of a model directory: one row of a table per family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from turnwise.errors import ModelError
from turnwise.renderers.tokenizer import Tokenizer
from turnwise.renderers.vision.base import VisionProcessor
from turnwise.renderers.vision.llava import LlavaVisionProcessor, TiledVisionProcessor
from turnwise.renderers.vision.processors import ModelFiles, read_files
from turnwise.renderers.vision.qwen_vl import QWEN2, QWEN2_5, QWEN3, QwenVisionProcessor

FAMILIES: Mapping[str, Callable[[str, ModelFiles], VisionProcessor]] = {
    "qwen2_vl": partial(QwenVisionProcessor, kind=QWEN2),
    "qwen2_5_vl": partial(QwenVisionProcessor, kind=QWEN2_5),
    "qwen3_vl": partial(QwenVisionProcessor, kind=QWEN3),
    "qwen3_vl_moe": partial(QwenVisionProcessor, kind=QWEN3),
    "llava": LlavaVisionProcessor,
    "smolvlm": TiledVisionProcessor,
    "idefics3": TiledVisionProcessor,
}
"""By `model_type` of `config.json`."""


def load_vision_processor(root: str | Path, codec: Tokenizer) -> VisionProcessor | None:
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
