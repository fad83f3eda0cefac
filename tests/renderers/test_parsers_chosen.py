"""Which parser a template gets, for forms that the corpus does not hold; and that `check` says
where no parser reads a call."""

import pytest

from turnwright.cli.check import check_template
from turnwright.renderers import MARKUP, SPECIAL, ByteTokenizer, ChatRenderer, ChatTemplate
from turnwright.types import Message, ToolCall

FRAME = """
{%- for m in messages -%}
  {{- '<|im_start|>' + m.role + '\\n' -}}
  {%- if m.role == 'assistant' and m.tool_calls -%}CALLS{%- else -%}{{- m.content -}}{%- endif -%}
  {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
ONE = "{% for c in m.tool_calls %}{% set f = c.function %}BODY{% endfor %}"
PYTHON = ONE.replace(
    "BODY",
    "{{ ', ' if not loop.first }}{{ f.name }}({% for k, v in f.arguments.items() %}{{ "
    "', ' if not loop.first }}{{ k }}={{ v | tojson }}{% endfor %})",
)
LIST = (
    "{{ '[' }}" + ONE.replace("BODY", "{{ ', ' if not loop.first }}{{ f | tojson }}") + "{{ ']' }}"
)
FORMS = {
    "pythonic": "{{ '[' }}" + PYTHON + "{{ ']' }}",
    "json_list": LIST,
    "granite": "<|tool_call|>" + LIST,
    "internlm2": ONE.replace(
        "BODY",
        "<|action_start|><|plugin|>\n{{ {'name': f.name, 'parameters': f.arguments} | tojson "
        "}}<|action_end|>",
    ),
    "function_gemma": ONE.replace(
        "BODY",
        "<start_function_call>call:{{ f.name }}{{ '{' }}{% for k, v in "
        "f.arguments.items() %}{{ ',' if not loop.first }}{{ k }}:<escape>{{ v "
        "}}<escape>{% endfor %}{{ '}' }}<end_function_call>",
    ),
    "minicpm3": "<|tool_call_start|>\n```python\n" + PYTHON + "\n```\n<|tool_call_end|>",
    "olmo3": "<function_calls>" + PYTHON + "</function_calls>",
}
UNREAD = {
    "words": "{% for c in m.tool_calls %}Run {{ c.function.name }} with {{ "
    "c.function.arguments | tojson }}!{% endfor %}",
    "an unknown mark before a list": "<|my_calls|>" + LIST,
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {"key": {}}}},
    }
]


def renderer(calls):
    return ChatRenderer(
        ByteTokenizer([*SPECIAL, *MARKUP]), ChatTemplate(FRAME.replace("CALLS", calls), origin="t")
    )


@pytest.mark.parametrize("name", FORMS)
def test_a_reply_in_the_template_s_own_form_is_read(name):
    made = renderer(FORMS[name])
    call = ToolCall("look", {"key": "a, (b)"})
    asked = Message("user", "u")
    opened = made.template.render([asked], TOOLS, generation_prompt=True)
    whole = made.template.render([asked, Message("assistant", "", (call,))], TOOLS)
    reply = whole.removeprefix(opened).partition("<|im_end|>")[0]
    found = made.parse(made.encode_reply(reply), TOOLS).tool_calls
    assert [(one.name, one.arguments, one.error) for one in found] == [
        ("look", {"key": "a, (b)"}, None)
    ]


@pytest.mark.parametrize("name", UNREAD)
def test_check_says_where_no_parser_reads_the_calls_of_a_template(name):
    findings = check_template(renderer(UNREAD[name]))
    assert any("no parser reads them back" in str(text) for _, text in findings), findings


def test_check_says_nothing_of_the_kind_where_calls_are_read_or_there_are_none():
    for calls in (FORMS["granite"], "{{ m.content }}"):
        findings = check_template(renderer(calls))
        assert not any("no parser" in str(text) for _, text in findings), findings
