r"""Formats with a parser of their own: Harmony, Python calls (LFM2), Llama 3, bare lists.

In examples `\n` is a line break, and a line that is indented further continues the one above it.

gpt-oss's Harmony (`Harmony`): a reply is a sequence of messages, each with a channel and an
optional recipient::

    <|channel|>analysis<|message|>I look it up.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.look_up <|constrain|>json
      <|message|>{"key": "a"}<|call|>
    <|channel|>final<|message|>It is b.<|return|>

The recipient may also be before the channel
(` to=functions.look_up<|channel|>commentary json<|message|>`, as the template writes it). Messages
of the analysis channel are thinking, all others visible text; each begins where the last one ended.

Calls in Python syntax (`read_list`): LFM2's list between marks, and lines of calls in MiniCPM 3 and
OLMo 3::

    <|tool_call_start|>[look_up(key='a', limit=3), look_up(key='b')]<|tool_call_end|>
    <|tool_call_start|>\n```python\nlook_up(key="a")\n```\n<|tool_call_end|>
    <function_calls>look_up(key="a")\nlook_up(key="b")</function_calls>

Values are Python literals or JSON (templates write nested objects so). The templates do not escape
quotes in strings, so such strings do not parse; strings with escapes, as in Python, do.

Llama 3's JSON (`LLAMA3`): the complete reply is one call, or several separated by semicolons or
nothing; Llama 4's may follow a text between marks::

    {"name": "look_up", "parameters": {"key": "a"}}
    <|python_start|>Let me see.<|python_end|>{"name": "look_up", "parameters": {"key": "a"}}
    <|python_tag|>{"name": "look_up", "parameters": {"key": "a"}};
      {"name": "look_up", "parameters": {"key": "b"}}

No mark identifies a call. Without `<|python_tag|>`, a reply that begins with an object of other
keys is a JSON answer, and a reply that begins with words has no calls.

Replies that consist of a list of calls, without a mark (`Bare`)::

    [look_up(key="a"), look_up(key="b")]                      Python: Llama 4, ToolACE, ...
    [{"name": "look_up", "arguments": {"key": "a"}}]          JSON: xLAM, ...

Replies with another beginning have no calls: words, a list of numbers, or a Markdown link are
answers. One that begins with a part of a call of an existing tool is a malformed call.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from turnwright.renderers.parsers.readers import (
    STRING,
    JsonCalls,
    make_call,
    python_as_json,
    read_json,
)
from turnwright.renderers.parsers.reply_format import (
    CALL_ENDS,
    CallSyntax,
    MalformedCall,
    Read,
    ReasoningMarks,
    ReplyFormat,
    finish_calls,
    is_mentioned,
    malformed_call,
    name_of,
    unopened_call,
)
from turnwright.types import Message, ToolCall, Tools

_START = "<|start|>"
_CHANNEL = "<|channel|>"
_MESSAGE = "<|message|>"
_CONSTRAINT = "<|constrain|>"
_FUNCTIONS = "functions."
_END = re.compile(r"<\|(?:end|call|return)\|>")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


@dataclass(frozen=True, slots=True)
class Harmony:
    """Parser of a reply as messages by channel."""

    name: str = "harmony"
    closes: tuple[str, ...] = ("<|call|>",)

    def parse(self, text: str, tools: Tools = (), *, thinking: bool = False) -> Message:
        """See `Parser.parse`; a reply without channels is visible text, or thinking if the prompt
        opened that."""
        if not thinking and "<|" not in text:
            return Message("assistant", text)

        thoughts: list[str] = []
        visible: list[str] = []
        calls: list[ToolCall] = []
        ignored = 0
        for number, part in enumerate(text.split(_START)):
            message = _HarmonyMessage.of(part, is_first=number == 0, thinking=thinking)
            recipient = _RECIPIENT.search(message.header) if message.header else None
            if recipient is not None and recipient[1] != "assistant":
                if tools:
                    calls.append(_call(recipient[1], message))
                continue

            # The final channel may be constrained to JSON, commentary that is no call is not.
            constrained = message.channel == "commentary" and _CONSTRAINT in message.header
            ended_as_call = message.end in self.closes
            if tools and (constrained or ended_as_call or _FUNCTIONS in message.header):
                beginning = f"{_CHANNEL}commentary to={_FUNCTIONS}NAME{_MESSAGE}"
                calls.append(unopened_call("the call", beginning))

            if message.channel == "analysis":
                thoughts.append(message.body)
                if tools:
                    ignored += message.body.count(" to=functions.")
            elif message.begun:
                visible.append(message.body)

        return Message(
            "assistant",
            "\n".join(visible),
            tool_calls=finish_calls(calls, tools) if calls else (),
            reasoning="\n".join(thoughts) if thoughts else None,
            calls_in_thinking=ignored,
        )

    def opens_reasoning(self, prompt: str) -> bool:
        """See `Parser.opens_reasoning`."""
        return prompt.rstrip().endswith(f"{_CHANNEL}analysis{_MESSAGE}")


class _HarmonyMessage(NamedTuple):
    """One message of a reply, up to its end mark."""

    header: str
    channel: str
    """First word after the mark of a channel; empty if there is none."""
    begun: bool
    """Whether its body has begun."""
    body: str
    end: str
    """Its end mark; empty if there is none."""

    @classmethod
    def of(cls, part: str, *, is_first: bool, thinking: bool) -> _HarmonyMessage:
        """Read a message; the prompt may have written the header of the first one."""
        header, begun, body = part.partition(_MESSAGE)
        words: list[str] = []
        if _CHANNEL in header:
            words = header.partition(_CHANNEL)[2].split("<")[0].split()
        channel = words[0] if words else ""

        if is_first and not channel:
            if thinking:
                header, channel = "", "analysis"
                begun, body = _MESSAGE, part
            elif not begun:
                begun, body = _MESSAGE, part

        end = _END.search(body)
        if end is None:
            return cls(header, channel, bool(begun), body, "")
        return cls(header, channel, bool(begun), body[: end.start()], end[0])


def _call(recipient: str, message: _HarmonyMessage) -> ToolCall:
    name = recipient.removeprefix(_FUNCTIONS)
    if not message.begun:
        return malformed_call("truncated", f"the tool call is cut off: {_MESSAGE} is missing", name)
    try:
        return make_call(name, read_json(message.body))
    except MalformedCall as error:
        return malformed_call(error.cause, str(error), name, raw=message.body)


HARMONY = Harmony()

_EXAMPLE = "[NAME(KEY='VALUE')]"
_CALL = re.compile(r"\s*([\w.-]+)\(")
_KEY = re.compile(r"\s*([\w-]+)\s*=")
_LFM2_BETWEEN = re.compile(r"\s*,(?=\s*[\w.-]+\()")
_LFM2_PLAIN = re.compile(r"""[^'"()\[\]{},]+""")
_FENCE = re.compile(r"^```(?:python)?\s*|\s*```$")
_LINES = re.compile(r"\)\s*\n(?=\s*[\w.-]+\()")
_OPENING = "([{"
_CLOSING = ")]}"
_MAX_GAP = 64
"""Characters of white space before a closing parenthesis."""


def read_list(body: str, tools: Tools) -> list[ToolCall]:
    """Parse `[NAME(KEY='VALUE'), ...]`."""
    text = body.strip()
    if not text.startswith("["):
        return [malformed_call("not_a_call", f"a tool call looks like {_EXAMPLE}")]

    calls: list[ToolCall] = []
    position = 1
    while True:
        head = _CALL.match(text, position)
        if head is None:
            cause = "not_a_call" if text[position:].strip() else "truncated"
            return [*calls, malformed_call(cause, f"a tool call looks like {_EXAMPLE}")]
        name = head[1]
        try:
            arguments, position = _arguments(text, head.end())
        except MalformedCall as error:
            return [*calls, malformed_call(error.cause, str(error), name)]
        calls.append(ToolCall(name, arguments))

        comma = _LFM2_BETWEEN.match(text, position)
        if comma is None:
            break
        position = comma.end()

    if text[position:].strip() != "]":
        cause = "not_a_call" if text[position:] else "truncated"
        calls.append(malformed_call(cause, f"the list of tool calls does not end: {_EXAMPLE}"))
    return calls


def _arguments(text: str, position: int) -> tuple[dict[str, Any], int]:
    """Return the arguments after an opening parenthesis, and the end of the call."""
    arguments: dict[str, Any] = {}
    while True:
        head = _KEY.match(text, position)
        if head is None:
            nearby = text[position : position + _MAX_GAP]
            end = position + len(nearby) - len(nearby.lstrip())
            if text[end : end + 1] == ")":
                return arguments, end + 1
            cause = "not_a_call" if text[end:] else "truncated"
            raise MalformedCall(cause, f"arguments are given by name: {_EXAMPLE}")

        key = head[1]
        if key in arguments:
            raise MalformedCall(
                "repeated_argument", f"the argument {key:.80} is given twice; give it once"
            )
        end = _end_of_value(text, head.end())
        value = text[head.end() : end].strip()
        arguments[key] = read_json(python_as_json(value), f"the argument {key:.80}")
        position = end + 1 if text[end] == "," else end


def _end_of_value(text: str, position: int) -> int:
    """Return the position of the comma or parenthesis after a value."""
    depth = 0
    while position < len(text):
        char = text[position]
        if char in _OPENING:
            depth += 1
        elif char in _CLOSING:
            if not depth:
                return position
            depth -= 1
        elif char == "," and not depth:
            return position
        elif char != ",":
            token = STRING.match(text, position) or _LFM2_PLAIN.match(text, position)
            if token is None:
                break
            position = token.end()
            continue
        position += 1
    raise MalformedCall("truncated", "the tool call is cut off: a value does not end")


_BARE_PYTHON = re.compile(r"\A\s*(?:```(?:python)?\s*)?\[?\s*([\w.-]+)\(\s*(?:\)|[\w-]+\s*=)")
"""Beginning of a reply that is a call without marks; group 1 is the tool."""
LFM2 = ReplyFormat(
    "lfm2", (CallSyntax("<|tool_call_start|>", read_list, "<|tool_call_end|>"),), bare=_BARE_PYTHON
)


def _read_lines(body: str, tools: Tools) -> list[ToolCall]:
    """Parse calls in lines, with or without a code fence around them."""
    text = _FENCE.sub("", body.strip()).strip()
    if text:
        text = "[" + _LINES.sub("),", text) + "]"
    return read_list(text, tools)


MINICPM3 = ReplyFormat(
    "minicpm3",
    (CallSyntax("<|tool_call_start|>", _read_lines, "<|tool_call_end|>"),),
    thinking=ReasoningMarks("<|thought_start|>", "<|thought_end|>"),
    bare=_BARE_PYTHON,
)
OLMO3 = ReplyFormat(
    "olmo3", (CallSyntax("<function_calls>", _read_lines, "</function_calls>"),), bare=_BARE_PYTHON
)


_PLAIN = ReplyFormat("plain", ())


@dataclass(frozen=True, slots=True)
class Bare:
    """Parser of replies that consist of calls."""

    name: str
    begins: re.Pattern[str]
    """Beginning of such a reply; group 1, if any, is the first tool's name, which must exist."""
    read: Read
    example: str
    """Beginning of the calls, for the model."""
    half: re.Pattern[str]
    """Part of a call without its beginning; group 1 is its tool, which must exist."""
    marks: re.Pattern[str] | None = None
    """Optional marks before the calls; group 1, if any, is visible text."""
    end: str = ""
    """Optional mark after the calls."""
    closes: tuple[str, ...] = ()
    starts: tuple[str, ...] = ("{", "[")
    """Texts of which `begins` or `marks` begins with one, to tell answers from calls at little
    cost."""

    def parse(self, text: str, tools: Tools = (), *, thinking: bool = False) -> Message:
        """See `Parser.parse`."""
        message = _PLAIN.parse(text, tools, thinking=thinking)
        if not tools:
            return message
        content = message.text.strip()
        has_end = bool(self.end) and self.end in content
        if not has_end and not content.startswith(self.starts) and not content.endswith(CALL_ENDS):
            return message

        # What is between the optional marks.
        body = content
        visible = ""
        marks = self.marks.match(body) if self.marks is not None else None
        if marks is not None:
            if marks.lastindex:
                visible = marks[1] or ""
            body = body[marks.end() :].strip()
        if self.end and body.endswith(self.end):
            body = body.removesuffix(self.end).strip()

        if self._is_call(body, tools):
            calls = self.read(body, tools)
        elif marks is not None:
            calls = [self._without_call(body)]
        elif self._is_half(content, tools):
            calls = [unopened_call("the call", self.example)]
            visible = message.text
        else:
            return message
        return Message(
            "assistant",
            visible,
            tool_calls=finish_calls(calls, tools),
            reasoning=message.reasoning,
        )

    def opens_reasoning(self, prompt: str) -> bool:
        """See `Parser.opens_reasoning`."""
        return _PLAIN.opens_reasoning(prompt)

    def _is_call(self, body: str, tools: Tools) -> bool:
        begins = self.begins.match(body)
        if begins is None:
            return False
        return not begins.lastindex or begins[1] in map(name_of, tools) or body.endswith(")]")

    def _without_call(self, body: str) -> ToolCall:
        """Return the malformed call of a reply with the marks before a call and none after them."""
        if not body:
            return malformed_call("truncated", "the tool call is cut off after its marks")
        return malformed_call(
            "not_a_call", f"no tool call follows its marks; it begins with {self.example}"
        )

    def _is_half(self, text: str, tools: Tools) -> bool:
        """Return whether a text begins with a part of a call and ends as one; after words, it is an
        answer."""
        if self.end and self.end in text and not is_mentioned(text, self.end):
            return True
        half = self.half.match(text) if text.endswith(CALL_ENDS) else None
        return half is not None and half[1] in map(name_of, tools)


_MARK = "<|python_tag|>"
# Llama 4 may put a reply's text between these marks, and the calls after them.
_LLAMA_MARKS = re.compile(r"<\|python_start\|>(?:(.*?)(?:<\|python_end\|>|\Z))?", re.DOTALL)
_BETWEEN = re.compile(r"\s*;?\s*(?=\{)")
_DECODER = json.JSONDecoder()
_READ = JsonCalls(arguments=("parameters", "arguments"))


def _read_objects(body: str, tools: Tools) -> list[ToolCall]:
    """Return the calls of a text; text after the last valid object is parsed with it, and makes it
    malformed."""
    text = body.removeprefix(_MARK).strip()
    calls: list[ToolCall] = []
    start = 0
    while True:
        try:
            _, end = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError):
            return calls + _READ(text[start:])
        between = _BETWEEN.match(text, end)
        if between is None:
            return calls + _READ(text[start:])
        calls += _READ(text[start:end])
        start = between.end()


