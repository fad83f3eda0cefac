"""Conversations of rows as ms-swift and older formats write them, and gold
replies that end them."""

from __future__ import annotations

import asyncio
import json

import pytest

import turnwright as tw
from turnwright.config import Limits
from turnwright.errors import TaskError
from turnwright.renderers.chat_renderer import ChatRenderer
from turnwright.renderers.load import template_renderer
from turnwright.renderers.template import ChatTemplate, with_preset_variables
from turnwright.training.warmup import conversations, read_conversation

RENDERER = template_renderer("qwen3_with_thinking")
LOOK = {"name": "look", "arguments": {"city": "Oslo"}}
SCHEMA = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
ASK = {"role": "user", "content": "Oslo?"}
NEXT = {"role": "user", "content": "And now?"}
ANSWER = {"role": "assistant", "content": "Rain."}


def openai(*calls, content=""):
    made = [{"type": "function", "function": call} for call in calls]
    return {"role": "assistant", "content": content, "tool_calls": made}


def result(text):
    return {"role": "tool", "content": text}


def swift(call):
    return {"role": "tool_call", "content": call}


SAME = {
    "text": (
        [ASK, swift(json.dumps(LOOK)), {"role": "tool_response", "content": "rain"}],
        [ASK, openai(LOOK), result("rain")],
    ),
    "object": (
        [ASK, swift(LOOK), {"role": "tool", "content": "rain"}],
        [ASK, openai(LOOK), result("rain")],
    ),
    "several": (
        [
            ASK,
            swift(json.dumps(LOOK)),
            swift(LOOK),
            {"role": "tool_response", "content": "a"},
            {"role": "tool", "content": "b"},
        ],
        [ASK, openai(LOOK, LOOK), result("a"), result("b")],
    ),
    "text before": (
        [
            ASK,
            {"role": "assistant", "content": "I look."},
            swift(LOOK),
            {"role": "tool_response", "content": "a"},
        ],
        [ASK, openai(LOOK, content="I look."), result("a")],
    ),
    "list": ([ASK, swift([LOOK, LOOK]), result("a")], [ASK, openai(LOOK, LOOK), result("a")]),
    "arguments as text": (
        [ASK, swift({"name": "look", "arguments": json.dumps(LOOK["arguments"])}), result("a")],
        [ASK, openai(LOOK), result("a")],
    ),
    "parameters": (
        [ASK, swift({"name": "look", "parameters": LOOK["arguments"]}), result("a")],
        [ASK, openai(LOOK), result("a")],
    ),
    "result as data": (
        [ASK, swift(LOOK), {"role": "tool_response", "content": {"sky": "grau ä", "t": [3]}}],
        [ASK, openai(LOOK), result('{"sky": "grau ä", "t": [3]}')],
    ),
    "legacy": (
        [
            ASK,
            {
                "role": "assistant",
                "content": None,
                "function_call": {"name": "look", "arguments": '{"city": "Oslo"}'},
            },
            {"role": "function", "name": "look", "content": "rain"},
        ],
        [ASK, openai(LOOK), {**result("rain"), "name": "look"}],
    ),
    "calls as text": (
        [
            ASK,
            {"role": "assistant", "content": "", "tool_calls": json.dumps([{"function": LOOK}])},
            result("a"),
        ],
        [ASK, openai(LOOK), result("a")],
    ),
    "older role names": (
        [
            ASK,
            {"role": "function_call", "content": json.dumps(LOOK)},
            {"role": "observation", "content": "a"},
        ],
        [ASK, openai(LOOK), result("a")],
    ),
}


@pytest.mark.parametrize(
    "tools", [[SCHEMA], json.dumps([SCHEMA]), [json.dumps(SCHEMA)], [SCHEMA["function"]]], ids=str
)
@pytest.mark.parametrize("given", list(SAME))
def test_rows_of_ms_swift_are_rows_of_openai(given, tools, tmp_path):
    """In tasks and in a warm-up, whose trained ids are equal."""
    theirs, ours = SAME[given]
    (one,) = tw.load_tasks([{"messages": [*theirs, NEXT]}])
    (two,) = tw.load_tasks([{"messages": [*ours, NEXT]}])
    assert one == two
    trained = []
    for name, row in (
        ("a", {"messages": [*theirs, ANSWER], "tools": tools}),
        ("b", {"messages": [*ours, ANSWER], "tools": [SCHEMA]}),
    ):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
        found = asyncio.run(
            conversations(tmp_path / f"{name}.jsonl", RENDERER, limits=Limits(), history="append")
        )
        trained.append([(row.ids, row.weights) for row in found[0].samples()])
    assert trained[0] == trained[1]


