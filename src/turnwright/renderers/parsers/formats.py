r"""Table of reply formats, one row per model family, in the order in which a template's format is
looked for.

Each example calls `look_up` with the key "a"; `\n` is a line break, and a line that is indented
further continues the one above it. Where arguments are bare text, the tool's JSON schema decides
what `5` is (see `readers.coerce`). Line breaks around it are removed exactly where the template
writes them.

A call without the mark that begins it is malformed (`unopened`): an end mark or an inner tag
outside of a call, or a reply that ends in the text of a call of an existing tool, without marks.
Marks in quotes or code spans are text.

Cohere: a JSON list between marks (Command R7B and later, thinking in `<|START_THINKING|>`), or in a
fence (Command R+)::

    <|START_ACTION|>[{"tool_call_id": "0", "tool_name": "look_up", "parameters": {"key": "a"}}]
      <|END_ACTION|>

DeepSeek V3 and R1; V3.1; V3.2 (`function_calls`) and V4 (`tool_calls`), where `string` tells a
string from JSON::

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look_up\n
      ```json\n{"key": "a"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look_up<｜tool▁sep｜>{"key": "a"}<｜tool▁call▁end｜>
      <｜tool▁calls▁end｜>
    <｜DSML｜tool_calls>\n<｜DSML｜invoke name="look_up">\n
      <｜DSML｜parameter name="key" string="true">a</｜DSML｜parameter>\n
      </｜DSML｜invoke>\n</｜DSML｜tool_calls>

Gemma 4 and, with other marks, FunctionGemma: JSON-like with marked strings and bare keys. A key is
everything between `{` or `,` and `:`, without quotes, and without spaces around it::

    <|channel>thought\nI look it up.\n<channel|>
      <|tool_call>call:look_up{key:<|"|>a<|"|>,limit:3}<tool_call|>
    <start_function_call>call:look_up{key:<escape>a<escape>,limit:3}<end_function_call>

GLM 4.5 and later, Laguna, Ling 3 and Spark: tags, with or without line breaks. Strings are bare
text, other values JSON::

    <think>I look it up.</think>\n<tool_call>look_up\n<arg_key>key</arg_key>\n
      <arg_value>a</arg_value>\n</tool_call>

Hermes, Qwen 2.5, Qwen 3, QwQ, MiMo, Granite 4 and many others; other formats put the same JSON
between other marks::

    <think>\nI look it up.\n</think>\n\nLet me see.\n
      <tool_call>\n{"name": "look_up", "arguments": {"key": "a"}}\n</tool_call>

Kimi K2, whose ids are kept as written, because the template repeats them; Kimi K3, with the type of
each argument::

    <|tool_calls_section_begin|><|tool_call_begin|>functions.look_up:0
      <|tool_call_argument_begin|>{"key": "a"}<|tool_call_end|><|tool_calls_section_end|>
    <|open|>tools<|sep|><|open|>call tool="look_up" index="1"<|sep|>
      <|open|>argument key="key" type="string"<|sep|>a<|close|>argument<|sep|>
      <|close|>call<|sep|><|close|>tools<|sep|>

MiniMax M2 and, with other tags, Muse and MiniCPM 5: tags with attributes, arguments as bare text::

    <minimax:tool_call>\n<invoke name="look_up">\n<parameter name="key">a</parameter>\n
      </invoke>\n</minimax:tool_call>

Mistral: a JSON list (v3, Nemo) or a name before JSON (v11 and later), to the end of the reply::

    [TOOL_CALLS][{"name": "look_up", "arguments": {"key": "a"}, "id": "abcdefghi"}]
    [THINK]I look it up.[/THINK]Let me see.[TOOL_CALLS]look_up[ARGS]{"key": "a"}
      [TOOL_CALLS]look_up[ARGS]{"key": "b"}
    [TOOL_CALLS]look_up[CALL_ID]abcdefghi[ARGS]{"key": "a"}

Qwen3-Coder, Qwen 3.5 and later, Nemotron 3 and Step 3.5: tags, arguments as bare text::

    <tool_call>\n<function=look_up>\n<parameter=key>\na\n</parameter>\n</function>\n</tool_call>

Formats of one family each, with a shared reader::

    Apriel             <tool_calls>[{"name": "look_up", ...}]</tool_calls>
                         (thinking ends in `[BEGIN FINAL RESPONSE]`)
    GigaChat           <|function_call|>{"name": "look_up", ...}
                         or earlier <|message_sep|>function call<|role_sep|>\n{...}
    Hunyuan 3          GLM's in `<tool_calls:opensource>`, `<tool_sep:opensource>` after the name
    MiniMax M1         <tool_calls>\n{"name": "look_up", ...}\n</tool_calls>   (one line per call)
    Nemotron v2        <TOOLCALL>[{"name": "look_up", ...}]</TOOLCALL>
    Seed               Qwen3-Coder's tags in `<seed:tool_call>`, thinking in `<seed:think>`
    Functionary 3.1    <function=look_up>{"key": "a"}</function>
    Functionary 3.2    look_up\n{"key": "a"}>>>look_up\n{"key": "b"}
                         (the prompt ends in `>>>`; `all` is the visible text)
    Solar Open         <|tool_call:begin|>ID<|tool_call:name|>look_up
                         <|tool_call:args|>{"key": "a"}<|tool_call:end|>
    Apertus            <|tools_prefix|>[{"look_up": {"key": "a"}}]<|tools_suffix|>
    Granite 3, Phi 4   <|tool_call|>[{"name": "look_up", "arguments": {"key": "a"}}]
                         (`<tool_call>` in Granite 3.1)
    InternLM 2         <|action_start|><|plugin|>{"name": "look_up", "parameters": {"key": "a"}}
                         <|action_end|>
    MiniCPM 5          <function name="look_up"><param name="key">a</param></function>
"""

