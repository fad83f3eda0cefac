"""Datasets with images: columns and markers, parts and files, and nothing outside of
the dataset's folder."""

from __future__ import annotations

import base64
import json
import os
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow

import turnwright as tw
from turnwright.errors import TaskError
from turnwright.media import MediaStore


def pixels(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (6, 5, 3), dtype=np.uint8)


def png(seed: int) -> bytes:
    out = BytesIO()
    Pillow.fromarray(pixels(seed)).save(out, "PNG")
    return out.getvalue()


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "data"
    (root / "images").mkdir(parents=True)
    for n in range(3):
        (root / "images" / f"{n}.png").write_bytes(png(n))
    (tmp_path / "secret.png").write_bytes(png(9))
    os.symlink(tmp_path / "secret.png", root / "images" / "link.png")
    os.symlink("0.png", root / "images" / "alias.png")
    os.symlink(tmp_path, root / "up")
    return root


def load(folder: Path, *rows, **more):
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tw.load_tasks(folder / "tasks.jsonl", **more)


def seen(task):
    """What the messages say, images by their seeds."""
    store = MediaStore()
    known = {store.put(tw.Image(pixels(n))): n for n in range(10)}
    return [
        [part if isinstance(part, str) else known[store.put(part)] for part in parts]
        for parts in (
            (m.content,) if isinstance(m.content, str) else m.content for m in task.messages
        )
    ]


A, B = "images/0.png", "images/1.png"
TEXT = {"type": "text", "text": "x"}


def user(*parts) -> list:
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "<image>What is it?", "images": [A]}, [[0, "What is it?"]]),
        ({"prompt": "<image> or <image>?", "images": [A, B]}, [[0, " or ", 1, "?"]]),
        ({"prompt": "Is <image>", "image": A}, [["Is ", 0]]),
        ({"question": "<image>?", "images": [{"bytes": None, "path": A}]}, [[0, "?"]]),
        (
            {
                "messages": [
                    {"role": "user", "content": "<image>1"},
                    {"role": "assistant", "content": "ok"},
                    {"role": "user", "content": "2<image>"},
                ],
                "images": [B, A],
            },
            [[1, "1"], ["ok"], ["2", 0]],
        ),
        ({"messages": user({"type": "image"}, TEXT), "images": [B]}, [[1, "x"]]),
        ({"messages": user({"type": "image", "text": None}, {**TEXT, "image": None}), "images": [B]}, [[1, "x"]]),  # noqa: E501
        ({"messages": user({"type": "image", "image": A}, TEXT)}, [[0, "x"]]),
        ({"messages": user({"type": "image", "path": A})}, [[0]]),
        ({"messages": user({"type": "image_url", "image_url": {"url": A}})}, [[0]]),
        ({"prompt": "<image>", "images": ["data:image/png;base64," + base64.b64encode(png(2)).decode()]}, [[2]]),  # noqa: E501
        ({"prompt": "<image>", "images": ["images/alias.png"]}, [[0]]),
        ({"prompt": "no <image> column"}, [["no <image> column"]]),
    ],
)  # fmt: skip
def test_rows_of_every_layout(folder, row, said, read):
    (task,) = load(folder, row, return_multi_modal_inputs=read)
    assert seen(task) == said


def test_reading_with_the_row_or_when_shown_gives_the_same_tasks(folder):
    row = {"prompt": "<image>?", "images": [A], "answer": "x"}
    (now,), (later,) = load(folder, row), load(folder, row, return_multi_modal_inputs=False)
    assert now.id == later.id
    assert now == later
    assert isinstance(now.images[0].value, bytes)
    assert isinstance(later.images[0].value, Path)
    assert now.info == {} == later.info
    assert now.messages[0].content[0] is now.images[0]
    (folder / "images" / "0.png").unlink()
    assert seen(now) == [[0, "?"]]
    with pytest.raises(tw.MediaError, match="No such file"):
        seen(later)


