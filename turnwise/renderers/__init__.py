"""Messages to token ids and back."""

from turnwise.renderers.base import Branch, Extend, Renderer, SampledReply
from turnwise.renderers.load import byte_renderer, load_renderer

__all__ = ["Branch", "Extend", "Renderer", "SampledReply", "byte_renderer", "load_renderer"]
