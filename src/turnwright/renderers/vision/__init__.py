"""Vision-language models: how images become ids, positions and pixel values. numpy and Pillow; no torch."""

from turnwright.renderers.vision.base import MediaBlock, VisionProcessor
from turnwright.renderers.vision.processors import PixelCache

__all__ = ["MediaBlock", "PixelCache", "VisionProcessor"]
