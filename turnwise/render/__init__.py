"""Messages to token ids and back."""

from turnwise.render.base import Branch, Extend, Renderer, SampledReply
from turnwise.render.load import byte_renderer, load_renderer

__all__ = ["Branch", "Extend", "Renderer", "SampledReply", "byte_renderer", "load_renderer"]
