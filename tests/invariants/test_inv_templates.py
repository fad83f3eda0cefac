"""Over the chat templates in use: contents have the ids of the full render, and nothing in them becomes control."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest
from corpus import TOOLS, distinct, template_of, tokenizer_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from turnwise.errors import TemplateError
from turnwise.render import Branch
from turnwise.render.chat import ChatRenderer
from turnwise.render.codec import TokenizerCodec
from turnwise.types import Message

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from templates import USER, messages_of, reply_of, sampled

NAMES = [name for name, _ in distinct()] or ["none"]
SCENARIOS = (("user",), ("tool",), ("tool", "user"), ("user",))
MANY = settings(max_examples=150, deadline=None)
clean = st.text(
    st.characters(codec="utf-8", exclude_characters="<>[]{}|\uff1c\uff1e\u2581", exclude_categories=("Cc", "Cs", "Cn", "Co")),
    max_size=20,
)


@cache
def renderer_of(name):
    if name == "none":
        pytest.skip("no templates at hand: run python tests/corpus.py")
    template = template_of(name, dict(distinct())[name])
    codec = TokenizerCodec(tokenizer_of(template))
    try:
        return ChatRenderer(codec, template, stop_ids=frozenset((codec.control["<|eos|>"],)))
    except TemplateError:
        return None


def said(roles, texts):
    return [
        Message(m.role, text, tool_call_id=m.tool_call_id, name=m.name)
        for m, text in zip(messages_of(roles), texts, strict=True)
    ]


@MANY
@given(
    name=st.sampled_from(NAMES), roles=st.sampled_from(SCENARIOS), texts=st.lists(clean, min_size=2, max_size=2), data=st.data()
)
def test_clean_content_has_the_ids_of_the_full_render(name, roles, texts, data):
    renderer = renderer_of(name)
    assume(renderer is not None and renderer.contract.append_only and renderer.contract.appends[", ".join(roles)] == "append")
    template, codec = renderer.template, renderer._codec
    tools = TOOLS if "tool" in roles else ()
    messages = said(roles, texts[: len(roles)])
    asked = Message("user", data.draw(clean))
    try:
        reply = reply_of(template, roles, tools)
        prompt = template.render([asked], tools, generation_prompt=True)
        shown = template.render([asked, reply], tools)
        whole = template.render([asked, reply, *messages], tools, generation_prompt=True)
        answer = renderer.extend([asked, reply], ids := sampled(renderer, prompt, shown), messages, tools)
    except TemplateError:
        assume(False)
    assume(shown.startswith(prompt) and whole.startswith(prompt))
    assert not isinstance(answer, Branch)
    if not set(codec.encode("".join(texts))) & set(codec.control.values()):
        assert [*renderer.open([asked], tools).ids, *ids, *answer.ids] == codec.encode(whole)


@MANY
@given(name=st.sampled_from(NAMES), roles=st.sampled_from(SCENARIOS), data=st.data())
def test_no_content_becomes_control(name, roles, data):
    renderer = renderer_of(name)
    assume(renderer is not None)
    control = renderer._codec.control
    marks = st.sampled_from([*control, *(text[:-1] for text in control), "assistant\n", "\n", "[INST]", "### User:", " "])
    hostile = st.lists(marks | clean, max_size=5).map("".join)
    tools = TOOLS if "tool" in roles else ()
    known = set(control.values())

    def controls(messages):
        reply = reply_of(renderer.template, roles, tools)
        ids = renderer.extend([USER, reply], [min(renderer.stop_ids)], messages, tools).ids
        return [i for i in ids if i in known]

    texts = [data.draw(hostile) for _ in roles]
    try:
        harmless = controls(said(roles, ["word"] * len(roles)))
        found = controls(said(roles, texts))
    except TemplateError:
        assume(False)
    assert found == harmless, texts
