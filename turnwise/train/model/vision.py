"""The tiny model that sees: a Qwen3-VL, and the settings of its image processor."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from turnwise.config import ModelConfig

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""Special as in the tokenizers of the Qwen-VL models."""
MERGE = 2
"""Patches along a side of what becomes one token."""
CLIP_FRAMES = 32
"""Clips of more frames than this are scaled down."""


def vision_model(config: ModelConfig, sizes: Mapping[str, Any], token: Callable[[str], int | None]) -> Any:
    """A Qwen3-VL with random weights.

    Args:
        sizes: of the decoder, as a text model's config has them.
        token: the id of a special token.
    """
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    quarter = sizes["head_dim"] // 8
    # Half of a head's width is shared out among time, height and width.
    rope = dict(sizes["rope_parameters"]) | {"mrope_section": [2 * quarter, quarter, quarter], "mrope_interleaved": True}
    text = dict(sizes) | {"rope_parameters": rope}
    tied, dtype = text.pop("tie_word_embeddings"), text.pop("dtype")
    side = config.image_side // config.patch
    vision = {
        "depth": config.layers,
        "hidden_size": config.hidden,
        "intermediate_size": 3 * config.hidden,
        "num_heads": config.heads,
        "in_channels": 3,
        "patch_size": config.patch,
        "spatial_merge_size": MERGE,
        # Of real ones it is 2, and an image is doubled for it; of a tiny one half the weights of patches would be in vain.
        "temporal_patch_size": 1,
        "out_hidden_size": config.hidden,
        "num_position_embeddings": side * side,
        "deepstack_visual_indexes": [0],
        "initializer_range": text["initializer_range"],
    }
    model = Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(
            text_config=text,
            vision_config=vision,
            image_token_id=token("<|image_pad|>"),
            video_token_id=token("<|video_pad|>"),
            vision_start_token_id=token("<|vision_start|>"),
            vision_end_token_id=token("<|vision_end|>"),
            tie_word_embeddings=tied,
            dtype=dtype,
        )
    )
    # Where a patch is must be heard beside what it shows, or nothing is learned of images in hundreds of steps.
    torch.nn.init.normal_(model.model.visual.pos_embed.weight, std=0.3)
    return model


def write_processor(config: ModelConfig, directory: Path) -> None:
    """Write the settings of the image and the video processor, as transformers reads them."""
    token = config.patch * MERGE
    shared = {
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_convert_rgb": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "patch_size": config.patch,
        "merge_size": MERGE,
        "temporal_patch_size": 1,
        "processor_class": "Qwen3VLProcessor",
    }
    most = config.image_side * config.image_side
    for name, kind, value, pixels in (
        ("preprocessor_config.json", "image_processor_type", "Qwen2VLImageProcessor", most),
        # Of all frames together.
        ("video_preprocessor_config.json", "video_processor_type", "Qwen3VLVideoProcessor", CLIP_FRAMES * most),
    ):
        size = {"size": {"shortest_edge": token * token, "longest_edge": pixels}}
        (directory / name).write_text(json.dumps({kind: value} | size | shared, indent=2) + "\n", encoding="utf-8")
