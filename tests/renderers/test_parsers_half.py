"""Replies that hold a part of a call: what is missing is said to the model and counted, and never
read as another call."""

from __future__ import annotations

import json

import orjson
import pytest

from tests.renderers.test_parsers import GOLDEN, MORE, TOOLS
from turnwright.records.run_dir import to_json
from turnwright.records.serialization import message_row, read_message
from turnwright.renderers import ChatTemplate
from turnwright.renderers.parsers import PARSERS, parser_for_template
from turnwright.types import Message, ToolCall

EXAMPLES = [*GOLDEN.items(), *((name, text) for name, text, _ in MORE.values())]
SAID = "Let me see."


def causes(name: str, text: str) -> list[str | None]:
    return [
        call.cause if call.error else None for call in PARSERS[name].parse(text, TOOLS).tool_calls
    ]


def call_alone(name: str, text: str) -> str:
    """Return an example without its thinking and its text."""
    rest = text.partition(SAID)[2] or text
    return rest.lstrip() if name != "command_r" else rest


def without_marks(name: str, text: str) -> list[str]:
    """Return an example without the marks that begin its calls, and without those
    that end them either."""
    halves = []
    for dialect in PARSERS[name].dialects:
        if dialect.open in text:
            begun = text.replace(dialect.open, "", 1).replace(
                (*dialect.sections, dialect.open)[0], "", 1
            )
            halves = [begun, begun.replace(dialect.close, "") if dialect.close else begun]
    return halves


TABLE = [(name, text) for name, text in EXAMPLES if hasattr(PARSERS[name], "dialects")]


@pytest.mark.parametrize(("name", "text"), TABLE, ids=[name for name, _ in TABLE])
def test_a_call_without_its_beginning_is_malformed(name, text):
    call = call_alone(name, text)
    halves = without_marks(name, call)
    assert halves
    for half in halves:
        for before in ("", "I look.\n"):
            if half == call:
                continue
            if before and not any(
                mark in half for mark in ("<", "[ARGS]", '"name"', '"tool_name"')
            ):
                continue  # a call in Python's or Gemma's syntax behind words is an answer
            message = PARSERS[name].parse(before + half, TOOLS)
            assert [call.cause for call in message.tool_calls] == ["unopened"], before + half
            assert message.tool_calls[0].error
            assert message.call_error_kinds == ("unopened",)
            assert message.text.startswith(before.strip())


HALVES = {
    "harmony": [
        '<|channel|>commentary <|constrain|>json<|message|>{"key": "5"}',
        '<|channel|>commentary json<|message|>{"key": "5"}<|call|>',
        'functions.look_up <|constrain|>json<|message|>{"key": "5"}<|call|>',
        '{"key": "5"}<|call|>',
    ],
    "llama3": ['"name": "look_up", "parameters": {"key": "5"}}'],
    "pythonic": [
        'look_up(key="5")',
        'look_up(key="5")]',
        'look_up(key="5")]<|python_end|>',
        "I look.<|python_end|>",
    ],
    "json_list": [
        '{"name": "look_up", "arguments": {"key": "5"}}',
        '"name": "look_up", "arguments": {"key": "5"}}]',
        '{"type": "function", "function": {"name": "look_up", "arguments": {"key": "5"}}}]',
    ],
    "qwen3_coder": [
        "<function=look_up>\n<parameter=key>\n5\n</parameter>\n</function>",
        "<function=look_up>\n<parameter=key>\n5\n</parameter>",
        "<parameter=key>\n5\n</parameter>\n</function>\n</tool_call>",
        "</tool_call>",
    ],
    "deepseek": [
        '<｜DSML｜invoke name="look_up">\n<｜DSML｜parameter name="key" '
        'string="true">5</｜DSML｜parameter>\n'
    ],
    "glm": ["look_up\n</tool_call>", "look_up\n<arg_key>key</arg_key>\n<arg_value>5</arg_value>"],
    "kimi": ["functions.look_up:0<|tool_call_argument_begin|>{}", "<|tool_calls_section_end|>"],
}


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, rows in HALVES.items() for text in rows]
)
def test_other_halves_of_a_call_are_malformed(name, text):
    assert causes(name, text) == ["unopened"]


def test_a_muse_message_to_a_tool_without_a_call_is_cut_off():
    assert causes("muse", " to=look_up<|message|>") == ["truncated"]
    assert PARSERS["muse"].parse(" to=user<|message|>42", TOOLS) == Message("assistant", "42")


def test_a_good_call_stands_beside_half_a_call():
    good = '<tool_call>{"name": "look_up", "arguments": {}}</tool_call>'
    assert causes("hermes", good + "\n</tool_call>") == [None, "unopened"]


ANSWERS = [
    ("hermes", "A call ends with `</tool_call>`, in that spelling."),
    ("hermes", '{"name": "Ann", "arguments": {"a": 1}}'),
    ("hermes", '{"answer": [1, 2]}'),
    ("hermes", "Use <b>bold</b> (or `code`)"),
    ("pythonic", "print(1)"),
    ("llama3", 'I say {"name": "look_up", "parameters": {}}'),
    ("harmony", '<|channel|>final <|constrain|>json<|message|>{"key": "5"}'),
    ("command_r", "```json\n[1]\n```"),
]