from __future__ import annotations

import json
import re
from dataclasses import replace

from turnwright.renderers.parsers.readers import (
    JsonCalls,
    NamedJsonCalls,
    TaggedCalls,
    make_call,
    read_json,
)
from turnwright.renderers.parsers.reply_format import (
    CallSyntax,
    MalformedCall,
    Parser,
    Read,
    ReasoningMarks,
    ReplyFormat,
    malformed_call,
)
from turnwright.renderers.parsers.special_formats import HARMONY, LFM2, LLAMA3, MINICPM3, OLMO3
from turnwright.types import ToolCall, Tools

_JSON = JsonCalls()
_JSON_LIST = JsonCalls(many=True)
# Beginnings of calls without marks; group 1 is the tool.
_BARE_JSON = re.compile(r'\{\s*"name"\s*:\s*"([^"]*)"\s*,\s*"(?:arguments|parameters)"\s*:')
_BARE_COHERE = re.compile(r'"tool_name"\s*:\s*"([^"]*)"')
_BARE_APERTUS = re.compile(r'\A\s*\[?\s*\{\s*"([^"]*)"\s*:\s*\{')
_BARE_GEMMA = re.compile(r"\bcall:([^\s{:]+)\{")
_BARE_FUNCTIONARY = re.compile(r"\A\s*([\w.-]+)>\s*\{")
_COHERE = JsonCalls("tool_name", ("parameters",), "tool_call_id", many=True)

_SEP = "<｜tool▁sep｜>"
_DEEPSEEK_SECTIONS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_FENCED = NamedJsonCalls("\n```json\n", f"function{_SEP}NAME\\n```json\\n{{...}}\\n```")
_BARE = NamedJsonCalls(_SEP, f"NAME{_SEP}{{...}}")


def _deepseek(body: str, tools: Tools) -> list[ToolCall]:
    kind, _, call = body.partition(_SEP)
    if kind.strip() == "function" and not call.lstrip().startswith("{"):
        return _FENCED(call.rstrip().removesuffix("```"), tools)
    return _BARE(body, tools)


