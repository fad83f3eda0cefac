"""Messages to token ids and back."""

from turnwise.render.base import Branch, Extend, Renderer, Sampled
from turnwise.render.load import byte_renderer, load_renderer

__all__ = ["Branch", "Extend", "Renderer", "Sampled", "byte_renderer", "load_renderer"]
