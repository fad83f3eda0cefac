"""transformers' Pillow image processors, which need no torch, by the name that a model's files call theirs."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from turnwise.errors import ModelError
from turnwise.media import MediaStore
from turnwise.render.vision.base import pixels_of
from turnwise.render.vision.files import ModelFiles
from turnwise.types import Media

_KNOWN: Mapping[str, str] = {
    "CLIPImageProcessor": "clip",
    "SiglipImageProcessor": "siglip",
    "LlavaImageProcessor": "llava",
    "Idefics3ImageProcessor": "idefics3",
    "SmolVLMImageProcessor": "smolvlm",
}
"""Name -> the folder of transformers that it lives in."""


def processor_name(files: ModelFiles, default: str) -> str:
    """What the model's files call their image processor, whatever runs it.

    Raises:
        ModelError: for one that is not known here.
    """
    given = files.image.get("image_processor_type") or files.image.get("feature_extractor_type") or default
    name = str(given).removesuffix("Fast").removesuffix("Pil").replace("FeatureExtractor", "ImageProcessor")
    if name not in _KNOWN:
        raise ModelError(f"{files.root}: an image processor {given!r}; known are {', '.join(_KNOWN)}")
    return name


def pil_images(media: Media, store: MediaStore) -> list[Any]:
    """The pixels as Pillow images: of an array 1 or 3 pixels high, transformers cannot tell where its channels are."""
    from PIL import Image as Pillow

    return [Pillow.fromarray(pixels) for pixels in pixels_of(media, store)]


def load_pillow_processor(files: ModelFiles, name: str) -> Any:
    """The processor of a model, run by Pillow and numpy.

    Raises:
        ModelError: when transformers is missing or has no such processor.
    """
    folder = _KNOWN[name]
    try:
        module = import_module(f"transformers.models.{folder}.image_processing_pil_{folder}")
        made = getattr(module, f"{name}Pil")
    except (ImportError, AttributeError) as error:
        raise ModelError(
            f"{files.root}: its images are processed by transformers' {name}Pil, which is not there ({error}); "
            'install "turnwise[vision]"'
        ) from error
    settings = {key: value for key, value in files.image.items() if key not in ("image_processor_type", "processor_class")}
    return made.from_dict(settings)
