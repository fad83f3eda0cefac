"""Gemma's calls, JSON-like with bare keys and marked strings: Gemma 4 and, with other marks, FunctionGemma::

<|channel>thought
I look it up.
<channel|><|tool_call>call:look_up{key:<|"|>a<|"|>,limit:3}<tool_call|>

<start_function_call>call:look_up{key:<escape>a<escape>,limit:3}<end_function_call>
"""

from __future__ import annotations

import json
import re

from turnwise.render.parsers.base import CallSyntax, MalformedCall, Read, ReasoningMarks, ReplyFormat, Tools, malformed_call
from turnwise.render.parsers.readers import make_call
from turnwise.render.parsers.values import read_json
from turnwise.types import ToolCall

_CALL = re.compile(r"\s*call:([^\s{]+)(?=\{)")
_WORDS = {"true": "true", "false": "false", "null": "null", "None": "null"}


def _token(match: re.Match[str]) -> str:
    if (string := match["string"]) is not None:
        return json.dumps(string)
    before_colon = match.string[match.end() : match.end() + 1] == ":"
    word = match["word"]
    if not before_colon and word in _WORDS:
        return _WORDS[word]
    exponent = match.start() and match.string[match.start() - 1].isdigit()  # 1e-05
    return word if exponent else json.dumps(word) if before_colon else word


def _reader(quote: str) -> Read:
    """Return the reader of calls whose strings stand between two of these marks."""
    example = f"call:NAME{{KEY:{quote}VALUE{quote}}}"
    token = re.compile(rf"{re.escape(quote)}(?P<string>.*?){re.escape(quote)}|(?P<word>[^\W\d][\w.-]*)", re.DOTALL)

    def read(body: str, tools: Tools) -> list[ToolCall]:
        head = _CALL.match(body)
        if head is None:
            return [malformed_call("not_a_call" if body.strip() else "truncated", f"a tool call looks like {example}")]
        try:
            return [make_call(head[1], read_json(token.sub(_token, body[head.end() :])))]
        except MalformedCall as error:
            return [malformed_call(error.cause, f"{error}; a tool call looks like {example}", head[1])]

    return read


GEMMA = ReplyFormat(
    "gemma",
    (CallSyntax("<|tool_call>", _reader('<|"|>'), "<tool_call|>"),),
    thinking=ReasoningMarks("<|channel>thought\n", "<channel|>"),
    dropped=("<|tool_response>",),
)
FUNCTION_GEMMA = ReplyFormat(
    "function_gemma", (CallSyntax("<start_function_call>", _reader("<escape>"), "<end_function_call>"),)
)
