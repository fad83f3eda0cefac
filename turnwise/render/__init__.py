"""Messages to token ids and back."""

from turnwise.render.base import Branch, Extend, Renderer

__all__ = ["Branch", "Extend", "Renderer"]
