"""Vision-language models: how images become ids, positions and pixel values. numpy
and Pillow; no torch."""

from turnwright.renderers.vision.processors import PixelCache
from turnwright.renderers.vision_protocol import MediaBlock, VisionProcessor

__all__ = ["MediaBlock", "PixelCache", "VisionProcessor"]