_HALF_JSON = re.compile(
    r'\A\s*\{?\s*(?:"(?:type|id)"\s*:\s*"[^"]*"\s*,\s*)*(?:"function"\s*:\s*\{\s*)?'
    r'"name"\s*:\s*"([^"]*)"\s*,\s*"(?:arguments|parameters)"\s*:'
)
LLAMA3 = Bare(
    "llama3",
    begins=re.compile(re.escape(_MARK) + r'|\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:'),
    read=_read_objects,
    example='{"name": ',
    half=_HALF_JSON,
    marks=_LLAMA_MARKS,
    starts=("{", _MARK, "<|python_start|>"),
)
PYTHONIC = Bare(
    "pythonic",
    begins=re.compile(r"\[\s*([\w.-]+)\("),
    read=read_list,
    example="[NAME(",
    half=_BARE_PYTHON,
    marks=re.compile(r"<\|python_start\|>"),
    end="<|python_end|>",
    closes=("<|python_end|>",),
    starts=("[", "<|python_start|>"),
)
JSON_LIST = Bare(
    "json_list",
    begins=re.compile(
        r'\[\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*|"id"\s*:\s*"[^"]*"\s*,\s*)*'
        r'"(?:name|function)"\s*:'
    ),
    read=JsonCalls(many=True, arguments=("arguments", "parameters")),
    example='[{"name": ',
    half=_HALF_JSON,
)
BARE = (PYTHONIC, JSON_LIST)