def test_the_folder_may_be_elsewhere_and_ids_stay(folder, tmp_path):
    row = {"prompt": "<image>?", "images": [A]}
    (one,) = load(folder, row)
    os.rename(folder, tmp_path / "moved")
    (two,) = load(tmp_path / "moved", row)
    assert one.id == two.id


@pytest.mark.parametrize(
    ("image", "said"),
    [
        ("../secret.png", "leads out of"),
        ("images/../../secret.png", "leads out of"),
        ("images/link.png", "leads out of"),
        ("up/secret.png", "leads out of"),
        ("/etc/hostname", "leads out of"),
        ("C:\\x.png", "leads out of"),
        ("images\\0.png", "leads out of"),
        ("images/7.png", "no file 'images/7.png'"),
        ("images", "no file"),
        ("", "no file"),
        ("http://127.0.0.1/a.png", "is a URL, which is not fetched"),
        ("file:///etc/hostname", "is a URL, which is not fetched"),
        (7, "an image is a path, a data URI or bytes, not int"),
        ({"path": "../secret.png", "bytes": None}, "leads out of"),
        ({"url": "x"}, "not NoneType"),
    ],
)
def test_what_is_no_file_of_the_dataset_is_refused(folder, image, said):
    for read in (True, False):
        with pytest.raises(TaskError, match=said) as told:
            load(
                folder,
                {"prompt": "ok"},
                {"prompt": "<image>", "images": [image]},
                return_multi_modal_inputs=read,
            )
        assert "tasks.jsonl line 2" in str(told.value)
    if isinstance(image, str) and image:
        with pytest.raises(TaskError, match=said):
            load(
                folder,
                {"messages": [{"role": "user", "content": [{"type": "image", "image": image}]}]},
            )


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "<image>", "images": [A, B]}, "2 images in its column and 1 places"),
        ({"prompt": "<image><image>", "images": [A]}, "1 images in its column and 2 places"),
        ({"prompt": "What is it?", "images": [A]}, "1 images in its column and 0 places"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
            "0 images in its column and 1 places",
        ),
        ({"prompt": "<video>", "videos": ["a.mp4"]}, "a video is a list of frames"),
    ],
)
def test_places_and_images_are_as_many(folder, row, said):
    with pytest.raises(TaskError, match=said):
        load(folder, row)


def test_columns_of_another_meaning_stay():
    (task,) = tw.load_tasks(
        [{"prompt": "Fix it.", "image": "python:3.11", "images": 3, "video": None}]
    )
    assert task.info == {"image": "python:3.11", "images": 3}
    assert task.columns == {"image": "python:3.11", "images": 3, "video": None}
    assert task.images == ()


def test_rows_from_code_name_no_files_but_paths_do(folder):
    with pytest.raises(TaskError, match=r"pathlib\.Path"):
        tw.load_tasks([{"prompt": "<image>", "images": [str(folder / A)]}])
    (task,) = tw.load_tasks([{"prompt": "<image>?", "images": [folder / A]}])
    assert seen(task) == [[0, "?"]]
    (task,) = tw.load_tasks(
        [
            {
                "prompt": "<image><image>",
                "images": [Pillow.fromarray(pixels(1)), tw.Image(pixels(2), alt="b")],
            }
        ]
    )
    assert seen(task) == [[1, 2]]
    assert task.images[1].alt == "b"


def test_clips_of_frames(folder):
    row = {
        "prompt": "<video>What moved? <image>",
        "videos": [{"frames": [A, B], "fps": 2}],
        "images": [A],
    }
    (task,) = load(folder, row)
    clip, text, image = task.messages[0].content
    assert text == "What moved? "
    store = MediaStore()
    assert store.put(clip).times == (0.0, 0.5)
    assert store.put(clip).frames[0] == store.put(image)


def test_parquet_and_saved_directories_hold_bytes(tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    rows = [
        {
            "problem_id": n,
            "prompt": "<image>?",
            "images": [{"bytes": png(n), "path": None}],
            "answer": str(n),
        }
        for n in range(3)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    tasks = tw.load_tasks(tmp_path)
    assert [seen(task) for task in tasks] == [[[n, "?"]] for n in range(3)]
    assert len({task.id for task in tasks}) == 3
