"""Each format by example, and what becomes of calls that do not read."""

from __future__ import annotations

import json

import pytest

import turnwright as tw
from turnwright.records.serialization import message_row, read_message
from turnwright.renderers.parsers import PARSERS
from turnwright.types import Message, ToolCall


def tool(name: str, **kinds: str) -> dict:
    properties = {key: {"type": kind} for key, kind in kinds.items()}
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": properties}},
    }


TOOLS = [
    tool("look_up", key="string", limit="integer", rows="array", exact="boolean"),
    tool("other"),
]
GOLDEN = {
    "hermes": (
        "<think>\nI look.\n</think>\n\nLet me see.\n"
        '<tool_call>\n{"name": "look_up", "arguments": {"key": "5", "limit": 3}}\n</tool_call>'
    ),
    "qwen3_coder": (
        "<think>\nI look.\n</think>\n\nLet me "
        "see.\n\n<tool_call>\n<function=look_up>\n<parameter=key>\n5\n</parameter>\n<parameter=limit>\n3\n</parameter>\n</function>\n</tool_call>"
    ),
    "seed": (
        "<seed:think>I look.</seed:think>\nLet me "
        "see.\n\n<seed:tool_call>\n<function=look_up>\n<parameter=key>5</parameter>\n<parameter=limit>3</parameter>\n</function>\n</seed:tool_call>"
    ),
    "llama3": '{"name": "look_up", "parameters": {"key": "5", "limit": 3}}',
    "mistral": '[THINK]I look.[/THINK]Let me see.[TOOL_CALLS]look_up[ARGS]{"key": "5", "limit": 3}',
    "deepseek": (
        "<think>\nI look.\n</think>\n\nLet me "
        "see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look_up<｜tool▁sep｜>"
        '{"key": "5", "limit": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "glm": (
        "<think>I look.</think>\nLet me "
        "see.\n<tool_call>look_up\n<arg_key>key</arg_key>\n<arg_value>5</arg_value>\n<arg_key>limit</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
    ),
    "hunyuan": (
        "<think:opensource>I look.</think:opensource>Let me "
        "see.<tool_calls:opensource>\n<tool_call:opensource>look_up<tool_sep:opensource>\n<arg_key:opensource>key</arg_key:opensource>\n<arg_value:opensource>5</arg_value:opensource>\n<arg_key:opensource>limit</arg_key:opensource>\n<arg_value:opensource>3</arg_value:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>"
    ),
    "kimi": (
        "<think>I look.</think>Let me "
        "see.<|tool_calls_section_begin|><|tool_call_begin|>functions.look_up:0"
        '<|tool_call_argument_begin|>{"key": "5", "limit": '
        "3}<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "kimi_k3": (
        "<|open|>think<|sep|>I look.<|close|>think<|sep|><|open|>response<|sep|>Let me "
        "see.<|close|>response<|sep|>"
        '<|open|>tools<|sep|><|open|>call tool="look_up" index="1"<|sep|><|open|>argument '
        'key="key" type="string"<|sep|>5'
        '<|close|>argument<|sep|><|open|>argument key="limit" '
        'type="number"<|sep|>3<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>"
    ),
    "harmony": (
        "<|channel|>analysis<|message|>I "
        "look.<|end|><|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.look_up "
        '<|constrain|>json<|message|>{"key": "5", "limit": 3}'
    ),
    "cohere": (
        "<|START_THINKING|>I look.<|END_THINKING|><|START_RESPONSE|>Let me "
        "see.<|END_RESPONSE|><|START_ACTION|>[\n"
        '    {"tool_call_id": "0", "tool_name": "look_up", "parameters": {"key": "5", "limit": '
        "3}}\n]<|END_ACTION|>"
    ),
    "command_r": 'Let me see.\nAction:\n```json\n[{"tool_name": "look_up", "parameters": '
    '{"key": "5", "limit": 3}}]```',
    "gemma": (
        "<|channel>thought\nI look.\n<channel|>Let me "
        'see.<|tool_call>call:look_up{key:<|"|>5<|"|>,limit:3}<tool_call|>'
    ),
    "lfm2": "<think>I look.</think>Let me see.<|tool_call_start|>[look_up(key='5', "
    "limit=3)]<|tool_call_end|>",
    "minimax_m2": (
        "<think>\nI look.\n</think>\n\nLet me see.\n<minimax:tool_call>\n<invoke "
        'name="look_up">\n<parameter name="key">5</parameter>\n<parameter '
        'name="limit">3</parameter>\n</invoke>\n</minimax:tool_call>'
    ),
    "muse": (
        " to=self<|message|>I look.<|eom|>Let me see.<atem:function_calls>\n<atem:invoke "
        'name="look_up">\n'
        '<atem:parameter name="key">5</atem:parameter>\n<atem:parameter '
        'name="limit">3</atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls>"
    ),
    "minimax_m1": 'Let me see.\n<tool_calls>\n{"name": "look_up", "arguments": {"key": "5", '
    '"limit": 3}}\n</tool_calls>',
    "apriel": (
        'I look.\n[BEGIN FINAL RESPONSE]\nLet me see.\n<tool_calls>[{"name": "look_up", '
        '"arguments": {"key": "5", "limit": 3}}]'
        "</tool_calls>"
    ),
    "nemotron_v2": '<TOOLCALL>[{"name": "look_up", "arguments": {"key": "5", "limit": '
    "3}}]</TOOLCALL>",
    "gigachat": 'Let me see.<|function_call|>{"name": "look_up", "arguments": {"key": "5", '
    '"limit": 3}}',
    "functionary": 'Let me see.<function=look_up>{"key": "5", "limit": 3}</function>',
    "minicpm": (
        "<think>\nI look.\n</think>\n\nLet me see.\n"
        '<function name="look_up"><param name="key"><![CDATA[5]]></param><param '
        'name="limit">3</param></function>'
    ),
    "solar": (
        "<|think|>I look.<|end|><|begin|>assistant<|content|>Let me "
        "see.<|tool_calls|><|tool_call:begin|>a1<|tool_call:name|>"
        'look_up<|tool_call:args|>{"key": "5", "limit": 3}<|tool_call:end|>'
    ),
    "granite": 'Let me see.<|tool_call|>[{"name": "look_up", "arguments": {"key": "5", "limit": '
    "3}}]",
    "internlm2": (
        'Let me see.<|action_start|><|plugin|>\n{"name": "look_up", "parameters": {"key": "5", '
        '"limit": 3}}<|action_end|>\n'
    ),
    "function_gemma": "<start_function_call>call:look_up{key:<escape>5<escape>,limit:3}<end_function_call>",  # noqa: E501
    "minicpm3": (
        "<|thought_start|>\nI look.\n<|thought_end|>\nLet me see.\n<|tool_call_start|>\n```python\n"
        'look_up(key="5", limit=3)\n```\n<|tool_call_end|>'
    ),
    "olmo3": 'Let me see.<function_calls>look_up(key="5", limit=3)</function_calls>',
    "pythonic": '[look_up(key="5", limit=3)]',
    "json_list": '[{"name": "look_up", "arguments": {"key": "5", "limit": 3}}]',
    "apertus": 'Let me see.<|tools_prefix|>[{"look_up": {"key": "5", "limit": 3}}]<|tools_suffix|>',
}
IDS = {"kimi": "functions.look_up:0", "cohere": "0", "solar": "a1"}


