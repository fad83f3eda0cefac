"""The same rows from JSONL, Parquet, Arrow, pandas, datasets and dicts are the same tasks,
prompts and trained ids."""

from __future__ import annotations

import asyncio
import base64
import importlib
import json
import math
import tempfile
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow

import turnwright as tw
from turnwright.config import Limits
from turnwright.envs.datasets import ImageSource, read_rows
from turnwright.errors import TaskError
from turnwright.renderers.load import template_renderer
from turnwright.training.warmup import conversations, read_conversation

pa = pytest.importorskip("pyarrow")
RENDERER = template_renderer("chatml")


def png(seed: int) -> bytes:
    out = BytesIO()
    Pillow.fromarray(np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)).save(
        out, "PNG"
    )
    return out.getvalue()


def schema(name: str, **kinds: str) -> dict:
    properties = {key: {"type": kind, "description": f"{key}."} for key, kind in kinds.items()}
    parameters = {"type": "object", "properties": properties, "required": list(kinds)}
    return {
        "type": "function",
        "function": {"name": name, "description": f"{name}.", "parameters": parameters},
    }


TOOLS = {
    "weather": (schema("weather", city="string"), {"city": "Oslo"}),
    "add": (schema("add", a="integer", b="integer"), {"a": 1, "b": -2}),
    "scale": (schema("scale", by="number", twice="boolean"), {"by": 0.5, "twice": True}),
    "pick": (
        schema("pick", names="array", box="object"),
        {"names": ["ä", "b"], "box": {"left": 1, "top": 2}},
    ),
    "none": (schema("none", names="array", box="object"), {"names": [], "box": {"left": 3}}),
}
texts = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=12).map(
    lambda text: f"q{text}"
)


def or_missing(values: st.SearchStrategy) -> st.SearchStrategy:
    """A value, null as a user writes it, or no key at all."""
    return st.one_of(values, st.none(), st.just(...))


def without_missing(row: dict) -> dict:
    return {key: value for key, value in row.items() if value is not ...}


@st.composite
def nested(draw) -> dict:
    inner = {
        "kind": "k",
        "x": draw(or_missing(st.integers(-5, 5))),
        "words": draw(or_missing(st.lists(texts, max_size=2))),
    }
    outer = {
        "ground_truth": draw(texts),
        "style": draw(or_missing(texts)),
        "weights": draw(or_missing(st.lists(st.floats(-1, 1, width=16), max_size=3))),
        "flag": draw(or_missing(st.booleans())),
        "inner": draw(or_missing(st.just(without_missing(inner)))),
    }
    return without_missing(outer)


