"""Messages that would lose their content are refused, wherever dicts become messages."""

import json
import subprocess
import sys

import pytest

import turnwright as tw
from turnwright.errors import TaskError
from turnwright.training.warmup import read_conversation

LOST = {"role": "user", "text": "hello"}
WHY = "a message of role 'user' has the unknown key 'text'; did you mean 'content'?"

REFUSED = [
    (LOST, WHY),
    ({"role": "user", "contents": "x"}, "'contents'; did you mean 'content'"),
    ({"role": "user", "content": "x", "conent": "y"}, "'conent'; did you mean 'content'"),
    ({"role": "user", "content": "x", "images": ["a.png"]}, "'images'; did you mean 'content'"),
    (
        {"role": "assistant", "content": "x", "toolCalls": [{"name": "f"}]},
        "'toolCalls'; did you mean 'tool_calls'",
    ),
    (
        {"role": "assistant", "content": None, "function_call": {"name": "f"}},
        "'function_call'; did you mean 'tool_calls'",
    ),
    (
        {"role": "assistant", "content": "x", "thoughts": "y"},
        "'thoughts'; did you mean 'reasoning_content'",
    ),
    (
        {"role": "tool", "content": "x", "tool_callid": "call_0"},
        "'tool_callid'; did you mean 'tool_call_id'",
    ),
    ({"role": "user"}, "a message of role 'user' has no 'content'; an empty one is ''"),
    ({"role": "user", "content": None, "txt": "x"}, "has no 'content'; its other keys are 'txt'"),
    ({"role": "assistant", "content": None, "tool_calls": None}, "has no 'content'"),
    ({"role": "assistant", "tool_calls": []}, "has no 'content'"),
    (
        {"role": "assistant", "content": None, "refusal": "I cannot."},
        "has no 'content'; its other keys are 'refusal'",
    ),
]


@pytest.mark.parametrize(("message", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_a_message_that_would_lose_its_content_is_refused(message, said):
    with pytest.raises(ValueError, match="a message of role") as caught:
        tw.Message.of(message)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


NULLS = {
    "audio": None,
    "refusal": None,
    "function_call": None,
    "tool_calls": None,
    "text": None,
    "images": [],
    "name": None,
}
ROW = {
    "id": "m1",
    "weight": 0.5,
    "train": True,
    "loss": False,
    "loss_scale": [1.0],
    "language": "en",
    "metadata": {"a": 1},
}
KEPT = [
    ({"role": "user", "content": "x", **NULLS, "annotations": []}, "x"),
    (
        {
            "role": "assistant",
            "content": "x",
            **ROW,
            "timestamp": "2026-01-01",
            "model": "m",
            "token_ids": [1, 2],
        },
        "x",
    ),
    ({"role": "user", "content": ""}, ""),
    ({"role": "user", "content": []}, ""),
    (
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
        },
        "",
    ),
    ({"role": "assistant", "reasoning_content": "Well."}, ""),
    ({"role": "assistant", "content": None, "thinking": "Well."}, ""),
]


@pytest.mark.parametrize(
    ("message", "text"), KEPT, ids=[str(sorted(message)) for message, _ in KEPT]
)
def test_keys_of_data_sets_that_are_no_content_are_ignored(message, text):
    read = tw.Message.of(message)
    assert read.text == text
    assert tw.Message.of(read.to_dict()) == read


class Observes(tw.Env):
    def reset(self, task, *, seed=None):
        return task.messages

    def step(self, action):
        return tw.Step([LOST], 0.0)

    def reward(self, trajectory):
        return 1.0


class Opens(Observes):
    def reset(self, task, *, seed=None):
        return [LOST]


async def play(task, model):
    await model.generate([LOST])
    return 1.0


@pytest.mark.parametrize("env", [Observes, Opens, play])
def test_observations_openings_and_prompts_of_functions(env):
    (trajectory,) = tw.rollout(env, [tw.Task("Go.")], engine=tw.ScriptedEngine(["a"]))
    assert trajectory.error is not None
    assert WHY in trajectory.error.message


def test_rows_and_conversations_name_their_place(tmp_path):
    with pytest.raises(TaskError, match=r"chats\.jsonl line 3: .*unknown key 'text'"):
        read_conversation(
            {"messages": [LOST, {"role": "assistant", "content": "x"}]}, "chats.jsonl line 3"
        )

    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": [LOST], "answer": "1"}) + "\n")
    (tmp_path / "world.py").write_text(
        "import turnwright as tw\nenv = tw.tool_env([], reward=lambda t: 1.0)\n"
    )
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[[env]]\nuse = "world.py:env"\ntasks = "rows.jsonl"\n')
    done = subprocess.run(
        [sys.executable, "-m", "turnwright.cli.main", "check", str(recipe)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("turnwright: error: ")
    assert (
        f"rows.jsonl line 1: the prompt is not a string or a list of chat messages: {WHY}"
        in done.stderr
    )
    assert done.stderr.count("\n") == 1
