"""Every template at hand: its format is recognised by what it shows, and what
it shows is read back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from kit.corpus import distinct, template_of

from turnwright.errors import TemplateError
from turnwright.renderers.parsers import PARSERS, parser_for_template
from turnwright.renderers.parsers.detect import render_probe_reply, without_call_endings
from turnwright.renderers.template import adapt_template
from turnwright.types import ToolCall

CORPUS = distinct()
needs_corpus = pytest.mark.skipif(
    not CORPUS, reason="0 templates at hand; `PYTHONPATH=tests python -m kit.corpus` fetches them"
)


def tools(*names: str, nullable: Any) -> list[dict[str, Any]]:
    kinds = {
        "text": {"type": "string"},
        "number": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "flag": {"type": "boolean"},
        "rows": {"type": "array", "items": {"type": "string"}},
        "deep": {"type": "object", "additionalProperties": {"type": "string"}},
        "nothing": {"type": nullable},
    }
    properties = {key: kind | {"description": "d"} for key, kind in kinds.items()}
    parameters = {"type": "object", "properties": properties, "required": ["text"]}
    return [
        {
            "type": "function",
            "function": {"name": name, "description": "d", "parameters": parameters},
        }
        for name in names
    ]


AWKWARD = {
    "text": 'it\'s "é ü 漢"\n\n two \\ lines {[,]} <b>&amp;</b>',
    "number": "007",
    "count": -3,
    "ratio": 1e-05,
    "flag": True,
    "rows": [1, "a", {"k": [False, 2.5]}],
    "deep": {"a": {"b": "x, y: z"}, "c": []},
}
SECOND = {"text": "true", "number": "[1", "count": 0, "flag": False, "nothing": None}
# Some templates cannot show a type that is a list, and then not None either.
STRICT = tools("look_up", "other", nullable=["string", "null"])
LENIENT = tools("look_up", "other", nullable="string")

UNREAD = {
    "MiniMax-M3": "arguments are nested tags without types",
    "meetkai-functionary-medium-v3.2": "a call has no mark but the template's own generation "
    "prompt (`>>>`)",
}
"""Templates whose calls no parser reads."""
LOSSY = {
    "LFM2.5-8B-A1B": "quotes in strings are not escaped",
    # LFM2.5-8B-A1B's twin, first by name where only trl's are at hand
    "lfm2_2_5": "quotes in strings are not escaped",
    "lfm2_2_5_v2": "quotes in strings are not escaped",
}
"""Templates whose own text of the awkward call is ambiguous."""
FIRST_ONLY = {
    "GigaChat3-10B-A1.8B": "shows the first call alone",
    "GigaChat3.1-10B-A1.8B": "shows the first call alone",
    "openai-gpt-oss-120b": "shows the first call alone",
    "gptoss": "shows the first call alone",
    "gptoss_training": "shows the first call alone",
    "meta-llama-Llama-3.1-8B-Instruct": "refuses two calls",
    "meta-llama-Llama-3.2-3B-Instruct": "refuses two calls",
    "llama3_1": "refuses two calls",
    "llama3_2": "refuses two calls",
}
"""Templates that do not show two calls in a message."""


def read_back(form: Any, name: str, given: Sequence[Mapping[str, Any]]) -> str:
    """What came of calls with these arguments: read, refused, or what was read instead."""
    calls = tuple(
        ToolCall("look_up", arguments, f"abcdefgh{number}")
        for number, arguments in enumerate(given)
    )
    wanted = [("look_up", arguments, None) for arguments in given]
    for known in (STRICT, LENIENT):
        shown = render_probe_reply(form, calls, known)
        if shown is None or "look_up" not in shown:
            continue
        for text in without_call_endings(shown):
            found = PARSERS[name].parse(text, known).tool_calls
            if [(c.name, c.arguments, c.error) for c in found] == wanted:
                return "read"
        return f"misread: {shown!r}"
    return "refused"


@needs_corpus
def test_every_template_reads_back_its_own_calls(capsys):
    table: Counter[str] = Counter()
    results: dict[str, str] = {}
    for full, source in CORPUS:
        name = full.rpartition("/")[2]
        try:
            form = adapt_template(template_of(full, source))
            shown = render_probe_reply(form)
        except TemplateError:
            shown = None
        if shown is None or "probe_name" not in shown:
            table["no calls shown" if shown else "not rendered"] += 1
            continue
        parser = parser_for_template(form)
        if parser is None:
            table["calls not read"] += 1
            assert name in UNREAD, f"{full} shows its calls in a way that no parser reads:\n{shown}"
            continue
        table[parser.name] += 1
        one, other = (read_back(form, parser.name, [arguments]) for arguments in (AWKWARD, SECOND))
        both = read_back(form, parser.name, [AWKWARD, SECOND])
        results[name] = "round trip"
        if name in LOSSY:
            assert one.startswith("misread")
            results[name] = LOSSY[name]
            continue
        assert one == other == "read", f"{full} ({parser.name}): {one}, {other}"
        if name in FIRST_ONLY:
            assert both != "read", f"{full} shows two calls after all"
            continue
        assert both == "read", f"{full} ({parser.name}): {both}"
    good = sum(result == "round trip" for result in results.values())
    with capsys.disabled():
        print(
            f"\n{len(CORPUS)} templates, {len(results)} read, {good} round-trip; by format: "
            f"{dict(table.most_common())}"
        )
    if len(CORPUS) >= 100:
        assert good >= 84
