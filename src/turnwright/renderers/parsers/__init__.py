"""Parse replies into reasoning, tool calls and visible text, by format."""

from turnwright.renderers.parsers.detect import (
    PARSERS,
    detect_format,
    parser_for_template,
    parser_named,
)
from turnwright.renderers.parsers.reply_format import Parser

__all__ = ["PARSERS", "Parser", "detect_format", "parser_for_template", "parser_named"]