def test_every_format_has_an_example():
    assert set(GOLDEN) == set(PARSERS)


@pytest.mark.parametrize("name", GOLDEN)
def test_a_format_is_read(name):
    text = GOLDEN[name]
    assert PARSERS[name].parse(text, TOOLS) == Message(
        "assistant",
        "Let me see." if "Let me see." in text else "",
        tool_calls=(ToolCall("look_up", {"key": "5", "limit": 3}, IDS.get(name, "call_0")),),
        reasoning="I look." if "I look." in text else None,
    )


@pytest.mark.parametrize("name", GOLDEN)
def test_plain_text_is_said_and_nothing_else(name):
    for text in ("", "42", "  two\nlines \n", "é漢\x00\ud800", "a [list] of {things}"):
        assert PARSERS[name].parse(text, TOOLS) == Message("assistant", text)


@pytest.mark.parametrize("name", GOLDEN)
def test_without_tools_nothing_is_a_call(name):
    message = PARSERS[name].parse(GOLDEN[name])
    assert message.tool_calls == ()
    assert "look_up" in message.text or name == "harmony"


@pytest.mark.parametrize("name", sorted(set(GOLDEN) - {"harmony"}))
def test_a_reply_that_begins_inside_thinking(name):
    close = (
        "</think>" if name in ("llama3", "pythonic", "json_list") else PARSERS[name].thinking.close
    )
    assert PARSERS[name].parse(f"hm\n{close}\n\n42", TOOLS, thinking=True) == Message(
        "assistant", "42", reasoning="hm"
    )
    assert PARSERS[name].parse("hm", TOOLS, thinking=True) == Message(
        "assistant", "", reasoning="hm"
    )