@st.composite
def datasets_of_rows(draw) -> tuple[str, list[dict]]:
    """Rows of one dataset; how its pictures are kept is the same in all of them, as in
    the columns of Arrow."""
    pictures = draw(st.sampled_from(["none", "bytes", "paths"]))
    as_text = draw(st.booleans())
    rows = []
    for number in range(draw(st.integers(1, 5))):
        names = draw(st.lists(st.sampled_from(sorted(TOOLS)), min_size=1, max_size=3))
        calls = []
        for place, name in enumerate(names):
            arguments = json.dumps(TOOLS[name][1]) if as_text else TOOLS[name][1]
            calls.append(
                {
                    "id": f"c{place}",
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
            )
        seen = draw(st.integers(0, 2)) if pictures != "none" else 0
        messages = [
            {"role": "user", "content": "<image>" * seen + draw(texts)},
            {
                "role": "assistant",
                "content": draw(st.sampled_from(["", "I look."])),
                "tool_calls": calls,
            },
            *(
                {"role": "tool", "content": draw(texts), "tool_call_id": call["id"]}
                for call in calls
            ),
            {"role": "assistant", "content": draw(texts)},
            *([{"role": "user", "content": draw(texts)}] if draw(st.booleans()) else []),
        ]
        row = {
            "messages": messages,
            "tools": [TOOLS[name][0] for name in dict.fromkeys(names)],
            "number": number,
            "answer": draw(or_missing(texts)),
            "reward_model": draw(nested()),
            "level": draw(st.integers(-3, 3)),
            "share": draw(or_missing(st.floats(0, 1, width=16))),
            "known": draw(or_missing(st.booleans())),
            "kinds": draw(or_missing(st.lists(texts, max_size=2))),
        }
        if pictures == "bytes":
            row["images"] = [{"bytes": png(n), "path": None} for n in range(seen)]
        elif pictures == "paths":
            row["images"] = [f"{n}.png" for n in range(seen)]
        rows.append(without_missing(row))
    return pictures, rows


def written(rows: list[dict], folder: Path) -> dict[str, Path]:
    """The rows as files."""

    def as_json(value):
        if isinstance(value, dict) and isinstance(value.get("bytes"), bytes):  # JSON has no bytes
            return "data:image/png;base64," + base64.b64encode(value["bytes"]).decode()
        if isinstance(value, dict):
            return {key: as_json(item) for key, item in value.items()}
        return [as_json(item) for item in value] if isinstance(value, list) else value

    files = {
        "jsonl": folder / "rows.jsonl",
        "parquet": folder / "rows.parquet",
        "arrow": folder / "rows.arrow",
    }
    files["jsonl"].write_text("".join(json.dumps(as_json(row)) + "\n" for row in rows), "utf-8")
    columns = dict.fromkeys(key for row in rows for key in row)
    table = pa.Table.from_pylist([dict.fromkeys(columns) | row for row in rows])
    importlib.import_module("pyarrow.parquet").write_table(table, files["parquet"])
    with pa.ipc.new_stream(str(files["arrow"]), table.schema) as writer:
        writer.write_table(table)
    return files


def described(tasks: list) -> list:
    """All that a model, a reward or a record meets of tasks."""
    found = []
    for task in tasks:
        columns = {key: value for key, value in task.columns.items() if key != "images"}
        found.append(
            [
                task.id,
                [message.to_dict() for message in task.messages],
                task.answer,
                dict(task.info),
                columns,
            ]
        )
    return found


def opened(task):
    """The ids of the opening prompt; pictures as text, since the template has none."""
    messages = [
        tw.Message(message.role, message.text_with_alt, message.tool_calls)
        for message in task.messages
    ]
    return RENDERER.open(messages, task.info["tools"]).ids


NUMPY = "pandas of numpy"
"""Makes whole numbers beside nulls floats, also within objects: such rows are equal in
value but not in text."""


def sources(rows: list[dict], files: dict[str, Path]) -> dict:
    """The rows as each library gives them."""
    found = {**files, "dicts": rows, "arrow table": pa.ipc.open_stream(files["arrow"]).read_all()}
    try:
        pd = importlib.import_module("pandas")
    except ImportError:
        pass
    else:
        found["pandas frame"] = pd.DataFrame(rows)
        found["pandas arrow"] = pd.read_parquet(files["parquet"], dtype_backend="pyarrow").to_dict(
            "records"
        )
        found[NUMPY] = pd.read_parquet(files["parquet"]).to_dict("records")
        found["pandas series"] = [pd.Series(row, dtype=object) for row in rows]
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        pass
    else:
        found["datasets"] = datasets.Dataset.from_list(
            [dict.fromkeys(key for one in rows for key in one) | row for row in rows]
        )
        found["datasets numpy"] = found["datasets"].with_format("numpy")
    return found


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(datasets_of_rows())
def test_the_same_rows_from_every_source_are_the_same_tasks(given_rows):
    pictures, rows = given_rows
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for n in range(2):
            (folder / f"{n}.png").write_bytes(png(n))
        files = written(rows, folder)
        if pictures == "bytes":
            del files["jsonl"]  # its data URIs are other names of the pictures
        expected = tw.load_tasks(rows, media_root=folder)
        for kind, source in sources(rows, files | {"arrow": folder / "rows.arrow"}).items():
            tasks = tw.load_tasks(source, media_root=folder)
            if kind == NUMPY:
                assert [(t.messages, t.answer, t.info) for t in tasks] == [
                    (t.messages, t.answer, t.info) for t in expected
                ]
                continue
            assert tasks == expected, kind
            assert described(tasks) == described(expected), kind
            assert [opened(task) for task in tasks] == [opened(task) for task in expected], kind
        labels = [[image.to_dict() for image in task.images] for task in expected]
        assert [len(row.get("images") or ()) for row in rows] == [len(images) for images in labels]


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(datasets_of_rows())
def test_the_same_rows_from_every_source_train_the_same_ids(given_rows):
    _, rows = given_rows
    for row in rows:  # the template has no pictures
        row.pop("images", None)
        row["messages"][0]["content"] = row["messages"][0]["content"].replace("<image>", "")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = written(rows, folder)
        expected = trained(files["jsonl"])
        assert len(expected) == len(rows)
        for file in (files["parquet"], files["arrow"]):
            assert trained(file) == expected, file.name
        from_dicts = [read_conversation(row, "row", ImageSource(folder)) for row in rows]
        for kind, source in sources(rows, files).items():
            given_rows = (
                [row for row, _ in read_rows(source)] if isinstance(source, Path) else list(source)
            )
            if kind in ("arrow table", "pandas frame"):
                continue  # no iterables of rows; `load_tasks` above reads them
            if kind == "pandas series":
                given_rows = [row.to_dict() for row in given_rows]
            assert [read_conversation(row, "row") for row in given_rows] == from_dicts, kind


def trained(file: Path) -> list:
    found = asyncio.run(conversations(file, RENDERER, limits=Limits(), history="append"))
    return [
        [(list(row.ids), list(row.weights)) for row in trajectory.samples()] for trajectory in found
    ]


def array(*items):
    made = np.empty(len(items), dtype=object)
    made[:] = items
    return made


def test_arrays_scalars_and_empty_cells_of_numpy():
    part = array({"type": "text", "text": "hi"})
    rows = [
        {
            "prompt": array({"role": "user", "content": "hi"}),
            "answer": np.str_("1"),
            "id": np.int64(7),
        },
        {
            "prompt": array({"role": "user", "content": part}),
            "answer": np.float64("nan"),
            "label": np.int32(3),
        },
        {
            "prompt": "hi",
            "images": array(),
            "info": {"a": np.array([1, 2]), "b": np.array([[1.5]]), "c": np.bool_(True)},
        },
        {
            "prompt": "hi",
            "id": "t",
            "at": np.datetime64("2026-01-02T03:04:05", "ns"),
            "day": np.datetime64("NaT"),
        },
        {"prompt": "hi", "id": "d", "at": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)},
    ]
    first, second, third, fourth, fifth = tw.load_tasks(rows)
    assert (first.id, first.messages, first.answer) == ("7", (tw.Message("user", "hi"),), "1")
    assert (type(first.info["id"]), type(first.answer)) == (int, str)
    assert (second.messages[0].text, second.answer, second.info) == ("hi", 3, {"label": 3})
    assert third.info == {"images": [], "info": {"a": [1, 2], "b": [[1.5]], "c": True}}
    assert (type(third.info["info"]["c"]), third.images) == (bool, ())
    assert fourth.info == {"id": "t", "at": "2026-01-02T03:04:05"}
    assert fifth.info["at"] == "2026-01-02T03:04:05+00:00"