def look(city: str) -> str:
    """Look.

    Args:
        city: Where.
    """
    return "rain"


@pytest.mark.parametrize(
    "tools", [json.dumps([SCHEMA]), [json.dumps(SCHEMA)], ["look"], [SCHEMA], ""], ids=str
)
def test_tools_of_a_row_as_text_select_tools(tools):
    env = tw.tool_env([look], reward=lambda trajectory: 1.0)
    (played,) = tw.rollout(
        env, tw.load_tasks([{"messages": [ASK], "tools": tools}]), tw.ScriptedEngine(["ok"])
    )
    assert played.error is None
    assert played.reward == 1.0


GOLD = {
    "call": ([openai(LOOK)], ["call"]),
    "swift": ([swift(json.dumps(LOOK))], ["call"]),
    "text and call": ([{"role": "assistant", "content": "I look."}, swift(LOOK)], ["call"]),
    "legacy": ([{"role": "assistant", "content": "", "function_call": LOOK}], ["call"]),
    "two messages": ([openai(LOOK), ANSWER], ["text"]),
    "text": ([ANSWER], ["text"]),
    "object": ([tw.Message("assistant", "Rain.")], ["text"]),
    "object with a call": (
        [tw.Message("assistant", "", (tw.ToolCall("look", {"city": "Oslo"}),))],
        ["call"],
    ),
}


@pytest.mark.parametrize("column", ["messages", "talk"])
@pytest.mark.parametrize("given", list(GOLD))
def test_a_gold_reply_that_ends_a_conversation_never_stays(given, column):
    end, (kind,) = GOLD[given]
    columns = {"prompt": "talk"} if column == "talk" else None
    (task,) = tw.load_tasks([{column: [ASK, *end]}], columns=columns)
    assert task.messages == (tw.Message("user", "Oslo?"),)
    if kind == "text":
        assert task.answer == "Rain."
    else:
        assert task.answer["tool_calls"][0]["function"] == LOOK
    (task,) = tw.load_tasks([{column: [ASK, *end], "solution": "gold"}], columns=columns)
    assert (len(task.messages), task.answer) == (1, "gold")


def test_a_prompt_that_ends_with_a_call_is_not_continued():
    (task,) = tw.load_tasks([{"prompt": [ASK, openai(LOOK)]}])
    assert (len(task.messages), task.answer["tool_calls"][0]["function"]) == (1, LOOK)
    (task,) = tw.load_tasks([{"prompt": [ASK, ANSWER]}])
    assert (len(task.messages), task.answer) == (2, None)
    with pytest.raises(TaskError, match="row 0: no prompt"):
        tw.load_tasks([{"messages": [openai(LOOK)]}])
    # A result at the end is asked about.
    (task,) = tw.load_tasks([{"messages": [ASK, openai(LOOK), result("rain")]}])
    assert len(task.messages) == 3


BAD = [
    (
        [{"role": "gpt", "content": "x"}],
        r"messages[0] has the role 'gpt'; write 'assistant' (roles are system",
    ),
    ([ASK, {"role": "human", "content": "x"}], "messages[1] has the role 'human'; write 'user'"),
    (
        [ASK, {"role": "asistant", "content": "x"}],
        "messages[1] has the role 'asistant'; did you mean 'assistant'?",
    ),
    (
        [ASK, {"role": "xyzzy", "content": "x"}],
        "messages[1] has the role 'xyzzy'; write one of system, developer, user",
    ),
    (
        [ASK, openai({"name": "look", "arguments": "{city"})],
        "messages[1].tool_calls[0]: the arguments of 'look': no JSON",
    ),
    (
        [ASK, openai(LOOK, {"name": "look", "arguments": "[1]"})],
        "messages[1].tool_calls[1]: the arguments of 'look' are list",
    ),
    ([ASK, openai({"arguments": {}})], "messages[1].tool_calls[0]: a call without a name"),
    ([ASK, swift("look(Oslo)")], "messages[1].content: no JSON"),
    ([ASK, swift({"arguments": {}})], "messages[1].content: a call without a name"),
    (
        [ASK, {"role": "assistant", "content": "", "tool_calls": 3}],
        "messages[1].tool_calls is int; write a list of calls",
    ),
    (
        [ASK, {"role": "assistant", "content": "", "function_call": "look("}],
        "messages[1].function_call: no JSON",
    ),
]