@pytest.mark.parametrize(("name", "text"), ANSWERS)
def test_answers_that_resemble_a_call_have_none(name, text):
    assert PARSERS[name].parse(text, TOOLS).tool_calls == ()


@pytest.mark.parametrize(("name", "text"), EXAMPLES, ids=[name for name, _ in EXAMPLES])
def test_no_beginning_and_no_end_of_a_reply_is_read_as_another_call(name, text):
    (whole,) = PARSERS[name].parse(text, TOOLS).tool_calls
    for position in range(len(text)):
        for part in (text[:position], text[position:]):
            for call in PARSERS[name].parse(part, TOOLS).tool_calls:
                assert call.error or (call.name, call.arguments) == (whole.name, whole.arguments), (
                    part
                )


@pytest.mark.parametrize(
    "answer", ["Write </think> at the end.", "Between <think> and </think> it thinks.", "x</think>"]
)
def test_an_answer_that_mentions_the_end_of_thinking_has_no_thinking(answer):
    for name in ("hermes", "qwen3_coder", "glm", "llama3"):
        assert PARSERS[name].parse(answer, TOOLS) == Message("assistant", answer)
    assert PARSERS["hermes"].parse("</think>\n\n42", TOOLS) == Message(
        "assistant", "42", reasoning=""
    )
    assert PARSERS["hermes"].parse("<think>a</think>b</think>", TOOLS) == Message(
        "assistant", "b</think>", reasoning="a"
    )


def test_bare_keys_of_gemma_are_read_up_to_the_colon():
    for key in (
        "$filter",
        "@odata.type",
        "start date",
        "2fa",
        "id[]",
        "naïve-key",
        "a.b",
        "None",
        "x}",
        "",
    ):
        text = f'<|tool_call>call:look_up{{n:[1,2.5,{{{key}:None}}],{key}:<|"|>a,b:{{c}}<|"|>,m:1e-05}}<tool_call|>'  # noqa: E501
        (call,) = PARSERS["gemma"].parse(text, TOOLS).tool_calls
        assert (call.arguments, call.error) == (
            {"n": [1, 2.5, {key: None}], key: "a,b:{c}", "m": 1e-05},
            None,
        )


NUMBERS = {
    "hermes": '<tool_call>{{"name": "look_up", "arguments": {{"limit": {}}}}}</tool_call>',
    "lfm2": "<|tool_call_start|>[look_up(limit={})]<|tool_call_end|>",
    "gemma": "<|tool_call>call:look_up{{limit:{}}}<tool_call|>",
    "deepseek": (
        '<｜DSML｜tool_calls><｜DSML｜invoke name="look_up"><｜DSML｜parameter name="limit" '
        'string="false">{}'
        "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>"
    ),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_no_float_holds_is_refused(name):
    for number in ("1e999", "-1e999", "[1.0, 2e308]"):
        (call,) = PARSERS[name].parse(NUMBERS[name].format(number), TOOLS).tool_calls
        assert (call.arguments, call.cause) == ({}, "not_json")
        assert "too large" in call.error


@pytest.mark.parametrize(
    "number", [2**63, 2**64, -(2**63) - 1, 10**40, "\ud800", {"\udc00": ["\ud800", 10**30]}]
)
def test_arguments_are_recorded_as_they_were_played(number):
    text = NUMBERS["hermes"].format(json.dumps(number))
    message = PARSERS["hermes"].parse(text, TOOLS)
    assert message.tool_calls[0].arguments == {"limit": number}
    assert read_message(orjson.loads(to_json(message_row(message)))) == message


TAGGED = """
{%- for m in messages -%}<|im_start|>{{ m.role }}
{{ m.content }}{%- for c in m.tool_calls or [] -%}<tool_call><function={{ c.function.name }}>
{%- for k, v in c.function.arguments.items() -%}<parameter={{ k }}>NEWLINE{{ v }}NEWLINE</parameter>{%- endfor -%}
</function></tool_call>{%- endfor -%}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""  # noqa: E501


@pytest.mark.parametrize("newline", ["", "{{ '\\n' }}"])
@pytest.mark.parametrize("value", ["a", "\na", "a\n", "\na\n", "\n", "\n\n", "a\n\nb", ""])
def test_line_breaks_at_an_argument_s_ends_survive_as_the_template_writes_them(newline, value):
    template = ChatTemplate(TAGGED.replace("NEWLINE", newline))
    parser = parser_for_template(template)
    assert parser is not None
    assert parser.name == "qwen3_coder"
    text = template.render(
        [Message("user", "u"), Message("assistant", "", (ToolCall("look_up", {"key": value}),))]
    )
    (call,) = parser.parse(
        text.rpartition("assistant\n")[2].removesuffix("<|im_end|>\n"), TOOLS
    ).tool_calls
    assert (call.arguments, call.error) == ({"key": value}, None)
