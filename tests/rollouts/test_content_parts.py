"""Messages whose content is several texts: one text wherever the template writes no
lists, from every source."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

import turnwright as tw
from turnwright.config import Limits
from turnwright.envs.tools.results import read_content
from turnwright.renderers import CHATML, ChatTemplate, SampledReply
from turnwright.renderers.load import template_renderer
from turnwright.training.warmup import conversations
from turnwright.types import Message, join_texts

PARTS = [{"type": "text", "text": "alpha"}, {"type": "text", "text": "beta"}]
PICTURE = tw.Image(np.zeros((8, 8, 3), np.uint8), alt="a black square")
LISTS = """{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.content is string %}{{- m.content }}{%- else %}
{%- for part in m.content %}{{- '[' + part.text + ']' }}{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""  # noqa: E501
BARE_LISTS = LISTS.replace("'[' + part.text + ']'", "part.text")
TEMPLATES = {
    "joins texts with +": CHATML,
    "trims": CHATML.replace("{{- message.content }}", "{{- message.content | trim }}"),
    "prints what it gets": CHATML.replace("{{- message.content }}", "{{ message.content }}"),
    "dumps what is no text": CHATML.replace(
        "{{- message.content }}",
        "{{- message.content if message.content is string else message.content | tojson }}",
    ),
    "writes lists with brackets": LISTS,
}


def prompt_of(renderer, env, tasks, replies=("ok",)):
    (played,) = tw.rollout(env, tasks, tw.ScriptedEngine(list(replies)), renderer=renderer)
    assert played.error is None, played.error
    return renderer.decode(next(iter(played.samples())).ids)


class Asks(tw.Env):
    content = PARTS

    def reset(self, task, *, seed=None):
        self.asked = False
        return {"role": "user", "content": self.content}

    def step(self, action):
        if self.asked:
            return tw.Step(reward=1.0, terminated=True)
        self.asked = True
        return tw.Step({"role": "user", "content": self.content}, reward=1.0)


@pytest.mark.parametrize("name", TEMPLATES)
def test_several_texts_are_one_text(tmp_path, name):
    (tmp_path / "made.jinja").write_text(TEMPLATES[name])
    renderer = template_renderer(str(tmp_path / "made.jinja"))
    row = {"messages": [{"role": "user", "content": PARTS}], "answer": "1"}

    def look() -> list:
        """Look."""
        return PARTS

    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    prompts = {
        "row": prompt_of(
            renderer, tw.tool_env(tools=[], reward=lambda t: 1.0), tw.load_tasks([row])
        ),
        "observation": prompt_of(renderer, Asks, [tw.Task("x")], ["ok", "ok"]),
        "result": prompt_of(
            renderer, tw.tool_env([look], reward=lambda t: 1.0), [tw.Task("x")], [call, "ok"]
        ),
    }
    for source, prompt in prompts.items():
        assert "'text'" not in prompt.replace('"', "'"), source
        assert "alpha\nbeta" in prompt, source

    for given in (
        [Message("user", ("alpha", "beta"))],
        [Message("system", ("alpha", "beta")), Message("user", "x")],
    ):
        assert "alpha\nbeta" in renderer.decode(renderer.open(given).ids)
    asked, reply = Message("user", "x"), renderer.encode_reply("ok")
    ids = [*renderer.open([asked]).ids, *reply]
    new = Message("user", ("alpha", "beta"))
    start = len(ids) - len(reply)
    composed = renderer.compose(
        [asked, Message("assistant", "ok"), new], [SampledReply(1, reply, start)], ids
    )
    assert composed.ids == renderer.extend([asked, Message("assistant", "ok")], reply, [new]).ids


def test_a_result_of_content_parts_is_content():
    """As chat formats have them, with an image or without; other lists of dicts are data."""
    part = {"type": "text", "text": "Here."}
    assert read_content([part, part], "look") == ("Here.", "Here.")
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    here, image = read_content([part, picture], "look")
    assert here == "Here."
    assert isinstance(image, tw.Image)
    rows = [{"type": "text", "text": "Here.", "line": 3}]
    assert json.loads(read_content(rows, "look")) == rows
    assert read_content([], "look") == "[]"


def test_a_template_that_writes_lists_gets_them():
    template = ChatTemplate(BARE_LISTS)
    assert template.writes_parts("user")
    assert "alphabeta" in template.render([Message("user", ("alpha", "beta"))])
    assert not ChatTemplate(CHATML).writes_parts("user")


def test_an_alt_text_is_a_part_of_its_own():
    class Sees(Asks):
        content = (PICTURE, "Which color?")

    assert "a black square\nWhich color?" in prompt_of(
        tw.byte_renderer(), Sees, [tw.Task("x")], ["ok", "ok"]
    )


def test_warm_up_conversations_have_the_same_texts(tmp_path):
    rows = [{"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": content}]}  # noqa: E501
            for content in (PARTS, "alpha\nbeta")]  # fmt: skip
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    renderer = tw.byte_renderer()
    read = asyncio.run(conversations(file, renderer, limits=Limits(), history="append"))
    first, second = (next(iter(one.samples())).ids for one in read)
    assert first == second


def test_texts_are_joined_where_nothing_separates_them():
    assert join_texts(["alpha", "beta"]) == "alpha\nbeta"
    assert join_texts(["Look at ", "this", "", "\nnow"]) == "Look at this\nnow"
    assert join_texts([]) == ""
    assert Message("user", ("a", "b")).text == Message("user", ("a", "b")).text_with_alt == "a\nb"


@pytest.mark.parametrize(
    "part", [{"type": "text"}, {"type": "text", "text": None}, {"type": "text", "content": "x"}]
)
def test_a_text_part_without_a_text_is_refused(part):
    with pytest.raises(TypeError, match="give 'text'"):
        Message.of({"role": "user", "content": [part]})
    assert (
        Message.of({"role": "user", "content": [{"type": "input_text", "text": "x"}]}).text == "x"
    )
