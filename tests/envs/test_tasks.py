"""Where tasks come from, what is said of bad rows, and what is held out."""

import importlib
import json
import random
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwright.envs import load_tasks, resolve_env, split_tasks
from turnwright.envs.tasks import check_disjoint, make_task_source
from turnwright.errors import ConfigError, TaskError
from turnwright.types import Message, Task


def write(path, rows):
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8"
    )
    return path


def test_columns(tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    rows = [
        {"question": "6 * 7?", "answer": "42", "level": 2},
        {"messages": chat, "id": 7},
        "",
        {
            "prompt": chat,
            "reward_model": {"style": "rule", "ground_truth": "x"},
            "extra_info": {"index": 3},
            "data_source": "d",
        },
        {"prompt": "p", "question": "kept"},
    ]
    first, second, third, fourth = load_tasks(write(tmp_path / "rows.jsonl", rows))
    assert first == Task("6 * 7?", "42", info={"level": 2})
    assert (second.id, [message.role for message in second.messages]) == ("7", ["system", "user"])
    assert (third.answer, third.info["extra_info"], third.info["data_source"]) == (
        "x",
        {"index": 3},
        "d",
    )
    assert (fourth.messages, fourth.info) == ((Message("user", "p"),), {"question": "kept"})


BAD = [
    ('{"prompt": "a"', "line 2: not JSON"),
    ("[1]", "line 2: a row is an object"),
    (
        {"answer": "42"},
        "no prompt; give the row one of the columns messages, prompt, question, problem, query (it has answer)",  # noqa: E501
    ),
    ({"promt": "a"}, "promt: did you mean 'prompt'?"),
    ({"prompt": ""}, "line 2: no prompt"),
    ({"prompt": True}, "line 2: the prompt is not a string or a list of chat messages"),
    ({"prompt": [{"content": "x"}]}, "a message needs a 'role'"),
    ({"prompt": [{"role": "user", "content": [{"type": "audio"}]}]}, "a content part of audio"),
    (
        {"prompt": [{"role": "user", "content": [{"type": "smell"}]}]},
        "a content part must be text, an image or a video",
    ),
    ({"prompt": "a", "id": 1.5}, "'id' is a string or an integer, not float"),
    ({"prompt": "other", "id": "a"}, "line 2: the id 'a' belongs to another task at"),
]


@pytest.mark.parametrize(("row", "said"), BAD, ids=lambda value: str(value)[:40])
def test_a_bad_row_is_named_with_its_line(tmp_path, row, said):
    path = write(tmp_path / "rows.jsonl", [{"prompt": "first", "id": "a"}, row])
    with pytest.raises(TaskError) as caught:
        load_tasks(path)
    assert said in str(caught.value)
    assert str(caught.value).startswith(f"{path} line 2: ")
    assert "\n" not in str(caught.value)


def test_bad_files(tmp_path):
    write(tmp_path / "train.jsonl", [])
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}')
    (tmp_path / "rows.csv").write_text("prompt\na\n")
    (tmp_path / "empty").mkdir()
    for name, said in [
        ("trian.jsonl", "no such file or directory; did you mean 'train.jsonl'?"),
        ("train.jsonl", "no tasks in it"),
        ("latin.jsonl", "line 1: not UTF-8 at byte 12"),
        ("rows.csv", "tasks come from .jsonl, .parquet or .arrow files"),
        ("empty", "no .jsonl, .parquet or .arrow file in it"),
        ("nowhere/rows.jsonl", "no such file or directory; check the path"),
    ]:
        with pytest.raises(TaskError) as caught:
            load_tasks(tmp_path / name)
        assert said in str(caught.value)
        assert str(tmp_path) in str(caught.value)


def test_a_row_that_stands_there_twice_is_taken_once(tmp_path):
    rows = [
        {"prompt": "a", "id": "1"},
        {"prompt": "a", "id": "1"},
        {"prompt": "b"},
        {"prompt": "b"},
    ]
    assert [task.messages[0].text for task in load_tasks(write(tmp_path / "rows.jsonl", rows))] == [
        "a",
        "b",
    ]


def test_a_folder_of_jsonl_files(tmp_path):
    write(tmp_path / "part-0.jsonl", [{"prompt": "a"}])
    write(tmp_path / "part-1.jsonl", [{"prompt": "b"}])
    assert len(load_tasks(tmp_path)) == 2
    write(tmp_path / "test-0.jsonl", [{"prompt": "c"}])
    with pytest.raises(TaskError, match=r"holds several splits \(part, test\); name one file"):
        load_tasks(tmp_path)


def test_functions():
    assert len(load_tasks(lambda: [Task("a"), {"prompt": "b"}])) == 2
    assert load_tasks(lambda split, n: [Task(f"{split} {i}") for i in range(n)], split="eval", n=2)[
        1
    ] == Task("eval 1")
    assert (
        load_tasks(lambda **kwargs: [Task(str(sorted(kwargs)))])[0].messages[0].text
        == "['n', 'seed', 'split']"
    )

    def broken():
        raise KeyError("x")

    for source, said in [(broken, r"broken\(\): raised KeyError: 'x'"), (lambda: "text", "returned str"),  # noqa: E501
                         (list, "no tasks in it"), (lambda: [{"answer": 1}], "row 0: no prompt")]:  # fmt: skip  # noqa: E501
        with pytest.raises(TaskError, match=said):
            load_tasks(source)


