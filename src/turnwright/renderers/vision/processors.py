"""Model files, transformers' Pillow processors, and a cache of pixel values."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from turnwright.errors import ModelError
from turnwright.media import MediaStore
from turnwright.renderers.model_files import read_json
from turnwright.renderers.tokenizer import Tokenizer
from turnwright.renderers.vision.processor import pixels_of
from turnwright.renderers.vision_protocol import VisionProcessor
from turnwright.types import Media


class ModelFiles(NamedTuple):
    """Settings of one model, from its files."""

    root: Path
    config: Mapping[str, Any]
    """`config.json`."""
    image: Mapping[str, Any]
    """Settings of the image processor."""
    video: Mapping[str, Any]
    """Settings of the video processor; without any, those of the image
    processor, as in transformers."""
    processor: Mapping[str, Any]
    """Settings of the processor around both (such as `image_seq_len`)."""
    codec: Tokenizer

    @property
    def vision(self) -> Mapping[str, Any]:
        """The vision tower's part of `config.json`."""
        return _part(self.config, "vision_config")

    def token(self, text: str, *names: str, needed: bool = True) -> int | None:
        """Return the id of a control token: by one of these names in
        `config.json`, else by its text.

        Raises `ModelError` if it is needed but missing, or the id is not a
        control token of the tokenizer.
        """
        control = self.codec.control
        for name in names:
            given = self.config.get(name)
            if isinstance(given, int) and not isinstance(given, bool):
                if given in control.values():
                    return given
                if not needed:
                    return None
                raise ModelError(
                    f"{self.root}: config.json has {name} = {given}, which is not an added token "
                    "of tokenizer.json; the tokenizer belongs to another model"
                )
        if text in control or not needed:
            return control.get(text)
        raise ModelError(
            f"{self.root}: tokenizer.json has no added token {text}, the placeholder of images"
        )


def read_files(root: Path, codec: Tokenizer) -> ModelFiles:
    """Read the settings files that exist. Raises `ModelError` if a file is not a JSON object."""
    processor = read_json(root / "processor_config.json")
    image = _part(processor, "image_processor") or read_json(root / "preprocessor_config.json")
    video = (
        _part(processor, "video_processor")
        or read_json(root / "video_preprocessor_config.json")
        or image
    )
    return ModelFiles(root, read_json(root / "config.json"), image, video, processor, codec)


def _part(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = settings.get(name)
    return found if isinstance(found, Mapping) else {}


_FOLDERS: Mapping[str, str] = {
    "CLIPImageProcessor": "clip",
    "SiglipImageProcessor": "siglip",
    "LlavaImageProcessor": "llava",
    "Idefics3ImageProcessor": "idefics3",
    "SmolVLMImageProcessor": "smolvlm",
}
"""Folder in transformers of each image processor."""


def processor_name(files: ModelFiles, default: str) -> str:
    """Return the name of the model's image processor, without its implementation's suffix;
    `ModelError` if it is unknown."""
    given = (
        files.image.get("image_processor_type")
        or files.image.get("feature_extractor_type")
        or default
    )
    name = (
        str(given)
        .removesuffix("Fast")
        .removesuffix("Pil")
        .replace("FeatureExtractor", "ImageProcessor")
    )
    if name not in _FOLDERS:
        raise ModelError(
            f"{files.root}: unknown image processor {given!r}; known are {', '.join(_FOLDERS)}"
        )
    return name


def pil_images(media: Media, store: MediaStore) -> list[Any]:
    """Return the pixels as Pillow images, because transformers cannot find the channels of
    arrays 1 or 3 pixels high."""
    from PIL import Image as Pillow

    return [Pillow.fromarray(pixels) for pixels in pixels_of(media, store)]


def load_pillow_processor(files: ModelFiles, name: str) -> Any:
    """Load a model's processor, implemented with Pillow and numpy; raise `ModelError` if
    transformers does not have it."""
    folder = _FOLDERS[name]
    try:
        module = import_module(f"transformers.models.{folder}.image_processing_pil_{folder}")
        made = getattr(module, f"{name}Pil")
    except (ImportError, AttributeError) as error:
        raise ModelError(
            f"{files.root}: its images need transformers' {name}Pil, which cannot be imported "
            f"({error}); "
            'install "turnwright[vision]"'
        ) from error
    settings = {
        key: value
        for key, value in files.image.items()
        if key not in ("image_processor_type", "processor_class")
    }
    return made.from_dict(settings)


class PixelCache:
    """Thread-safe cache of processed pixel values of one run, shared by engine and trainer.

    Over `max_bytes`, the least recently used values are evicted, and processed again when needed.
    """

    def __init__(self, vision: VisionProcessor, store: MediaStore, max_bytes: int = 2**30) -> None:
        self.vision = vision
        self.store = store
        self.processed = 0
        """Number of images and videos processed."""
        self._max_bytes = max_bytes
        self._held = 0
        self._known: OrderedDict[str, Mapping[str, Any]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, media: Media) -> Mapping[str, Any]:
        """Return the pixel values of an image or video, read-only.

        Raises `MediaError` if it is not in the store.
        """
        key = media.key
        with self._lock:
            found = self._known.get(key)
            if found is not None:
                self._known.move_to_end(key)
                return found
            made = self.vision.process(media, self.store)
            self.processed += 1
            self._known[key] = made
            self._held += _bytes(made)
            while self._held > self._max_bytes and len(self._known) > 1:
                self._held -= _bytes(self._known.popitem(last=False)[1])
            return made

    def merged(self, media: Sequence[Media]) -> dict[str, Any]:
        """Return the pixel values of several media, in order."""
        return self.vision.merge([self.get(one) for one in media])


def _bytes(arrays: Mapping[str, Any]) -> int:
    return sum(array.nbytes for array in arrays.values())