def test_pictures_as_arrays_stay_pictures():
    pixels = np.zeros((4, 5, 3), dtype=np.uint8)
    rows = [
        {"prompt": "<image>?", "images": [pixels]},
        {
            "prompt": [
                {
                    "role": "user",
                    "content": [{"type": "image", "image": pixels}, {"type": "text", "text": "?"}],
                }
            ]
        },
        {"prompt": "<image>?", "images": array(pixels)},
        {"prompt": "<image>?", "images": [Pillow.fromarray(pixels)]},
    ]
    for row in rows:
        (task,) = tw.load_tasks([row])
        assert isinstance(task.messages[0].content[0], tw.Image)


def test_nulls_mean_missing_but_stay_in_lists_and_in_json_text():
    call = {"function": {"name": "f", "arguments": {"a": None, "b": {"c": None}, "d": [None, 1]}}}
    text = {"function": {"name": "f", "arguments": '{"a": null}'}}
    tool = schema("f", a="string")
    tool["function"]["parameters"]["properties"]["a"] |= {"enum": ["x", None], "default": None}
    rows = [
        {
            "messages": [
                {"role": "user", "content": "q", "name": None},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "r"},
                {"role": "assistant", "content": None, "tool_calls": [text], "function_call": None},
                {"role": "user", "content": "q"},
            ],
            "tools": [tool],
            "metadata": {"a": None, "b": [None, {"c": None}]},
            "label": None,
        }
    ]
    (task,) = tw.load_tasks(rows)
    assert task.messages[1].tool_calls[0].arguments == {"b": {}, "d": [None, 1]}
    assert task.messages[3].tool_calls[0].arguments == {"a": None}
    kept = task.info["tools"][0]["function"]["parameters"]["properties"]["a"]
    assert kept == {"type": "string", "description": "a.", "enum": ["x", None]}
    assert task.info["metadata"] == {"b": [None, {}]}
    assert "label" not in task.info
    assert task.columns["label"] is None  # a reward that names the column gets None


