"""Cohere's actions: a list of JSON between marks (Command R7B and later), or in a fence (Command R+)::

<|START_THINKING|>I look it up.<|END_THINKING|><|START_ACTION|>[
    {"tool_call_id": "0", "tool_name": "look_up", "parameters": {"key": "a"}}
]<|END_ACTION|>
"""

from turnwise.render.parsers.base import CallSyntax, ReasoningMarks, ReplyFormat
from turnwise.render.parsers.readers import JsonCalls

_READ = JsonCalls("tool_name", ("parameters",), "tool_call_id", many=True)
COHERE = ReplyFormat(
    "cohere",
    (CallSyntax("<|START_ACTION|>", _READ, "<|END_ACTION|>"),),
    thinking=ReasoningMarks("<|START_THINKING|>", "<|END_THINKING|>"),
    dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
)
COMMAND_R = ReplyFormat("command_r", (CallSyntax("Action:\n```json\n", _READ, "```"),), ("Action:\n", "<"))