_DEEPSEEK_TAGS = TaggedCalls(
    head=re.compile(r'<｜DSML｜invoke name="([^">\n]*)">'),
    argument=re.compile(r'\s*<｜DSML｜parameter name="([^">\n]*)" string="(?P<type>true|false)">'),
    end="</｜DSML｜parameter>",
    tail="</｜DSML｜invoke>",
    example='<｜DSML｜invoke name="NAME"><｜DSML｜parameter name="KEY" '
    'string="true|false">VALUE</｜DSML｜parameter></｜DSML｜invoke>',
)

_DEEPSEEK_INNER = (
    "<｜DSML｜invoke",
    "</｜DSML｜invoke>",
    "<｜DSML｜parameter",
    "</｜DSML｜parameter>",
)

_GEMMA_CALL = re.compile(r"\s*call:([^\s{]+)(?=\{)")


def _gemma_token(match: re.Match[str]) -> str:
    """Return a token of a Gemma call as JSON: a string, a bare key with the bracket or comma before
    it, or None."""
    string, key = match["string"], match["key"]
    if string is not None:
        return json.dumps(string)
    if key is not None:
        return f"{match['before']}{json.dumps(key.strip())}:"
    return "null"


def _gemma(quote: str) -> Read:
    """Return the reader of calls whose strings are between two of these marks."""
    example = f"call:NAME{{KEY:{quote}VALUE{quote}}}"
    mark = re.escape(quote)
    # A key is everything up to the colon: schemas have keys such as `$filter`, `start date` and
    # `id[]`.
    token = re.compile(
        rf'{mark}(?P<string>.*?){mark}|(?P<before>[{{,])(?P<key>(?:(?!{mark})[^,:{{"])*):|\bNone\b',
        re.DOTALL,
    )

    def read(body: str, tools: Tools) -> list[ToolCall]:
        head = _GEMMA_CALL.match(body)
        if head is None:
            cause = "not_a_call" if body.strip() else "truncated"
            return [malformed_call(cause, f"a tool call looks like {example}")]
        name = head[1]
        arguments = token.sub(_gemma_token, body[head.end() :])
        try:
            return [make_call(name, read_json(arguments))]
        except MalformedCall as error:
            problem = f"{error}; a tool call looks like {example}"
            return [malformed_call(error.cause, problem, name)]

    return read


def _glm_tags(suffix: str, after_name: str = "") -> TaggedCalls:
    key = f"arg_key{suffix}"
    value = f"arg_value{suffix}"
    return TaggedCalls(
        head=re.compile(rf"\A\s*([^\s<]+)\s*{after_name}"),
        argument=re.compile(rf"\s*<{key}>([^<]*)</{key}>\s*<{value}>"),
        end=f"</{value}>",
        tail="",
        example=f"NAME{after_name}<{key}>KEY</{key}><{value}>VALUE</{value}>",
    )


def _glm_inner(suffix: str) -> tuple[str, ...]:
    key = f"arg_key{suffix}"
    value = f"arg_value{suffix}"
    return f"<{key}>", f"</{key}>", f"<{value}>", f"</{value}>"


_KIMI_MARK = "<|tool_call_argument_begin|>"


def _kimi_head(text: str) -> tuple[str, str]:
    """Return name and id: `functions.look_up:0` is the id of a call of `look_up`."""
    given_id = text.strip()
    name, _, _ = given_id.removeprefix("functions.").partition(":")
    return name, given_id


_KIMI = NamedJsonCalls(_KIMI_MARK, f"functions.NAME:0{_KIMI_MARK}{{...}}", _kimi_head)
_KIMI_SECTIONS = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_KIMI_K3 = TaggedCalls(
    head=re.compile(r'<\|open\|>call tool="([^"<]*)"[^<]*<\|sep\|>'),
    argument=re.compile(r'\s*<\|open\|>argument key="([^"<]*)" type="(?P<type>[^"<]*)"<\|sep\|>'),
    end="<|close|>argument<|sep|>",
    tail="<|close|>call<|sep|>",
    example='<|open|>call tool="NAME"<|sep|><|open|>argument key="KEY" type="TYPE"<|sep|>VALUE'
    "<|close|>argument<|sep|><|close|>call<|sep|>",
)
_KIMI_K3_INNER = (
    "<|open|>call ",
    "<|close|>call<|sep|>",
    "<|open|>argument ",
    "<|close|>argument<|sep|>",
)


