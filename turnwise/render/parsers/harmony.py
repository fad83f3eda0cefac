"""gpt-oss's Harmony: a reply is a run of messages, each with a channel and perhaps a recipient::

    <|channel|>analysis<|message|>I look it up.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>{"key": "a"}<|call|>

    <|channel|>final<|message|>It is b.<|return|>

The recipient may also stand before the channel (` to=functions.look_up<|channel|>commentary json<|message|>`, as the
template writes it). Messages of the analysis channel are thinking, those of the others visible text; each begins where the
last one ended, whatever ended it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from turnwise.render.parsers.base import MalformedCall, Tools, finish_calls, malformed_call
from turnwise.render.parsers.readers import make_call
from turnwise.render.parsers.values import read_json
from turnwise.types import Message, ToolCall

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_END = re.compile(r"<\|(?:end|call|return)\|>")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


@dataclass(frozen=True, slots=True)
class Harmony:
    """Reads a reply as messages by channel."""

    name: str = "harmony"

    def parse(self, text: str, tools: Tools = (), *, thinking: bool = False) -> Message:
        """See `Parser.parse`; a reply without channels is visible text, or thinking where that was opened."""
        if not thinking and "<|" not in text:
            return Message("assistant", text)
        thoughts: list[str] = []
        said: list[str] = []
        found: list[ToolCall] = []
        ignored = 0
        for number, part in enumerate(text.split(_START)):
            header, begun, body = part.partition(_MESSAGE)
            channel = header.partition(_CHANNEL)[2].split("<")[0].split() if _CHANNEL in header else []
            if number == 0 and thinking and not channel:  # the prompt wrote the header
                header, begun, body, channel = "", _MESSAGE, part, ["analysis"]
            elif number == 0 and not begun and not channel:
                begun, body = _MESSAGE, part
            body = _END.split(body, maxsplit=1)[0]
            to = _RECIPIENT.search(header) if header else None
            if to is not None and to[1] != "assistant":
                if tools:
                    found.append(_call(to[1], body, bool(begun)))
            elif channel[:1] == ["analysis"]:
                thoughts.append(body)
                ignored += body.count(" to=functions.") if tools else 0
            elif begun:
                said.append(body)
        reasoning = "\n".join(thoughts) if thoughts else None
        calls = finish_calls(found, tools) if found else ()
        return Message("assistant", "\n".join(said), tool_calls=calls, reasoning=reasoning, calls_in_thinking=ignored)

    def opens_reasoning(self, prompt: str) -> bool:
        """See `Parser.opens_reasoning`."""
        return prompt.rstrip().endswith(f"{_CHANNEL}analysis{_MESSAGE}")


def _call(recipient: str, body: str, begun: bool) -> ToolCall:
    name = recipient.removeprefix("functions.")
    if not begun:
        return malformed_call("truncated", f"the tool call is cut off: {_MESSAGE} is missing", name)
    try:
        arguments = read_json(body)
    except MalformedCall as error:
        return malformed_call(error.cause, str(error), name)
    return make_call(name, arguments)


HARMONY = Harmony()