def test_a_column_that_only_other_rows_have_is_none_in_columns():
    first, second = tw.load_tasks([{"prompt": "a", "solution": "1"}, {"prompt": "b", "level": 2}])
    assert first.columns == {"solution": "1", "level": None, "answer": "1"}
    assert second.columns == {"solution": None, "level": 2}
    assert (first.info, second.info) == ({"solution": "1"}, {"level": 2})


def test_ids_are_those_of_rows_without_the_columns_that_are_passed_on():
    """`id` and `env` are in `info`, which names a task; tasks keep the ids that they had."""
    (bare,) = tw.load_tasks([{"prompt": "a", "env": "x"}])
    assert bare.id == tw.Task("a", env="x").id
    assert (bare.env, bare.info) == ("x", {"env": "x"})
    tasks = tw.load_tasks(
        [{"prompt": "a", "id": 1}, {"prompt": "a", "id": 2}, {"prompt": "b", "id": 3}]
    )
    assert [task.id for task in tasks] == ["1", "2", "3"]
    with pytest.raises(TaskError, match="has the content of the held-out task 2"):
        importlib.import_module("turnwright.envs.tasks").check_disjoint(tasks[:1], tasks[1:2])


def test_objects_that_are_no_list_of_rows():
    with pytest.raises(TaskError, match=r"dict is no list of rows; name one of its parts: 'train'"):
        tw.load_tasks({"train": [{"prompt": "a"}]})


def test_rows_of_functions_may_be_tables():
    table = pa.Table.from_pylist([{"prompt": "a"}, {"prompt": "b"}])

    def make():
        return table

    assert [task.messages[0].text for task in tw.load_tasks(make)] == ["a", "b"]


def test_columns_of_json_in_arrow(tmp_path):
    if not hasattr(pa, "json_"):
        pytest.skip("this pyarrow has no type of JSON")
    kind = pa.struct([("value", pa.json_()), ("many", pa.list_(pa.json_()))])
    text = pa.array(
        [{"value": '{"x": 1}', "many": ["2", "[3]"]}],
        pa.struct([("value", pa.utf8()), ("many", pa.list_(pa.utf8()))]),
    )
    table = pa.table({"prompt": ["a"], "meta": text.cast(kind)})
    (task,) = tw.load_tasks(table)
    assert task.info["meta"] == {"value": {"x": 1}, "many": [2, [3]]}


def test_images_of_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    (tmp_path / "a.png").write_bytes(png(1))
    row = {
        "prompt": "<image>?",
        "images": [
            {"bytes": png(0), "path": None},
            {"bytes": None, "path": str(tmp_path / "a.png")},
        ],
    }
    features = datasets.Features(
        {"prompt": datasets.Value("string"), "images": datasets.Sequence(datasets.Image())}
    )
    one = {**row, "images": row["images"][:1]}
    (decoded,) = tw.load_tasks(datasets.Dataset.from_list([one], features=features))
    (plain,) = tw.load_tasks([one])
    assert decoded == plain
    (path,) = tw.load_tasks(
        datasets.Dataset.from_list([{**row, "images": row["images"][1:]}], features=features)
    )
    assert path.images[0].value == tmp_path / "a.png"
    with pytest.raises(
        TaskError, match=r"DatasetDict is no list of rows; name one of its parts: 'train'"
    ):
        tw.load_tasks(
            datasets.DatasetDict({"train": datasets.Dataset.from_list([{"prompt": "a"}])})
        )


def test_missing_values_of_pandas():
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame(
        {
            "prompt": ["a", "b"],
            "at": [pd.Timestamp("2026-01-02"), pd.NaT],
            "n": pd.array([1, None], "Int64"),
        }
    )
    first, second = tw.load_tasks(frame)
    assert (first.info, second.info) == ({"at": "2026-01-02T00:00:00", "n": 1}, {})
    assert math.isclose(first.info["n"], 1)
