"""Vision-language models: how images become ids, positions and pixel values. numpy and Pillow; no torch."""

from turnwise.render.vision.eyes import Block, Eyes
from turnwise.render.vision.pixels import Pixels

__all__ = ["Block", "Eyes", "Pixels"]
