"""Vision-language models: how images become ids, positions and pixel values. numpy and Pillow; no torch."""

from turnwise.renderers.vision.base import MediaBlock, VisionProcessor
from turnwise.renderers.vision.processors import PixelCache

__all__ = ["MediaBlock", "PixelCache", "VisionProcessor"]
