"""Hermes' JSON, as Qwen 2.5, Qwen 3, QwQ, MiMo, Granite 4 and many others write it::

    <think>
    I look it up.
    </think>

    Let me see.
    <tool_call>
    {"name": "look_up", "arguments": {"key": "a"}}
    </tool_call>

The same JSON stands between other marks in the rest of the table here.
"""

from turnwise.render.parsers.base import CallSyntax, ReasoningMarks, ReplyFormat
from turnwise.render.parsers.readers import JsonCalls

HERMES = ReplyFormat("hermes", (CallSyntax("<tool_call>", JsonCalls(), "</tool_call>"),))

NEMOTRON_V2 = ReplyFormat("nemotron_v2", (CallSyntax("<TOOLCALL>", JsonCalls(many=True), "</TOOLCALL>"),))
"""`<TOOLCALL>[{"name": ..., "arguments": ...}, ...]</TOOLCALL>`"""

APRIEL = ReplyFormat(
    "apriel",
    (CallSyntax("<tool_calls>", JsonCalls(many=True), "</tool_calls>"),),
    ("<", "[BEGIN FINAL RESPONSE]"),
    ReasoningMarks("Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]"),
)
"""`<tool_calls>[{...}, ...]</tool_calls>`; thinking ends in `[BEGIN FINAL RESPONSE]`."""

MINIMAX_M1 = ReplyFormat("minimax_m1", (CallSyntax("<tool_calls>", JsonCalls(lines=True), "</tool_calls>"),))
"""`<tool_calls>`, a line of JSON for each call, `</tool_calls>`."""

GIGACHAT = ReplyFormat(
    "gigachat",
    (CallSyntax("<|function_call|>", JsonCalls()), CallSyntax("function call<|role_sep|>\n", JsonCalls())),
    dropped=("<|message_sep|>",),
)
"""`<|function_call|>{...}`, earlier `<|message_sep|>`, then `function call<|role_sep|>` and `{...}`."""
