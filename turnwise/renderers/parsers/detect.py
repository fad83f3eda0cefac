"""The formats by name, and the one that a template writes."""

from __future__ import annotations

from collections.abc import Mapping

from turnwise.errors import TemplateError
from turnwise.renderers.parsers import formats, special_formats
from turnwise.renderers.parsers import formats as deepseek
from turnwise.renderers.parsers import formats as gemma
from turnwise.renderers.parsers import formats as glm
from turnwise.renderers.parsers import formats as hermes
from turnwise.renderers.parsers import formats as kimi
from turnwise.renderers.parsers import formats as minimax
from turnwise.renderers.parsers import formats as mistral
from turnwise.renderers.parsers import formats as others
from turnwise.renderers.parsers import formats as qwen3_coder
from turnwise.renderers.parsers import special_formats as lfm2
from turnwise.renderers.parsers import special_formats as llama3
from turnwise.renderers.parsers.base import Parser, Tools
from turnwise.renderers.parsers.special_formats import BARE
from turnwise.renderers.template import ChatTemplate
from turnwise.types import Message, ToolCall

_ALL: tuple[Parser, ...] = (
    hermes.HERMES,
    qwen3_coder.QWEN3_CODER,
    qwen3_coder.SEED,
    mistral.MISTRAL,
    deepseek.DEEPSEEK,
    glm.GLM,
    glm.HUNYUAN,
    kimi.KIMI,
    kimi.KIMI_K3,
    special_formats.HARMONY,
    formats.COHERE,
    formats.COMMAND_R,
    gemma.GEMMA,
    lfm2.LFM2,
    minimax.MINIMAX_M2,
    minimax.MUSE,
    hermes.MINIMAX_M1,
    hermes.APRIEL,
    hermes.NEMOTRON_V2,
    hermes.GIGACHAT,
    others.FUNCTIONARY,
    others.MINICPM,
    others.GRANITE,
    others.INTERNLM2,
    gemma.FUNCTION_GEMMA,
    lfm2.MINICPM3,
    lfm2.OLMO3,
    others.SOLAR,
    others.APERTUS,
    llama3.LLAMA3,
)
PARSERS: Mapping[str, Parser] = {parser.name: parser for parser in (*_ALL, *BARE)}

PROBE_NAME, PROBE_ARGUMENTS, PROBE_CONTENT, PROBE_REASON = "probe_name", {"probe_key": "probe_value"}, "CONTENT", "REASON"
PROBE_CALL = ToolCall(PROBE_NAME, PROBE_ARGUMENTS, "abcdefghi")
_USER = Message("user", "USERMARK")
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": PROBE_NAME,
        "description": "A tool.",
        "parameters": {
            "type": "object",
            "properties": {"probe_key": {"type": "string", "description": "A key."}},
            "required": ["probe_key"],
        },
    },
}


def detect_format(shown: str) -> str | None:
    """The name of the parser that reads what a template shows; None where it shows calls in a way that none reads, or none.

    Nothing is known by a model's name: the first parser is taken that reads the very call that the template was given. Where
    the template shows no call, the first that reads its thinking.

    Args:
        shown: the text that the template renders for an assistant message with content "CONTENT", reasoning "REASON" and one
            call of `probe_name` with `{"probe_key": "probe_value"}`; with or without the header and what closes it.
    """
    if PROBE_NAME not in shown:
        if PROBE_REASON not in shown:
            return None
        return next((p.name for p in _ALL if PROBE_REASON in (p.parse(shown).reasoning or "")), None)
    return next((parser.name for text in without_call_endings(shown) for parser in _ALL if _reads(parser, text)), None)


def _reads(parser: Parser, text: str) -> bool:
    """Whether a parser reads the very call that the template was given."""
    calls = parser.parse(text, (PROBE_TOOL,)).tool_calls
    return [(call.name, call.arguments, call.error) for call in calls] == [(PROBE_NAME, PROBE_ARGUMENTS, None)]


def detect_format_or_default(shown: str) -> str:
    """`recognise`, and "hermes" where nothing fits."""
    return detect_format(shown) or "hermes"


def without_call_endings(shown: str) -> list[str]:
    """What is shown, and for calls that run to the end of a reply, or are all of it, without what stands around them."""
    end = max(shown.rfind("}"), shown.rfind("]")) + 1
    begin = shown.find('{"name": "')
    whole = 0 <= begin < end and '"parameters": ' in shown[begin:end]
    return [shown, *([shown[:end]] if end else []), *([shown[begin:end]] if whole else [])]


def render_probe_reply(
    template: ChatTemplate, calls: tuple[ToolCall, ...] = (PROBE_CALL,), tools: Tools = (PROBE_TOOL,)
) -> str | None:
    """What a template writes behind a user's message for a reply with thinking, text and calls, or as much as it takes.

    None where it takes none of it.
    """
    best = None
    for content, reasoning in ((PROBE_CONTENT, PROBE_REASON), ("", PROBE_REASON), (PROBE_CONTENT, None), ("", None)):
        try:
            text = template.render((_USER, Message("assistant", content, tool_calls=calls, reasoning=reasoning)), tools)
        except TemplateError:
            continue
        _, found, behind = text.rpartition(_USER.text)
        if found and calls[0].name in behind:
            return behind
        best = behind if found and best is None else best
    return best


def parser_for_template(template: ChatTemplate) -> Parser | None:
    """The parser of what a template shows (see `recognise`); None where it shows no calls, or calls that none reads.

    A list of calls without a mark counts only where a reply is nothing else: right behind the generation prompt.
    """
    name = detect_format(render_probe_reply(template) or "")
    if name is not None:
        return PARSERS[name]
    alone = _shown_alone(template)
    return next((parser for text in without_call_endings(alone) for parser in BARE if _reads(parser, text)), None)


def shows_calls(template: ChatTemplate) -> str:
    """What a template writes for a reply that is one call; empty where it shows none."""
    shown = render_probe_reply(template) or ""
    return shown if PROBE_NAME in shown else ""


def _shown_alone(template: ChatTemplate) -> str:
    """What a template writes behind the generation prompt for a reply that is one call; empty where that is not told."""
    asked, reply = (_USER,), Message("assistant", "", tool_calls=(PROBE_CALL,))
    try:
        prompt = template.render(asked, (PROBE_TOOL,), generation_prompt=True)
        whole = template.render((*asked, reply), (PROBE_TOOL,))
    except TemplateError:
        return ""
    return whole.removeprefix(prompt) if whole.startswith(prompt) else ""