def _minimax_tags(call: str, argument: str) -> TaggedCalls:
    return TaggedCalls(
        head=re.compile(rf'<{call} name="([^">\n]*)">'),
        argument=re.compile(rf'\s*<{argument} name="([^">\n]*)">'),
        end=f"</{argument}>",
        tail=f"</{call}>",
        example=f'<{call} name="NAME"><{argument} name="KEY">VALUE</{argument}></{call}>',
    )


def _minimax_inner(call: str, argument: str) -> tuple[str, ...]:
    return f"<{call} name=", f"</{call}>", f"<{argument} name=", f"</{argument}>"


def _mistral_head(text: str) -> tuple[str, str]:
    name, _, given_id = text.partition("[CALL_ID]")
    return name.strip(), given_id.strip()


_MISTRAL = NamedJsonCalls("[ARGS]", "[TOOL_CALLS]NAME[ARGS]{...}", _mistral_head)


def _mistral(body: str, tools: Tools) -> list[ToolCall]:
    is_json = body.lstrip()[:1] in ("[", "{")
    return _JSON_LIST(body, tools) if is_json else _MISTRAL(body, tools)


def _solar_head(text: str) -> tuple[str, str]:
    given_id, _, name = text.partition("<|tool_call:name|>")
    return name.strip(), given_id.strip()


_SOLAR = NamedJsonCalls(
    "<|tool_call:args|>",
    "<|tool_call:begin|>ID<|tool_call:name|>NAME<|tool_call:args|>{...}<|tool_call:end|>",
    _solar_head,
)
_SOLAR_INNER = ("<|tool_call:name|>", "<|tool_call:args|>")


def _apertus(body: str, tools: Tools) -> list[ToolCall]:
    try:
        value = read_json(body)
    except MalformedCall as error:
        return [malformed_call(error.cause, str(error))]
    if not isinstance(value, list) or not value:
        return [malformed_call("not_a_call", 'tool calls are a list of objects {"NAME": {...}}')]

    calls = []
    for item in value:
        if isinstance(item, dict) and len(item) == 1:
            ((name, arguments),) = item.items()
            calls.append(make_call(name, arguments))
        else:
            calls.append(malformed_call("not_a_call", 'a tool call is an object {"NAME": {...}}'))
    return calls


_GRANITE_ENDS = ("<|/tool_call|>", "</tool_call>")


def _granite(body: str, tools: Tools) -> list[ToolCall]:
    text = body.strip()
    for mark in _GRANITE_ENDS:  # Phi 4 writes an end, Granite none
        text = text.removesuffix(mark)
    return _JSON_LIST(text)


_GIGACHAT_END = "<|message_sep|>"


def _gigachat(body: str, tools: Tools) -> list[ToolCall]:
    return _JSON(body.rstrip().removesuffix(_GIGACHAT_END))


_MINIMAX_TAGS = _minimax_tags("invoke", "parameter")
_MINICPM = replace(_minimax_tags("function", "param"), cdata=True)


def _minicpm(body: str, tools: Tools) -> list[ToolCall]:
    return _MINICPM(f"<function {body}</function>", tools)


_QWEN3_CODER_TAGS = TaggedCalls(
    head=re.compile(r"<function=([^>\n]*)>"),
    argument=re.compile(r"\s*<parameter=([^>\n]*)>"),
    end="</parameter>",
    tail="</function>",
    example="<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>",
    newline=True,
)
_SEED_TAGS = replace(_QWEN3_CODER_TAGS, newline=False)
_QWEN3_CODER_INNER = ("<function=", "</function>", "<parameter=", "</parameter>")

