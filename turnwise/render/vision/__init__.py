"""Vision-language models: how images become ids, positions and pixel values. numpy and Pillow; no torch."""

from turnwise.render.vision.eyes import MediaBlock, VisionProcessor
from turnwise.render.vision.pixels import PixelCache

__all__ = ["MediaBlock", "PixelCache", "VisionProcessor"]
