"""Gemma 4's calls, JSON-like with bare keys and strings between `<|"|>`::

<|channel>thought
I look it up.
<channel|><|tool_call>call:look_up{key:<|"|>a<|"|>,limit:3}<tool_call|>
"""

from __future__ import annotations

import json
import re

from turnwise.render.parsers.base import BadCall, Dialect, Format, Thinking, Tools, bad_call
from turnwise.render.parsers.readers import with_arguments
from turnwise.render.parsers.values import read_json
from turnwise.types import ToolCall

_EXAMPLE = 'call:NAME{KEY:<|"|>VALUE<|"|>}'
_CALL = re.compile(r"\s*call:([^\s{]+)(?=\{)")
_TOKEN = re.compile(r'<\|"\|>(?P<string>.*?)<\|"\|>|(?P<word>[^\W\d][\w.-]*)', re.DOTALL)
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


def _read(body: str, tools: Tools) -> list[ToolCall]:
    head = _CALL.match(body)
    if head is None:
        return [bad_call("not_a_call" if body.strip() else "truncated", f"a tool call looks like {_EXAMPLE}")]
    try:
        return [with_arguments(head[1], read_json(_TOKEN.sub(_token, body[head.end() :])))]
    except BadCall as error:
        return [bad_call(error.cause, f"{error}; a tool call looks like {_EXAMPLE}", head[1])]


GEMMA = Format(
    "gemma",
    (Dialect("<|tool_call>", _read, "<tool_call|>"),),
    thinking=Thinking("<|channel>thought\n", "<channel|>"),
    dropped=("<|tool_response>",),
)
