"""Model files, transformers' Pillow processors, cache of pixel values."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from turnwise.errors import ModelError
from turnwise.media import MediaStore
from turnwise.renderers.base import read_json
from turnwise.renderers.tokenizer import Tokenizer
from turnwise.renderers.vision.base import VisionProcessor, pixels_of
from turnwise.types import Media


class ModelFiles(NamedTuple):
    """Settings of one model, as its files give them."""

    root: Path
    config: Mapping[str, Any]
    """`config.json`."""
    image: Mapping[str, Any]
    """Of the image processor."""
    video: Mapping[str, Any]
    """Of the video processor; where there are none, those of the image processor, as transformers does."""
    processor: Mapping[str, Any]
    """Of the processor around both (`image_seq_len` and the like)."""
    codec: Tokenizer

    @property
    def vision(self) -> Mapping[str, Any]:
        """The vision tower's part of `config.json`."""
        found = self.config.get("vision_config")
        return found if isinstance(found, Mapping) else {}

    def token(self, text: str, *names: str, needed: bool = True) -> int | None:
        """The id of a control token: the one that `config.json` calls by one of these names, else the one of this text.

        Raises:
            ModelError: when there is none and it is needed, or the id is no control token of the tokenizer.
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
                    f"{self.root}: config.json says {name} = {given}, which is no added token of tokenizer.json; "
                    "the tokenizer belongs to another model"
                )
        if text in control or not needed:
            return control.get(text)
        raise ModelError(f"{self.root}: tokenizer.json has no added token {text}, which stands for images")


def read_files(root: Path, codec: Tokenizer) -> ModelFiles:
    """Read what there is.

    Raises:
        ModelError: for a file that is no JSON object.
    """
    processor = read_json(root / "processor_config.json")
    image = _part(processor, "image_processor") or read_json(root / "preprocessor_config.json")
    video = _part(processor, "video_processor") or read_json(root / "video_preprocessor_config.json") or image
    return ModelFiles(root, read_json(root / "config.json"), image, video, processor, codec)


def _part(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = settings.get(name)
    return found if isinstance(found, Mapping) else {}


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


class PixelCache:
    """What a model's processor makes of the images of one run, for engine and trainer alike. Safe to use from several threads.

    Args:
        eyes: the model's.
        store: where the images are.
        most_bytes: memory for what was processed; the longest unused goes first, and is processed again when needed.
    """

    def __init__(self, eyes: VisionProcessor, store: MediaStore, most_bytes: int = 2**30) -> None:
        self.vision = eyes
        self.store = store
        self.processed = 0
        """Images and videos processed so far."""
        self._most = most_bytes
        self._held = 0
        self._known: OrderedDict[str, Mapping[str, Any]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, media: Media) -> Mapping[str, Any]:
        """The pixel values of one image or video, not to be written to.

        Raises:
            MediaError: when it is not in the store.
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
            while self._held > self._most and len(self._known) > 1:
                self._held -= _bytes(self._known.popitem(last=False)[1])
            return made

    def merged(self, media: Sequence[Media]) -> dict[str, Any]:
        """The pixel values of several, in order."""
        return self.vision.merge([self.get(one) for one in media])


def _bytes(arrays: Mapping[str, Any]) -> int:
    return sum(array.nbytes for array in arrays.values())