def test_files_with_columns_name_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(TaskError, match="needs pyarrow; pip install pyarrow"):
        load_tasks(tmp_path / "rows.parquet")


def test_parquet_and_arrow_as_the_hub_and_save_to_disk_write_them(tmp_path):
    pa = pytest.importorskip("pyarrow")
    rows = [{"question": f"q{i}", "answer": str(i), "extra_info": {"index": i}} for i in range(5)]
    table = pa.Table.from_pylist(rows)
    (tmp_path / "hub" / "data").mkdir(parents=True)
    importlib.import_module("pyarrow.parquet").write_table(
        table, tmp_path / "hub" / "data" / "train-00000-of-00001.parquet"
    )
    saved = tmp_path / "saved" / "train"
    saved.mkdir(parents=True)
    with pa.ipc.new_stream(str(saved / "data-00000-of-00001.arrow"), table.schema) as writer:
        writer.write_table(table)
    (saved / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]})
    )
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    expected = [
        Task(row["question"], row["answer"], info={"extra_info": row["extra_info"]}) for row in rows
    ]
    assert load_tasks(tmp_path / "hub") == expected
    assert load_tasks(saved) == expected
    with pytest.raises(TaskError, match=r"holds several splits; name one: .*train"):
        load_tasks(tmp_path / "saved")
    (tmp_path / "broken.arrow").write_bytes(b"nothing")
    with pytest.raises(TaskError, match="cannot be read"):
        load_tasks(tmp_path / "broken.arrow")


rows_of_tasks = st.lists(st.integers(0, 30), min_size=2, max_size=60)


@given(rows_of_tasks, st.integers(0, 3))
def test_a_split_is_disjoint_complete_and_independent_of_order(numbers, seed):
    tasks = [Task(f"q{number}", id=f"{number}-{place}") for place, number in enumerate(numbers)]
    if len(set(numbers)) < 2:
        return
    try:
        train, held = split_tasks(tasks, 1, seed)
    except TaskError as error:
        assert "leaves none" in str(error)  # noqa: PT017
        return
    check_disjoint(train, held)
    assert sorted(task.id for task in train + held) == sorted(task.id for task in tasks)
    mixed = random.Random(0).sample(tasks, len(tasks))
    assert {task.id for task in split_tasks(mixed, 1, seed)[1]} == {task.id for task in held}


def test_overlap_is_found_by_id_and_by_content():
    with pytest.raises(TaskError, match="task a is in training and held out"):
        check_disjoint([Task("x", id="a")], [Task("y", id="a")])
    with pytest.raises(
        TaskError, match="task a of training has the content of the held-out task b"
    ):
        check_disjoint([Task("x", id="a")], [Task("x", id="b")])
    with pytest.raises(TaskError, match="has the content"):
        # A row's number in its file is no content.
        check_disjoint(
            [Task("x", info={"extra_info": {"index": 1}})],
            [Task("x", info={"extra_info": {"index": 2}})],
        )
    check_disjoint([Task("x", info={"level": 1})], [Task("x", info={"level": 2})])
    with pytest.raises(TaskError, match="3 tasks are to be held out of 3"):
        split_tasks([Task("a"), Task("b"), Task("c")], 3)


def test_a_fifth_is_held_out_where_nobody_says_otherwise():
    tasks = [Task(str(i)) for i in range(50)]
    source = make_task_source(tasks, None, "mine")
    train, held = source("train", 0, 1), source("eval", 0, 1)
    assert (len(train), len(held)) == (40, 10)
    check_disjoint(train, source("eval", 0, 2))
    assert source("train", 7, 1) == train[:7]
    assert source("train", 0, 2) != train
    assert make_task_source(tasks[:4], None, "mine")("eval", 0, 0) == []
    assert len(make_task_source(tasks[:1], None, "mine")("train", 0, 0)) == 1


def test_sources_of_both_splits():
    source = make_task_source([Task("a")], [Task("b")], "mine")
    assert (source("train", 0, 0), source("eval", 0, 0)) == ([Task("a")], [Task("b")])
    own = make_task_source(
        lambda split, n, seed: [Task(f"{split} {i}") for i in range(n + 3)], None, "mine"
    )
    assert own("eval", 2, 0) == [Task("eval 0"), Task("eval 1")]
    with pytest.raises(TaskError, match="mine has no train tasks"):
        make_task_source(None, [Task("b")], "mine")("train", 1, 0)
    with pytest.raises(TaskError, match="takes n and seed takes split too"):
        make_task_source(lambda n, seed: [], None, "mine")