def test_harmony_begins_inside_thinking():
    rest = "<|end|><|start|>assistant<|channel|>final<|message|>42"
    assert PARSERS["harmony"].parse(f"hm{rest}", thinking=True) == Message(
        "assistant", "42", reasoning="hm"
    )
    assert PARSERS["harmony"].parse("hm", thinking=True) == Message("assistant", "", reasoning="hm")


MORE = {
    "mistral list": (
        "mistral",
        '[TOOL_CALLS] [{"name": "look_up", "arguments": {"key": "5"}, "id": "abcdefghi"}]',
        "abcdefghi",
    ),
    "mistral id": (
        "mistral",
        '[TOOL_CALLS]look_up[CALL_ID]abcdefghi[ARGS]{"key": "5"}',
        "abcdefghi",
    ),
    "deepseek v3": (
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look_up\n```json\n"
        '{"key": "5"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "call_0",
    ),
    "deepseek v4": (
        "deepseek",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="look_up">\n<｜DSML｜parameter name="key" '
        'string="true">5</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        "call_0",
    ),
    "llama python tag": (
        "llama3",
        '<|python_tag|>{"name": "look_up", "parameters": {"key": "5"}}',
        "call_0",
    ),
    "glm in one line": (
        "glm",
        "<tool_call>look_up<arg_key>key</arg_key><arg_value>5</arg_value></tool_call>",
        "call_0",
    ),
    "harmony as the template writes it": (
        "harmony",
        ' to=functions.look_up<|channel|>commentary json<|message|>{"key": "5"}<|call|>',
        "call_0",
    ),
    "gigachat 3": (
        "gigachat",
        '<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "look_up", "arguments": {"key": '
        '"5"}}',
        "call_0",
    ),
    "granite 3.1": (
        "granite",
        '<tool_call>[{"name": "look_up", "arguments": {"key": "5"}}]',
        "call_0",
    ),
    "phi 4": (
        "granite",
        '<|tool_call|>[{"name": "look_up", "arguments": {"key": "5"}}]<|/tool_call|>',
        "call_0",
    ),
    "llama 4": ("pythonic", '<|python_start|>[look_up(key="5")]<|python_end|>', "call_0"),
    "a list in OpenAI's shape": (
        "json_list",
        '[{"type": "function", "function": {"name": "look_up", "arguments": {"key": "5"}}}]',
        "call_0",
    ),
    "xlam with parameters": (
        "json_list",
        '[\n  {"name": "look_up", "parameters": {"key": "5"}}\n]',
        "call_0",
    ),
    "arguments as a JSON string": (
        "hermes",
        '<tool_call>{"name": "look_up", "arguments": "{\\"key\\": \\"5\\"}"}</tool_call>',
        "call_0",
    ),
}


@pytest.mark.parametrize("row", MORE)
def test_other_ways_of_a_format(row):
    name, text, given_id = MORE[row]
    assert PARSERS[name].parse(text, TOOLS) == Message(
        "assistant", "", tool_calls=(ToolCall("look_up", {"key": "5"}, given_id),)
    )


def call(body: str) -> str:
    return f"<tool_call>{body}</tool_call>"


def tags(body: str) -> str:
    return call(f"<function=look_up>{body}</function>")


GOOD = '{"name": "look_up", "arguments": {"key": "a"}}'
MALFORMED = {
    ("hermes", "truncated"): [
        call(GOOD).removesuffix("</tool_call>"),
        call(GOOD[:-1]),
        call(GOOD[:-5]),
        "<tool_call>",
        call('{"name": "look_up",'),
    ],
    ("hermes", "trailing_comma"): [
        call('{"name": "look_up", "arguments": {"key": "a",}}'),
        call('{"name": "look_up", "arguments": {"rows": [1, 2, ]}}'),
    ],
    ("hermes", "python_literal"): [
        call("{'name': 'look_up', 'arguments': {}}"),
        call('{"name": "look_up", "arguments": {"exact": True}}'),
        call('{"name": "look_up", "arguments": {"key": None}}'),
    ],
    ("hermes", "not_json"): [
        call("look_up(1)"),
        call(""),
        call(GOOD + "}"),
        call(GOOD + " and more"),
        call('{"name": "look_up", "arguments": {"limit": NaN}}'),
        call('{"name": "look_up", "arguments": {"limit": ' + "9" * 5000 + "}}"),
    ],
    ("hermes", "too_deep"): [call("[" * 100_000)],
    ("hermes", "not_a_call"): [
        call("[]"),
        call("3"),
        call('{"arguments": {}}'),
        call('{"name": 3, "arguments": {}}'),
    ],
    ("hermes", "arguments_not_object"): [
        call('{"name": "look_up", "arguments": [1]}'),
        call('{"name": "look_up", "arguments": "a"}'),
        call('{"name": "look_up", "arguments": null}'),
        call('{"name": "look_up", "parameters": {"key": "a"}}'),
    ],
    ("qwen3_coder", "truncated"): [
        tags("<parameter=key>a"),
        call("<function=look_up>"),
        "<tool_call><function=look_up>",
        call(""),
    ],
    ("qwen3_coder", "not_a_call"): [
        call(GOOD),
        tags("key=a"),
        call("<function=></function>"),
        call("<function=look_up></function> and more"),
    ],
    ("qwen3_coder", "repeated_argument"): [
        tags("<parameter=key>a</parameter><parameter=key>b</parameter>")
    ],
    ("mistral", "truncated"): [
        "[TOOL_CALLS]",
        "[TOOL_CALLS]look_up",
        '[TOOL_CALLS]look_up[ARGS]{"key": "a',
        '[TOOL_CALLS][{"name": "look_up"',
    ],
    ("mistral", "trailing_comma"): ['[TOOL_CALLS]look_up[ARGS]{"key": "a",}'],
    ("mistral", "arguments_not_object"): ["[TOOL_CALLS]look_up[ARGS][1]"],
    ("llama3", "truncated"): ['{"name": "look_up", "parameters": {"key"', "<|python_tag|>{"],
    ("llama3", "not_json"): [
        '{"name": "look_up", "parameters": {}} and more',
        "<|python_tag|>print(1)",
    ],
    ("kimi", "truncated"): [
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.look_up:0",
        "<|tool_call_begin|>",
    ],
    ("harmony", "truncated"): [
        "<|channel|>commentary to=functions.look_up",
        '<|channel|>commentary to=functions.look_up<|message|>{"key"',
    ],
    ("harmony", "arguments_not_object"): [
        "<|channel|>commentary to=functions.look_up<|message|>[]"
    ],
    ("glm", "truncated"): [
        call("look_up<arg_key>key</arg_key><arg_value>a"),
        call("look_up").removesuffix("</tool_call>"),
    ],
    ("glm", "not_a_call"): [call(GOOD), call("look_up<arg_key>key</arg_key>a")],
    ("deepseek", "truncated"): [
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>look_up<｜tool▁sep｜>{}",
    ],
    ("deepseek", "not_json"): [
        '<｜DSML｜tool_calls><｜DSML｜invoke name="look_up"><｜DSML｜parameter name="limit" '
        'string="false">three'
        "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>"
    ],
    ("lfm2", "truncated"): [
        "<|tool_call_start|>[look_up(key='a<|tool_call_end|>",
        "<|tool_call_start|>[look_up(",
    ],
    ("lfm2", "not_a_call"): [
        "<|tool_call_start|>look_up(1)<|tool_call_end|>",
        "<|tool_call_start|>[look_up(1)]<|tool_call_end|>",
    ],
    ("gemma", "truncated"): [
        '<|tool_call>call:look_up{key:<|"|>a<|"|>',
        "<|tool_call>call:look_up{key:<tool_call|>",
    ],
    ("gemma", "not_json"): ["<|tool_call>call:look_up{key:a}<tool_call|>"],
}


@pytest.mark.parametrize(
    ("name", "cause", "text"),
    [(*key, text) for key, rows in MALFORMED.items() for text in rows],
    ids=lambda x: x[:40],
)
def test_a_malformed_call_says_what_is_wrong(name, cause, text):
    (found,) = PARSERS[name].parse(text, TOOLS).tool_calls
    assert found.cause == cause
    assert found.arguments == {}
    assert found.id
    assert found.error
    assert len(found.error) < 300


@pytest.mark.parametrize(
    "bad", [text for (name, _), rows in MALFORMED.items() if name == "hermes" for text in rows[-1:]]
)
def test_of_two_calls_the_good_one_stands(bad):
    for text in (call(GOOD) + bad, bad + call(GOOD)):
        found = PARSERS["hermes"].parse(text, TOOLS).tool_calls
        assert [c.arguments for c in found if c.error is None] == [{"key": "a"}]
        assert sum(c.error is not None for c in found) == 1


def test_a_call_broken_off_by_the_next_one_leaves_it_standing():
    text = '<tool_call>{"name": "look_up", "arguments": <tool_call>' + GOOD + "</tool_call>"
    first, second = PARSERS["hermes"].parse(text, TOOLS).tool_calls
    assert (first.cause, second.arguments) == ("truncated", {"key": "a"})


def test_of_a_list_and_of_one_block_of_tags_the_good_ones_stand():
    found = (
        PARSERS["mistral"]
        .parse('[TOOL_CALLS][{"name": "look_up", "arguments": {}}, {"name": 3}]', TOOLS)
        .tool_calls
    )
    assert [c.cause for c in found] == [None, "not_a_call"]
    text = "<function=look_up><parameter=key>a</function><function=look_up><parameter=key>b</parameter></function>"  # noqa: E501
    found = PARSERS["qwen3_coder"].parse(call(text), TOOLS).tool_calls
    assert [(c.cause, dict(c.arguments)) for c in found] == [
        ("truncated", {}),
        (None, {"key": "b"}),
    ]


def test_marks_inside_arguments_are_text():
    for inner in ("</tool_call>", "<tool_call>", "</tool_call> </tool_call>"):
        text = call('{"name": "look_up", "arguments": {"key": "x' + inner + 'y"}}')
        message = PARSERS["hermes"].parse(f"Hm. {text} Yes.", TOOLS)
        assert message == Message(
            "assistant",
            "Hm.  Yes.",
            tool_calls=(ToolCall("look_up", {"key": f"x{inner}y"}, "call_0"),),
        )
        text = tags(f"<parameter=key>\nx{inner}y\n</parameter>")
        (found,) = PARSERS["qwen3_coder"].parse(text, TOOLS).tool_calls
        assert found.arguments == {"key": f"x{inner}y"}


def test_an_unknown_tool_and_a_repeated_call_are_told_apart_from_malformed_ones():
    text = call(GOOD) + call(GOOD) + call('{"name": "lookup", "arguments": {}}')
    found = PARSERS["hermes"].parse(text, TOOLS).tool_calls
    assert [(c.cause, c.error) for c in found] == [
        (None, None),
        ("duplicated", None),
        ("unknown_tool", None),
    ]


def test_calls_inside_thinking_are_counted_and_are_none():
    message = PARSERS["hermes"].parse(f"<think>{call(GOOD)}{call(GOOD)}</think>{call(GOOD)}", TOOLS)
    assert (message.calls_in_thinking, len(message.tool_calls)) == (2, 1)
    assert message.call_error_kinds == ("in_thinking", "in_thinking")
    assert PARSERS["hermes"].parse(f"<think>{call(GOOD)}</think>").calls_in_thinking == 0
    assert PARSERS["hermes"].parse(f"hm {call(GOOD)}", TOOLS, thinking=True).calls_in_thinking == 1


COERCED = [
    ({"type": "string"}, "5", "5"),
    ({"type": "string"}, "true", "true"),
    ({"type": "string", "enum": ["1", "2"]}, "1", "1"),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"type": "integer"}, "5", 5),
    ({"type": "integer"}, "5.5", 5.5),
    ({"type": "integer"}, "five", "five"),
    ({"type": "number"}, "1e-05", 1e-05),
    ({"type": "number"}, "NaN", "NaN"),
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "false", False),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": ["string", "null"]}, "None", None),
    ({"type": ["string", "null"]}, "nothing", "nothing"),
    ({"type": ["string", "null"]}, "5", "5"),
    ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "5", 5),
    ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "5a", "5a"),
    ({"type": "array"}, "[1, {'k': None}]", [1, {"k": None}]),
    ({"type": "object"}, '{"k": [true]}', {"k": [True]}),
    ({"type": "array"}, "[" * 100_000, "[" * 100_000),
    ({}, "5", 5),
    ({}, "five", "five"),
    (None, '{"a": 1}', {"a": 1}),
]


@pytest.mark.parametrize(("schema", "text", "value"), COERCED, ids=lambda x: str(x)[:40])
def test_bare_text_is_what_its_schema_asks_for(schema, text, value):
    properties = {} if schema is None else {"key": schema}
    tools = [
        {
            "function": {
                "name": "look_up",
                "parameters": {"type": "object", "properties": properties},
            }
        }
    ]
    (found,) = (
        PARSERS["qwen3_coder"]
        .parse(tags(f"<parameter=key>\n{text}\n</parameter>"), tools)
        .tool_calls
    )
    assert found.error is None
    assert found.arguments == {"key": value}
    assert type(found.arguments["key"]) is type(value)


def test_llama_answers_in_json_are_no_calls():
    for text in ('{"answer": 42}', '{"nam', "{", 'I say {"name": "look_up", "parameters": {}}'):
        assert PARSERS["llama3"].parse(text, TOOLS) == Message("assistant", text)
    two = '{"name": "look_up", "parameters": {"key": "a; {"}}; {"name": "other", "parameters": {}}'
    assert [c.name for c in PARSERS["llama3"].parse(two, TOOLS).tool_calls] == ["look_up", "other"]


def test_an_empty_call_of_tags_has_no_arguments():
    for name, text in (
        ("qwen3_coder", call("<function=other>\n</function>")),
        ("glm", call("other\n")),
    ):
        assert PARSERS[name].parse(text, TOOLS).tool_calls == (ToolCall("other", {}, "call_0"),)


def test_counts_are_in_the_trajectory():
    async def look_up(key: str) -> str:
        """Look something up."""
        return key

    bad = call('{"name": "look_up", "arguments": {"key": "a",}}')
    replies = [
        call(GOOD) + bad + call('{"name": "lookup", "arguments": {}}') + call(GOOD),
        call('{"name": "look_up", "arguments": {"key": 1}}') + bad,
        f"<think>{call(GOOD)}</think>42",
    ]
    (trajectory,) = tw.rollout(tw.tool_env([look_up]), [tw.Task("q")], tw.ScriptedEngine(replies))
    assert trajectory.error is None
    assert {
        key: value for key, value in trajectory.metrics.items() if key.startswith("malformed")
    } == {
        "malformed_calls": 5,
        "malformed_trailing_comma": 2,
        "malformed_unknown_tool": 1,
        "malformed_duplicated": 1,
        "malformed_in_thinking": 1,
    }
    first, second, _ = (
        {key: value for key, value in turn.info.items() if key != "tool_log"}
        for turn in trajectory.turns
    )
    assert first == {
        "tool_calls": 4,
        "tool_errors": 2,
        "tool_errors/trailing_comma": 1,
        "tool_errors/unknown_tool": 1,
    }
    assert second == {
        "tool_calls": 2,
        "tool_errors": 2,
        "tool_errors/wrong_type": 1,
        "tool_errors/trailing_comma": 1,
    }


def test_a_reply_survives_its_record_with_what_is_wrong_with_it():
    text = f"<think>{call(GOOD)}</think>{call(GOOD)}{call(GOOD)}{call('{')}"
    reply = PARSERS["hermes"].parse(text, TOOLS)
    assert [c.cause for c in reply.tool_calls] == [None, "duplicated", "truncated"]
    assert read_message(message_row(reply)) == reply


@pytest.mark.parametrize("name", ["pythonic", "minicpm3", "olmo3", "json_list", "granite"])
def test_two_calls_are_read(name):
    one, two = 'look_up(key="a")', "look_up(key='b(), c')"
    lists = {
        "pythonic": f"[{one}, {two}]",
        "olmo3": f"<function_calls>{one}\n{two}</function_calls>",
    }
    lists["minicpm3"] = f"<|tool_call_start|>\n```python\n{one}\n{two}\n```\n<|tool_call_end|>"
    lists["json_list"] = json.dumps(
        [{"name": "look_up", "arguments": {"key": key}} for key in ("a", "b(), c")]
    )
    lists["granite"] = f"<|tool_call|>{lists['json_list']}"
    found = PARSERS[name].parse(lists[name], TOOLS).tool_calls
    assert [(call.name, call.arguments, call.error) for call in found] == [
        ("look_up", {"key": "a"}, None),
        ("look_up", {"key": "b(), c"}, None),
    ]


@pytest.mark.parametrize("name", ["pythonic", "json_list"])
def test_an_answer_that_only_looks_like_a_list_of_calls_is_an_answer(name):
    for text in (
        "[1, 2]",
        "[link](url) and more",
        '[{"city": "Paris"}]',
        "[f(x) for x in y] is a loop",
        "[]",
        "I call [look_up()].",
    ):
        assert PARSERS[name].parse(text, TOOLS) == Message("assistant", text)
    for text in ('[look_up(key="a"', '[{"name": "look_up", "argum'):
        (call,) = PARSERS["pythonic" if "(" in text else "json_list"].parse(text, TOOLS).tool_calls
        assert call.cause == "truncated"
