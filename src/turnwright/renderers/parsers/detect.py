"""Parsers by name, and detection of the format that a template writes.

A format is detected by what it reads: the template renders a reply with a call of a made-up tool,
and the first parser that returns exactly this call is taken (`parser_for_template`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from turnwright import plugins
from turnwright.renderers.parsers.formats import FORMATS
from turnwright.renderers.parsers.readers import TaggedCalls
from turnwright.renderers.parsers.reply_format import Parser, ReplyFormat
from turnwright.renderers.parsers.special_formats import BARE
from turnwright.renderers.template import ChatTemplate, probe_tool
from turnwright.types import Message, ToolCall, Tools

PARSERS: Mapping[str, Parser] = {parser.name: parser for parser in (*FORMATS, *BARE)}

PROBE_NAME = "probe_name"
PROBE_ARGUMENTS = {"probe_key": "probe_value"}
PROBE_CONTENT = "CONTENT"
PROBE_REASON = "REASON"
PROBE_CALL = ToolCall(PROBE_NAME, PROBE_ARGUMENTS, "abcdefghi")
_USER = Message("user", "USERMARK")
PROBE_TOOL = probe_tool(PROBE_NAME, "A tool.", "probe_key", "A key.")


def detect_format(rendered: str) -> str | None:
    """Return the name of the parser for a template's replies; None if the template writes no call,
    or one that none parses.

    Model names do not matter: the result is the first parser that returns exactly the call that the
    template was given. If the template writes no call, it is the first that returns its thinking.
    `rendered` is the template's text for an assistant message with content "CONTENT", reasoning
    "REASON" and one call of `probe_name` with `{"probe_key": "probe_value"}`.
    """
    if PROBE_NAME in rendered:
        parser = _first_reading(FORMATS, rendered)
        return None if parser is None else parser.name

    if PROBE_REASON in rendered:
        for parser in FORMATS:
            if _splits_thinking(parser, rendered):
                return parser.name
    return None


def _first_reading(parsers: Sequence[Parser], rendered: str) -> Parser | None:
    """Return the first parser that returns exactly the probe call, of the text or of a variant of
    it."""
    for text in without_call_endings(rendered):
        for parser in parsers:
            calls = parser.parse(text, (PROBE_TOOL,)).tool_calls
            if len(calls) != 1 or calls[0].error is not None:
                continue
            if calls[0].name == PROBE_NAME and calls[0].arguments == PROBE_ARGUMENTS:
                return parser
    return None


def _splits_thinking(parser: Parser, rendered: str) -> bool:
    """Return whether a parser finds the end of the probe's thinking."""
    if isinstance(parser, ReplyFormat):
        # The header of the message is before the thinking, and may have the mark that closes it.
        start = max(0, rendered.rfind(parser.thinking.open.strip(), 0, rendered.find(PROBE_REASON)))
        rendered = rendered[start:]
    message = parser.parse(rendered, thinking=True)
    return PROBE_REASON in (message.reasoning or "") and bool(message.text.strip())


def without_call_endings(rendered: str) -> list[str]:
    """Return the text, and variants without the text around calls that run to the end of a reply or
    are all of it."""
    variants = [rendered]
    end = max(rendered.rfind("}"), rendered.rfind("]")) + 1
    if end:
        variants.append(rendered[:end])
    begin = rendered.find('{"name": "')
    if 0 <= begin < end and '"parameters": ' in rendered[begin:end]:
        variants.append(rendered[begin:end])
    return variants


def render_probe_reply(
    template: ChatTemplate,
    calls: tuple[ToolCall, ...] = (PROBE_CALL,),
    tools: Tools = (PROBE_TOOL,),
) -> str | None:
    """Render a reply to a user with thinking, text and calls, or as much as the template accepts;
    None if it accepts none."""
    without_call = None
    for content, reasoning in (
        (PROBE_CONTENT, PROBE_REASON),
        ("", PROBE_REASON),
        (PROBE_CONTENT, None),
        ("", None),
    ):
        message = Message("assistant", content, tool_calls=calls, reasoning=reasoning)
        text = template.try_render((_USER, message), tools) or ""
        _, found, reply = text.rpartition(_USER.text)
        if not found:
            continue
        if calls[0].name in reply:
            return reply
        if without_call is None:
            without_call = reply
    return without_call


def parser_for_template(template: ChatTemplate) -> Parser | None:
    """Return the parser for a template's replies; None if it writes no calls, or calls that no
    parser reads.

    A list of calls without a mark counts only if it is the complete reply: right after the
    generation prompt.
    """
    rendered = render_probe_reply(template) or ""
    name = detect_format(rendered)
    if name is not None:
        return with_line_breaks_of(PARSERS[name], rendered)

    # A reply of one call after the generation prompt.
    prompt = template.try_render((_USER,), (PROBE_TOOL,), generation_prompt=True)
    called = Message("assistant", "", tool_calls=(PROBE_CALL,))
    full = template.try_render((_USER, called), (PROBE_TOOL,))
    if prompt is None or full is None or not full.startswith(prompt):
        return None
    return _first_reading(BARE, full.removeprefix(prompt))


def with_line_breaks_of(parser: Parser, rendered: str) -> Parser:
    """Return a parser that removes line breaks around an argument exactly where the template writes
    them.

    Templates of one format differ in this, and a string may begin or end with line breaks of its
    own.
    """
    (value,) = PROBE_ARGUMENTS.values()
    if not isinstance(parser, ReplyFormat) or value not in rendered:
        return parser

    newline = f"\n{value}\n" in rendered
    dialects = []
    for dialect in parser.dialects:
        if isinstance(dialect.read, TaggedCalls):
            dialect = replace(dialect, read=replace(dialect.read, newline=newline))
        dialects.append(dialect)
    if tuple(dialects) == parser.dialects:
        return parser
    return replace(parser, dialects=tuple(dialects))


def parser_named(name: str) -> Parser:
    """Return the parser of a format by its name, ours or an installed package's.

    Raises `ConfigError` for an unknown one.
    """
    parser: Parser = PARSERS.get(name) or plugins.load("parsers", name)
    return parser