@pytest.mark.parametrize("prompt", ["problem", "query"])
@pytest.mark.parametrize(
    "answer",
    [
        {"label": 7},
        {"solution": 7},
        {"response": 7},
        {"ground_truth": 7},
        {"reward_spec": {"method": "rule", "ground_truth": 7}},
    ],
    ids=lambda answer: next(iter(answer)),
)
def test_the_columns_of_other_systems_are_read(tmp_path, prompt, answer):
    """An answer under a known name was None without a word."""
    (named,) = load_tasks(write(tmp_path / "a.jsonl", [{"prompt": "6?", **answer}]))
    assert (named.answer, named.info) == (7, answer)
    (task,) = load_tasks(write(tmp_path / "b.jsonl", [{prompt: "6?", **answer}]))
    assert (task.messages, task.answer) == ((Message("user", "6?"),), 7)


def test_columns_are_mapped_and_must_be_there(tmp_path):
    row = {"ask": "6?", "meta": {"gold": [7]}, "answer": "no", "number": 3, "level": 1}
    columns = {"prompt": "ask", "answer": "meta.gold", "id": "number"}
    (task,) = load_tasks(write(tmp_path / "rows.jsonl", [row]), columns=columns)
    assert (task.id, task.messages, task.answer) == ("3", (Message("user", "6?"),), [7])
    assert task.info == {"meta": {"gold": [7]}, "answer": "no", "level": 1}
    with pytest.raises(
        TaskError,
        match=r"row 1.*no column 'lable', which columns.answer names; did you mean 'label'",
    ):
        load_tasks(
            [{"prompt": "a", "lable": 1}, {"prompt": "b", "label": 1}], columns={"answer": "lable"}
        )
    with pytest.raises(TaskError, match=r"is a tw.Task already"):
        load_tasks([Task("a")], columns=columns)


def test_a_conversation_that_ends_with_a_reference_reply(tmp_path):
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6?"}]
    full = [*asked, {"role": "assistant", "content": "It is 7."}]
    opening = (Message("system", "Be brief."), Message("user", "6?"))
    (task,) = load_tasks([{"messages": full}])
    assert (task.messages, task.answer) == (opening, "It is 7.")
    (task,) = load_tasks([{"messages": full, "solution": "7"}])
    assert (task.messages, task.answer) == (opening, "7")
    (task,) = load_tasks(
        [{"talk": full, "gold": "8"}], columns={"prompt": "talk", "answer": "gold"}
    )
    assert (task.messages, task.answer) == (opening, "8")
    shot = [*full, {"role": "user", "content": "8?"}]
    (task,) = load_tasks([{"messages": shot}])
    assert (len(task.messages), task.answer) == (4, None)
    (task,) = load_tasks([{"prompt": full}])  # TRL and verl continue the message of such a prompt
    assert (len(task.messages), task.answer) == (3, None)


def test_columns_of_metadata_and_tools(tmp_path):
    row = {"text": "6?", "label": "7", "meta": {"level": 3}, "functions": ["add"]}
    columns = {"prompt": "text", "metadata": "meta", "tools": "functions"}
    (task,) = load_tasks(write(tmp_path / "rows.jsonl", [row]), columns=columns)
    assert (task.answer, task.info) == (
        "7",
        {"label": "7", "metadata": {"level": 3}, "tools": ["add"]},
    )
    with pytest.raises(
        TaskError,
        match=r"line 1: no column 'mata', which columns.metadata names; did you mean 'meta'",
    ):
        load_tasks(tmp_path / "rows.jsonl", columns={"prompt": "text", "metadata": "mata"})
    with pytest.raises(
        TaskError,
        match=r"line 1: no column 'xyzzy', which columns.metadata names;.*text, label, meta, functions",  # noqa: E501
    ):
        load_tasks(tmp_path / "rows.jsonl", columns={"prompt": "text", "metadata": "xyzzy"})


def test_a_recipe_maps_columns(tmp_path):
    from turnwright.config import load

    write(tmp_path / "rows.jsonl", [{"ask": f"{n}?", "gold": n} for n in range(4)])
    text = '[[env]]\nuse = "geometry"\ntasks = "rows.jsonl"\ncolumns = { prompt = "ask", answer = "gold" }\n'  # noqa: E501
    (tmp_path / "run.toml").write_text(text)
    config = load(tmp_path / "run.toml").config
    world = resolve_env(config.env[0], base=tmp_path)
    assert {task.answer for task in world.tasks("train", 0, 0)} <= set(range(4))
    for wrong, said in (
        ('columns = { anser = "gold" }', "holds one of prompt"),
        ("columns = { answer = 3 }", "name a column"),
    ):
        (tmp_path / "run.toml").write_text(
            text.replace('columns = { prompt = "ask", answer = "gold" }', wrong)
        )
        with pytest.raises(ConfigError, match=said):
            load(tmp_path / "run.toml")
    (tmp_path / "run.toml").write_text(text.replace('tasks = "rows.jsonl"\n', ""))
    with pytest.raises(ConfigError, match=r"columns = .*has no effect: it needs env\.tasks given"):
        load(tmp_path / "run.toml")
