"""Processor and tokenizer of slime's user code, and images for the rollout servers."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

from turnwright_compat.slime.engine import current_server
from turnwright_compat.slime.processor import open_picture


def load_tokenizer(name_or_path: str, **_: Any) -> Any:
    """Return the tokenizer of the episode that runs, whatever the path."""
    return current_server("load_tokenizer").model.tokenizer


def load_processor(name_or_path: str, **_: Any) -> Any:
    """Return the processor of the episode that runs, whatever the path; None for a text-only model."""
    return current_server("load_processor").processor


def build_processor_kwargs(multimodal_inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return arguments of the processor: ids as lists, everything else as tensors."""
    made = dict(multimodal_inputs or {})
    made["text_kwargs"] = {**made.get("text_kwargs", {}), "return_tensors": None, "return_mm_token_type_ids": False}
    for key in ("audio_kwargs", "images_kwargs", "videos_kwargs"):
        made[key] = {**made.get(key, {}), "return_tensors": "pt"}
    return made


def process_vision_info(prompt: Sequence[dict[str, Any]], processor: Any) -> dict[str, Any]:
    """Return the images of messages as Pillow images; None where there are none."""
    parts = [part for message in prompt if isinstance(message.get("content"), list) for part in message["content"]]
    found = [part["image"] for part in parts if isinstance(part, dict) and part.get("image") is not None]
    return {"images": [open_picture(one) for one in found] or None, "videos": None}


def encode_image_for_rollout_engine(image: Any) -> str:
    """Return a Pillow image as a data URL of a PNG file."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
