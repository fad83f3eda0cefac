"""Messages to token ids and back."""

from turnwright.renderers.chat_renderer import ChatRenderer
from turnwright.renderers.load import MARKUP, SPECIAL, byte_renderer, load_renderer
from turnwright.renderers.renderer import Branch, Extend, Renderer, SampledReply
from turnwright.renderers.template import CHATML, ChatTemplate, template_names, template_source
from turnwright.renderers.tokenizer import ByteTokenizer, HFTokenizer

__all__ = [
    "CHATML",
    "MARKUP",
    "SPECIAL",
    "Branch",
    "ByteTokenizer",
    "ChatRenderer",
    "ChatTemplate",
    "Extend",
    "HFTokenizer",
    "Renderer",
    "SampledReply",
    "byte_renderer",
    "load_renderer",
    "template_names",
    "template_source",
]