_FUNCTIONARY = NamedJsonCalls(">", "<function=NAME>{...}</function>")
_INTERNLM = JsonCalls(arguments=("parameters", "arguments"))
_HY = ":opensource"
_HUNYUAN_TAGS = _glm_tags(_HY, f"<tool_sep{_HY}>")
_HUNYUAN_SECTIONS = (f"<tool_calls{_HY}>", f"</tool_calls{_HY}>")
FORMATS: tuple[Parser, ...] = (
    ReplyFormat("hermes", (CallSyntax("<tool_call>", _JSON, "</tool_call>"),), bare=_BARE_JSON),
    ReplyFormat(
        "qwen3_coder",
        (CallSyntax("<tool_call>", _QWEN3_CODER_TAGS, "</tool_call>", inner=_QWEN3_CODER_INNER),),
    ),
    ReplyFormat(
        "seed",
        (
            CallSyntax(
                "<seed:tool_call>", _SEED_TAGS, "</seed:tool_call>", inner=_QWEN3_CODER_INNER
            ),
        ),
        thinking=ReasoningMarks("<seed:think>", "</seed:think>"),
    ),
    ReplyFormat(
        "mistral",
        (CallSyntax("[TOOL_CALLS]", _mistral, inner=("[ARGS]", "[CALL_ID]")),),
        hints=("[TOOL_CALLS]", "[/THINK]", "[THINK]", "[ARGS]"),
        thinking=ReasoningMarks("[THINK]", "[/THINK]"),
        bare=_BARE_JSON,
    ),
    ReplyFormat(
        "deepseek",
        (
            CallSyntax(
                "<｜tool▁call▁begin｜>",
                _deepseek,
                "<｜tool▁call▁end｜>",
                _DEEPSEEK_SECTIONS,
                (_SEP,),
            ),
            CallSyntax(
                "<｜DSML｜tool_calls>",
                _DEEPSEEK_TAGS,
                "</｜DSML｜tool_calls>",
                inner=_DEEPSEEK_INNER,
            ),
            CallSyntax(
                "<｜DSML｜function_calls>",
                _DEEPSEEK_TAGS,
                "</｜DSML｜function_calls>",
                inner=_DEEPSEEK_INNER,
            ),
        ),
    ),
    ReplyFormat(
        "glm", (CallSyntax("<tool_call>", _glm_tags(""), "</tool_call>", inner=_glm_inner("")),)
    ),
    ReplyFormat(
        "hunyuan",
        (
            CallSyntax(
                f"<tool_call{_HY}>",
                _HUNYUAN_TAGS,
                f"</tool_call{_HY}>",
                _HUNYUAN_SECTIONS,
                (f"<tool_sep{_HY}>", *_glm_inner(_HY)),
            ),
        ),
        thinking=ReasoningMarks(f"<think{_HY}>", f"</think{_HY}>"),
    ),
    ReplyFormat(
        "kimi",
        (
            CallSyntax(
                "<|tool_call_begin|>", _KIMI, "<|tool_call_end|>", _KIMI_SECTIONS, (_KIMI_MARK,)
            ),
        ),
    ),
    ReplyFormat(
        "kimi_k3",
        (
            CallSyntax(
                "<|open|>tools<|sep|>", _KIMI_K3, "<|close|>tools<|sep|>", inner=_KIMI_K3_INNER
            ),
        ),
        thinking=ReasoningMarks("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        dropped=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    HARMONY,
    ReplyFormat(
        "cohere",
        (CallSyntax("<|START_ACTION|>", _COHERE, "<|END_ACTION|>"),),
        thinking=ReasoningMarks("<|START_THINKING|>", "<|END_THINKING|>"),
        dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        bare=_BARE_COHERE,
    ),
    ReplyFormat(
        "command_r",
        (CallSyntax("Action:\n```json\n", _COHERE, "```"),),
        ("Action:\n", "<"),
        bare=_BARE_COHERE,
    ),
    ReplyFormat(
        "gemma",
        (CallSyntax("<|tool_call>", _gemma('<|"|>'), "<tool_call|>"),),
        thinking=ReasoningMarks("<|channel>thought\n", "<channel|>"),
        dropped=("<|tool_response>",),
        bare=_BARE_GEMMA,
    ),
    LFM2,
    ReplyFormat(
        "minimax_m2",
        (
            CallSyntax(
                "<minimax:tool_call>",
                _MINIMAX_TAGS,
                "</minimax:tool_call>",
                inner=_minimax_inner("invoke", "parameter"),
            ),
        ),
    ),
    ReplyFormat(
        "muse",
        (
            CallSyntax(
                "<atem:function_calls>",
                _minimax_tags("atem:invoke", "atem:parameter"),
                "</atem:function_calls>",
                inner=_minimax_inner("atem:invoke", "atem:parameter"),
            ),
        ),
        thinking=ReasoningMarks("to=self<|message|>", "<|eom|>"),  # a separate message
        dropped=("<|eom|>",),
        header=re.compile(r"\s*(?:<\|start\|>assistant)?\s*\bto=([^\s<]+)<\|message\|>"),
    ),
    ReplyFormat(
        "minimax_m1",
        (CallSyntax("<tool_calls>", JsonCalls(lines=True), "</tool_calls>"),),
        bare=_BARE_JSON,
    ),
    ReplyFormat(
        "apriel",
        (CallSyntax("<tool_calls>", _JSON_LIST, "</tool_calls>"),),
        ("<", "[BEGIN FINAL RESPONSE]"),
        ReasoningMarks(
            "Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]", always_opened=True
        ),
        bare=_BARE_JSON,
    ),
    ReplyFormat(
        "nemotron_v2", (CallSyntax("<TOOLCALL>", _JSON_LIST, "</TOOLCALL>"),), bare=_BARE_JSON
    ),
    ReplyFormat(
        "gigachat",
        (
            CallSyntax("<|function_call|>", _gigachat),
            CallSyntax("function call<|role_sep|>\n", _gigachat),
        ),
        dropped=(_GIGACHAT_END,),
        bare=_BARE_JSON,
    ),
    ReplyFormat(
        "functionary",
        (CallSyntax("<function=", _FUNCTIONARY, "</function>"),),
        bare=_BARE_FUNCTIONARY,
    ),
    ReplyFormat(
        "minicpm",
        (CallSyntax("<function ", _minicpm, "</function>", inner=("<param name=", "</param>")),),
    ),
    ReplyFormat(
        "granite",
        (
            CallSyntax("<|tool_call|>", _granite, inner=_GRANITE_ENDS),
            CallSyntax("<tool_call>", _granite),
        ),
        bare=_BARE_JSON,
    ),
    ReplyFormat(
        "internlm2",
        (
            CallSyntax(
                "<|action_start|><|plugin|>",
                _INTERNLM,
                "<|action_end|>",
                inner=("<|action_start|>", "<|plugin|>"),
            ),
        ),
        bare=_BARE_JSON,
    ),
    ReplyFormat(
        "function_gemma",
        (CallSyntax("<start_function_call>", _gemma("<escape>"), "<end_function_call>"),),
        bare=_BARE_GEMMA,
    ),
    MINICPM3,
    OLMO3,
    ReplyFormat(
        "solar",
        (
            CallSyntax(
                "<|tool_call:begin|>",
                _SOLAR,
                "<|tool_call:end|>",
                ("<|tool_calls|>",),
                _SOLAR_INNER,
            ),
        ),
        thinking=ReasoningMarks("<|think|>", "<|end|>"),
        dropped=("<|begin|>assistant", "<|content|>"),
    ),
    ReplyFormat(
        "apertus",
        (CallSyntax("<|tools_prefix|>", _apertus, "<|tools_suffix|>"),),
        bare=_BARE_APERTUS,
    ),
    LLAMA3,
)
