"""Replies read back: thinking, tool calls and visible text, by format."""

from turnwise.render.parsers.base import Parser
from turnwise.render.parsers.choose import PARSERS, choose, parser_of, recognise

__all__ = ["PARSERS", "Parser", "choose", "parser_of", "recognise"]
