"""Parsers by name, and detection of the format that a template writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from turnwright import plugins
from turnwright.renderers.parsers.formats import FORMATS
from turnwright.renderers.parsers.readers import TaggedCalls
from turnwright.renderers.parsers.reply_format import Parser, ReplyFormat
from turnwright.renderers.parsers.special_formats import BARE
from turnwright.renderers.template import ChatTemplate, probe_tool
from turnwright.types import Message, ToolCall, Tools

PARSERS: Mapping[str, Parser] = {parser.name: parser for parser in (*FORMATS, *BARE)}

PROBE_NAME, PROBE_ARGUMENTS, PROBE_CONTENT, PROBE_REASON = (
    "probe_name",
    {"probe_key": "probe_value"},
    "CONTENT",
    "REASON",
)
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
    if PROBE_NAME not in rendered:
        if PROBE_REASON not in rendered:
            return None
        return next((parser.name for parser in FORMATS if _splits_thinking(parser, rendered)), None)
    return next(
        (
            parser.name
            for text in without_call_endings(rendered)
            for parser in FORMATS
            if _reads(parser, text)
        ),
        None,
    )


def _splits_thinking(parser: Parser, rendered: str) -> bool:
    """Return whether a parser finds the end of the probe's thinking."""
    if isinstance(parser, ReplyFormat):
        # The header of the message is before the thinking, and may have the mark that closes it.
        start = max(0, rendered.rfind(parser.thinking.open.strip(), 0, rendered.find(PROBE_REASON)))
        rendered = rendered[start:]
    message = parser.parse(rendered, thinking=True)
    return PROBE_REASON in (message.reasoning or "") and bool(message.text.strip())


def _reads(parser: Parser, text: str) -> bool:
    """Return whether a parser returns exactly the probe call."""
    calls = parser.parse(text, (PROBE_TOOL,)).tool_calls
    return [(call.name, call.arguments, call.error) for call in calls] == [
        (PROBE_NAME, PROBE_ARGUMENTS, None)
    ]


def without_call_endings(rendered: str) -> list[str]:
    """Return the text, and variants without the text around calls that run to the end of a
    reply or are all of it."""
    end = max(rendered.rfind("}"), rendered.rfind("]")) + 1
    begin = rendered.find('{"name": "')
    is_call = 0 <= begin < end and '"parameters": ' in rendered[begin:end]
    return [
        rendered,
        *([rendered[:end]] if end else []),
        *([rendered[begin:end]] if is_call else []),
    ]


def render_probe_reply(
    template: ChatTemplate,
    calls: tuple[ToolCall, ...] = (PROBE_CALL,),
    tools: Tools = (PROBE_TOOL,),
) -> str | None:
    """Render a reply to a user with thinking, text and calls, or as much as the template accepts;
    None if it accepts none."""
    best = None
    for content, reasoning in (
        (PROBE_CONTENT, PROBE_REASON),
        ("", PROBE_REASON),
        (PROBE_CONTENT, None),
        ("", None),
    ):
        asked = (_USER, Message("assistant", content, tool_calls=calls, reasoning=reasoning))
        text = template.try_render(asked, tools) or ""
        _, found, reply = text.rpartition(_USER.text)
        if found and calls[0].name in reply:
            return reply
        best = reply if found and best is None else best
    return best


def parser_for_template(template: ChatTemplate) -> Parser | None:
    """Return the parser for a template's replies; None if it writes no calls, or
    calls that no parser reads.

    A list of calls without a mark counts only if it is the complete reply: right
    after the generation prompt.
    """
    rendered = render_probe_reply(template) or ""
    name = detect_format(rendered)
    if name is not None:
        return with_line_breaks_of(PARSERS[name], rendered)
    # A reply of one call after the generation prompt; empty if the two cannot be separated.
    prompt = template.try_render((_USER,), (PROBE_TOOL,), generation_prompt=True)
    full = template.try_render(
        (_USER, Message("assistant", "", tool_calls=(PROBE_CALL,))), (PROBE_TOOL,)
    )
    alone = (
        full.removeprefix(prompt) if full and prompt is not None and full.startswith(prompt) else ""
    )
    return next(
        (parser for text in without_call_endings(alone) for parser in BARE if _reads(parser, text)),
        None,
    )


def with_line_breaks_of(parser: Parser, rendered: str) -> Parser:
    """Return a parser that removes line breaks around an argument exactly where
    the template writes them.

    Templates of one format differ in this, and a string may begin or end
    with line breaks of its own.
    """
    (value,) = PROBE_ARGUMENTS.values()
    if not isinstance(parser, ReplyFormat) or value not in rendered:
        return parser

    newline = f"\n{value}\n" in rendered
    dialects = tuple(
        replace(dialect, read=replace(dialect.read, newline=newline))
        if isinstance(dialect.read, TaggedCalls)
        else dialect
        for dialect in parser.dialects
    )
    return parser if dialects == parser.dialects else replace(parser, dialects=dialects)


def parser_named(name: str) -> Parser:
    """Return the parser of a format by its name, ours or an installed package's; raise
    `ConfigError` for an unknown one."""
    found: Parser = PARSERS.get(name) or plugins.load("parsers", name)
    return found
