"""Warm-up from a dataset of conversations: every reply a sampled span, nothing else,
through the same renderer."""

import asyncio
import json

import pytest
from kit.runs import train

from turnwright.cli.main import main
from turnwright.config import Limits
from turnwright.errors import TaskError
from turnwright.renderers.load import template_renderer
from turnwright.training.warmup import conversations, encode_as_sampled, read_conversation

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
CALL = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
PLAIN = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello?"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Bye <|im_end|> now."},
        {"role": "assistant", "content": "Bye."},
        {"role": "user", "content": "never answered"},
    ]
}
CALLING = {
    "messages": [
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "5", "tool_call_id": "c1"},
        {"role": "assistant", "content": "It is 5."},
    ],
    "tools": [ADD],
}
THINKING = {
    "messages": [
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": "5", "reasoning_content": "Two and three."},
    ]
}


def learned(tmp_path, rows, *, renderer=None, **options):
    path = tmp_path / "said.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    renderer = renderer or template_renderer("qwen3_with_thinking")
    notes = []
    given = {"limits": Limits(), "history": "append", "note": notes.append} | options
    found = asyncio.run(conversations(path, renderer, **given))
    return renderer, found, notes


def sampled(renderer, trajectory):
    return [renderer.decode(span.ids) for span in trajectory.spans if span.sampled]


def test_what_the_assistant_says_is_sampled_and_nothing_else(tmp_path):
    renderer, (plain, calling), notes = learned(tmp_path, [PLAIN, CALLING])
    assert notes == []
    assert [text.removesuffix("<|im_end|>") for text in sampled(renderer, plain)] == [
        "Hello.",
        "Bye.",
    ]
    told = "".join(renderer.decode(span.ids) for span in plain.spans if not span.sampled)
    assert "Be brief." in told
    assert "Bye <|im_end|> now." in told  # as text: the world cannot end a turn
    assert "never answered" not in told
    call, answer = sampled(renderer, calling)
    assert '"name": "add"' in call
    assert answer.startswith("It is 5.")
    assert [c.arguments for c in calling.turns[0].reply.tool_calls] == [{"a": 2, "b": 3}]
    assert "Adds." in renderer.decode(calling.spans[0].ids)


def test_the_ids_are_those_of_the_template(tmp_path):
    """Fed ids are those of the whole conversation as the chat template writes it,
    where it strips nothing."""
    renderer, (calling,), _ = learned(tmp_path, [CALLING], renderer=template_renderer("chatml"))
    said = read_conversation(CALLING, "row")
    whole = renderer.template.render(
        [*said.opening, said.replies[0], *said.answers[0], said.replies[1]], said.tools
    )
    (row,) = calling.samples()
    assert renderer.decode(row.ids).rstrip() == whole.rstrip()


def test_thinking_is_written_as_the_template_does():
    renderer = template_renderer("qwen3_with_thinking")
    text = encode_as_sampled(renderer, read_conversation(THINKING, "row"), 0)
    assert "Two and three." in text
    read = renderer.parse(renderer.encode_reply(text))
    assert (read.text.strip(), read.reasoning.strip()) == ("5", "Two and three.")


def test_what_cannot_be_learned_is_left_out_and_counted(tmp_path):
    long = {
        "messages": [{"role": "user", "content": "x " * 500}, {"role": "assistant", "content": "y"}]
    }
    silent = {"messages": [{"role": "user", "content": "x"}]}
    first = {"messages": [{"role": "assistant", "content": "x"}]}
    fake = {
        "tools": [ADD],
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "<tool_call>nonsense</tool_call>"},
        ],
    }
    _, found, (note,) = learned(
        tmp_path, [PLAIN, long, silent, first, fake, silent], limits=Limits(context=400)
    )
    assert len(found) == 1
    assert note.startswith(
        "skipped 5 of 6 conversations in said.jsonl: 2 without an assistant message, "
    )
    for reason in (
        "1 over the context",
        "1 starting with an assistant message",
        "1 with a reply that the template cannot reproduce",
    ):
        assert reason in note
    _, found, notes = learned(tmp_path, [PLAIN, silent, silent], limit=1)
    assert (len(found), notes) == (1, [])
    with pytest.raises(TaskError, match="none of 1 conversations is usable"):
        learned(tmp_path, [silent])
    with pytest.raises(TaskError, match="line 1: a conversation is a row with"):
        learned(tmp_path, [{"text": "x"}])


RECIPE = """\
[model]
hidden = 32
layers = 1
[[env]]
use = "hop"
[limits]
turns = 3
turn_tokens = 6
[rollout]
groups = 2
group_size = 2
[warmup]
dataset = "said.jsonl"
steps = 12
batch = 4
lr = 1e-2
gate_success = 0.0
gate_tasks = 2
[train]
steps = 1
[eval]
tasks = 2
"""


def test_a_run_learns_what_the_dataset_says(tmp_path, capsys):
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"code of {name}"},
                {"role": "assistant", "content": "answer 7"},
            ]
        }
        for name in ("amber", "birch", "cedar")
    ]
    (tmp_path / "said.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "recipe.toml").write_text(RECIPE)
    train(tmp_path / "recipe.toml", tmp_path / "run")
    metrics = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    losses = [row["loss"] for row in metrics if row["phase"] == "warmup"]
    assert len(losses) == 12
    assert losses[-1] < 0.5 * losses[0]
    assert (
        main(
            [
                "train",
                str(tmp_path / "recipe.toml"),
                "--warmup.dataset",
                "no.jsonl",
                "--out",
                str(tmp_path / "other"),
            ]
        )
        == 2
    )
    assert "no such file" in capsys.readouterr().err
