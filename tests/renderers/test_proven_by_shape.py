"""Prompts are those of the template for these texts, whatever was played before: orders of
conversations, words, late state."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.histories import TOOLS, of_template
from kit.stateful import source, sources

from turnwright.errors import TemplateError
from turnwright.renderers import CHATML, ChatTemplate, template_names, template_source
from turnwright.renderers.inspected import Inspected, watch_placeholders
from turnwright.renderers.locality import reach_of
from turnwright.renderers.template import random_mark
from turnwright.types import Message, ToolCall

NONE: frozenset[str] = frozenset()
TEXTS = (
    "Begin.",
    "go on",
    "/quiet please",
    "Error: no such key",
    "ERROR",
    "",
    "  \n",
    "a text of more than two dozen letters",
)
TURNS = st.integers(0, 18)
texts = st.sampled_from(TEXTS)


def renderer_of(text):
    return of_template(ChatTemplate(text, origin="made.jinja"))


@st.composite
def conversations(draw, lengths=TURNS):
    """An opening, and pairs of a reply and what answers it: a user, or the result of a call."""
    opening = [Message("user", draw(texts.filter(str.strip)))]
    if draw(st.booleans()):
        opening.insert(0, Message(draw(st.sampled_from(("system", "user"))), draw(texts)))
    tools = draw(st.sampled_from((0, 1, 2, 9)))  # of ten turns
    turns = []
    for number in range(draw(lengths)):
        if draw(st.integers(0, 9)) >= tools:
            turns.append((Message("assistant", draw(texts)), [Message("user", draw(texts))]))
        else:
            call = ToolCall("look", {"key": draw(texts)}, f"call{number:05d}")
            result = Message("tool", draw(texts), tool_call_id=call.id, name="look")
            turns.append((Message("assistant", "", (call,)), [result]))
    return opening, turns


same_length = st.integers(1, 14).flatmap(
    lambda length: st.lists(conversations(st.just(length)), min_size=2, max_size=3)
)
"""Conversations that differ in their texts and roles alone."""


def played(renderer, conversation):
    """The texts of the prompts of a conversation, in `append` mode."""
    opening, turns = conversation
    stop = renderer.codec.control["<|im_end|>"]
    try:
        prompts = [renderer.decode(renderer.open(opening, TOOLS).ids)]
    except TemplateError as error:
        return [str(error)]
    history = list(opening)
    for reply, told in turns:
        history.append(reply)
        prompts.append(renderer.decode(renderer.extend(history, [stop], told, TOOLS).ids))
        history += told
    return prompts


KEPT = [source(frozenset((user,)), frozenset((tool,)), "kept", "")
        for user in ("word", "length", "said before", "blank") for tool in ("late", "failed", "omits blank")]  # fmt: skip  # noqa: E501


@given(st.one_of(st.sampled_from(KEPT), sources()), same_length, st.randoms(use_true_random=False))
@settings(max_examples=80)
def test_prompts_do_not_depend_on_what_was_played_before(template, talks, chance):
    alone = [played(renderer_of(template), talk) for talk in talks]
    order = list(range(len(talks))) * 2
    chance.shuffle(order)
    shared = renderer_of(template)
    for number in order:
        assert played(shared, talks[number]) == alone[number], (
            f"conversation {number} in the order {order}"
        )


@given(sources(), conversations(), conversations(), st.integers(0, 18))
@settings(max_examples=40)
def test_a_conversation_that_is_resumed_goes_on_with_the_same_prompts(template, talk, other, cut):
    """A new process continues after any turn; it has played nothing, or something else."""
    opening, turns = talk
    prompts = played(renderer_of(template), talk)
    cut %= len(turns) + 1
    history = list(opening) + [message for reply, told in turns[:cut] for message in (reply, *told)]
    for before in ((), (other,)):
        renderer = renderer_of(template)
        for conversation in before:
            played(renderer, conversation)
        rest = list(history)
        for number, (reply, told) in enumerate(turns[cut:] if len(prompts) > 1 else (), cut + 1):
            rest.append(reply)
            found = renderer.extend(rest, [renderer.codec.control["<|im_end|>"]], told, TOOLS)
            assert renderer.decode(found.ids) == prompts[number]
            rest += told


@given(
    st.sampled_from(
        [*KEPT, CHATML, *map(template_source, ("chatml", "qwen3_with_thinking", "qwen_vl"))]
    ),
    conversations(),
)
@settings(max_examples=80)
def test_an_append_is_what_the_template_writes_behind_this_conversation(template, talk):
    """With a template that keeps all earlier text, the prompts and replies
    together are its rendering."""
    renderer = renderer_of(template)
    opening, turns = talk
    prompts = played(renderer, talk)
    history = list(opening)
    assert prompts[0] == renderer.template.render(history, TOOLS, generation_prompt=True)
    for prompt, (reply, told) in zip(prompts[1:], turns, strict=True):
        history += [reply, *told]
        assert renderer.template.render(history, TOOLS, generation_prompt=True).endswith(
            f"<|im_end|>{prompt}"
        )


CONDITIONS = """
'word' in X
X.startswith('word')
X == 'word'
'word' == X
X in ['word', 'other']
X | lower == 'word'
X.split('word') | length > 1
X | length > 3
X | length > 0
1 < X | length < 5
X[:2] == 'wo'
X.find('word') >= 0
X is in(['word'])
X | replace('word', '') != X
(X ~ '.') == 'word.'
('<' + X) in '<word>'
'rd.' in X ~ '.'
X.upper().endswith('WORD')
messages | map(attribute='content') | list | select('equalto', 'word') | list | length > 0
messages | selectattr('content', 'in', ['word']) | list
messages[0] == {'role': 'user', 'content': 'word'}
X.isdigit()
X < 'n'
X | trim | first == 'w'
(X | tojson) == '"word"'
X.count('word')
X
X | trim
not X
X is string
X and 'word' in X
X | int(0) == 7
X.strip('w') == 'ord'
X | title == 'Word'
""".strip().splitlines()


@given(
    st.sampled_from(CONDITIONS),
    st.sampled_from(("word", "Word", " word ", "swords", "other", "7", "wo", "ord", "x" * 30)),
)
@settings(max_examples=300)
def test_what_is_allowed_takes_the_way_of_the_placeholder(condition, text):
    """Whatever a template asks of a text: a text that is allowed gets the answer
    that a placeholder got."""
    by_macro = "{%- macro said(m) -%}{{- m.content -}}{%- endmacro -%}"
    for value in ("messages[0].content", "said(messages[0])"):
        body = by_macro + "{%- if CONDITION -%}yes{%- else -%}no{%- endif -%}".replace(
            "CONDITION", condition.replace("X", value)
        )
        template = ChatTemplate(body)
        with watch_placeholders() as inspected:
            of_placeholder = template.render([Message("user", random_mark())])
        if inspected.allows([text]):
            assert template.render([Message("user", text)]) == of_placeholder, (condition, value)
        elif not inspected.unprovable:
            assert (
                any(
                    word in text or word in text.casefold()
                    for word in map(str.casefold, inspected.words)
                )
                or inspected.any_case
            )


def test_common_questions_of_templates_are_provable():
    """Searches for words and emptiness leave most texts provable; a length does not."""
    plain = "an ordinary text"
    for condition, provable in (
        ("'word' in X", True),
        ("X | length > 0", True),
        ("X | trim", True),
        ("X | length > 9", False),
    ):
        with watch_placeholders() as inspected:
            value = condition.replace("X", "messages[0].content")
            ChatTemplate("{%- if " + value + " -%}yes{%- endif -%}").render(
                [Message("user", random_mark())]
            )
        assert inspected.allows([plain]) is provable, condition
    assert Inspected().allows(["anything"])


@pytest.mark.parametrize(
    ("template", "reach"),
    [
        (CHATML, "none"),
        (template_source("chatml"), "first"),
        (template_source("qwen3_with_thinking"), "all"),
        ("{%- for m in messages -%}{{- m.content -}}{%- endfor -%}{{- messages | length -}}", "all"),  # noqa: E501
        ("{%- for m in messages -%}{{- loop.index ~ m.content -}}{%- endfor -%}", "all"),
        ("{%- for m in messages[1:] -%}{{- m.content -}}{%- endfor -%}", "all"),
        ("{%- set last = messages[-1].role -%}{%- for m in messages -%}{{- m.content ~ last -}}{%- endfor -%}", "all"),  # noqa: E501
        ("{%- set who = messages[0].role -%}{%- for m in messages -%}{{- m.content ~ who -}}{%- endfor -%}", "first"),  # noqa: E501
        ("{%- set ns = namespace(n=0) -%}{%- for m in messages -%}{%- set ns.n = 1 -%}{{- m.content -}}{%- endfor -%}", "all"),  # noqa: E501
        ("{%- for m in messages -%}{%- for c in m.tool_calls or [] -%}{{- loop.index -}}{%- endfor -%}{%- endfor -%}", "none"),  # noqa: E501
        ("{%- macro a() -%}{{- messages | length -}}{%- endmacro -%}{%- for m in messages -%}{{- a() -}}{%- endfor -%}", "all"),  # noqa: E501
        ("{%- for m in messages -%}", "all"),
    ],
)  # fmt: skip
def test_which_earlier_messages_matter_is_read_from_the_source(template, reach):
    assert reach_of(template) == reach


def test_every_built_in_template_is_rendered():
    """Each named template opens and goes on; the text of a demonstration's result is in it."""
    call = ToolCall("look", {"key": "a"}, "call00000")
    shot = [
        Message("user", "q"),
        Message("assistant", "I look.", (call,)),
        Message("tool", "FOUND", tool_call_id=call.id, name="look"),
    ]
    for name in template_names():
        renderer = renderer_of(template_source(name))
        assert "FOUND" in renderer.decode(
            renderer.open([*shot, Message("assistant", "A."), Message("user", "next")], TOOLS).ids
        )
