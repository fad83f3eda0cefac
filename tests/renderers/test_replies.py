"""Replies are read and written in the format that the chat template shows."""

from __future__ import annotations

import pytest
from kit.corpus import tokenizer_of

import turnwright as tw
from tests.renderers.test_parsers import TOOLS
from turnwright.errors import TemplateError
from turnwright.renderers import ChatRenderer, ChatTemplate, HFTokenizer, byte_renderer
from turnwright.types import Message, ToolCall

GLM = """\
{%- for m in messages %}{{- '<|' + m.role + '|>' }}
    {%- if m.role == 'assistant' %}{{- '<think>' + (m.reasoning_content or '') + '</think>' }}{%- endif %}{{- m.content }}
    {%- for call in m.tool_calls or [] %}{{- '<tool_call>' + call.function.name }}
        {%- for k, v in call.function.arguments.items() %}
            {{- '<arg_key>' + k + '</arg_key><arg_value>' + (v if v is string else v | tojson) + '</arg_value>' }}
        {%- endfor %}{{- '</tool_call>' }}
    {%- endfor %}
    {%- if m.role == 'assistant' %}{{- '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|><think>' }}{%- endif %}"""  # noqa: E501
CALL = (
    "<tool_call>look_up<arg_key>key</arg_key><arg_value>5</arg_value>"
    "<arg_key>limit</arg_key><arg_value>3</arg_value></tool_call>"
)


def renderer(source: str = GLM) -> ChatRenderer:
    template = ChatTemplate(source)
    return ChatRenderer(HFTokenizer(tokenizer_of(template)), template)


def test_calls_are_read_in_the_format_of_the_template_behind_its_own_thinking_mark():
    text = renderer()
    said = f"I look.</think>So:{CALL}"
    ids = text.encode_reply(said)
    assert text.decode(ids[:-1]) == said
    marks = [
        text.decode([i])
        for i in ids
        if text.decode([i]) in ("</think>", "<tool_call>", "<arg_key>", "</arg_value>")
    ]
    assert marks == [
        "</think>",
        "<tool_call>",
        "<arg_key>",
        "</arg_value>",
        "<arg_key>",
        "</arg_value>",
    ]
    call = ToolCall("look_up", {"key": "5", "limit": 3}, "call_0")
    assert text.parse(ids, TOOLS) == Message(
        "assistant", "So:", tool_calls=(call,), reasoning="I look."
    )
    cut = text.parse(text.encode_reply(f"I look {CALL}"), TOOLS)
    assert (cut.text, cut.tool_calls, cut.calls_in_thinking) == ("", (), 1)
    assert text.parse((), TOOLS, CALL, thinking=False).tool_calls == (call,)


def test_a_call_written_in_another_format_than_the_model_reads_is_refused():
    hermes = '<tool_call>{"name": "look_up", "arguments": {}}</tool_call>'
    with pytest.raises(TemplateError, match="the template's call format is 'glm'"):
        renderer().encode_reply(f"</think>{hermes}")
    assert byte_renderer().parse(byte_renderer().encode_reply(hermes), TOOLS).tool_calls == (
        ToolCall("look_up", {}, "call_0"),
    )


def test_an_environment_goes_on_behind_thinking_that_the_prompt_opened():
    class Goes(tw.Env):
        def reset(self, task, *, seed=None):
            self.seen = []
            return "go"

        def step(self, action):
            self.seen.append((action.text, action.reasoning))
            if len(self.seen) < 3:
                return tw.Step(tw.InlineObservation(" and"))
            return tw.Step(reward=1.0, terminated=True, info={"seen": self.seen})

    text = renderer()
    engine = tw.ScriptedEngine([" hm", " so</think>yes", "no"], renderer=text)
    (trajectory,) = tw.rollout(Goes, [tw.Task("x")], engine, renderer=text, history="inline")
    assert trajectory.error is None
    assert trajectory.turns[-1].info["seen"] == [("", "hm"), ("yes", "so"), ("no", None)]
