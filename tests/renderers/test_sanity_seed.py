"""The sanity check over the conversation of verl's documentation, with templates that strip
thinking as Qwen3 and QwQ do."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
from kit.rollouts import bpe

import turnwright as tw
from turnwright.renderers import ChatRenderer, ChatTemplate, HFTokenizer

# Written for this test: QwQ drops the thinking of all replies but the last, Qwen3 that of the
# replies before the last question.
TEMPLATE = """
{%- set ns = namespace(asked=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.asked = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
  {%- if m.role == 'tool' -%}
    {{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' -}}
  {%- else -%}
    {{- '<|im_start|>' + m.role + '\\n' -}}
    {%- if m.role == 'assistant' and m.reasoning_content and KEEPS -%}
      {{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' -}}
    {%- endif -%}
    {{- m.content -}}
    {%- for call in m.tool_calls or [] -%}
      {{- '\\n' if m.content -}}
      {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) -}}
      {{- '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""  # noqa: E501
RULES = {"qwen3": "loop.index0 > ns.asked", "qwq": "loop.last", "keeps all": "true"}
SEARCH = {
    "type": "function",
    "function": {"name": "search", "parameters": {"type": "object", "properties": {"query": {}}}},
}
REPLIES = [
    "<think>\nuser asked about a simple math question.\n</think>\n\n2 + 2 = 4.",
    "<think>\nuser wants to know the reasoning behind the answer. Search for a good "
    "explanation\n</think>\n\n"
    '<tool_call>\n{"name": "search", "arguments": {"query": "Why is 2 + 2 = 4?"}}\n</tool_call>',
    "<think>\nThe tool provided a good explanation.\n</think>\n\nThe sum of two and two is four "
    "because it is arithmetic.",
]


class Seed(tw.Env):
    tools = (SEARCH,)

    def reset(self, task: tw.Task, *, seed: int | None = None) -> Any:
        self.said = [
            "Explain why.",
            {
                "role": "tool",
                "content": "The sum of two and two is four.",
                "tool_call_id": "call_0",
            },
        ]
        return [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": "What is 2 + 2?"},
        ]

    def step(self, action: tw.Action) -> tw.Step:
        return tw.Step(self.said.pop(0)) if self.said else tw.Step(terminated=True)


def played(rule: str, **options: Any) -> tuple[list[tw.Trajectory], list[str]]:
    """Episodes with a template of this rule, and the warnings that came of them."""
    render = ChatRenderer(
        HFTokenizer(bpe()), ChatTemplate(TEMPLATE.replace("KEEPS", RULES[rule]), origin=rule)
    )
    tasks = [tw.Task(id=f"t{number}") for number in range(40)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = tw.rollout(
            Seed,
            tasks,
            tw.ScriptedEngine(REPLIES),
            renderer=render,
            limits=tw.Limits(turn_tokens=400),
            **options,
        )
    assert all(trajectory.error is None for trajectory in found), found[0].error
    return found, [str(one.message) for one in caught if "full render" in str(one.message)]


def breaks(trajectory: tw.Trajectory) -> dict[str, float]:
    return {
        name: value
        for name, value in trajectory.metrics.items()
        if name.startswith("render_mismatch")
    }


@pytest.mark.parametrize("rule", ["qwen3", "qwq"])
def test_the_default_warns_once_with_both_texts(rule: str) -> None:
    found, said = played(rule)
    assert "What was sampled is trained as it is" in said[0]
    assert len(said) == 1, (
        "thinking was stripped from what a full render shows, and nobody was told"
    )
    assert "thinking_stripped" in said[0]
    trained, template = said[0].split("trained:")[1].split("template:")
    assert "<think>\\nuser asked about a simple" in trained
    assert "<think>" not in template.split("Other differences")[0]
    assert "2 + 2 = 4." in template
    assert sum(trajectory.metrics.get("render_checks", 0) for trajectory in found) >= 2, (
        "hardly any episode is compared"
    )


@pytest.mark.parametrize("rule", ["qwen3", "qwq"])
@pytest.mark.parametrize("mode", ["strict", "ignore_strippable", "disable", "off"])
def test_every_mode_over_the_conversation(rule: str, mode: Any) -> None:
    assert "sanity_share" in inspect.signature(tw.rollout).parameters, (
        "tw.rollout cannot be told to compare every episode"
    )
    found, said = played(rule, sanity=mode, sanity_share=1.0)
    compared = mode in ("strict", "ignore_strippable")
    assert len(said) == compared
    for trajectory in found:
        assert trajectory.metrics.get("render_checks", 0) == compared
        assert breaks(trajectory) == ({"render_mismatch_thinking_stripped": 1} if compared else {})
        assert trajectory.branches == {}, "a measurement changes nothing"


def test_a_template_that_keeps_all_thinking_is_not_warned_about() -> None:
    if "sanity_share" in inspect.signature(tw.rollout).parameters:
        found, said = played("keeps all", sanity_share=1.0)
        assert said == []
        assert all(
            trajectory.metrics["render_checks"] == 1 and not breaks(trajectory)
            for trajectory in found
        )


@pytest.mark.parametrize("rule", ["qwen3", "qwq"])
def test_history_as_the_template_shows_it_is_no_difference(rule: str) -> None:
    """What verl calls the inference chat template: earlier thinking leaves the
    context, as a branch."""
    found, said = played(rule, history="template")
    assert said == []
    assert all("thinking_stripped" in trajectory.branches for trajectory in found)
