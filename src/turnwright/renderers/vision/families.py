"""Vision processors by model family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from turnwright.errors import ModelError
from turnwright.renderers.tokenizer import Tokenizer
from turnwright.renderers.vision.llava import LlavaVisionProcessor, TiledVisionProcessor
from turnwright.renderers.vision.processors import ModelFiles, read_files
from turnwright.renderers.vision.qwen_vl import QWEN2, QWEN2_5, QWEN3, QwenVisionProcessor
from turnwright.renderers.vision_protocol import VisionProcessor

FAMILIES: Mapping[str, Callable[[str, ModelFiles], VisionProcessor]] = {
    "qwen2_vl": partial(QwenVisionProcessor, kind=QWEN2),
    "qwen2_5_vl": partial(QwenVisionProcessor, kind=QWEN2_5),
    "qwen3_vl": partial(QwenVisionProcessor, kind=QWEN3),
    "qwen3_vl_moe": partial(QwenVisionProcessor, kind=QWEN3),
    "llava": LlavaVisionProcessor,
    "smolvlm": TiledVisionProcessor,
    "idefics3": TiledVisionProcessor,
}
"""Vision processor of each `model_type` of `config.json`."""


def load_vision_processor(root: str | Path, codec: Tokenizer) -> VisionProcessor | None:
    """Load the vision processor of a Hugging Face model directory; None for a text-only model.

    Reads `config.json` and the processors' settings (`preprocessor_config.json`,
    `video_preprocessor_config.json`, `processor_config.json`); missing settings
    have transformers' defaults.

    Raises `ModelError` if the vision-language model's type is unknown, or its
    files contradict each other.
    """
    files = read_files(Path(root), codec)
    kind = files.config.get("model_type")
    if not isinstance(kind, str) or not files.vision:
        return None
    if kind not in FAMILIES:
        raise ModelError(
            f"{root}: a vision model of unknown type {kind!r}; known are {', '.join(FAMILIES)}. "
            "A text-only model has no vision_config in its config.json"
        )
    return FAMILIES[kind](kind, files)
