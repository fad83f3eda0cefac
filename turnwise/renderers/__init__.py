"""Messages to token ids and back."""

from turnwise.renderers.base import Branch, Extend, Renderer, SampledReply
from turnwise.renderers.chat_renderer import ChatRenderer
from turnwise.renderers.load import MARKUP, SPECIAL, byte_renderer, load_renderer
from turnwise.renderers.template import CHATML, ChatTemplate, template_names, template_source
from turnwise.renderers.tokenizer import ByteTokenizer, HFTokenizer

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