@pytest.mark.parametrize(("messages", "said"), BAD, ids=[said for _, said in BAD])
def test_what_cannot_be_read_is_named_with_row_message_and_call(messages, said, tmp_path):
    row = {"messages": [*messages, NEXT, ANSWER]}
    for read in (lambda: tw.load_tasks([row]), lambda: read_conversation(row, "tasks row 0")):
        with pytest.raises(TaskError) as caught:
            read()
        assert said in str(caught.value)
        assert str(caught.value).startswith("tasks row 0: ")
        assert "\n" not in str(caught.value)


def test_tools_that_cannot_be_read():
    row = {"messages": [ASK, ANSWER]}
    for tools, said in (
        (["look"], r"row: tools\[0\] is 'look'; write the tool's schema"),
        ("[{", "row: tools: no JSON"),
    ):
        with pytest.raises(TaskError, match=said):
            read_conversation({**row, "tools": tools}, "row")


def test_thinking_in_the_content_before_a_call_is_trained(tmp_path):
    thought = {"role": "assistant", "content": "<think>\nI look.\n</think>\n"}
    rows = [
        {
            "messages": [
                ASK,
                thought,
                swift(LOOK),
                {"role": "tool_response", "content": "rain"},
                ANSWER,
            ]
        },
        {
            "messages": [
                ASK,
                {**openai(LOOK), "reasoning_content": "I look."},
                result("rain"),
                ANSWER,
            ]
        },
    ]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row | {"tools": [SCHEMA]}) + "\n" for row in rows)
    )
    one, two = asyncio.run(
        conversations(tmp_path / "rows.jsonl", RENDERER, limits=Limits(), history="append")
    )
    first, second = ([list(row.ids) for row in trajectory.samples()] for trajectory in (one, two))
    assert first == second
    assert "<think>\nI look.\n</think>" in RENDERER.decode(
        next(span.ids for span in one.spans if span.sampled)
    )


def test_a_row_has_template_variables_of_its_own(tmp_path):
    """Played where they change nothing that the template renders, else refused by
    what to set for the run."""
    env, engine = (
        tw.tool_env([], reward=lambda trajectory: 1.0),
        tw.ScriptedEngine(lambda messages, rng: "ok"),
    )

    def play(value):
        (task,) = tw.load_tasks([{"prompt": "a", "chat_template_kwargs": value}])
        return tw.rollout(env, [task], engine, renderer=RENDERER)

    for same in (
        {"enable_thinking": True},
        '{"enable_thinking": true}',
        {},
        {"enable_thinking": None},
    ):
        assert play(same)[0].reward == 1.0
    for value, said in (
        (
            {"enable_thinking": False},
            r"set it for the run \(\[model.template_args\] enable_thinking = false;",
        ),
        (
            {"enable_thinkin": True},
            r"has no variable 'enable_thinkin'; did you mean 'enable_thinking'",
        ),
        ([1], "chat_template_kwargs is list"),
        ("x", "chat_template_kwargs is no JSON"),
    ):
        with pytest.raises(TaskError, match=said):
            play(value)
        (tmp_path / "rows.jsonl").write_text(
            json.dumps({"messages": [ASK, ANSWER], "chat_template_kwargs": value}) + "\n"
        )
        with pytest.raises(TaskError, match=rf"rows\.jsonl line 1: .*{said}"):
            asyncio.run(
                conversations(tmp_path / "rows.jsonl", RENDERER, limits=Limits(), history="append")
            )
    # As `model.template_args` sets it.
    source = with_preset_variables(RENDERER.template.source, {"enable_thinking": False})
    off = ChatRenderer(RENDERER.codec, ChatTemplate(source))
    (task,) = tw.load_tasks([{"prompt": "a", "chat_template_kwargs": {"enable_thinking": False}}])
    assert tw.rollout(env, [task], engine, renderer=off)[0].reward == 1.0
    (task,) = tw.load_tasks([{"prompt": "a", "chat_template_kwargs": {"enable_thinking": True}}])
    with pytest.raises(TaskError, match="would render another prompt"):
        tw.rollout(env, [task], engine, renderer=off)
