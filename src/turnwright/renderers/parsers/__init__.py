"""Parse replies into reasoning, tool calls and visible text, by format."""

from turnwright.renderers.parsers.base import Parser
from turnwright.renderers.parsers.detect import PARSERS, detect_format, parser_for_template, parser_named

__all__ = ["PARSERS", "Parser", "detect_format", "parser_for_template", "parser_named"]
