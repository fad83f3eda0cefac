"""What a model directory says about images: its own settings, and those of its processors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from turnwise.errors import ModelError
from turnwise.render.codec import Tokenizer
from turnwise.render.files import read_json


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
